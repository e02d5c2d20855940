//! Dirty bits as a collector uses them: which pages were written to since it looked last.

use selfpage_core::tables::{Invalidation, PageSize};

use super::super::error::Error;
use super::extent::Extent;
use super::inside::{self, OnFault, Plan, Ran, Scene};

/// What pages are chosen by.
const SEED: u64 = 4096;

/// What the closure found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// Pages whose bit was looked at.
    pub looked_at: u64,
    /// Dirty ones.
    pub found: u64,
    /// Pages that were dirty and not written, or written and not dirty.
    wrong: u64,
    /// Bits that were cleared.
    cleared: u64,
}

/// Whether a page is written in a round: about so many of a hundred are, others each time.
const fn is_chosen(page: u64, round: u64, percent: u64) -> bool {
    (page * SEED + round).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xffff < percent * 0x10000 / 100
}

/// How many pages are written in all rounds.
pub fn written(percent: u64, extent: &Extent) -> u64 {
    let rounds = (0..extent.collections).flat_map(|round| (0..extent.pages).map(move |page| (page, round)));
    rounds.filter(|(page, round)| is_chosen(*page, *round, percent)).count() as u64
}

/// Writes, looks and clears, some times.
///
/// # Errors
/// There is no KVM, or the dirty bits are not those of the pages that were written.
pub fn run(percent: u64, extent: &'static Extent) -> Result<Ran<Found>, Error> {
    let plan = Plan {
        len_bytes: extent.pages << 12,
        pages: PageSize::Small4KiB,
        on_fault: OnFault::Unprotect,
        watch: extent.watch,
        invalidation: Invalidation::Adaptive,
    };
    let ran = inside::run(plan, move |scene| collect(scene, percent, extent))?;
    let (Found { found, wrong, cleared, .. }, written) = (ran.result, written(percent, extent));
    if (found, wrong, cleared) != (written, 0, written) {
        return Err(Error::Failed(format!("of {written} pages written, {:?}", ran.result)));
    }
    Ok(ran)
}

fn collect(scene: &Scene, percent: u64, extent: &Extent) -> Found {
    let mut all = Found { looked_at: 0, found: 0, wrong: 0, cleared: 0 };
    scene.clear_dirty_bits();
    scene.begin();
    for round in 0..extent.collections {
        let chosen = |page: &u64| is_chosen(*page, round, percent);
        (0..extent.pages).filter(chosen).for_each(|page| scene.memory().write(page as usize, 0, round));
        for page in 0..extent.pages {
            let is_dirty = scene.entry(page).is_dirty();
            all.looked_at += 1;
            all.found += u64::from(is_dirty);
            all.wrong += u64::from(is_dirty != chosen(&page));
        }
        all.cleared += scene.clear_dirty_bits();
    }
    scene.end();
    all
}
