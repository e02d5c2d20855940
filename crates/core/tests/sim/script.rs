//! What happens between a look at a page's word and what is done about it, by a script in the place of chance: the word comes to be
//! what it was, and yet something has happened to the page.

use std::cell::Cell;
use std::num::NonZeroU32;

use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange};
use selfpage_core::fault::claim::{with_claim, with_emptied};
use selfpage_core::fault::evict::trim_standby;
use selfpage_core::fault::protect::{self, Protection};
use selfpage_core::fault::relocate::{self, Unmoved};
use selfpage_core::fault::save::save;
use selfpage_core::fault::{self, Failure, Fault, Outcome, copy_first, image, inherit, poison, range};
use selfpage_core::page::State;
use selfpage_core::pager::Context;
use selfpage_core::region::{Access, Region};
use selfpage_core::shortage::Shortage;
use selfpage_core::stack;
use selfpage_core::sync::Ordering;

mod clones;

use crate::machine::halves;
use crate::pager::Backing;
use crate::scheduler::{self, Role, State as Does};
use crate::snapshots::Cuts;
use crate::threads::evict_some;
use crate::world::{Habit, Life, World};
use crate::{checks, dice};

/// A page of a region that takes part in snapshots.
#[derive(Clone, Copy)]
struct Stage {
    world: &'static World,
    region: &'static Region,
    page: PageNo,
}

impl Stage {
    /// The same with a page that many pages on.
    fn at(self, step: u64) -> Stage {
        Stage { page: self.page.plus(step), ..self }
    }

    /// Moves pages, all told by how far they are from this one.
    fn relocate(self, step: u64, count: u64, to: u64) -> Result<(), (PageNo, Unmoved)> {
        let from = PageRange { first: self.at(step).page, count };
        relocate::relocate(&self.world.domain, Context::Normal, from, self.at(to).page)
    }

    fn index(self) -> u64 {
        self.region.index(self.page)
    }

    fn range(self) -> PageRange {
        PageRange { first: self.page, count: 1 }
    }

    fn word(self) -> (State, bool) {
        let word = self.region.word(self.page).unwrap().load();
        (word.state(), word.wishes().copied_first())
    }

    fn write(self, value: u64) {
        checks::write(self.world, self.page, 0, value);
    }

    fn evict(self) {
        self.world.evict(self.range());
        while save(&self.world.domain).taken > 0 {}
        trim_standby(&self.world.domain, 0);
    }

    /// A whole snapshot: it has every page that has changed since the one before.
    fn snapshot(self) {
        let domain = &self.world.domain;
        copy_first::cut(domain, &[self.region], || copy_first::note_image(&[self.region])).unwrap();
        let mut images = [(PageNo(0), [0; PAGE_BYTES]); 8];
        let mut from = Some(0);
        while let Some(at) = from {
            from = image::read(domain, self.region, at, &mut images).unwrap().1;
        }
        assert!(!self.region.sets.changed.contains(self.index()));
    }
}

/// Has `prepare` and a snapshot done, and then `drop`, with an event at each look that it takes at the page's word until there is none
/// left. The next snapshot needs the page.
fn the_next_snapshot_needs(state: State, prepare: fn(Stage), drop: fn(Stage), events: [fn(Stage); 2]) {
    on_stage(0, |stage| {
        let world = stage.world;
        copy_first::join(&world.domain, stage.region);
        prepare(stage);
        stage.snapshot();
        assert_eq!(stage.word(), (state, true));
        scheduler::spawn("drops", Role::Domain, move || drop(stage));
        scheduler::spawn("others", Role::Domain, move || {
            for event in events {
                scheduler::block(Does::Watching);
                event(stage);
            }
        });
        scheduler::run_by_looks().unwrap();
        assert!(stage.region.sets.changed.contains(stage.index()), "what was dropped does not count as changed");
    });
}

/// Sets a world up for a script, in calm weather, and takes it down afterwards.
fn on_stage(seed: u64, script: impl FnOnce(Stage)) {
    on_stage_with(seed, Cuts::AtOneInstant, script);
}

