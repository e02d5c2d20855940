//! The whole of core in a simulated world: threads, machine, pagers, policy and time all follow from one seed.
//!
//! Every call to a joint (Mmu, Pager, Policy) is a point where another thread may go on, and so is every look at a page's
//! word. What each page contains is known at every moment; what becomes of each frame is checked whenever nobody is inside
//! the gate.
//!
//! A failure prints its seed. To see it again: `SELFPAGE_SIM_SEED=123 cargo test --release -p selfpage-core --test sim`.
//! With `SELFPAGE_SIM_LAST=200` it comes with the last 200 yields. `SELFPAGE_SIM_SEEDS` says how many seeds are tried.

mod checks;
mod child;
mod dice;
mod machine;
mod pager;
mod policy;
mod scheduler;
mod script;
mod shadow;
mod snapshots;
mod steps;
mod threads;
mod tracker;
mod weather;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use snapshots::Cuts;
use world::{Habit, Life, World};

/// Steps of the program in each run.
const STEPS: u32 = 2000;

/// Seeds that notice a line that is removed from core. `breaks/` tells which.
const KEPT_SEEDS: &[u64] = &[0, 1, 2, 3, 4, 7, 10, 18, 24, 42, 46, 55, 70, 75, 98, 112, 115, 357, 914];

/// What a run came to.
struct Run {
    yields: u64,
    counts: selfpage_core::trace::Counts,
}

fn run(seed: u64, habit: Habit, cuts: Cuts) -> Result<Run, String> {
    selfpage_core::sync::RACE.get_or_init(|| scheduler::look);
    dice::seed(seed);
    scheduler::reset();
    let mut life = Life::default();
    let world = World::new(&mut life, STEPS, habit, cuts);
    let result = catch_unwind(AssertUnwindSafe(|| -> Result<Run, String> {
        threads::spawn(world);
        steps::spawn(world);
        scheduler::run()?;
        let run = Run { yields: scheduler::yields(), counts: world.domain.counters.read() };
        checks::at_the_end(world);
        Ok(run)
    }));
    let failure = |what: &str| format!("seed {seed}: {what}\n  {:?}\n  {}", world.weather.climate(), world.frames());
    match result {
        Ok(Ok(run)) => {
            scheduler::reset();
            // SAFETY: world-outlives: all its threads have ended.
            unsafe { life.end() };
            Ok(run)
        }
        // What failed is left as it is: its threads still refer to it.
        Ok(Err(report)) => {
            std::mem::forget(life);
            Err(failure(&report))
        }
        Err(panic) => {
            std::mem::forget(life);
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked");
            Err(failure(&format!("{words}\n{}", scheduler::report())))
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
fn contents_are_always_right() {
    run_all(Habit::None, if cfg!(debug_assertions) { 300 } else { 10_000 });
}

#[test]
fn contents_that_a_handler_gives_are_right() {
    run_all(Habit::Supply, if cfg!(debug_assertions) { 100 } else { 2000 });
}

#[test]
fn contents_that_move_are_right() {
    run_all(Habit::Relocate, if cfg!(debug_assertions) { 100 } else { 2000 });
}

#[test]
fn what_was_written_is_found() {
    run_all(Habit::Track, if cfg!(debug_assertions) { 100 } else { 2000 });
}

/// Runs the kept seeds and as many more as `SELFPAGE_SIM_SEEDS` says, or else `seeds`; or the one that `SELFPAGE_SIM_SEED` names.
fn run_all(habit: Habit, seeds: u64) {
    if let Some(seed) = number("SELFPAGE_SIM_SEED") {
        scheduler::keep_last(number("SELFPAGE_SIM_LAST").unwrap_or(0) as usize);
        let run = run(seed, habit, Cuts::AtOneInstant).unwrap_or_else(|report| panic!("{report}"));
        println!("seed {seed}: {} yields, {:?}", run.yields, run.counts);
        return;
    }
    let seeds = number("SELFPAGE_SIM_SEEDS").unwrap_or(seeds);
    let (next, yields) = (AtomicU64::new(0), AtomicU64::new(0));
    let total = KEPT_SEEDS.len() as u64 + seeds;
    let workers = std::thread::available_parallelism().map_or(1, |count| count.get()).min(16);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= total {
                    return None;
                }
                let seed = KEPT_SEEDS.get(at as usize).copied().unwrap_or(at);
                match run(seed, habit, Cuts::AtOneInstant) {
                    Ok(run) => yields.fetch_add(run.yields, Ordering::Relaxed),
                    Err(report) => {
                        next.store(total, Ordering::Relaxed);
                        return Some(report);
                    }
                };
            }
        };
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().filter_map(|handle| handle.join().unwrap_or(Some("a worker panicked".into()))).collect()
    });
    println!("{total} seeds, {} yields", yields.load(Ordering::Relaxed));
    assert!(
        failures.is_empty(),
        "{}\nagain: SELFPAGE_SIM_SEED=<seed> cargo test --release -p selfpage-core --test sim",
        failures.join("\n")
    );
}

#[test]
fn a_clone_has_the_contents_of_its_instant() {
    with_a_clone(Habit::None);
}

#[test]
fn contents_that_move_out_of_and_into_a_clone_are_right() {
    with_a_clone(Habit::Relocate);
}

fn with_a_clone(habit: Habit) {
    let only = number("SELFPAGE_SIM_SEED");
    scheduler::keep_last(number("SELFPAGE_SIM_LAST").unwrap_or(0) as usize);
    let seeds = number("SELFPAGE_SIM_SEEDS").unwrap_or(if cfg!(debug_assertions) { 100 } else { 500 });
    for seed in only.map_or(0..seeds, |seed| seed..seed + 1) {
        run(seed, habit, Cuts::WithAClone).unwrap_or_else(|report| panic!("{report}"));
    }
}

#[test]
fn a_cut_without_the_stop_is_caught() {
    let caught = (0..1000).any(|seed| {
        run(seed, Habit::None, Cuts::WithoutTheStop)
            .err()
            .is_some_and(|report| report.contains("in the image, and was"))
    });
    assert!(caught);
}
