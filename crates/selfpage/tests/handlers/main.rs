//! Protected pages, and handlers of the program's own.

#[path = "../child/mod.rs"]
mod child;
#[path = "../../../../tests/over_memory.rs"]
mod over_memory;
#[allow(dead_code)]
#[path = "../failure/scenario.rs"]
mod scenario;
#[path = "../../../../tests/skip.rs"]
mod skip;
#[path = "../failure/tried.rs"]
mod tried;

mod asked;
mod at_once;
mod dropped;
mod given;
mod outlives;
mod owns;
mod paging;
mod passed;
mod refused;
mod stacks;
mod system_calls;
mod uses;

use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, FaultHandler, MemoryFault, Protection, Region, Trap};

use tried::word;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// A domain of 64 frames, and a region of 256 pages over it with a handler; each page begins with its number plus one.
fn handled(trap: Trap, handler: impl FaultHandler + 'static) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let builder = domain.region(4 * FRAMES * PAGE).name("handled").trap(trap).handler(handler);
    let mut region = builder.stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
    for (page, words) in region.as_mut_slice::<u64>().chunks_mut(WORDS).enumerate() {
        words[0] = page as u64 + 1;
    }
    (domain, region)
}

/// A handler that lets the access through.
fn unprotect(fault: &MemoryFault<'_>) -> Answer {
    fault.protect_page(Protection::ReadWrite).unwrap();
    Answer::Handled
}

fn thread_id() -> u32 {
    // SAFETY: test: takes nothing.
    unsafe { libc::gettid() as u32 }
}

fn write(region: &Region, page: usize, value: u64) {
    // SAFETY: test: a page of the region, which nobody holds a reference into.
    unsafe { word(region, page).write_volatile(value) }
}

fn read(region: &Region, page: usize) -> u64 {
    // SAFETY: test: as above.
    unsafe { word(region, page).read_volatile() }
}
