//! What a sequence of accesses brings along.

use std::sync::atomic::Ordering;
use std::time::Duration;

use selfpage::store::MemoryStore;
use selfpage::{Domain, Trap};

const PAGE: usize = 4096;
const PAGES: usize = 2048;

#[test]
fn reading_ahead_ends_with_the_region() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let domain = Domain::with_frames(4096 * PAGE).build().unwrap();
        let store = || MemoryStore::new(64 << 20).unwrap();
        // A place for two regions side by side, where nothing else comes to lie.
        let place = domain.region(2 * PAGES * PAGE).far_from_all().zero().unwrap();
        let first = place.as_ptr() as usize;
        drop(place);
        let made = |at| domain.region(PAGES * PAGE).trap(trap).at(at).stored(store()).unwrap();
        let (read, beside) = (made(first), made(first + PAGES * PAGE));
        assert!(read.as_slice::<u64>().iter().step_by(512).all(|word| *word == 0));
        // What was asked of pager threads they may still be at.
        std::thread::sleep(Duration::from_millis(100));
        let brought = beside.residency().iter().filter(|byte| byte.load(Ordering::Relaxed) != 0).count();
        assert_eq!(brought, 0, "pages of a region that nobody has read");
        assert!(domain.stats().counts.fills_ahead_total > 0, "nothing was read ahead");
    }
}
