//! How much a case does: all that is timed and counted, or as little as is stepped through.

/// How much.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Of the instructions of ring 3.
    pub watch: Watch,
    /// 4 KiB pages, a power of two and more than a hundred.
    pub pages: u64,
    /// How often each of them is looked at.
    pub looks: u64,
    /// How many are protected one by one.
    pub singles: u64,
    /// How many trap.
    pub trapped_pages: u64,
    /// How many are written one after the other, where a handler protects or gives them back one by one.
    pub in_turn: u64,
    /// How often all of those are.
    pub rounds: u64,
    /// How often a share of all pages is written, and found.
    pub collections: u64,
}

/// Whether instructions of ring 3 are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// They are carried out as fast as the machine can.
    Unwatched,
    /// Each is an exception more.
    Stepped,
}

impl Extent {
    /// 16 MiB.
    pub const WHOLE: Extent = Extent {
        watch: Watch::Unwatched,
        pages: 4096,
        looks: 16,
        singles: 4096,
        trapped_pages: 40,
        in_turn: 100,
        rounds: 20,
        collections: 4,
    };

    /// Where KVM emulates ring 0 each instruction takes some 50 µs.
    pub const STEPPED: Extent = Extent {
        watch: Watch::Stepped,
        pages: 128,
        looks: 1,
        singles: 8,
        trapped_pages: 1,
        in_turn: 8,
        rounds: 1,
        collections: 1,
    };
}
