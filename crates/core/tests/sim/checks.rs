//! What holds of a whole domain whenever nobody is inside its gate.

use selfpage_core::addr::{Frame, FrameRun, PageNo, PageRange};
use selfpage_core::fault::{self, Fault, Outcome, sample, save::save};
use selfpage_core::page::{State, Word};
use selfpage_core::pager::Context;
use selfpage_core::region::Access;
use std::num::NonZeroU32;

use crate::machine::Halves;
use crate::pager::Backing;
use crate::scheduler;
use crate::threads::evict_some;
use crate::world::{Part, World};

/// Each frame is in one place, each page reads as it must, and all counts add up. With the gate closed.
pub fn at_rest(world: &World) {
    scheduler::at_once(|| {
        let mut places = Places(vec![None; world.domain.frames.capacity() as usize]);
        let queue = queued(world);
        let (mut on_standby, mut sampled) = (0, 0);
        for part in &world.parts {
            for page in part.region.range.pages() {
                let word = look_at(world, part, page, &queue, &mut places);
                on_standby += u32::from(word.state() == State::Standby);
                sampled += u32::from(word.state() == State::Aside && !word.wishes().unmapped());
            }
        }
        assert_eq!(sampled, world.domain.stack.sampled(), "sampled pages");
        assert_eq!(on_standby, world.domain.stack.on_standby(), "frames on standby");
        place_free(world, &mut places);
        place_copies(world, &mut places);
        let lost: Vec<usize> = (0..places.0.len()).filter(|at| places.0[*at].is_none()).collect();
        for frame in lost.iter().map(|at| Frame(*at as u32)) {
            assert_eq!(world.mmu.in_slot(frame), None, "{frame:?} is nowhere, and has memory");
        }
        let (claimed, held) = (world.domain.stack.claimed() as usize, places.0.len() - lost.len());
        assert_eq!(claimed, held, "frames are lost; nowhere are {lost:?}");
        world.mmu.check();
    });
}

/// More rounds than a page needs when nobody else is at work.
const MOST_ROUNDS: u32 = 10_000;

