//! That no sequence of calls lets a holder read or write memory without a capability for it.
//!
//! Three holders make random calls, most of them likely to succeed and some wrong on purpose. One begins with all memory; the
//! others have what is put into their CNodes. A CPU that remembers translations reads, writes and executes through every
//! hierarchy; what it writes into frames is meant to hurt: a page that was a CNode or a table once is written back as it was.
//! Beside the mechanism goes a model in plain Rust (model.rs, entries.rs) that has no memory, only lists. It says of each call what
//! it answers, errors included, and where an address leads to the last bit.
//!
//! What is checked (checks.rs), after each call that takes something away and after some of the others: each entry of each table is
//! to the bit what the model says, accessed and dirty bits included; whatever a walk from any PML4 comes to is covered by the
//! live capability that its entry came of, with those rights; CNodes and tables are nowhere more than readable; the CPU remembers
//! nothing that the tables do not say now, and was told to leave each PML4 that went; no two objects share a byte; CNodes hold
//! what they should; places of what is gone are empty. Of calls that are refused, one in sixteen is followed by a look at whether
//! any word of a CNode or a table has changed; the cases in directed.rs look at all memory each time.
//!
//! That these tests would notice: broken.rs breaks the machine in each way that a check is for, and mutations.rs takes away each
//! rule of the mechanism. harms.rs says of each rule what it is for: the harm that a few calls do without it.
//!
//! What they do not show: that the model is right where it agrees with the mechanism by the same mistake; that the walk is the
//! CPU's (that is for the comparison with a real one); anything about two CPUs at once.
//!
//! Each error has been answered, and the counts of all answers are printed. A failure prints its seed. To see it again:
//! `SELFPAGE_CAPABILITY_SEED=12 cargo test --release -p selfpage-core --test capability`. `SELFPAGE_CAPABILITY_SEEDS` says how many
//! seeds are tried.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod broken;
mod checks;
mod chooser;
#[allow(dead_code)]
#[path = "../sim/dice.rs"]
mod dice;
mod directed;
mod entries;
mod harms;
#[path = "../tables/machine.rs"]
mod machine;
mod model;
mod mutations;
mod operations;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use machine::{Cpu, memory};
use selfpage_core::capability::{Error, Rule};
use selfpage_core::physical::PhysMemory;
use world::{Counts, MEMORY_BYTES, World};

/// Steps for each seed.
const STEPS: u64 = 20_000;

/// What calls can be told. NotCanonical is for address spaces (see directed.rs): no call here takes a virtual address.
const ERRORS: [Error; 16] = [
    Error::NoCapability,
    Error::DepthOverflow,
    Error::WrongType,
    Error::NoRight,
    Error::BadSize,
    Error::Misaligned,
    Error::OutOfRange,
    Error::SlotTaken,
    Error::EntryTaken,
    Error::AlreadyMapped,
    Error::NotMapped,
    Error::NoSuchEntry,
    Error::PartOfMapping,
    Error::InUse,
    Error::RevokeInProgress,
    Error::OutOfMemory,
];

/// What a seed came to: its answers, or the step and what was wrong there.
fn run(memory: &PhysMemory, cpu: &Cpu, seed: u64, waived: Option<Rule>, steps: u64) -> Result<Counts, (u64, String)> {
    dice::seed(seed);
    let mut world = World::new(memory, cpu, waived);
    for step in 0..steps {
        let result = catch_unwind(AssertUnwindSafe(|| world.step()));
        match result {
            Ok(Ok(())) => {}
            Ok(Err(what)) => return Err((step, what)),
            Err(_) => return Err((step, "panicked".into())),
        }
    }
    Ok(world.counts())
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
fn nobody_reaches_what_it_has_no_capability_for() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let seeds = match number("SELFPAGE_CAPABILITY_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SELFPAGE_CAPABILITY_SEEDS").unwrap_or(100),
    };
    let mut counts = Counts::new();
    for seed in seeds {
        let found = run(&memory, &cpu, seed, None, STEPS);
        let found = found.unwrap_or_else(|(step, what)| panic!("seed {seed}, step {step}: {what}"));
        found.into_iter().for_each(|(answer, times)| *counts.entry(answer).or_default() += times);
    }
    for ((call, answer), times) in &counts {
        println!("{call:17} {answer:17} {times:9}");
    }
    println!("{} calls and accesses", counts.values().sum::<u64>());
    for error in ERRORS {
        let times: u64 =
            counts.iter().filter(|((_, answer), _)| *answer == format!("{error:?}")).map(|(_, times)| times).sum();
        assert!(times > 0, "{error:?} was never answered");
    }
}
