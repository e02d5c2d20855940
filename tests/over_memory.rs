//! Stores of tests that are a `MemoryStore` but for a call or two.

/// In an `impl BackingStore`: has each of the calls that are named done by the `MemoryStore` in that field. The others stand beside it.
macro_rules! over_memory {
    (@$store:tt claim) => {
        fn claim(&self, want: u32) -> std::result::Result<(Blok, u32), PagerError> {
            self.$store.claim(want)
        }
    };
    (@$store:tt release) => {
        fn release(&self, first: Blok, count: u32) {
            self.$store.release(first, count);
        }
    };
    (@$store:tt reads_in_trap) => {
        fn reads_in_trap(&self) -> bool {
            self.$store.reads_in_trap()
        }
    };
    (@$store:tt read) => {
        fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> std::result::Result<(), PagerError> {
            self.$store.read(context, bloks)
        }
    };
    (@$store:tt write) => {
        fn write(&self, bloks: &mut [WriteBlok<'_>]) {
            self.$store.write(bloks);
        }
    };
    ($store:tt: $($call:ident),+) => {
        $(over_memory!(@$store $call);)+
    };
}
pub(crate) use over_memory;
