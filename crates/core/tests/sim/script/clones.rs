//! The same of clones and their sources.

use super::*;

/// Threads that access a page as one of a region that was there before, and a pager thread. How often that left one stopped.
fn come_late(world: &'static World, page: PageNo) -> &'static Cell<u32> {
    let (mmu, stopped): (_, &Cell<u32>) = (world.mmu, Box::leak(Box::default()));
    for access in [Access::Read, Access::Write] {
        scheduler::spawn("is late", Role::Program, move || {
            while mmu.read(page).is_none() {
                mmu.fault(page, access, None);
            }
            scheduler::wake(u32::MAX, |_, state| state == Does::Reading);
        });
    }
    scheduler::spawn("resolves", Role::Domain, move || {
        while mmu.read(page).is_none() {
            let Some((page, access)) = mmu.next_fault() else {
                scheduler::block(Does::Reading);
                continue;
            };
            let fault = Fault { addr: page.addr(), access, thread: 0 };
            let outcome = fault::resolve(&world.domain, Context::PagerThread, fault);
            stopped.set(stopped.get() + u32::from(outcome == Outcome::Retry));
        }
    });
    stopped
}

/// Runs a script in worlds with a clone of a worker region.
fn on_stage_with_a_clone(script: impl Fn(Stage, &'static Region)) {
    on_stage_with_a_clone_that(|clone| clone.trap.is_read(), script);
}

/// Runs a script in worlds whose clone is as it needs it.
fn on_stage_with_a_clone_that(fits: impl Fn(&Region) -> bool, script: impl Fn(Stage, &'static Region)) {
    let met = Cell::new(0);
    for seed in 0..8 {
        on_stage_with(seed, Cuts::WithAClone, |stage| {
            let clone = stage.world.clone_part().unwrap().region;
            if fits(clone) {
                met.set(met.get() + 1);
                script(stage, clone);
            }
        });
    }
    assert!(met.get() > 0, "no such clone");
}

/// A fault at the addresses of a clone before its cut keeps no pager thread, and has the page after the cut.
#[test]
fn a_clone_gets_no_page_before_its_cut() {
    on_stage_with_a_clone(|stage, clone| {
        let (world, source) = (stage.world, stage.region);
        let (domain, mmu, page) = (&world.domain, world.mmu, clone.range.first.plus(stage.index()));
        let stopped = come_late(world, page);
        scheduler::spawn("clones", Role::Domain, move || {
            copy_first::join(domain, source);
            for value in 1..4 {
                checks::write(world, stage.page, 0, value);
                domain.cut.moved.wait(mmu, domain.cut.moved.count(), 1000);
            }
            assert_eq!((mmu.read(page), stopped.get()), (None, 2));
            copy_first::cut(domain, &[source], || clone.link()).unwrap();
            inherit::go_on(domain, clone);
        });
        scheduler::run().unwrap();
        assert_eq!(mmu.read(page), Some([3, 0]));
    });
}

/// Both pages are claimed before the pager of the source says that a trap cannot fill its page.
#[test]
fn who_has_handed_a_page_of_a_clone_over_waits_for_it() {
    let fills_in_trap = |clone: &Region| clone.pager().unwrap().fills_in() == Context::Trap;
    on_stage_with_a_clone_that(fills_in_trap, |stage, clone| {
        let (domain, page) = (&stage.world.domain, clone.range.first.plus(stage.index()));
        copy_first::join(domain, stage.region);
        stage.write(1);
        copy_first::cut(domain, &[stage.region], || clone.link()).unwrap();
        inherit::go_on(domain, clone);
        stage.evict();
        assert!(stage.word().0 == State::Absent && clone.sets.inherited.contains(stage.index()));
        hands_over_and_waits(stage, page);
        assert_eq!(stage.world.mmu.read(page), Some([1, 0]));
        assert_eq!(stage.word().0, State::Absent);
    });
}

/// Nobody who is late waits for a cut that is not made, or looks at the source, which may leave first.
#[test]
fn a_clone_whose_cut_is_not_made_is_a_region_of_its_own() {
    on_stage_with_a_clone(|stage, clone| {
        let (world, source) = (stage.world, stage.region);
        let (domain, mmu, page) = (&world.domain, world.mmu, clone.range.first.plus(stage.index()));
        let stopped = come_late(world, page);
        scheduler::spawn("clones", Role::Domain, move || {
            checks::write(world, stage.page, 0, 1);
            domain.cut.moved.wait(mmu, domain.cut.moved.count(), 1000);
            assert_eq!((mmu.read(page), stopped.get()), (None, 2));
            inherit::give_up(clone);
            inherit::go_on(domain, clone);
        });
        scheduler::run().unwrap();
        assert_eq!(mmu.read(page), Some([0, 0]));
        assert!(clone.source().is_none() && source.heir().is_none());
    });
}

/// The last page that a clone lacked comes between two looks of somebody else's, and its source has another clone made.
#[test]
fn nobody_waits_for_the_cut_of_a_clone_that_lacks_nothing_more() {
    on_stage_with_a_clone(|stage, clone| {
        let (domain, source) = (&stage.world.domain, stage.region);
        let page = clone.range.first.plus(stage.index());
        copy_first::join(domain, source);
        stage.write(1);
        copy_first::cut(domain, &[source], || clone.link()).unwrap();
        inherit::go_on(domain, clone);
        for other in clone.range.pages().filter(|other| *other != page) {
            range::discard(domain, Context::Normal, PageRange { first: other, count: 1 }).unwrap();
        }
        let fetch = move |context| {
            let fault = Fault { addr: page.addr(), access: Access::Read, thread: 0 };
            assert_eq!(fault::resolve(domain, context, fault), Outcome::Resolved);
        };
        scheduler::spawn("is late", Role::Domain, move || fetch(Context::Normal));
        scheduler::spawn("others", Role::Domain, move || {
            // Two at the page's word, and then it has found out which its source is.
            (0..3).for_each(|_| scheduler::block(Does::Watching));
            fetch(Context::PagerThread);
            assert_eq!((clone.sets.inherited.next(0), clone.source().is_some()), (None, true));
            source.part();
            copy_first::cut(domain, &[source], || ()).unwrap();
        });
        scheduler::run_by_looks().unwrap();
        assert_eq!(stage.world.mmu.read(page), Some([1, 0]));
    });
}

/// A page comes, is written to and goes between the question whether it is to be emptied and the claim for that.
#[test]
fn a_clones_page_that_was_had_since_it_was_asked_about_is_not_emptied() {
    on_stage_with_a_clone(|stage, clone| {
        let (domain, source) = (&stage.world.domain, stage.region);
        let of_clone = Stage { region: clone, page: clone.range.first.plus(stage.index()), ..stage };
        copy_first::join(domain, source);
        stage.write(1);
        copy_first::cut(domain, &[source], || clone.link()).unwrap();
        inherit::go_on(domain, clone);
        let asked = Cell::new(0);
        let lacks = |clone: &Region, _| {
            let lacks = clone.sets.inherited.contains(stage.index());
            if asked.replace(asked.get() + 1) == 0 {
                of_clone.write(2);
                of_clone.evict();
                assert_eq!(of_clone.word(), (State::Absent, false));
            }
            lacks
        };
        assert_eq!(with_emptied(domain, of_clone.page, lacks, || ()).unwrap(), None);
        checks::write(stage.world, of_clone.page, 1, 3);
        assert_eq!(stage.world.mmu.read(of_clone.page), Some([2, 3]));
    });
}
