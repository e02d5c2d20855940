//! A store with hardly more room than what is saved in it: what a save gives back is there for the next.

use selfpage::store::MemoryStore;
use selfpage::{Domain, Region};
use selfpage_core::addr::PAGE_BYTES;

const PAGES: usize = 1024;
const WORDS: usize = PAGE_BYTES / 8;

fn region_with_spare(domain: &Domain, spare: usize) -> Region {
    let store = MemoryStore::new(((PAGES + spare) * PAGE_BYTES) as u64).unwrap();
    domain.region(PAGES * PAGE_BYTES).name("heap").stored(store).unwrap()
}

fn change(region: &mut Region, page: usize) {
    region.as_mut_slice::<u64>()[page * WORDS + 3] += 1;
}

#[test]
fn all_that_is_saved_can_be_saved_again() {
    for spare in [1, 8] {
        let domain = Domain::with_frames(2 * PAGES * PAGE_BYTES).build().unwrap();
        let mut region = region_with_spare(&domain, spare);
        for round in 0..3 {
            (0..PAGES).for_each(|page| change(&mut region, page));
            let flushed = region.flush(0, region.len_bytes());
            assert!(flushed.is_ok(), "{spare} pages to spare, round {round}: {flushed:?}");
        }
        assert_eq!(domain.stats().counts.save_errors_total, 0);
    }
}

#[test]
fn evictions_find_room() {
    for spare in [1, 8] {
        let domain = Domain::with_frames(PAGES / 4 * PAGE_BYTES).build().unwrap();
        let mut region = region_with_spare(&domain, spare);
        (0..PAGES).for_each(|page| change(&mut region, page));
        let mut random = 1_u64;
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            change(&mut region, (random >> 33) as usize % PAGES);
        }
        let counts = domain.stats().counts;
        assert!(counts.saves_total > PAGES as u64, "{counts:?}");
        assert_eq!(counts.save_errors_total, 0, "{spare} pages to spare");
    }
}
