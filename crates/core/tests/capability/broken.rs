//! Each check, and a machine that is broken in the way that it is for.

use selfpage_core::capability::Rights;
use selfpage_core::physical::PhysAddr;

use crate::dice;
use crate::machine::{Cpu, FIRST, memory};
use crate::model::level;
use crate::world::{MEMORY_BYTES, World};

/// A machine on which the CPU has reached something of late.
fn used<'m>(memory: &'m selfpage_core::physical::PhysMemory, cpu: &'m Cpu) -> World<'m> {
    dice::seed(0);
    let mut world = World::new(memory, cpu, None);
    for step in 0.. {
        world.step().unwrap();
        if step > 2000 && !cpu.known.borrow().is_empty() {
            break;
        }
    }
    assert_eq!(world.check_all(), Ok(()));
    world
}

/// Changes a word for the time of a look at it.
fn with_word(world: &World<'_>, at: PhysAddr, change: impl Fn(u64) -> u64, look: impl Fn() -> Result<(), String>) {
    let word = world.memory.load(at);
    world.memory.store(at, change(word));
    look().expect_err("a check that sees it");
    world.memory.store(at, word);
    assert_eq!(look(), Ok(()));
}

#[test]
fn each_check_sees_what_it_is_for() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut world = used(&memory, &cpu);
    // The entries on the way to a page that the CPU remembers.
    let (root, page) = *cpu.known.borrow().keys().min().unwrap();
    let (root, _) = world.model.objects.iter().find(|(_, object)| object.base == root.0).unwrap();
    let way = world.model.way(*root, (page as u64) << 12 & ((1 << 48) - 1));
    let place = |step: usize| {
        let (table, index) = way.steps[step];
        PhysAddr(world.model.object(table).base + u64::from(index) * 8)
    };
    let (first, last) = (place(0), place(way.steps.len() - 1));
    with_word(&world, last, |_| FIRST.0 | 7, || world.check_reach());
    with_word(&world, last, |word| word & !0x000f_ffff_ffff_f000 | 1 << 51, || world.check_reach());
    with_word(&world, first, |_| FIRST.0 | 7, || world.check_reach());
    with_word(&world, first, |_| 0, || world.check_cpu());
    with_word(&world, last, |word| word ^ 1 << 6, || world.check_tables());
    with_word(&world, FIRST, |count| count + 1, || world.check_nodes());
    with_word(&world, FIRST.plus(63 * 64), |head| u64::from(head == 0), || world.check_nodes());
    world.check_written(FIRST.plus(64)).unwrap_err();
    // Nothing was emptied there.
    world.model.emptied.push(FIRST.0 + 64);
    world.check_emptied().unwrap_err();
    world.model.emptied.clear();
    world.model.lost_roots.push(1);
    world.check_left().unwrap_err();
    world.model.lost_roots.clear();
    // The capability that an entry comes of has fewer rights now, or is gone.
    let (table, index) = *way.steps.last().unwrap();
    let from = world.model.object(table).entries[&index].from;
    world.model.cap_mut(from).rights = Rights::NONE;
    world.check_reach().unwrap_err();
    world.model.caps.remove(&from);
    world.check_reach().unwrap_err();
    // A table lies where another object is, and sticks out of what it is made from.
    let moved = world.model.objects.values_mut().find(|object| level(object.kind).is_some()).unwrap();
    moved.base = FIRST.0;
    world.check_disjoint().unwrap_err();
}
