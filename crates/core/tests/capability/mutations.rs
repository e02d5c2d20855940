//! The rules, each taken away by itself: the same steps as ever must notice.

use selfpage_core::capability::Rule;

use crate::machine::{Cpu, memory};
use crate::world::MEMORY_BYTES;
use crate::{STEPS, run};

/// Seeds that are tried for each rule.
const SEEDS: u64 = 20;

#[test]
fn each_rule_is_missed() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut unnoticed = Vec::new();
    for rule in Rule::ALL {
        let noticed = (0..SEEDS).find_map(|seed| {
            let (step, what) = run(&memory, &cpu, seed, Some(rule), STEPS).err()?;
            Some((seed, step, what))
        });
        match noticed {
            Some((seed, step, what)) => println!("{rule:?}: seed {seed}, step {step}: {what}"),
            None => unnoticed.push(rule),
        }
    }
    assert!(unnoticed.is_empty(), "nothing is seen when these are taken away: {unnoticed:?}");
}