fn on_stage_with(seed: u64, cuts: Cuts, script: impl FnOnce(Stage)) {
    selfpage_core::sync::RACE.get_or_init(|| scheduler::look);
    dice::seed(seed);
    scheduler::reset();
    let mut life = Life::default();
    let world = World::new(&mut life, 0, Habit::None, cuts);
    let region = world.parts[0].region;
    let stage = Stage { world, region, page: region.range.first.plus(2) };
    world.weather.calm(|| script(stage));
    scheduler::reset();
    // SAFETY: world-outlives: its threads have ended.
    unsafe { life.end() };
}

#[test]
fn advice_is_not_for_the_next_region_at_its_addresses() {
    on_stage(0, |stage| {
        let domain = &stage.world.domain;
        for (goes, state) in [(false, State::Resident), (true, State::Absent)] {
            stage.evict();
            assert!(range::prefetch(domain, stage.region, stage.range()));
            if goes {
                replace(stage);
            }
            while let Some(request) = fault::next_request(domain) {
                fault::serve(domain, request);
            }
            assert_eq!(stage.word().0, state);
            range::discard(domain, Context::Normal, stage.range()).unwrap();
        }
    });
}

/// Others come to its addresses: the same one, under another number.
fn replace(stage: Stage) {
    let regions = &stage.world.domain.regions;
    assert!(regions.remove(stage.region));
    // SAFETY: region-in-map: it is as it was.
    assert!(unsafe { regions.insert(stage.region) });
}

#[test]
fn a_failure_says_nothing_of_the_next_region_at_its_addresses() {
    for goes in [false, true] {
        on_stage(0, |stage| {
            let domain = &stage.world.domain;
            let demand = &domain.stack.demand;
            scheduler::spawn("waits", Role::Domain, move || {
                while stack::take(domain, NonZeroU32::MIN).is_some() {}
                let fault = Fault { addr: stage.page.addr(), access: Access::Read, thread: 0 };
                let outcome = fault::resolve(domain, Context::PagerThread, fault);
                assert_eq!(outcome, Outcome::Failed(Failure::Shortage(Shortage::AllHeld)));
                let failed = stage.region.word(stage.page).unwrap().load().failed();
                assert_eq!(failed, !goes, "whether the page that is there counts as failed");
            });
            scheduler::spawn("has none", Role::Domain, move || {
                // Until it waits.
                scheduler::block(Does::Asleep { word: 0, deadline_ns: scheduler::now_ns() + 1_000_000 });
                assert!(domain.counters.frame_waits_total.load(Ordering::Relaxed) > 0);
                demand.state_shortage(stage.world.mmu, demand.wanted.count(), Shortage::AllHeld);
                // Until it looks for the last time.
                scheduler::block(Does::Watching);
                if goes {
                    replace(stage);
                }
            });
            scheduler::run_by_looks().unwrap();
        });
    }
}

/// Others have a page as soon as whoever cannot have it lets go of it. It is not made to fail then, wherever it is by now.
#[test]
fn a_page_that_was_had_since_it_failed_fails_no_more() {
    on_stage(0, |stage| {
        let (domain, fails) = (&stage.world.domain, &stage.world.weather.fill_fails_once_in);
        let fault = Fault { addr: stage.page.addr(), access: Access::Read, thread: 0 };
        fails.set(1);
        scheduler::spawn("fails", Role::Domain, move || {
            let outcome = fault::resolve(domain, Context::PagerThread, fault);
            assert!(matches!(outcome, Outcome::Failed(Failure::Pager(_))), "{outcome:?}");
            assert!(poison::poison(domain, stage.page, || ()));
        });
        scheduler::spawn("has it", Role::Domain, move || {
            // Until the next look behind the failure.
            let has_failed = || stage.world.part(stage.page).pager.failed_ns(stage.index()) > 0;
            while !has_failed() || stage.word().0 != State::Absent {
                scheduler::block(Does::Watching);
            }
            fails.set(0);
            assert_eq!(fault::resolve(domain, Context::PagerThread, fault), Outcome::Resolved);
            stage.evict();
        });
        scheduler::run_by_looks().unwrap();
        assert_eq!((stage.word().0, fails.get()), (State::Absent, 0));
    });
}

