//! The operations of Appel and Li, by a closure on its own page tables.

use selfpage_core::capability::Rights;
use selfpage_core::tables::PageSize;

use super::super::error::Error;
use super::inside::{OnFault, Plan, READ_WRITE, Ran, Scene, run};

/// 16 MiB.
const PAGES: u64 = 4096;
/// What is protected together, and how often there is such a range.
const HUNDRED: u64 = 100;
const HUNDREDS: u64 = PAGES / HUNDRED;
/// How often a page is looked at.
const LOOKS: u64 = 16;
/// How often the same page traps, fewer than what a guest takes for a closure that does not get on.
const TRAPS: u64 = 50;
const TRAPPED_PAGES: u64 = 40;
/// How often all of a hundred pages are written.
const ROUNDS: u64 = 20;
/// Prime to a hundred: all pages are met, and no neighbours one after the other.
const STEP: u64 = 37;

/// What is done again and again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// A page's dirty bit is read.
    Dirty,
    /// A page is protected.
    Prot1,
    /// A hundred are, in one call.
    Prot100,
    /// And may be written again.
    Unprot100,
    /// A protected page is written, and the handler does nothing about it.
    Trap,
    /// A protected page is written; the handler lets it be, and protects another one.
    Appel1,
    /// A hundred pages are protected in one call; each is written, and the handler lets it be. One page is an operation.
    Appel2,
}

impl Operation {
    /// How often.
    pub const fn times(self) -> u64 {
        match self {
            Operation::Dirty => LOOKS * PAGES,
            Operation::Prot1 => PAGES,
            Operation::Prot100 | Operation::Unprot100 => HUNDREDS,
            Operation::Trap => TRAPS * TRAPPED_PAGES,
            Operation::Appel1 | Operation::Appel2 => ROUNDS * HUNDRED,
        }
    }

    /// Does it as often.
    ///
    /// # Errors
    /// There is no KVM, or the closure did not see what it must.
    pub fn run(self) -> Result<Ran<bool>, Error> {
        let (on_fault, work): (_, fn(&Scene) -> bool) = match self {
            Operation::Dirty => (OnFault::Unprotect, dirty),
            Operation::Prot1 => (OnFault::Unprotect, prot1),
            Operation::Prot100 => (OnFault::Unprotect, prot100),
            Operation::Unprot100 => (OnFault::Unprotect, unprot100),
            Operation::Trap => (OnFault::Count(TRAPS), trap),
            Operation::Appel1 => (OnFault::UnprotectAndProtectLast, appel1),
            Operation::Appel2 => (OnFault::Unprotect, appel2),
        };
        let plan = Plan { len_bytes: PAGES << 12, pages: PageSize::Small4KiB, on_fault };
        let ran = run(plan, work)?;
        if !ran.result {
            return Err(Error::Failed(format!("{self:?} left page tables that it must not leave")));
        }
        Ok(ran)
    }
}

/// The `number`th of a hundred pages, as they are met.
const fn met(number: u64) -> u64 {
    number * STEP % HUNDRED
}

fn writable(scene: &Scene) -> u64 {
    (0..PAGES).map(|page| u64::from(scene.entry(page).rights().contain(Rights::WRITE))).sum()
}

fn dirty(scene: &Scene) -> bool {
    (0..PAGES).step_by(2).for_each(|page| scene.memory().write(page as usize, 0, 1));
    scene.begin();
    let dirty: u64 = (0..LOOKS * PAGES).map(|look| u64::from(scene.entry(look % PAGES).is_dirty())).sum();
    scene.end();
    dirty == LOOKS * PAGES / 2
}

fn prot1(scene: &Scene) -> bool {
    scene.begin();
    let changed: u64 = (0..PAGES).map(|page| scene.protect(page, 1, Rights::READ)).sum();
    scene.end();
    changed == PAGES && writable(scene) == 0
}

fn prot100(scene: &Scene) -> bool {
    scene.begin();
    let changed: u64 = (0..HUNDREDS).map(|range| scene.protect(range * HUNDRED, HUNDRED, Rights::READ)).sum();
    scene.end();
    changed == HUNDREDS * HUNDRED && writable(scene) == PAGES - changed
}

fn unprot100(scene: &Scene) -> bool {
    scene.protect(0, PAGES, Rights::READ);
    scene.begin();
    let changed: u64 = (0..HUNDREDS).map(|range| scene.protect(range * HUNDRED, HUNDRED, READ_WRITE)).sum();
    scene.end();
    changed == HUNDREDS * HUNDRED && writable(scene) == changed
}

fn trap(scene: &Scene) -> bool {
    scene.protect(0, PAGES, Rights::READ);
    scene.begin();
    (0..TRAPPED_PAGES).for_each(|page| scene.memory().write(page as usize, 0, 1));
    scene.end();
    writable(scene) == TRAPPED_PAGES
}

fn appel1(scene: &Scene) -> bool {
    scene.protect(0, PAGES, Rights::READ);
    // From now on one page may be written: the last of a round.
    scene.memory().write(met(HUNDRED - 1) as usize, 0, 0);
    scene.begin();
    for round in 1..=ROUNDS {
        (0..HUNDRED).for_each(|number| scene.memory().write(met(number) as usize, 0, round));
    }
    scene.end();
    writable(scene) == 1 && written(scene)
}

fn appel2(scene: &Scene) -> bool {
    scene.protect(HUNDRED, PAGES - HUNDRED, Rights::READ);
    scene.begin();
    for round in 1..=ROUNDS {
        scene.protect(0, HUNDRED, Rights::READ);
        (0..HUNDRED).for_each(|number| scene.memory().write(met(number) as usize, 0, round));
    }
    scene.end();
    writable(scene) == HUNDRED && written(scene)
}

fn written(scene: &Scene) -> bool {
    (0..HUNDRED).all(|page| scene.memory().read(page as usize, 0) == ROUNDS)
}