/// Where each frame is.
struct Places(Vec<Option<&'static str>>);

impl Places {
    fn put(&mut self, frame: Frame, place: &'static str) {
        let before = self.0[frame.0 as usize].replace(place);
        assert_eq!(before, None, "{frame:?} is {place} too");
    }
}

fn queued(world: &World) -> Vec<(PageNo, Frame)> {
    let saves = &world.domain.saves;
    let entries: Vec<_> = std::iter::from_fn(|| saves.pop()).collect();
    entries.iter().for_each(|(page, frame)| assert!(saves.push(*page, *frame)));
    entries.into_iter().map(|(page, frame)| (PageNo(page), Frame(frame as u32))).collect()
}

fn place_free(world: &World, places: &mut Places) {
    let free = &world.domain.stack.free;
    let most = NonZeroU32::MAX;
    let runs: Vec<FrameRun> = std::iter::from_fn(|| free.take(most, || {})).collect();
    for run in runs {
        for frame in (0..run.count.get()).map(|at| run.first.plus(at)) {
            places.put(frame, "free");
            assert_eq!(world.domain.frames.owner(frame), None, "{frame:?} is free");
        }
        free.give(run.first, run.count.get());
    }
}

/// Copies that a snapshot keeps.
fn place_copies(world: &World, places: &mut Places) {
    let copies: Vec<(PageNo, Frame)> = std::iter::from_fn(|| world.domain.cut.take()).collect();
    for (page, frame) in copies {
        places.put(frame, "a copy");
        assert!(world.domain.cut.keep(page, frame));
    }
}

/// What a page of the clone's source holds.
fn held(world: &World, page: PageNo) -> Option<Halves> {
    let part = world.part(page);
    let word = part.region.word(page).expect("a page of the region").load();
    match word.state() {
        State::Absent | State::Poisoned => part.pager.kept(part.region.index(page)),
        State::Resident => Some(world.mmu.read(page).unwrap_or_default()),
        _ => world.mmu.in_slot(word.frame()),
    }
}

/// Checks one page: its word, and what a child that was forked now would read in it.
fn look_at(world: &World, part: &Part, page: PageNo, queue: &[(PageNo, Frame)], places: &mut Places) -> Word {
    let (domain, at, index) = (&world.domain, world.at(page), part.region.index(page));
    let word = part.region.word(page).expect("a page of the region").load();
    let (state, frame) = (word.state(), word.frame());
    let mapped = world.mmu.read(page);
    let contents = match state {
        State::Busy => panic!("{page:?} is busy, and nobody is inside"),
        State::Absent | State::Poisoned => match world.ancestor(page) {
            Some(ancestor) => held(world, ancestor),
            None => part.pager.kept(index),
        },
        State::Resident => Some(mapped.unwrap_or_default()),
        State::Standby => {
            assert_eq!(part.pager.kept(index), world.mmu.in_slot(frame), "{page:?}: standby, and the pager differs");
            world.mmu.in_slot(frame)
        }
        State::Saving | State::Aside => world.mmu.in_slot(frame),
    };
    let right = contents.is_some_and(|contents| world.shadow.may_be(at, contents));
    assert!(right, "{page:?} is {word:?} with {contents:?}, not {:?}", world.shadow.now(at));
    assert!(mapped.is_none() || state == State::Resident, "{page:?} is mapped and {word:?}");
    assert!(!world.mmu.poisoned(page) || state == State::Poisoned, "{page:?} is poisoned and {word:?}");
    assert_eq!(world.is_in_core(page), state == State::Resident, "{page:?}: residency");
    assert!(world.shadow.may_have_pins(at, word.pins()), "{page:?} is {word:?} with {} pins", world.shadow.pins(at));
    let wanted = state == State::Resident && word.wishes().write_protected();
    assert_eq!(
        world.mmu.protected(page),
        wanted && mapped.is_some(),
        "{page:?} is {word:?}: what the machine protects"
    );
    let unmapped = word.wishes().unmapped();
    assert!(!unmapped || state != State::Resident, "{page:?} is mapped, and nobody may access it");
    if matches!(state, State::Resident | State::Standby | State::Saving | State::Aside) {
        places.put(frame, "of a page");
        assert_eq!(domain.frames.owner(frame), Some(page));
    }
    let entries: Vec<Frame> = queue.iter().filter(|entry| entry.0 == page).map(|entry| entry.1).collect();
    assert_eq!(entries.len(), usize::from(word.in_save()), "{page:?} is {word:?} and queued {} times", entries.len());
    for old in entries {
        if state == State::Saving {
            assert_eq!(old, frame, "{page:?} is to be saved from another frame");
        } else {
            places.put(old, "being saved");
        }
    }
    word
}

/// Nobody runs any more, and nothing goes wrong: every page can be read, and every frame that may go goes.
pub fn at_the_end(world: &World) {
    world.mmu.check_wakes();
    world.weather.clear_up();
    while save(&world.domain).taken > 0 {}
    at_rest(world);
    world.parts.iter().flat_map(|part| part.region.range.pages()).for_each(|page| world.unprotect(page));
    for part in &world.parts {
        for page in part.region.range.pages() {
            read(world, page);
        }
    }
    at_rest(world);
    sample_and_use(world);
    let mut last = 0;
    loop {
        let evicted = evict_some(world, 256);
        while save(&world.domain).taken > 0 {}
        fault::evict::trim_standby(&world.domain, 0);
        match evicted.ready + evicted.queued {
            0 if last == 0 => break,
            went => last = went,
        }
    }
    at_rest(world);
    for part in world.parts.iter().filter(|part| part.pager.backing() == Backing::Store) {
        for page in part.region.range.pages() {
            let word = part.region.word(page).expect("a page of the region").load();
            assert_eq!(word.state(), State::Absent, "{page:?} is {word:?}: the policy was not told of its frame");
        }
    }
    assert_eq!(world.domain.stack.on_standby(), 0);
}

/// Pages are unmapped to see whether they are used: half of them are, and no others are said to be.
fn sample_and_use(world: &World) {
    let domain = &world.domain;
    let everywhere = PageRange { first: PageNo(0), count: u64::MAX };
    let found = sample::in_core(domain, 0..domain.frames.capacity(), everywhere);
    let mut pages = found.pages().to_vec();
    pages.sort_unstable_by_key(|entry| entry.0);
    let sample = sample::begin(domain, &pages);
    let (used, unused) = sample.pages().split_at(sample.pages().len() / 2);
    for (page, _) in used {
        let fault = Fault { addr: page.addr(), access: Access::Read, thread: 0 };
        assert_eq!(fault::resolve(domain, Context::PagerThread, fault), Outcome::Resolved, "{page:?}");
    }
    assert_eq!(sample::unused(domain, sample.pages()), unused.len());
    assert!(used.iter().all(|(_, frame)| domain.frames.used(*frame)), "a use that nobody noted");
    assert!(unused.iter().all(|(_, frame)| !domain.frames.used(*frame)), "a use of a page that nobody used");
    sample::end_all(domain);
    at_rest(world);
}

/// Reads a page while nobody else runs.
pub fn read(world: &World, page: PageNo) {
    for _ in 0..MOST_ROUNDS {
        if let Some(seen) = world.mmu.read(page) {
            return assert!(world.shadow.agrees(world.at(page), seen), "{page:?} reads as {seen:?} in the end");
        }
        come_closer(world, page, Access::Read);
    }
    panic!("{page:?} cannot be had in the end: {}", world.frames());
}

/// Writes half a page while nobody else runs.
pub fn write(world: &World, page: PageNo, half: usize, value: u64) {
    for _ in 0..MOST_ROUNDS {
        if world.mmu.write(page, half, value) {
            return world.shadow.write(world.at(page), half, value);
        }
        come_closer(world, page, Access::Write);
    }
    panic!("{page:?} cannot be written: {}", world.frames());
}

/// Resolves a fault, or makes room for that.
fn come_closer(world: &World, page: PageNo, access: Access) {
    if world.domain.stack.ready() == 0 {
        evict_some(world, 8);
        while save(&world.domain).taken > 0 {}
        return;
    }
    match fault::resolve(&world.domain, Context::PagerThread, Fault { addr: page.addr(), access, thread: 0 }) {
        Outcome::Resolved | Outcome::Retry | Outcome::Busy => {}
        other => panic!("{page:?} is {other:?}, and nobody else runs"),
    }
}