/// What was passed, or handed over, in one region is asked in the next.
#[test]
fn the_handler_of_the_next_region_is_asked_first() {
    for goes in [false, true] {
        on_stage(0, |stage| {
            let domain = &stage.world.domain;
            let region = stage.world.parts[2].region;
            let stage = Stage { region, page: region.range.first, ..stage };
            let fault = Fault { addr: stage.page.addr(), access: Access::Read, thread: 0 };
            let expected = if goes { Outcome::Missing } else { Outcome::Resolved };
            scheduler::spawn("hands over", Role::Trap, move || {
                assert_eq!(fault::resolve_asking(domain, Context::Trap, fault), expected);
                let of = region.serial();
                if goes {
                    replace(stage);
                }
                let passed = || fault::resolve_further(domain, Context::PagerThread, fault, of);
                assert_eq!(scheduler::in_role(Role::Domain, passed), expected);
            });
            scheduler::spawn("serves", Role::Domain, move || {
                domain.requested.wait(stage.world.mmu, domain.requested.count(), 0);
                let request = fault::next_request(domain).unwrap();
                if goes {
                    replace(stage);
                    region.asks_first.store(1, Ordering::Relaxed);
                }
                fault::serve(domain, request);
            });
            scheduler::run().unwrap();
        });
    }
}

#[test]
fn a_page_that_was_armed_again_before_it_is_discarded_counts_as_changed() {
    let prepare = |stage: Stage| stage.write(1);
    let discard = |stage: Stage| {
        assert_eq!(range::discard(&stage.world.domain, Context::Normal, stage.range()), Ok(()));
        assert_eq!(stage.word().0, State::Absent);
    };
    the_next_snapshot_needs(State::Resident, prepare, discard, [|stage| stage.write(2), Stage::snapshot]);
}

#[test]
fn a_page_that_was_armed_again_before_it_is_supplied_counts_as_changed() {
    let prepare = |stage: Stage| {
        stage.write(1);
        stage.evict();
    };
    let supply = |stage: Stage| {
        let supplied = range::supply(&stage.world.domain, Context::Normal, stage.page, &[0; PAGE_BYTES]);
        assert_eq!(supplied, Ok(Outcome::Resolved));
    };
    let come_and_go = |stage: Stage| {
        stage.write(2);
        stage.evict();
        assert_eq!(stage.word(), (State::Absent, false));
    };
    the_next_snapshot_needs(State::Absent, prepare, supply, [come_and_go, Stage::snapshot]);
}

/// A page that the program has used where its region did not hear of it, and what may happen to it on the way.
#[test]
fn what_is_taken_up_is_as_it_was_or_absent() {
    for drops in [false, true] {
        on_stage(0, |stage| {
            let (domain, mmu) = (&stage.world.domain, stage.world.mmu);
            mmu.put(stage.page, 7);
            scheduler::spawn("takes up", Role::Domain, move || {
                assert_eq!(range::take_up(domain, stage.page), Ok(Outcome::Resolved));
            });
            if drops {
                scheduler::spawn("drops", Role::Domain, move || {
                    scheduler::block(Does::Watching);
                    assert!(mmu.advise_away(stage.page));
                });
            }
            scheduler::run_by_looks().unwrap();
            let (state, held) = if drops { (State::Absent, None) } else { (State::Resident, Some([7; 2])) };
            assert_eq!((stage.word().0, mmu.read(stage.page)), (state, held));
            mmu.check();
        });
    }
}

