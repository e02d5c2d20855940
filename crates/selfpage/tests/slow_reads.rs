//! A store that takes its time over reads is no shortage of frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, Trap};
use selfpage_core::pager::{Context, PagerError};

#[path = "../../../tests/over_memory.rs"]
mod over_memory;

use over_memory::over_memory;

const PAGE: usize = 4096;
const FRAMES: usize = 16;
const PAGES: usize = 4 * FRAMES;
/// More than there are frames: some find that all of them are being filled.
const READERS: usize = FRAMES + 4;
/// Longer than the evictor tries in vain.
const STALL: Duration = Duration::from_secs(2);

/// A store in memory whose reads stall once it is told so.
struct Stalling {
    store: MemoryStore,
    stalls: AtomicBool,
}

impl BackingStore for Stalling {
    over_memory!(store: claim, release, reads_in_trap, write);

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        if self.stalls.load(Ordering::SeqCst) {
            std::thread::sleep(STALL);
        }
        self.store.read(context, bloks)
    }
}

#[test]
fn whoever_finds_all_frames_in_slow_fills_waits_for_one() {
    for trap in [Trap::Upcall, Trap::Worker] {
        let domain = Domain::with_frames(FRAMES * PAGE).workers(READERS as u32).build().unwrap();
        let store = MemoryStore::new((2 * PAGES * PAGE) as u64).unwrap();
        let store = Arc::new(Stalling { store, stalls: AtomicBool::new(false) });
        assert!(store.reads_in_trap());
        let mut region = domain.region(PAGES * PAGE).trap(trap).stored_in(store.clone()).unwrap();
        for page in 0..PAGES {
            region.as_mut_slice::<u64>()[page * PAGE / 8] = page as u64 + 1;
        }
        region.evict(0, PAGES * PAGE).unwrap();
        store.stalls.store(true, Ordering::SeqCst);
        let words = region.as_slice::<u64>();
        std::thread::scope(|scope| {
            for number in 0..READERS {
                // In an order that no reading ahead follows.
                let page = number * 29 % PAGES;
                scope.spawn(move || assert_eq!(words[page * PAGE / 8], page as u64 + 1, "{trap:?}"));
            }
        });
        store.stalls.store(false, Ordering::SeqCst);
    }
}
