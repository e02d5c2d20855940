//! The frames that one huge page has room for.

use selfpage_core::addr::{Frame, PAGE_BYTES};
use selfpage_core::frame::GROUP;
use selfpage_core::linux::pagemap::Categories;
use selfpage_core::mmu::{Mmu, Trap};

use crate::ground::{Ground, Pinned};
use crate::physical;

#[test]
fn a_group_is_512_clean_pages_of_its_own_side_by_side() {
    let Some(ground) = Ground::of(GROUP) else { return };
    ground.mmu.populate(Frame(0), GROUP).unwrap();
    for frame in 0..GROUP {
        let known = ground.descriptors.pagemap.categories(ground.pool + frame as usize * PAGE_BYTES).unwrap();
        assert!(known.contains(Categories::PRESENT), "frame {frame} has no memory");
        assert!(!known.contains(Categories::ZERO), "frame {frame} is the page of zeros, which is everybody's");
        assert_eq!(ground.filled_with(frame), 0, "frame {frame} is not clean");
    }
    if !physical::can_be_neighbours() {
        return;
    }
    let neighbours = physical::neighbours(&physical::pages(ground.pool, GROUP as usize));
    // The last took the place of another for a moment, and is a new one.
    assert!(neighbours >= GROUP as usize - 3, "{neighbours} of {GROUP} lie side by side");
}

#[test]
fn a_page_moves_while_a_device_is_at_its_neighbours() {
    let Some(ground) = Ground::of(GROUP) else { return };
    ground.mmu.populate(Frame(0), GROUP).unwrap();
    let Some(_pinned) = Pinned::page(ground.pool + PAGE_BYTES) else { return };
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1).unwrap();
    ground.mmu.map(Trap::Worker, ground.page(2), Frame(2), GROUP - 2).unwrap();
}