/// From the moment on in which it is unmapped its frame has the only copy.
#[test]
fn what_is_taken_up_is_not_lost_where_it_cannot_be_mapped() {
    on_stage(0, |stage| {
        let (domain, mmu, pinned) = (&stage.world.domain, stage.world.mmu, &stage.world.weather.pinned_once_in);
        mmu.put(stage.page, 7);
        scheduler::spawn("takes up", Role::Domain, move || {
            assert_eq!(range::take_up(domain, stage.page), Ok(Outcome::Resolved));
        });
        scheduler::spawn("refuses", Role::Domain, move || {
            while mmu.read(stage.page).is_some() {
                scheduler::block(Does::Watching);
            }
            pinned.set(1);
        });
        scheduler::run_by_looks().unwrap();
        pinned.set(0);
        let word = stage.region.word(stage.page).unwrap().load();
        assert_eq!((word.state(), mmu.in_slot(word.frame())), (State::Aside, Some([7; 2])));
        mmu.check();
    });
}

fn fetch(stage: Stage) {
    let fault = Fault { addr: stage.page.addr(), access: Access::Read, thread: 0 };
    assert_eq!(fault::resolve(&stage.world.domain, Context::PagerThread, fault), Outcome::Retry);
}

fn read_ahead(stage: Stage) {
    let domain = &stage.world.domain;
    assert!(range::prefetch(domain, stage.region, stage.range()));
    fault::serve(domain, fault::next_request(domain).unwrap());
}

fn supply(stage: Stage) {
    let supplied = range::supply(&stage.world.domain, Context::Normal, stage.page, &[0; PAGE_BYTES]);
    assert_eq!(supplied, Ok(Outcome::Violation));
}

/// An absent page that is given up is absent before and after: its word tells nothing.
#[test]
fn nothing_comes_in_the_place_of_a_guard_that_came_meanwhile() {
    let cases: [(fn(Stage), bool); 3] = [(fetch, false), (read_ahead, false), (supply, true)];
    for (brings_in, looks_at_guards_first) in cases {
        on_stage(0, |stage| {
            let (domain, mmu) = (&stage.world.domain, stage.world.mmu);
            protect::protect(domain, stage.range(), Protection::Read).unwrap();
            scheduler::spawn("brings in", Role::Domain, move || brings_in(stage));
            scheduler::spawn("gives up", Role::Domain, move || {
                scheduler::block(Does::Watching);
                if looks_at_guards_first {
                    // Until the step behind that look.
                    scheduler::block(Does::Asleep { word: 0, deadline_ns: scheduler::now_ns() + 1 });
                }
                let guard = || {
                    stage.region.guarded.insert(stage.index());
                    mmu.put(stage.page, 7);
                };
                assert_eq!(with_emptied(domain, stage.page, |_, _| true, guard), Ok(Some(())));
            });
            scheduler::run_by_looks().unwrap();
            assert_eq!((stage.word().0, mmu.read(stage.page)), (State::Absent, Some([7; 2])));
            mmu.check();
        });
    }
}

/// Has a page accessed in a trap, which hands it over, and a pager thread twice meet somebody at it when it comes for that. Whoever claimed the
/// page again, only to hand it over, would be whom it meets when it comes for another.
fn hands_over_and_waits(stage: Stage, page: PageNo) {
    let (domain, mmu, weather) = (&stage.world.domain, stage.world.mmu, &stage.world.weather);
    weather.wrong_context_once_in.set(1);
    scheduler::spawn("accesses", Role::Trap, move || {
        let fault = Fault { addr: page.addr(), access: Access::Read, thread: 0 };
        assert_eq!(fault::resolve(domain, Context::Trap, fault), Outcome::Resolved);
    });
    scheduler::spawn("serves", Role::Domain, move || {
        for expected in [Outcome::Busy, Outcome::Busy, Outcome::Resolved] {
            let request = loop {
                match fault::next_request(domain) {
                    Some(request) => break request,
                    None => domain.requested.wait(mmu, domain.requested.count(), 1000),
                }
            };
            // From now on a claim in the trap would bring the page in.
            weather.wrong_context_once_in.set(0);
            let serve = || fault::serve(domain, request);
            let outcome = match expected {
                Outcome::Busy => with_claim(domain, page, |_| serve()).unwrap(),
                _ => serve(),
            };
            assert_eq!(outcome, expected);
        }
    });
    scheduler::run().unwrap();
}

