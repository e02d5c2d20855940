//! The rules, each taken away by itself: the same steps as ever must notice. That a call is refused for another reason than the
//! rule's does not count: something must happen that must not, or stay away that must. What harm that does in the end, harms.rs says.

use selfpage_core::capability::Rule;

use crate::machine::{Cpu, memory};
use crate::world::MEMORY_BYTES;
use crate::{STEPS, run};

/// Seeds that noticed, where 0 did not.
const KEPT_SEEDS: &[(Rule, u64)] =
    &[(Rule::RetypeTakesWrite, 7), (Rule::PlacingTakesWrite, 1), (Rule::PagesAreAligned, 2)];

/// How many others are tried for each rule.
const SEEDS: u64 = 40;

#[test]
fn each_rule_is_missed() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut unnoticed = Vec::new();
    for rule in Rule::ALL {
        let kept = KEPT_SEEDS.iter().filter(|(kept, _)| *kept == rule).map(|(_, seed)| *seed);
        let noticed = kept.chain(0..SEEDS).find_map(|seed| {
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
