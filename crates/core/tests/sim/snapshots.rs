//! A thread that takes snapshots all the time: an image is what every page held at the instant of its cut.

use selfpage_core::addr::{PAGE_BYTES, PageNo};
use selfpage_core::fault::copy_first::{self, AtBusy};
use selfpage_core::fault::image::{self, Image};
use selfpage_core::fault::inherit;
use selfpage_core::region::Region;

use crate::dice;
use crate::machine::{Halves, halves};
use crate::world::{Stage, World};

/// How cuts are made, and what for.
#[derive(Clone, Copy, PartialEq)]
pub enum Cuts {
    AtOneInstant,
    /// Page by page, while writers go on: what this must not be.
    WithoutTheStop,
    /// One is for a clone, the others for snapshots of it and its source.
    WithAClone,
}

/// Takes snapshots until the program ends.
pub fn run(world: &'static World) {
    let regions: Vec<&Region> = world.parts.iter().map(|part| part.region).collect();
    regions.iter().for_each(|region| copy_first::join(&world.domain, region));
    if let Some(clone) = world.clone_part() {
        make_clone(world, clone.region);
    }
    let mut base: Option<Vec<Halves>> = None;
    // How often each page had been dropped behind core's back when an image last had it right.
    let mut noticed = vec![0; world.shadow.image().len()];
    while world.steps_left.get() > 0 {
        if base.is_none() {
            regions.iter().for_each(|region| region.sets.changed.fill(region.range.count));
        }
        base = take(world, &regions, base, &mut noticed);
        let moved = world.domain.cut.moved.count();
        (0..dice::below(20)).for_each(|_| world.domain.cut.moved.wait(world.mmu, moved, 100));
    }
    world.ended(Stage::PagerThreads, crate::threads::PAGER_THREADS);
}

/// Makes the last region a clone of the first, as a program does with one that it has just made.
fn make_clone(world: &World, clone: &Region) {
    let (domain, source) = (&world.domain, world.parts[0].region);
    (0..dice::below(100)).for_each(|_| domain.cut.moved.wait(world.mmu, domain.cut.moved.count(), 100));
    // Its cut stops writers to whatever is armed.
    for part in world.parts.iter().filter(|_| dice::once_in(2)) {
        let _ = copy_first::arm(domain, part.region, AtBusy::Skip);
    }
    let at_once = || {
        clone.link();
        world.shadow.inherit(world.at(source.range.first), world.at(clone.range.first), source.range.count as usize);
        world.cloned.set(true);
    };
    // The machine may have no memory to protect a page just now.
    while copy_first::cut(domain, &[source], at_once).is_err() {}
    inherit::go_on(domain, clone);
}

/// One snapshot over the one before. `None`: it failed, and the next one needs every page.
fn take(world: &World, regions: &[&Region], base: Option<Vec<Halves>>, noticed: &mut [u32]) -> Option<Vec<Halves>> {
    let domain = &world.domain;
    for _ in 0..dice::below(3) {
        for region in regions {
            copy_first::arm(domain, region, AtBusy::Skip).ok()?;
        }
    }
    domain.cut.lacks();
    let mut truth = Vec::new();
    let mut needed = Vec::new();
    let mut at_once = || {
        copy_first::note_image(regions);
        truth = world.shadow.image();
        needed = vec![false; truth.len()];
        let pages = regions.iter().flat_map(|region| region.range.pages().map(move |page| (region, page)));
        pages.for_each(|(region, page)| needed[world.at(page)] = region.sets.pending.contains(region.index(page)));
    };
    match world.cuts {
        Cuts::AtOneInstant | Cuts::WithAClone => copy_first::cut(domain, regions, at_once).map(drop).ok()?,
        Cuts::WithoutTheStop => {
            for region in regions {
                copy_first::arm(domain, region, AtBusy::Wait).ok()?;
            }
            at_once();
        }
    }
    let mut image = base.unwrap_or_else(|| vec![[0; 2]; truth.len()]);
    let read = read_all(world, regions, &mut image);
    copy_first::end(domain, regions);
    read?;
    for region in regions {
        for page in region.range.pages() {
            let at = world.at(page);
            let (now, may_be, losses) = truth[at];
            let dropped = match needed[at] {
                // What is dropped behind core's back before it was copied is zero.
                true => world.shadow.losses(at) != losses && image[at] == [0; 2],
                // It is not missed before somebody touches it.
                false => world.shadow.losses(at) != noticed[at],
            };
            let right = image[at] == now || may_be.contains(&Some(image[at])) || dropped;
            assert!(right, "{page:?} is {:?} in the image, and was {now:?}", image[at]);
            if image[at] == now {
                noticed[at] = losses;
            } else {
                // The next image may have another idea of what it was.
                region.sets.changed.insert(region.index(page));
            }
        }
    }
    Some(image)
}

/// Reads what changed. `None`: a page could not be had.
fn read_all(world: &World, regions: &[&Region], image: &mut [Halves]) -> Option<()> {
    let mut images: Vec<Image> = vec![(PageNo(0), [0; PAGE_BYTES]); 1 + dice::below(8) as usize];
    let take_copies = |images: &mut Vec<Image>, image: &mut [Halves]| {
        loop {
            let count = image::take_copies(&world.domain, images);
            images[..count].iter().for_each(|(page, bytes)| image[world.at(*page)] = halves(bytes));
            if count == 0 {
                break;
            }
        }
    };
    for region in regions {
        let mut from = Some(0);
        while let Some(at) = from {
            take_copies(&mut images, image);
            let zeros = image::pass_over(&world.domain, region, at);
            let passed = zeros.clone().map(|index| world.at(region.range.first.plus(index)));
            passed.for_each(|at| image[at] = [0; 2]);
            let read = world.waiting_for(region.range, || {
                image::read(&world.domain, region, zeros.end, &mut images)
                    .map_err(|(page, failure)| world.judge(page, failure))
            });
            let (count, next) = read.ok()?;
            images[..count].iter().for_each(|(page, bytes)| image[world.at(*page)] = halves(bytes));
            from = next;
        }
    }
    take_copies(&mut images, image);
    (!world.domain.cut.lacks()).then_some(())
}
