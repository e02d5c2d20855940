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
    fn image(&self, writers: Writers) -> [u32; PAGES] {
        if writers == Writers::Stop {
            self.cut.close(&self.mmu);
        }
        while let Some(page) = self.unarmed.next(0) {
            let mut mapped = self.pages[page as usize].lock().unwrap();
            self.unarmed.remove(page);
            mapped.unarmed = false;
        }
        self.pending.fill(PAGES as u64);
        if writers == Writers::Stop {
            self.cut.open(&self.mmu);
        }
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

/// What writers to armed pages do while the cut is made.
#[derive(Clone, Copy, PartialEq)]
enum Writers {
    Stop,
    /// There is no instant then.
    GoOn,
}

/// Numbers that go to one page and then to the other, while an image is made. Whether it has no later write without the earlier one.
fn is_of_one_instant(first: usize, armed: bool, writers: Writers) -> bool {
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
    let image = world.image(writers);
    writer.join().unwrap();
    other.join().unwrap();
    assert!(world.pages.iter().all(|page| page.lock().unwrap().value == 1));
    image[first] >= image[1 - first] && image[first] <= 1
}

#[test]
fn an_image_has_no_write_without_those_before_it() {
    for (first, armed) in [(0, true), (0, false), (1, true), (1, false)] {
        explore(2, move || assert!(is_of_one_instant(first, armed, Writers::Stop)));
    }
}

#[test]
fn without_the_stop_the_same_is_caught() {
    static CAUGHT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    explore(2, || {
        if !is_of_one_instant(1, false, Writers::GoOn) {
            CAUGHT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    });
    assert_ne!(CAUGHT.load(std::sync::atomic::Ordering::Relaxed), 0);
}