#[test]
fn who_has_handed_a_page_over_waits_for_it() {
    on_stage(0, |stage| hands_over_and_waits(stage, stage.world.parts[1].region.range.first));
}

/// Runs a script on the stage whose first three pages are 1, 2 and 3, the second in the store alone.
fn on_three_pages(script: impl FnOnce(Stage)) {
    on_stage(0, |stage| {
        for (step, value) in (0..3).zip(1..) {
            stage.at(step).write(value);
        }
        stage.at(1).evict();
        script(stage);
        stage.world.mmu.check();
    });
}

/// One of several pages that are to move is given up: it stays, and so do those behind it.
#[test]
fn what_is_given_up_does_not_move() {
    on_three_pages(|stage| {
        let (mmu, at) = (stage.world.mmu, |step| stage.at(step));
        stage.region.given_up.insert(at(1).index());
        assert_eq!(stage.relocate(0, 3, 4), Err((at(1).page, Unmoved::GivenUp)));
        assert_eq!([4, 5, 6].map(|step| mmu.read(at(step).page)), [Some([1, 0]), None, None]);
        assert_eq!((at(1).word().0, mmu.read(at(2).page)), (State::Absent, Some([3, 0])));
        stage.region.given_up.remove(at(1).index());
        assert_eq!(stage.relocate(1, 2, 5), Ok(()));
    });
}

/// Nor does anything move to what is given up: who finds its mark there knows that contents are gone.
#[test]
fn nothing_moves_to_what_is_given_up() {
    on_three_pages(|stage| {
        let (mmu, at) = (stage.world.mmu, |step| stage.at(step));
        stage.region.given_up.insert(at(5).index());
        assert_eq!(stage.relocate(0, 3, 4), Err((at(1).page, Unmoved::Closed)));
        assert_eq!(stage.relocate(2, 1, 5), Err((at(2).page, Unmoved::Closed)));
        assert_eq!([4, 5, 6].map(|step| mmu.read(at(step).page)), [Some([1, 0]), None, None]);
        assert_eq!((at(1).word().0, mmu.read(at(2).page)), (State::Absent, Some([3, 0])));
        stage.region.given_up.remove(at(5).index());
        assert_eq!(stage.relocate(1, 2, 5), Ok(()));
        assert_eq!(mmu.read(at(6).page), Some([3, 0]));
    });
}

/// A clone's cut, which comes in the middle of an image, arms a page that was written to since, and went: it looks as it did when the
/// image still needed it.
#[test]
fn a_neighbour_that_has_its_copy_already_is_not_read_anew() {
    let mut met = 0;
    for seed in 0..40 {
        on_stage(seed, |stage| {
            let (world, region) = (stage.world, stage.region);
            let neighbour = Stage { page: stage.page.plus(1), ..stage };
            copy_first::join(&world.domain, region);
            for stage in [stage, neighbour] {
                stage.write(1);
                stage.evict();
                region.sets.changed.insert(stage.index());
            }
            copy_first::cut(&world.domain, &[region], || copy_first::note_image(&[region])).unwrap();
            assert_eq!(neighbour.word(), (State::Absent, true));
            scheduler::spawn("reads", Role::Domain, move || {
                let mut images = [(PageNo(0), [0; PAGE_BYTES]); 8];
                let (count, _) = image::read(&world.domain, region, stage.index(), &mut images).unwrap();
                let copies = image::take_copies(&world.domain, &mut images[count..]);
                let of_neighbour = images[..count + copies].iter().filter(|image| image.0 == neighbour.page);
                let found: Vec<_> = of_neighbour.map(|image| halves(&image.1)[0]).collect();
                assert_eq!(found, [1], "seed {seed}: the image has it once, as it was");
            });
            let met = &raw mut met;
            scheduler::spawn("others", Role::Domain, move || {
                while neighbour.word() == (State::Absent, true) && region.sets.pending.contains(neighbour.index()) {
                    scheduler::block(Does::Watching);
                    // Where the image has taken most of the frames for its pages there is none for a copy.
                    if stage.word().0 == State::Busy && world.domain.stack.ready() > 2 {
                        neighbour.write(2);
                        neighbour.evict();
                        copy_first::cut(&world.domain, &[region], || ()).unwrap();
                        assert_eq!(neighbour.word(), (State::Absent, true));
                        // SAFETY: one-real-thread: the test's own, which waits for this script.
                        unsafe { *met += 1 };
                    }
                }
            });
            scheduler::run_by_looks().unwrap();
        });
    }
    assert!(met > 0, "no image read the two together");
}

