//! What the program does, step by step.

use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange};
use selfpage_core::fault::protect::{self, Protection};
use selfpage_core::fault::range::{self, Undone};
use selfpage_core::fault::relocate::{self, Unmoved};
use selfpage_core::fault::{self, Failure, Fault, Outcome, flush, sample};
use selfpage_core::mmu::{Refusal, Trap};
use selfpage_core::pager::Context;
use selfpage_core::region::Access;

use crate::checks;
use crate::child;
use crate::dice;
use crate::machine::set_half;
use crate::scheduler::{self, Role};
use crate::snapshots;
use crate::world::{Habit, Stage, World};

/// Threads of the program.
pub const PROGRAMS: usize = 3;
/// Neighbouring pages with one owner, who alone writes them.
const BLOCK: u64 = 4;

/// How long a sample waits for pages that other threads are at.
const SETTLING_NS: u64 = 1_000_000;

/// Starts the program.
pub fn spawn(world: &'static World) {
    for (me, name) in ["program 0", "program 1", "program 2"].into_iter().enumerate() {
        scheduler::spawn(name, Role::Program, move || Program { world, me, pinned: Vec::new() }.run());
    }
    scheduler::spawn("snapshots", Role::Domain, move || snapshots::run(world));
    world.left.set(PROGRAMS + 1);
    let _ = world.mmu.handler.set(Box::new(move || handle_signal(world)));
}

/// An access to half a page.
#[derive(Clone, Copy)]
enum Touch {
    Read,
    Write { half: usize },
}

