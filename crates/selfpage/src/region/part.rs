//! Parts of a region: which pages a range of bytes is, and what messages call them.

use std::sync::Arc;

use selfpage_core::addr::{PAGE_BYTES, PageNo, PageRange, VirtAddr};
use selfpage_core::fault::Failure;
use selfpage_core::pager::Pager;
use selfpage_core::region;

use super::{Bound, Region};
use crate::domain::{Inner, Life};
use crate::error::{Error, Kind, Result, pages};
use crate::protection;

impl Region {
    pub(crate) fn core(&self) -> &region::Region {
        &self.bound.region
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.life.inner
    }

    pub(crate) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    pub(crate) fn range(&self, operation: &'static str, offset_bytes: usize, len_bytes: usize) -> Result<PageRange> {
        self.bound.may_change(&self.life.inner, operation)?;
        self.bound.range(operation, offset_bytes, len_bytes)
    }

    pub(crate) fn whole_pages(
        &self,
        operation: &'static str,
        offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<PageRange> {
        self.bound.may_change(&self.life.inner, operation)?;
        self.bound.whole_pages(operation, offset_bytes, len_bytes)
    }
}

impl Bound {
    /// Whether it is memory without a file behind it, whose contents are what the program wrote and nothing else.
    pub(crate) fn is_anonymous(&self) -> bool {
        // A pager that neither saves a page nor could hand it on does not know what is in it.
        let defines = |pager: &dyn Pager| !pager.saves() && pager.keeps_in().is_some();
        self.store().is_some() || defines(&*self.pager)
    }

    /// Whether the calling thread may change the region's rights and mappings.
    ///
    /// # Errors
    /// It is in a protection domain without that right. The process is a forked child that did not get the region.
    pub(crate) fn may_change(&self, inner: &Inner, operation: &'static str) -> Result<()> {
        inner.is_here(operation, || format!("region {}", self.name))?;
        protection::may_change(self.start(), operation, &self.name)
    }

    /// Whether pages may be armed that this thread needs meanwhile: it would wait for itself.
    ///
    /// # Errors
    /// Its stack lies in the region.
    pub(crate) fn has_no_stack_of_this_thread(&self, operation: &'static str) -> Result<()> {
        let here = 0_u8;
        if !self.region.range.contains(VirtAddr((&raw const here).addr()).page()) {
            return Ok(());
        }
        let cause =
            "the stack of this thread lies there, and it would stop at a page of its own: do it on another stack";
        Err(Error::new(Kind::Invalid, operation, format!("region {}", self.name), cause))
    }

    pub(crate) fn range(&self, operation: &'static str, offset_bytes: usize, len_bytes: usize) -> Result<PageRange> {
        let end = offset_bytes.checked_add(len_bytes).filter(|end| *end <= self.len_bytes());
        let Some(end) = end else {
            let cause = format!("it has {} bytes; asked for {len_bytes} from {offset_bytes} on", self.len_bytes());
            return Err(Error::new(Kind::Invalid, operation, format!("region {}", self.name), cause));
        };
        let first = (offset_bytes / PAGE_BYTES) as u64;
        let count = (end.div_ceil(PAGE_BYTES) as u64).saturating_sub(first);
        let count = if len_bytes == 0 { 0 } else { count };
        Ok(PageRange { first: self.region.range.first.plus(first), count })
    }

    /// The same where what else lies in a page that the range begins or ends in would change with it.
    pub(crate) fn whole_pages(
        &self,
        operation: &'static str,
        offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<PageRange> {
        let range = self.range(operation, offset_bytes, len_bytes)?;
        if offset_bytes.is_multiple_of(PAGE_BYTES) && len_bytes.is_multiple_of(PAGE_BYTES) {
            return Ok(range);
        }
        let cause = format!(
            "bytes {offset_bytes}..{} begin or end within a page, of which the rest is not to change: give multiples of {PAGE_BYTES}",
            offset_bytes + len_bytes
        );
        Err(Error::new(Kind::Invalid, operation, format!("region {}", self.name), cause))
    }

    /// Drops the contents of a range, in a handler: that waits for no pager thread where it need not.
    pub(crate) fn discard(&self, inner: &Inner, range: PageRange) -> Result<()> {
        self.discarded(inner, range, inner.discard(range))
    }

    /// The same, outside of handlers. Of a large range it costs what was used of that.
    pub(crate) fn discard_large(&self, inner: &Inner, range: PageRange) -> Result<()> {
        self.discarded(inner, range, self.discard_used(inner, range))
    }

    fn discarded(
        &self,
        inner: &Inner,
        range: PageRange,
        done: std::result::Result<(), (PageNo, Failure)>,
    ) -> Result<()> {
        let stays =
            |(page, why)| Error::failure("discard", format!("{}, which its clone needs", self.page_name(page)), why);
        let done = done.map_err(stays);
        // Also where another page of the range stays: those that were given up hold nothing that anybody needs.
        self.begin_anew(inner, range);
        self.take_refusals_back(inner, range);
        done
    }

    pub(crate) fn page_name(&self, page: PageNo) -> String {
        pages(&self.name, self.region.index(page), 1)
    }

    pub(super) fn range_name(&self, range: PageRange) -> String {
        pages(&self.name, self.region.index(range.first), range.count)
    }

    /// The name that the program gave it, if it did.
    pub(crate) fn given_name(&self) -> &str {
        if self.is_named { &self.name } else { "" }
    }
}
