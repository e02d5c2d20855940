//! What limits must leave a process for it to be managed, and how long the file of records becomes. The tool has this file too, and looks
//! before it begins anything: nothing else of this library stands in it.

use std::fmt;

/// Addresses for objects: 32 MiB for each thread that has any, and 5,000 threads.
pub const OBJECTS_BYTES: usize = 160 << 30;
/// Addresses for large blocks.
pub const LARGE_BYTES: usize = 32 << 30;
/// Addresses for mappings.
pub const MAPS_BYTES: usize = 64 << 30;
/// Addresses for what must not be paged: the C library's, our own, and what is known of threads.
pub const QUIET_BYTES: usize = 64 << 30;
pub const OWN_BYTES: usize = 8 << 30;
pub const BESIDE_BYTES: usize = 64 << 30;

/// As many addresses as the domain's regions have.
pub const MANAGED_BYTES: usize = OBJECTS_BYTES + LARGE_BYTES + MAPS_BYTES;

/// A file of records that has so many bytes takes no more: it is memory, and grows for as long as processes come and go.
pub const RECORDS_BYTES: u64 = 16 << 20;

/// Where pages go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    Nowhere,
    InMemory,
    InFile,
}

impl Stored {
    /// As `--store` names it.
    pub fn at(place: &[u8]) -> Stored {
        match place {
            b"none" => Stored::Nowhere,
            b"memory" => Stored::InMemory,
            _ => Stored::InFile,
        }
    }
}

/// What a process may have.
pub struct Limits {
    /// Of addresses (`RLIMIT_AS`).
    pub addresses_bytes: u64,
    /// Of memory of its own to write to (`RLIMIT_DATA`).
    pub data_bytes: u64,
}

impl Limits {
    /// What a program with so many frames has too little of.
    pub fn lack(&self, frames_bytes: u64, stored: Stored) -> Option<Lack> {
        const MANAGED: u64 = MANAGED_BYTES as u64;
        const RESERVED: u64 = (QUIET_BYTES + OWN_BYTES + BESIDE_BYTES) as u64;
        // What is known of each comes to less than a 64th.
        let frames = frames_bytes.saturating_add(frames_bytes / 64);
        // A bitmap for each process that may come to share the file.
        let in_file = if stored == Stored::InFile { MANAGED / 32 } else { 0 };
        let in_memory = if stored == Stored::InMemory { MANAGED } else { 0 };
        // Twelve bytes for each page, and as many for its place in a store.
        let tables = MANAGED / 4096 * if stored == Stored::Nowhere { 12 } else { 24 };
        // For threads of ours, and what the program itself begins with.
        let beside = 64 << 20;
        let addresses = frames.saturating_add(RESERVED + MANAGED + MANAGED / 64 + in_file + in_memory);
        let data = frames.saturating_add(tables + beside + in_memory);
        let lack = |what, option, has_bytes, needs_bytes| {
            (has_bytes < needs_bytes).then_some(Lack { what, option, has_bytes, needs_bytes })
        };
        lack("few addresses", "ulimit -v", self.addresses_bytes, addresses)
            .or_else(|| lack("little memory to write to", "ulimit -d", self.data_bytes, data))
    }
}

/// Too little of something.
pub struct Lack {
    what: &'static str,
    option: &'static str,
    has_bytes: u64,
    needs_bytes: u64,
}

impl fmt::Display for Lack {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lack { what, option, has_bytes, needs_bytes } = self;
        let (kib, gib) = (has_bytes >> 10, needs_bytes.div_ceil(1 << 30));
        write!(to, "too {what}: `{option}` is {kib}; raise `{option}` to {gib} GiB ({}), or lift it", gib << 20)
    }
}
