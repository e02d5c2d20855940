//! The threads of the domain: those that the library runs beside the program's.

use selfpage_core::addr::PageRange;
use selfpage_core::fault::evict::{Evicted, evict, trim_standby};
use selfpage_core::fault::save::save;
use selfpage_core::fault::{self, Failure, Fault, Outcome, copy_first};
use selfpage_core::mmu::{Mmu, Trap};
use selfpage_core::pager::Context;
use selfpage_core::policy::Policy;
use selfpage_core::region::Access;
use selfpage_core::shortage::Shortage;
use selfpage_core::sync::Ordering;

use crate::dice;
use crate::scheduler::{self, Role, State};
use crate::world::{Stage, World};

const READERS: usize = 2;
const SERVERS: usize = 2;
/// Fruitless rounds, a millisecond apart at most, after which faults are told that there is no frame.
const MOST_BARREN: u32 = 20;

/// Starts them all.
pub fn spawn(world: &'static World) {
    for name in ["reader 0", "reader 1"] {
        scheduler::spawn(name, Role::Domain, move || reader(world));
    }
    for name in ["server 0", "server 1"] {
        scheduler::spawn(name, Role::Domain, move || server(world));
    }
    scheduler::spawn("evictor", Role::Domain, move || evictor(world));
    scheduler::spawn("saver", Role::Domain, move || saver(world));
}

/// How many pager threads there are.
pub const PAGER_THREADS: usize = READERS + SERVERS;

/// Resolves the faults of worker regions.
fn reader(world: &'static World) {
    while world.stage.get() == Stage::Programs {
        let Some((page, access)) = world.mmu.next_fault() else {
            scheduler::block(State::Reading);
            continue;
        };
        scheduler::step_aside("read");
        let fault = Fault { addr: page.addr(), access, thread: 0 };
        let outcome = world.waiting_for(PageRange { first: page, count: 1 }, || {
            let outcome = fault::resolve(&world.domain, Context::PagerThread, fault);
            if let Outcome::Failed(failure) = outcome {
                world.judge(page, failure);
            }
            outcome
        });
        match outcome {
            Outcome::Resolved | Outcome::Retry | Outcome::Busy => {}
            Outcome::Protected => {
                world.unprotect(page);
                world.mmu.wake_faulters(Trap::Worker, page, 1);
            }
            // As the library has it: a clone cannot have the page before it is written to.
            Outcome::Failed(_) if access == Access::Write && copy_first::is_owed(&world.domain, page) => {
                world.mmu.refuse(page);
            }
            Outcome::Failed(Failure::Writing(_)) => {
                let why = world.mmu.refused_last();
                assert_eq!(why, Some("set_writing"), "{page:?}: a write is refused that may go on");
                world.mmu.refuse(page);
            }
            Outcome::Failed(_) => {
                scheduler::step_aside("poison");
                fault::poison::poison(&world.domain, page, || ());
            }
            other => panic!("{page:?} is {other:?}"),
        }
    }
    world.ended(Stage::Evictor, 1);
}

/// Serves what other threads hand over.
fn server(world: &'static World) {
    loop {
        let seen = world.domain.requested.count();
        while let Some(request) = fault::next_request(&world.domain) {
            fault::serve(&world.domain, request);
        }
        if world.stage.get() != Stage::Programs {
            break;
        }
        world.domain.requested.wait(world.mmu, seen, 0);
    }
    world.ended(Stage::Evictor, 1);
}

/// Keeps the reserve.
fn evictor(world: &'static World) {
    let (domain, stack) = (&world.domain, &world.domain.stack);
    let mut barren = 0;
    let (mut asked, mut since) = (0, 0);
    let ends = || world.stage.get() > Stage::PagerThreads;
    while let Some(seen) = stack.demand.wanted.count_unless(ends) {
        if stack.ready() >= stack.reserve.load(Ordering::Relaxed) {
            barren = 0;
            stack.demand.end_shortage();
            stack.demand.wanted.wait(world.mmu, seen, 0);
            continue;
        }
        let available = stack.demand.available.count();
        let let_go = stack.let_go();
        let evicted = evict_some(world, 1 + dice::below(16) as u32);
        // What is queued for a store that fails comes back.
        if evicted.ready > 0 || (evicted.queued > 0 && domain.save_error().is_none()) {
            barren = 0;
            stack.demand.end_shortage();
            continue;
        }
        if barren == 0 {
            (asked, since) = (seen, let_go);
        }
        barren += 1;
        stack.demand.available.wait(world.mmu, available, 1000);
        if barren > MOST_BARREN && !stack.awaits_pagers(since, let_go) {
            let held = if stack.no_memory() { Shortage::NoMemory } else { Shortage::AllHeld };
            let why = domain.save_error().map_or(held, Shortage::Unsaved);
            let Some(seen) = stack.demand.wanted.count_unless(ends) else { break };
            stack.demand.state_shortage(world.mmu, asked, why);
            stack.demand.wanted.wait(world.mmu, seen, 0);
            barren = 0;
        }
    }
    world.ended(Stage::Saver, 1);
}

/// One round of the evictor.
pub fn evict_some(world: &World, want: u32) -> Evicted {
    let policy = &mut *world.policy.try_lock().expect("one evictor");
    let keep = world.domain.stack.budget() * u32::from(policy.standby_share()) / 256;
    let evicted = evict(&world.domain, policy, want);
    trim_standby(&world.domain, keep);
    evicted
}

fn saver(world: &'static World) {
    loop {
        let seen = world.domain.to_save.count();
        while save(&world.domain).taken > 0 {}
        if world.stage.get() == Stage::Saver {
            break;
        }
        world.domain.to_save.wait(world.mmu, seen, 0);
    }
    world.ended(Stage::Saver, 0);
}
