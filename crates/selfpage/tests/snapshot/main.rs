//! Snapshots: what they have, that it is of one instant, and what happens where they cannot be taken.

mod alone;
mod clones;
mod consistent;
mod failed;
mod killed;
mod kinds;

#[path = "../disk/mod.rs"]
mod disk;
#[path = "../../../../tests/skip.rs"]
mod skip;

/// Bytes of a page, and words of eight.
const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// Words of a region that several threads use.
#[derive(Clone, Copy)]
struct Words {
    first: *const std::sync::atomic::AtomicU64,
    count: usize,
}

// SAFETY: region-view: the words are atomics, and the test keeps the region as long as its threads.
unsafe impl Send for Words {}
// SAFETY: region-view: as above.
unsafe impl Sync for Words {}

impl Words {
    fn of(region: &selfpage::Region) -> Words {
        Words { first: region.as_ptr().cast(), count: region.len_bytes() / 8 }
    }

    /// Word `word` of page `page`.
    fn at(&self, page: usize, word: usize) -> &std::sync::atomic::AtomicU64 {
        assert!(page * WORDS + word < self.count);
        // SAFETY: region-view: within the region.
        unsafe { &*self.first.add(page * WORDS + word) }
    }
}

/// A page of a snapshot, as words.
fn saved(snapshot: &selfpage::snapshot::Snapshot, region: usize, page: usize) -> Vec<u64> {
    let mut bytes = [0; PAGE];
    snapshot.read_page(region, page as u64, &mut bytes).unwrap();
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// Runs `work` in a forked child and says how it ended: 0 for success.
fn in_child(work: impl FnOnce() -> bool) -> i32 {
    fork(work).wait()
}

/// Begins `work` in a forked child.
fn fork(work: impl FnOnce() -> bool) -> Child {
    // SAFETY: fork-quiet: the child only does `work` and ends; what it needs of the library was made ready by its handlers.
    match unsafe { libc::fork() } {
        0 => {
            let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(false);
            // SAFETY: fork-quiet: ends without running what belongs to the parent.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        child => {
            assert!(child > 0);
            Child(child)
        }
    }
}

/// A forked child.
struct Child(i32);

impl Child {
    /// How it ended.
    fn wait(self) -> i32 {
        let mut status = 0;
        let began = std::time::Instant::now();
        // SAFETY: fork-quiet: waits for our own child, and ends it where it hangs.
        while unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } != self.0 {
            if began.elapsed().as_secs() > 60 {
                // SAFETY: fork-quiet: as above.
                unsafe { libc::kill(self.0, libc::SIGKILL) };
                panic!("the child hangs");
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        status
    }
}
