//! The operations of Appel and Li, by a closure on its own page tables.

use selfpage_core::capability::Rights;
use selfpage_core::tables::{Invalidation, PageSize};

use super::super::error::Error;
use super::extent::Extent;
use super::inside::{OnFault, Plan, READ_WRITE, Ran, Scene, run};

/// What is protected in one call.
const HUNDRED: u64 = 100;
/// How often the same page traps, fewer than what a guest takes for a closure that does not get on.
const TRAPS: u64 = 50;
/// Prime to how many pages are met: all are, and no neighbours one after the other.
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
    Appel2(Invalidation),
}

impl Operation {
    /// How often.
    pub const fn times(self, extent: &Extent) -> u64 {
        match self {
            Operation::Dirty => extent.looks * extent.pages,
            Operation::Prot1 => extent.singles,
            Operation::Prot100 | Operation::Unprot100 => hundreds(extent),
            Operation::Trap => TRAPS * extent.trapped_pages,
            Operation::Appel1 | Operation::Appel2(_) => extent.rounds * extent.in_turn,
        }
    }

    /// Does it as often.
    ///
    /// # Errors
    /// There is no KVM, or the closure did not see what it must.
    pub fn run(self, extent: &'static Extent) -> Result<Ran<bool>, Error> {
        let (on_fault, work): (_, fn(&Scene, &Extent) -> bool) = match self {
            Operation::Dirty => (OnFault::Unprotect, dirty),
            Operation::Prot1 => (OnFault::Unprotect, prot1),
            Operation::Prot100 => (OnFault::Unprotect, prot100),
            Operation::Unprot100 => (OnFault::Unprotect, unprot100),
            Operation::Trap => (OnFault::Count(TRAPS), trap),
            Operation::Appel1 => (OnFault::UnprotectAndProtectLast, appel1),
            Operation::Appel2(_) => (OnFault::Unprotect, appel2),
        };
        let invalidation = match self {
            Operation::Appel2(invalidation) => invalidation,
            _ => Invalidation::Adaptive,
        };
        let plan = Plan {
            len_bytes: extent.pages << 12,
            pages: PageSize::Small4KiB,
            on_fault,
            watch: extent.watch,
            invalidation,
        };
        let ran = run(plan, move |scene| work(scene, extent))?;
        if !ran.result {
            return Err(Error::Failed(format!("{self:?} left page tables that it must not leave")));
        }
        Ok(ran)
    }
}

/// How often there are a hundred pages that are protected together.
const fn hundreds(extent: &Extent) -> u64 {
    extent.pages / HUNDRED
}

/// The `number`th of the pages of a round, as they are met.
const fn met(number: u64, extent: &Extent) -> u64 {
    number * STEP % extent.in_turn
}

fn writable(scene: &Scene, extent: &Extent) -> u64 {
    (0..extent.pages).map(|page| u64::from(scene.entry(page).rights().contain(Rights::WRITE))).sum()
}

fn dirty(scene: &Scene, extent: &Extent) -> bool {
    let looks = extent.looks * extent.pages;
    (0..extent.pages).step_by(2).for_each(|page| scene.memory().write(page as usize, 0, 1));
    scene.begin();
    let dirty: u64 = (0..looks).map(|look| u64::from(scene.entry(look % extent.pages).is_dirty())).sum();
    scene.end();
    dirty == looks / 2
}

fn prot1(scene: &Scene, extent: &Extent) -> bool {
    scene.begin();
    let changed: u64 = (0..extent.singles).map(|page| scene.protect(page, 1, Rights::READ)).sum();
    scene.end();
    changed == extent.singles && writable(scene, extent) == extent.pages - changed
}

fn prot100(scene: &Scene, extent: &Extent) -> bool {
    scene.begin();
    let changed: u64 = (0..hundreds(extent)).map(|range| scene.protect(range * HUNDRED, HUNDRED, Rights::READ)).sum();
    scene.end();
    changed == hundreds(extent) * HUNDRED && writable(scene, extent) == extent.pages - changed
}

fn unprot100(scene: &Scene, extent: &Extent) -> bool {
    scene.protect(0, extent.pages, Rights::READ);
    scene.begin();
    let changed: u64 = (0..hundreds(extent)).map(|range| scene.protect(range * HUNDRED, HUNDRED, READ_WRITE)).sum();
    scene.end();
    changed == hundreds(extent) * HUNDRED && writable(scene, extent) == changed
}

fn trap(scene: &Scene, extent: &Extent) -> bool {
    scene.protect(0, extent.pages, Rights::READ);
    scene.begin();
    (0..extent.trapped_pages).for_each(|page| scene.memory().write(page as usize, 0, 1));
    scene.end();
    writable(scene, extent) == extent.trapped_pages
}

fn appel1(scene: &Scene, extent: &Extent) -> bool {
    scene.protect(0, extent.pages, Rights::READ);
    // From now on one page may be written: the last of a round.
    scene.memory().write(met(extent.in_turn - 1, extent) as usize, 0, 0);
    scene.begin();
    for round in 1..=extent.rounds {
        (0..extent.in_turn).for_each(|number| scene.memory().write(met(number, extent) as usize, 0, round));
    }
    scene.end();
    writable(scene, extent) == 1 && written(scene, extent)
}

fn appel2(scene: &Scene, extent: &Extent) -> bool {
    scene.protect(extent.in_turn, extent.pages - extent.in_turn, Rights::READ);
    scene.begin();
    for round in 1..=extent.rounds {
        scene.protect(0, extent.in_turn, Rights::READ);
        (0..extent.in_turn).for_each(|number| scene.memory().write(met(number, extent) as usize, 0, round));
    }
    scene.end();
    writable(scene, extent) == extent.in_turn && written(scene, extent)
}

fn written(scene: &Scene, extent: &Extent) -> bool {
    (0..extent.in_turn).all(|page| scene.memory().read(page as usize, 0) == extent.rounds)
}
