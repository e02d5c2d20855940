//! Anonymous memory without a store.

use selfpage_core::addr::PageBytes;
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, Verdict};

use super::is_zero;

/// Gives zeroed pages. It has nowhere to save them to, so a page with contents stays in core: the region must fit the frames.
///
/// # Source
/// What `mmap(MAP_ANONYMOUS)` promises.
#[derive(Default)]
pub struct Zero;

impl Pager for Zero {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn saves(&self) -> bool {
        false
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn fill(&self, _context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        for page in pages.iter_mut().filter(|page| !page.zeroed) {
            page.bytes.clear();
        }
        Ok(0)
    }

    fn changed(&self, _index: u64, bytes: &PageBytes) -> Verdict {
        if is_zero(bytes) { Verdict::Clean } else { Verdict::Stays }
    }

    /// All that there is of a page is in its frame.
    fn keeps_in(&self) -> Option<usize> {
        Some(0)
    }

    fn keeps_untouched(&self) -> bool {
        false
    }

    fn keeps(&self, _index: u64) -> bool {
        false
    }

    fn forget(&self, _index: u64, _count: u64) {}
}
