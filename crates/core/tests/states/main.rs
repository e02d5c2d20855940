//! Small configurations, exhaustively: every state that a holder can reach in six calls.
//!
//! A lender and a holder share a small machine. The holder has a CNode with three tables, three Frames, 8 KiB of RAM, and two
//! places that are free. Its tables are
//! - a PD and two PTs: tables in a table, and one of them twice; a 2 MiB page beside a table, and the same Frame in small pages;
//!   every table read through a PT, its own entries included; a frame behind either of two PTs;
//! - or a PDPT, a PD and a PT: a chain, where each table fits in one other only, and a large page must not stand for a table.
//!
//! Its Frames are one of 4 KiB, one of 2 MiB, which a PD maps as one page and a PT by parts, and one of 4 KiB that was lent to be
//! read, which its owner may take back at any time. The RAM becomes a fourth table or a Frame of 8 KiB, is taken back, and becomes
//! the other; at first what lies in it looks like entries.
//!
//! The steps are copy (with all rights; of a PT and of the first Frame also with the right to read alone), delete, revoke (all, or
//! one capability), map and modify_flags (to read, to read and write), unmap, and retype of all the RAM. They name every
//! capability, and entry 0, entry 1, and both together. Not among them: CNodes below the holder's own, offsets within a Frame, the
//! right to execute by itself, RAM in parts, `clear_dirty_bits`, and what a CPU remembers.
//!
//! Every state that a step leads to is checked (`check.rs`), and no step that is refused may have changed a word. States are the
//! same if renaming makes them so (`name.rs`). From each, all steps are tried, six from each start: a minute on two cores. A change
//! of the rules changes the numbers, and then the test wants to know them.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod check;
#[allow(dead_code)]
#[path = "../tables/machine.rs"]
mod machine;
mod name;
mod seen;
mod world;

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use selfpage_core::capability::{Rule, Type};
use world::{Step, World};

const SHARED: [Type; 3] = [Type::Pd, Type::Pt, Type::Pt];
const CHAIN: [Type; 3] = [Type::Pdpt, Type::Pd, Type::Pt];

/// Names are as good as random already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().take(8).for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }
    fn write_u128(&mut self, name: u128) {
        self.0 = name as u64;
    }
}

/// What went wrong, and the steps that led there.
struct Violation {
    what: &'static str,
    steps: Vec<Step>,
}

/// How many states are first reached by 0, 1, 2, … steps.
fn explore(tables: [Type; 3], depth: usize, waived: Option<Rule>) -> Result<Vec<usize>, Violation> {
    let mut world = World::new(tables, waived);
    let start = world.save();
    world.look();
    check::check(&world.seen).map_err(|what| Violation { what, steps: Vec::new() })?;
    let mut known = HashSet::<u128, BuildHasherDefault<AsItIs>>::default();
    known.insert(name::name(&world.seen, world.roots()));
    let mut border = vec![Vec::new()];
    let mut counts = vec![1];
    for _ in 0..depth {
        let mut beyond: Vec<Vec<Step>> = Vec::new();
        let mut found = 0;
        for steps in &border {
            world.restore(&start);
            for step in steps {
                world.take(*step).unwrap();
            }
            let here = world.save();
            world.look();
            for step in world.steps() {
                let refused = world.take(step).is_err();
                if world.is_as(&here) {
                    continue;
                }
                let violation = |what| Violation { what, steps: [&steps[..], &[step]].concat() };
                if refused {
                    return Err(violation("a refused call changed something"));
                }
                world.look();
                check::check(&world.seen).map_err(violation)?;
                if known.insert(name::name(&world.seen, world.roots())) {
                    found += 1;
                    if counts.len() < depth {
                        beyond.push([&steps[..], &[step]].concat());
                    }
                }
                world.restore(&here);
            }
        }
        counts.push(found);
        border = beyond;
    }
    Ok(counts)
}

fn every_state_is_safe(tables: [Type; 3], depth: usize, expected: usize) {
    let begin = Instant::now();
    let found = explore(tables, depth, None);
    let counts = found.unwrap_or_else(|violation| panic!("{}, after {:?}", violation.what, violation.steps));
    let total: usize = counts.iter().sum();
    println!("{tables:?}: {total} states, by number of steps {counts:?}, in {:?}", begin.elapsed());
    assert_eq!(total, expected, "other states are reached than before: is that meant?");
}

#[test]
fn a_directory_and_two_tables() {
    every_state_is_safe(SHARED, 6, 1_638_953);
}

#[test]
fn a_chain_of_tables() {
    every_state_is_safe(CHAIN, 6, 708_848);
}

#[test]
fn without_a_rule_a_state_is_reached_that_must_not_be() {
    let rules = [
        (Rule::EntriesFit, 1),
        (Rule::EntriesHaveLess, 1),
        (Rule::MappedWithin, 1),
        (Rule::CopiesHaveLess, 1),
        (Rule::EntriesGo, 2),
        (Rule::MappedOnce, 2),
        (Rule::EntryIsFree, 2),
        (Rule::CarvedOnce, 2),
        (Rule::ChildlessWhenDeleted, 2),
        (Rule::TableEntriesGo, 3),
        (Rule::BeginsEmpty, 1),
    ];
    for (rule, steps) in rules {
        let found = explore(SHARED, 4, Some(rule)).err();
        let found = found.unwrap_or_else(|| panic!("nothing is wrong without {rule:?}"));
        println!("without {rule:?}: {}, after {:?}", found.what, found.steps);
        assert_eq!(found.steps.len(), steps, "{rule:?}");
    }
}