/// Does `work`, and `other` in the middle of it: after so many of its looks at a page's word, or at its end.
fn run_with_one_after(looks: u32, work: impl FnOnce() + 'static, other: impl FnOnce() + 'static) {
    let done: &Cell<bool> = Box::leak(Box::default());
    scheduler::spawn("works", Role::Domain, move || {
        work();
        done.set(true);
        scheduler::wake(u32::MAX, |_, state| state == Does::Watching);
    });
    scheduler::spawn("comes between", Role::Domain, move || {
        (0..looks).take_while(|_| !done.get()).for_each(|_| scheduler::block(Does::Watching));
        other();
    });
    scheduler::run_by_looks().unwrap();
}

/// A tracker looks at a page on its way out, and at whether it is armed once it is back: the write before that has its note nowhere else.
#[test]
fn what_is_put_back_counts_as_written() {
    let met = Cell::new(0);
    for seed in 0..8 {
        for looks in 0..8 {
            on_stage(seed, |stage| {
                let (world, parts) = (stage.world, &stage.world.parts);
                let Some(part) = parts.iter().find(|part| part.pager.backing() == Backing::Nothing) else { return };
                let (mmu, region, page) = (world.mmu, part.region, part.region.range.first);
                let stage = Stage { world, region, page };
                stage.write(1);
                let arm = move || !region.arm(page) | mmu.written(page);
                assert!(arm(), "it is new");
                stage.write(2);
                let (found, gone): &(Cell<bool>, Cell<bool>) = Box::leak(Box::default());
                run_with_one_after(
                    looks,
                    move || stage.evict(),
                    move || {
                        gone.set(mmu.read(page).is_none());
                        found.set(arm());
                    },
                );
                assert_eq!((stage.word().0, mmu.read(page)), (State::Resident, Some([2, 0])));
                met.set(met.get() + u32::from(gone.get()));
                assert!(
                    found.get() || !gone.get() || !region.is_armed(page),
                    "seed {seed}: what was written before it was put back is not found (after {looks} looks)"
                );
            });
        }
    }
    assert!(met.get() > 0, "it was never looked at on its way");
}

/// The policy suggests a frame on its way, and so knows it no more, unless it is told of it again.
#[test]
fn the_policy_is_told_of_what_has_moved() {
    for looks in 0..32 {
        on_three_pages(|stage| {
            let world = stage.world;
            let evicts = move || {
                evict_some(world, 256);
                while save(&world.domain).taken > 0 {}
            };
            run_with_one_after(looks, move || stage.relocate(0, 3, 4).unwrap(), evicts);
            (0..7).for_each(|step| checks::write(world, stage.at(step).page, 0, step + 1));
            for _ in 0..8 {
                evict_some(world, 256);
                while save(&world.domain).taken > 0 {}
                trim_standby(&world.domain, 0);
            }
            let known: Vec<u64> = (0..7).filter(|step| stage.at(*step).word().0 == State::Absent).collect();
            assert!(
                known.len() == 7,
                "seed 0: the policy was not told of a frame (only {known:?}, after {looks} looks)"
            );
        });
    }
}
