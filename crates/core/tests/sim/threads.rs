//! The threads of the domain: those that the library runs beside the program's.

use selfpage_core::fault::evict::{Evicted, evict, trim_standby};
use selfpage_core::fault::save::save;
use selfpage_core::fault::{self, Fault, Outcome};
use selfpage_core::pager::Context;
use selfpage_core::policy::Policy;
use selfpage_core::region::Access;
use selfpage_core::stack::Shortage;

use crate::dice;
use crate::scheduler::{self, Role, State};
use crate::world::{Stage, World};

const READERS: usize = 2;
const SERVERS: usize = 2;
/// Rounds without a frame, after which nobody believes in the next.
const PATIENCE: u32 = 20;

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
        let Some((thread, page)) = world.mmu.next_fault() else {
            scheduler::block(State::Reading);
            continue;
        };
        scheduler::step_aside("read");
        let fault = Fault { addr: page.addr(), access: Access::Read };
        match fault::resolve(&world.domain, Context::PagerThread, fault) {
            Outcome::Resolved | Outcome::Retry => {}
            Outcome::Failed(failure) => world.mmu.tell(thread, page, failure),
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
    loop {
        let seen = stack.wanted.count();
        let (mut fruitless, mut empty) = (0, 0);
        while world.stage.get() <= Stage::PagerThreads
            && stack.ready() < stack.reserve.load(std::sync::atomic::Ordering::Relaxed)
        {
            let given = stack.available.count();
            let evicted = evict_some(world, 1 + dice::below(16) as u32);
            fruitless = if evicted.ready + evicted.queued == 0 { fruitless + 1 } else { 0 };
            empty = if stack.ready() == 0 { empty + 1 } else { 0 };
            if empty == 0 {
                stack.set_shortage(world.mmu, None);
            } else if empty > PATIENCE
                && let Some(error) = domain.save_error()
            {
                stack.set_shortage(world.mmu, Some(Shortage::Unsaved(error)));
            } else if empty > PATIENCE && fruitless > PATIENCE {
                stack.set_shortage(world.mmu, Some(Shortage::AllHeld));
            }
            if evicted.ready == 0 {
                stack.available.wait(world.mmu, given, 1000);
            }
        }
        stack.set_shortage(world.mmu, None);
        if world.stage.get() > Stage::PagerThreads {
            break;
        }
        stack.wanted.wait(world.mmu, seen, 0);
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
        while save(&world.domain) > 0 {}
        if world.stage.get() == Stage::Saver {
            break;
        }
        world.domain.to_save.wait(world.mmu, seen, 0);
    }
    world.ended(Stage::Saver, 0);
}
