//! A tracker of dirty pages, which looks at a page in three steps, as the library's does. What was written between two of its looks, or
//! came to hold something else, the second finds, wherever the page went meanwhile.

use std::cell::{Cell, RefCell};

use selfpage_core::addr::{PageNo, PageRange};

use crate::machine::Halves;
use crate::scheduler;
use crate::world::World;

/// What a page held, and how often it had been dropped behind core's back, which nobody can find.
type Seen = (Halves, u32);

pub struct Tracker {
    /// What each page held when a look ended, where that is known.
    seen: RefCell<Vec<Option<Seen>>>,
    /// One looks at a time.
    looks: Cell<bool>,
}

impl Tracker {
    pub fn new(pages: usize) -> Tracker {
        Tracker { seen: RefCell::new(vec![None; pages]), looks: Cell::new(false) }
    }

    /// Looks at pages of one region, and arms them again.
    pub fn scan(&self, world: &World, range: PageRange) {
        if self.looks.replace(true) {
            return;
        }
        let before: Vec<_> = range.pages().map(|page| now(world, page)).collect();
        let region = world.part(range.first).region;
        let mut found: Vec<bool> = Vec::new();
        for page in range.pages() {
            found.push(!region.arm(page));
            scheduler::step_aside("arm");
        }
        for (page, found) in range.pages().zip(&mut found) {
            *found |= world.mmu.written(page);
            scheduler::step_aside("written");
        }
        for ((page, found), before) in range.pages().zip(found).zip(before) {
            let found = found || !region.is_armed(page);
            let at = world.at(page);
            let last = std::mem::replace(&mut self.seen.borrow_mut()[at], now(world, page));
            if let (Some((held, losses)), Some((holds, _)), false) = (last, before, found) {
                let same = held == holds || losses != world.shadow.losses(at);
                assert!(same, "{page:?} held {held:?}, held {holds:?} before this look, and is not found");
            }
            scheduler::step_aside("is_armed");
        }
        self.looks.set(false);
    }
}

fn now(world: &World, page: PageNo) -> Option<Seen> {
    let (shadow, at) = (&world.shadow, world.at(page));
    (!shadow.fading(at) && !shadow.doubtful(at)).then(|| (shadow.now(at), shadow.losses(at)))
}
