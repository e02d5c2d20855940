//! A forked child: it has its parent's memory at the same addresses, with contents of its own, and none of the frames that no page
//! has mapped. It runs to its end while the parent stands still; then the memory is the parent's again.

use std::mem::MaybeUninit;
use std::ptr::NonNull;

use selfpage_core::addr::PageRange;
use selfpage_core::fault::{copy_first, protect, range, save::save};
use selfpage_core::pager::{Context, Pager};
use selfpage_core::stack;

use crate::checks;
use crate::dice;
use crate::scheduler;
use crate::threads::evict_some;
use crate::world::{Stretch, World};

/// What a child does before it looks at everything.
const STEPS: u64 = 100;

/// Lets a child run, if now is a moment at which the library forks. With the gate closed.
pub fn run(world: &World) {
    // A clone takes a frame for what its source drops, and nobody evicts here while it waits for one.
    if world.clone_part().is_some() {
        return;
    }
    // The library waits for all three.
    let Ok(policy) = world.policy.try_lock().map(|policy| policy.clone()) else { return };
    if world.domain.undrained() > 0 {
        return;
    }
    scheduler::at_once(|| {
        dice::apart(|| {
            let memory = copy(world);
            let (shadow, value) = (world.shadow.pages(), world.value.get());
            let stores: Vec<_> = world.parts.iter().map(|part| part.pager.pages()).collect();
            let mut aside = Vec::new();
            protect::each_aside(&world.domain, |frame, contents| aside.push((frame, *contents)));
            let machine = world.mmu.fork();
            world.weather.calm(|| {
                begin(world, &aside);
                live(world);
            });
            world.mmu.go_on(machine);
            world.parts.iter().zip(stores).for_each(|(part, pages)| part.pager.set_pages(pages));
            world.shadow.set_pages(shadow);
            world.value.set(value);
            put_back(memory);
        });
    });
    *world.policy.try_lock().expect("one thread at a time") = policy;
}

/// What the library does in a child before anything else.
fn begin(world: &World, aside: &[(selfpage_core::addr::Frame, selfpage_core::addr::PageBytes)]) {
    let domain = &world.domain;
    stack::forget_unmapped(domain);
    copy_first::forget(domain);
    for part in &world.parts {
        part.region.let_all_go();
        part.pager.forked();
    }
    let mut protected = Vec::new();
    protect::each_protected(domain, |page| protected.push(page));
    protected.sort_unstable();
    protect::protect_again(domain, &protected).expect("the machine refuses nothing");
    for (frame, contents) in aside {
        protect::put_aside(domain, *frame, contents).expect("the machine has memory");
    }
    domain.requests.reset();
    domain.advice.reset();
    domain.handovers.forget_all();
    checks::at_rest(world);
    domain.gate.open(world.mmu);
}

/// Uses its pages, and finds in each what its parent or itself has written last.
fn live(world: &World) {
    let pages = || world.parts.iter().flat_map(|part| part.region.range.pages());
    pages().for_each(|page| world.unprotect(page));
    for _ in 0..STEPS {
        let page = world.any_page();
        match dice::below(8) {
            0..3 => checks::read(world, page),
            // What its parent was discarding may be gone already, and nobody knew what a write would be added to.
            3..6 if !world.shadow.fading(world.at(page)) && !world.shadow.doubtful(world.at(page)) => {
                world.value.set(world.value.get() + 1);
                checks::write(world, page, dice::below(2) as usize, world.value.get());
            }
            3..7 => drop(evict_some(world, 1 + dice::below(8) as u32)),
            _ => {
                let dropped = range::discard(&world.domain, Context::Normal, PageRange { first: page, count: 1 });
                assert_eq!(dropped, Ok(()));
                world.shadow.set_pins(world.at(page), 0);
                world.shadow.turn(world.at(page), [0; 2]);
            }
        }
        while save(&world.domain).taken > 0 {}
    }
    pages().for_each(|page| checks::read(world, page));
    checks::at_rest(world);
}

/// What core keeps, byte by byte.
type Copied = Vec<(Stretch, Box<[MaybeUninit<u8>]>)>;

fn copy(world: &World) -> Copied {
    let domain = (NonNull::from(&world.domain).cast(), size_of_val(&world.domain));
    let stretches = world.cores.iter().copied().chain([domain]);
    // SAFETY: memory of the world, which nobody changes while one thread runs at once.
    stretches.map(|at| (at, unsafe { NonNull::slice_from_raw_parts(at.0.cast(), at.1).as_ref() }.into())).collect()
}

fn put_back(copied: Copied) {
    for ((start, len), bytes) in copied {
        // SAFETY: as above. What is no atomic has the same value as before.
        unsafe { start.cast().copy_from_nonoverlapping(NonNull::from(&*bytes).cast::<MaybeUninit<u8>>(), len) };
    }
}