thread_local! {
    /// Threads, a bit each, that may be called away by a signal where they sleep.
    static OPEN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Does `call` with signals let in where it sleeps.
fn with_signals<R>(call: impl FnOnce() -> R) -> R {
    let bit = 1u64 << scheduler::current().expect("a simulated thread");
    OPEN.set(OPEN.get() | bit);
    let result = call();
    OPEN.set(OPEN.get() & !bit);
    result
}

/// A signal, maybe: its handler reads a page.
fn handle_signal(world: &World) {
    let Some(bit) = scheduler::current().map(|id| 1u64 << id) else { return };
    if OPEN.get() & bit != 0 && dice::once_in(8) {
        OPEN.set(OPEN.get() & !bit);
        let _ = access(world, world.any_page(), Touch::Read);
        OPEN.set(OPEN.get() | bit);
    }
}

/// Makes an access as the hardware does: again and again until it succeeds, or the program is told why not.
fn access(world: &World, page: PageNo, touch: Touch) -> Result<(), ()> {
    world.waiting_for(PageRange { first: page, count: 1 }, || access_until_told(world, page, touch))
}

fn access_until_told(world: &World, page: PageNo, touch: Touch) -> Result<(), ()> {
    loop {
        scheduler::step_aside("access");
        if touch_mapped(world, page, touch) {
            return Ok(());
        }
        let access = match touch {
            Touch::Read => Access::Read,
            Touch::Write { .. } => Access::Write,
        };
        let failure = match world.part(page).region.trap {
            Trap::Worker | Trap::TrackedWorker if world.mmu.poisoned(page) => return Err(()),
            Trap::Worker | Trap::TrackedWorker => {
                let signal_after = dice::once_in(32).then(|| dice::below(200));
                let refused = world.mmu.fault(page, access, signal_after);
                if signal_after.is_some() {
                    handle_signal(world);
                }
                if refused {
                    return Err(());
                }
                None
            }
            Trap::Upcall | Trap::TrackedUpcall => {
                let fault = Fault { addr: page.addr(), access, thread: 0 };
                match scheduler::in_role(Role::Trap, || fault::resolve(&world.domain, Context::Trap, fault)) {
                    Outcome::Resolved | Outcome::Retry => None,
                    Outcome::Failed(failure) => Some(failure),
                    Outcome::Protected => {
                        world.unprotect(page);
                        None
                    }
                    other => panic!("{page:?} is {other:?}"),
                }
            }
        };
        if let Some(failure) = failure {
            world.judge(page, failure);
            return Err(());
        }
    }
}

/// The access itself. `false`: the page is not mapped.
fn touch_mapped(world: &World, page: PageNo, touch: Touch) -> bool {
    let at = world.at(page);
    assert!(
        world.mmu.read(page).is_none() || world.is_in_core(page),
        "{page:?} is mapped, and is not said to be in core"
    );
    match touch {
        Touch::Read => world.mmu.read(page).is_some_and(|seen| {
            let right = world.shadow.agrees(at, seen);
            assert!(right, "{page:?} reads as {seen:?} and is {:?}", world.shadow.now(at));
            true
        }),
        Touch::Write { half } => {
            if let Some(seen) = world.mmu.read(page) {
                let right = world.shadow.agrees(at, seen);
                assert!(right, "{page:?} is {seen:?} before a write, and not {:?}", world.shadow.now(at));
            }
            let value = world.value.get() + 1;
            let written = world.mmu.write(page, half, value);
            if written {
                world.value.set(value);
                world.shadow.write(at, half, value);
            }
            written
        }
    }
}

struct Program {
    world: &'static World,
    me: usize,
    pinned: Vec<PageNo>,
}

impl Program {
    fn run(mut self) {
        while let Some(left) = self.world.steps_left.get().checked_sub(1) {
            self.world.steps_left.set(left);
            self.step();
        }
        while !self.pinned.is_empty() {
            self.unpin();
        }
        self.world.ended(Stage::PagerThreads, crate::threads::PAGER_THREADS);
    }

    fn step(&mut self) {
        let world = self.world;
        match dice::below(1000) {
            0..350 => drop(access(world, world.any_page(), Touch::Read)),
            350..580 => drop(access(world, self.own_page(), Touch::Write { half: dice::below(2) as usize })),
            580..620 => self.protect(),
            620..650 | 800..830 if world.habit == Habit::Relocate => self.relocate(),
            620..650 | 800..830 if world.habit == Habit::Track => world.tracker.scan(world, self.any_range(64)),
            620..680 => {
                for page in self.any_range(12).pages() {
                    let _ = access(world, page, Touch::Read);
                }
            }
            680..740 => self.pin(),
            740..800 => self.unpin(),
            800..830 if world.habit == Habit::Supply => self.supply(),
            800..850 => self.discard(),
            850..865 => self.sample(),
            865..890 => {
                world.evict(self.any_range(8));
            }
            890..930 => self.flush(),
            930..960 => {
                let range = self.any_range(24);
                range::prefetch(&world.domain, world.part(range.first).region, range);
            }
            960..985 => self.advise_away(),
            985..990 => self.fork(),
            990..995 => self.resize(),
            _ => world.weather.change(),
        }
    }

    fn owns(&self, page: PageNo) -> bool {
        page.0 / BLOCK % PROGRAMS as u64 == self.me as u64
    }

    fn own_page(&self) -> PageNo {
        loop {
            let page = self.world.any_page();
            if self.owns(page) {
                return page;
            }
        }
    }

    fn any_range(&self, most: u64) -> PageRange {
        let first = self.world.any_page();
        let end = self.world.part(first).region.range.end();
        PageRange { first, count: (1 + dice::below(most)).min(end.0 - first.0) }
    }

    /// Each holds so few pins that all of them together leave frames for the others.
    fn pin(&mut self) {
        let world = self.world;
        let page = self.own_page();
        let at = world.at(page);
        if self.pinned.len() > world.domain.stack.budget() as usize / 16 {
            return;
        }
        if dice::once_in(2) && access(world, page, Touch::Read).is_err() && dice::once_in(2) {
            return;
        }
        world.shadow.set_pinning(at, true);
        let range = PageRange { first: page, count: 1 };
        world.waiting_for(range, || match with_signals(|| range::pin(&world.domain, Context::Trap, page)) {
            Outcome::Resolved => {
                self.pinned.push(page);
                world.shadow.set_pins(at, world.shadow.pins(at) + 1);
            }
            Outcome::Failed(failure) => world.judge(page, failure),
            Outcome::Protected => {}
            other => panic!("{page:?} is {other:?}"),
        });
        world.shadow.set_pinning(at, false);
        self.look_at_pinned();
    }

    /// A pinned page is there.
    fn look_at_pinned(&self) {
        for page in &self.pinned {
            scheduler::step_aside("pinned");
            let word = self.world.part(*page).region.word(*page).expect("a page of the region");
            assert!(touch_mapped(self.world, *page, Touch::Read), "{page:?} is pinned, and went: {:?}", word.load());
        }
    }

    fn unpin(&mut self) {
        let world = self.world;
        self.look_at_pinned();
        if self.pinned.is_empty() {
            return;
        }
        let page = self.pinned.swap_remove(dice::below(self.pinned.len() as u64) as usize);
        let at = world.at(page);
        world.shadow.set_pinning(at, true);
        assert!(range::unpin(&world.domain, page), "{page:?} lost a pin");
        world.shadow.set_pins(at, world.shadow.pins(at) - 1);
        world.shadow.set_pinning(at, false);
    }

    fn discard(&mut self) {
        let range = self.own_range();
        self.drop_contents(range);
    }

    /// Some pages of one owner.
    fn own_range(&self) -> PageRange {
        let first = self.own_page();
        let end = self.world.part(first).region.range.end().0.min((first.0 / BLOCK + 1) * BLOCK);
        PageRange { first, count: 1 + dice::below(end - first.0) }
    }

    /// Discards pages of one owner. Whether all of them.
    fn drop_contents(&mut self, range: PageRange) -> bool {
        let world = self.world;
        range.pages().for_each(|page| world.shadow.fade(world.at(page), [0; 2]));
        let discard = |context| range::discard(&world.domain, context, range);
        let done = world.waiting_for(range, || {
            loop {
                let done = with_signals(|| discard(Context::Trap));
                // What a pager thread must do it does, but it waits for no cut.
                let handed = matches!(done, Err((_, Undone::Failed(Failure::Machine(Refusal::NoDescriptor)))));
                match if handed { discard(Context::Normal) } else { done } {
                    Err((_, Undone::AwaitCut(wait))) => wait.sleep(&world.domain.cut, world.mmu),
                    // A page that the clone of its region needs, and cannot have.
                    Err((page, Undone::Failed(failure))) => {
                        world.judge(page, failure);
                        return Err((page, failure));
                    }
                    Ok(()) => return Ok(()),
                }
            }
        });
        let dropped = done.map_or_else(|(page, _)| PageRange { count: page.0 - range.first.0, ..range }, |()| range);
        range.pages().filter(|page| !dropped.contains(*page)).for_each(|page| world.shadow.stay(world.at(page)));
        self.are_zero(dropped);
        dropped.count == range.count
    }

    /// Pages of one owner are as if nobody had touched them.
    fn are_zero(&mut self, range: PageRange) {
        self.have_no_pins(range);
        range.pages().for_each(|page| self.world.shadow.turn(self.world.at(page), [0; 2]));
    }

    /// The pins on pages of one owner went with what was there.
    fn have_no_pins(&mut self, range: PageRange) {
        self.pinned.retain(|page| !range.contains(*page));
        range.pages().for_each(|page| self.world.shadow.set_pins(self.world.at(page), 0));
    }

    /// Moves what some pages of one owner hold to others.
    fn relocate(&mut self) {
        let (world, from, to) = (self.world, self.own_range(), self.own_range());
        let count = from.count.min(to.count);
        let (from, to) = (PageRange { count, ..from }, PageRange { count, ..to });
        let kind = |page| world.part(page).pager.backing();
        let meet = from.pages().any(|page| to.contains(page));
        if world.clone_part().is_some() && !world.cloned.get() {
            // What the clone has is what the pages hold at one instant, and nobody knows what these hold meanwhile.
            return;
        }
        let doubtful = from.pages().any(|page| world.shadow.doubtful(world.at(page)));
        if meet || doubtful || kind(from.first) != kind(to.first) {
            return;
        }
        if dice::once_in(2) && !self.drop_contents(to) {
            return;
        }
        let shift = to.first.0.wrapping_sub(from.first.0);
        let new = |page: PageNo| world.at(PageNo(page.0.wrapping_add(shift)));
        for page in from.pages() {
            world.shadow.fade(new(page), world.shadow.now(world.at(page)));
            world.shadow.fade(world.at(page), [0; 2]);
        }
        let end = world.waiting_for(from, || self.relocate_until_refused(from, to.first));
        for page in from.pages() {
            if page < end {
                // What it was to have from its source may have been dropped there, before it moved.
                let doubtful = world.shadow.doubtful(world.at(page));
                world.shadow.finish(new(page));
                if doubtful {
                    world.shadow.doubt(new(page));
                }
            } else {
                world.shadow.stay(new(page));
                world.shadow.stay(world.at(page));
            }
        }
        let moved = end.0 - from.first.0;
        self.have_no_pins(PageRange { count: moved, ..to });
        self.are_zero(PageRange { count: moved, ..from });
    }

    /// The first page that has not moved.
    fn relocate_until_refused(&self, from: PageRange, to: PageNo) -> PageNo {
        let (world, mut at, mut context) = (self.world, from.first, Context::Trap);
        while at < from.end() {
            let rest = PageRange { first: at, count: from.end().0 - at.0 };
            let now = std::mem::replace(&mut context, Context::Trap);
            let there = to.plus(at.0 - from.first.0);
            let Err((page, why)) = with_signals(|| relocate::relocate(&world.domain, now, rest, there)) else {
                break;
            };
            at = page;
            match why {
                Unmoved::AwaitCut(wait) => wait.sleep(&world.domain.cut, world.mmu),
                // What a pager thread must do it does.
                Unmoved::Failed(Failure::Machine(Refusal::NoDescriptor)) if now == Context::Trap => {
                    context = Context::Normal;
                }
                Unmoved::Failed(Failure::Machine(Refusal::Pinned | Refusal::Denied)) => {
                    assert!(world.weather.climate().pins, "{page:?}: nobody holds it");
                    return page;
                }
                // It may have been a page that the clone has from the new place.
                Unmoved::Failed(Failure::Pager(error)) if world.clone_part().is_some() => {
                    assert!(world.weather.climate().bad_fills, "{page:?}: {error:?} for no reason");
                    return page;
                }
                Unmoved::Failed(failure) => {
                    world.judge(page, failure);
                    return page;
                }
                Unmoved::Apart | Unmoved::GivenUp | Unmoved::Closed => {
                    panic!("{page:?}: all have one store, and none is given up")
                }
            }
        }
        from.end()
    }

    /// Gives an absent page its contents, as a handler does that is asked before the pager.
    fn supply(&self) {
        let (world, page) = (self.world, self.own_page());
        let at = world.at(page);
        let value = world.value.get() + 1;
        world.value.set(value);
        let mut contents = [0; PAGE_BYTES];
        (0..2).for_each(|half| set_half(&mut contents, half, value));
        world.shadow.fade(at, [value; 2]);
        let range = PageRange { first: page, count: 1 };
        let supply = |context| range::supply(&world.domain, context, page, &contents);
        let given = world.waiting_for(range, || {
            loop {
                let given = supply(Context::Trap);
                // As in a discard.
                let handed = given == Ok(Outcome::Failed(Failure::Machine(Refusal::NoDescriptor)));
                match if handed { supply(Context::Normal) } else { given } {
                    Err(wait) => wait.sleep(&world.domain.cut, world.mmu),
                    Ok(outcome) => return outcome,
                }
            }
        });
        match given {
            Outcome::Resolved => return world.shadow.turn(at, [value; 2]),
            // It is not absent, or nobody may access it.
            Outcome::Violation => {}
            Outcome::Failed(failure) => world.judge(page, failure),
            other => panic!("{page:?} is {other:?}"),
        }
        world.shadow.stay(at);
    }

    /// Protects a few pages, whoever uses them.
    fn protect(&self) {
        let (world, range) = (self.world, self.any_range(12));
        let protection = [Protection::None, Protection::Read, Protection::ReadWrite][dice::below(3) as usize];
        // What cannot be protected is as it was.
        let _ = world.waiting_for(range, || with_signals(|| protect::protect(&world.domain, range, protection)));
    }

    fn flush(&mut self) {
        let world = self.world;
        let mut rest = self.any_range(8);
        while rest.count > 0 {
            let result = world.waiting_for(rest, || with_signals(|| flush::flush(&world.domain, rest)));
            let (page, failure) = match result {
                Ok(left) => {
                    rest = left;
                    continue;
                }
                Err(failed) => failed,
            };
            match failure {
                Failure::Pager(error) => {
                    let nowhere = error == selfpage_core::pager::PagerError::NoStore;
                    assert!(nowhere || world.weather.climate().bad_saves, "{page:?}: {error:?} for no reason");
                }
                failure => world.judge(page, failure),
            }
            return;
        }
    }

    /// Unmaps some pages to see whether they are used; or has those mapped again that were not.
    fn sample(&self) {
        let domain = &self.world.domain;
        if dice::once_in(4) {
            return sample::end_all(domain);
        }
        let found = sample::in_core(domain, 0..domain.frames.capacity(), self.any_range(24));
        let mut pages = found.pages().to_vec();
        pages.sort_unstable_by_key(|entry| entry.0);
        sample::await_settled(domain, &pages, domain.mmu.now_ns() + SETTLING_NS);
        sample::begin(domain, &pages);
    }

    fn advise_away(&mut self) {
        let (world, page) = (self.world, self.own_page());
        if !self.pinned.contains(&page) && world.mmu.advise_away(page) {
            world.shadow.turn(world.at(page), [0; 2]);
            world.shadow.lose(world.at(page));
            if let Some(heir) = world.heir(page) {
                world.shadow.doubt(world.at(heir));
            }
        }
    }

    /// Gives a few frames up, or takes them back.
    fn resize(&self) {
        let (world, stack) = (self.world, &self.world.domain.stack);
        let few = 1 + dice::below(u64::from(world.domain.frames.capacity() / 6)) as u32;
        if world.cutting.get() {
            return;
        }
        if world.cut.get() > 0 {
            return stack.extend(world.mmu, world.cut.replace(0));
        }
        world.cutting.set(true);
        let before = stack.budget();
        let result = range::give_up(&world.domain, few);
        world.cut.set(before - stack.budget());
        match result {
            Ok(()) => assert_eq!(world.cut.get(), few),
            Err(failure) => world.judge(world.parts[0].region.range.first, failure),
        }
        world.cutting.set(false);
    }

    /// Forks: closes the gate, lets a child run, and opens it again.
    fn fork(&mut self) {
        let (world, gate) = (self.world, &self.world.domain.gate);
        for _ in 0..20 {
            if gate.close(world.mmu, 20 + dice::below(100) as u32).is_ok() {
                checks::at_rest(world);
                child::run(world);
                (0..dice::below(100)).for_each(|_| scheduler::step_aside("fork"));
                checks::at_rest(world);
                return gate.open(world.mmu);
            }
            scheduler::step_aside("fork");
        }
    }
}
