//! Frames and nothing else.

use selfpage_core::pager::{Context, FillPage, Pager, PagerError};

/// Gives pages as they come: what is in them is undefined (some earlier contents of the same domain, or zero). Nothing is
/// cleared, nothing is saved.
///
/// # Source
/// Nemesis §6.6, the physical stretch driver.
#[derive(Default)]
pub struct Physical;

impl Pager for Physical {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn saves(&self) -> bool {
        false
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn fill(&self, _context: Context, _pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        Ok(0)
    }

    fn keeps_untouched(&self) -> bool {
        false
    }

    fn keeps(&self, _index: u64) -> bool {
        false
    }

    fn forget(&self, _index: u64, _count: u64) {}
}
