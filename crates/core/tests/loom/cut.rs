//! The cut of a snapshot against writes: the image is of one instant.

use loom::sync::{Arc, Mutex};
use loom::thread;
use selfpage_core::addr::{Frame, PageNo};
use selfpage_core::cut::Cut;
use selfpage_core::pageset::PageSet;
use selfpage_core::ring::{Ring, Slot};
use selfpage_core::sync::AtomicU64;

use super::machine::{Bed, Sleeping};
use super::{Memory, explore};

const PAGES: usize = 2;

/// What the machine has of a page: a write is told where it is armed, else it is made, in one step.
#[derive(Default)]
struct Mapped {
    unarmed: bool,
    value: u32,
}

struct World {
    cut: Cut,
    mmu: Sleeping,
    /// The pages, whose locks stand for claims as well.
    pages: [Mutex<Mapped>; PAGES],
    unarmed: PageSet,
    pending: PageSet,
    _memory: (Memory<Slot>, Memory<AtomicU64>, Memory<AtomicU64>),
}

impl World {
    fn new() -> Arc<World> {
        let (mut slots, mut unarmed, mut pending) = (Memory::new(2), Memory::new(1), Memory::new(1));
        Arc::new(World {
            cut: Cut::new(Ring::new(slots.table())),
            mmu: Sleeping(Bed::new()),
            pages: Default::default(),
            unarmed: PageSet::new(unarmed.table()),
            pending: PageSet::new(pending.table()),
            _memory: (slots, unarmed, pending),
        })
    }

    fn write(&self, page: usize, value: u32) {
        loop {
            {
                let mut mapped = self.pages[page].lock().unwrap();
                if mapped.unarmed {
                    mapped.value = value;
                    return;
                }
            }
            self.first_write(page);
        }
    }

    /// As `copy_first::first_write`: the gate of writes, the claim, the copy, and only then the protection.
    fn first_write(&self, page: usize) {
        let moved = self.cut.moved.count();
        let Some(_writing) = self.cut.begin_write(&self.mmu) else {
            return self.cut.moved.wait(&self.mmu, moved, 0);
        };
        let mut mapped = self.pages[page].lock().unwrap();
        if self.pending.contains(page as u64) {
            assert!(self.cut.keep(PageNo(page as u64), Frame(mapped.value)), "there is room for every page");
            self.pending.remove(page as u64);
        }
        mapped.unarmed = true;
        self.unarmed.insert(page as u64);
    }

    /// As `copy_first::cut`, and all that follows.
    fn image(&self) -> [u32; PAGES] {
        self.cut.close(&self.mmu);
        while let Some(page) = self.unarmed.next(0) {
            let mut mapped = self.pages[page as usize].lock().unwrap();
            self.unarmed.remove(page);
            mapped.unarmed = false;
        }
        self.pending.fill(PAGES as u64);
        self.cut.open(&self.mmu);
        let mut image = [u32::MAX; PAGES];
        while let Some(page) = self.pending.next(0) {
            let mapped = self.pages[page as usize].lock().unwrap();
            if self.pending.contains(page) {
                image[page as usize] = mapped.value;
                self.pending.remove(page);
            }
        }
        while let Some((page, Frame(value))) = self.cut.take() {
            image[page.0 as usize] = value;
        }
        image
    }
}

/// Numbers that go to one page and then to the other: an image never has the later write without the earlier one.
fn one_instant(first: usize, armed: bool) {
    explore(2, move || {
        let world = World::new();
        if !armed {
            (0..PAGES).for_each(|page| world.first_write(page));
        }
        let writer = {
            let world = world.clone();
            thread::spawn(move || {
                world.write(first, 1);
                world.write(1 - first, 1);
            })
        };
        // Somebody else has the other page written to without being told.
        let other = {
            let world = world.clone();
            thread::spawn(move || world.first_write(1 - first))
        };
        let image = world.image();
        writer.join().unwrap();
        other.join().unwrap();
        assert!(image[first] >= image[1 - first] && image[first] <= 1, "{image:?}");
        assert!(world.pages.iter().all(|page| page.lock().unwrap().value == 1));
    });
}

#[test]
fn an_image_has_no_write_without_those_before_it() {
    for first in 0..PAGES {
        one_instant(first, true);
        one_instant(first, false);
    }
}
