//! That no sequence of calls lets a holder read or write memory without a capability for it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod checks;
mod chooser;
#[path = "../sim/dice.rs"]
mod dice;
mod directed;
mod entries;
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
