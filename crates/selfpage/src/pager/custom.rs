//! A pager of the program's own.

use std::error::Error;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};

use super::Noted;
use crate::error::unless_it_panics;
use crate::trap::thread;

/// The small trait for a pager of one's own: where a page's contents come from, and where they go.
///
/// # Context
/// PagerThread: it may allocate and block, but must not touch managed memory, fork, or wait for what waits for it: it works on no
/// pages of any domain. A region that it drops ends soon after; a region or domain that it makes, or a sample that it begins, is an error. A
/// panic is an error of the page, and nothing more. Pager threads have a descriptor table of their own: see [`UserPager::descriptors`].
///
/// # Examples
/// See `examples/own_pager.rs`.
pub trait UserPager: Send + Sync {
    /// Writes the contents of page `index` (of the region) to `bytes`, which are zero. Until they are saved or forgotten they are the same each
    /// time, and afterwards those that were saved: the program may have a slice of the region, whose bytes may not change meanwhile.
    ///
    /// # Errors
    /// The access fails with `SIGBUS`, after a line that says "the pager failed with", and the errno of the error or of what it comes from,
    /// by name: an error of your own words is told as `EIO`. Write down or print what is more than that.
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()>;

    /// Keeps what is in page `index`, which has changed since it was filled.
    ///
    /// # Errors
    /// The page stays in core. Of the error the number is told, as for [`UserPager::fill`].
    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()>;

    /// Page `index` has been discarded; the next fill should give what a page never written to has.
    fn forget(&self, index: u64) {
        let _ = index;
    }

    /// The descriptors that [`fill`](UserPager::fill), [`save`](UserPager::save) and [`sync`](UserPager::sync) use, as the program has
    /// them: files, sockets. Pager threads have these at the same numbers, from when the region is made until it is dropped, and no others of the
    /// program's but its standard streams. They stay the program's: whoever owns them closes them, as a pager does that is dropped.
    ///
    /// What `fill` opens itself has a number in the pager threads' table alone, and a pager must not own it when it is dropped, on a thread of
    /// the program's: that would close what the program has at the number. Close it before `fill` returns, or keep the bare number.
    ///
    /// It is asked when the region is made, and again in a forked child, after [`forked`](UserPager::forked).
    ///
    /// # Context
    /// Normal.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// This process is a forked child from now on.
    fn forked(&self) {}

    /// Makes what was saved last.
    ///
    /// # Errors
    /// What stands in the way; [`crate::Region::flush`] returns it.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A pager that the program has a handle to as well.
impl<P: UserPager + ?Sized> UserPager for Arc<P> {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        (**self).fill(index, bytes)
    }

    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()> {
        (**self).save(index, bytes)
    }

    fn forget(&self, index: u64) {
        (**self).forget(index);
    }

    fn descriptors(&self) -> Vec<RawFd> {
        (**self).descriptors()
    }

    fn forked(&self) {
        (**self).forked();
    }

    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }
}

/// Makes a [`UserPager`] a pager.
pub struct Custom {
    user: Arc<dyn UserPager>,
    /// Of a page that was given, nothing.
    noted: Noted,
}

impl Custom {
    pub(crate) fn new(user: Arc<dyn UserPager>, noted: Noted) -> Custom {
        Custom { user, noted }
    }
}

/// Runs the user's code: neither its errors nor its panics reach the pager thread.
fn guarded(work: impl FnOnce() -> io::Result<()>) -> Result<(), PagerError> {
    // To look at an error, and to drop it, is the user's code too.
    let looked_at = || unless_it_panics(|| work().map_err(|error| error_of(&error)));
    thread::in_a_pager(looked_at).unwrap_or(Err(PagerError::Panicked))
}

/// What an error of std's is as a pager's: of a store of the program's own, say. Its errno is kept, or that of what it comes from; `EIO`
/// where there is none.
///
/// # Context
/// Any.
pub fn error_of(error: &io::Error) -> PagerError {
    PagerError::Io(errno_of(error))
}

/// The system's number for an error, or for what it comes from, as one of the library's does.
fn errno_of(error: &io::Error) -> i32 {
    let mut of = error.raw_os_error();
    let mut from = error.source();
    while let (None, Some(cause)) = (of, from) {
        of = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        from = cause.source();
    }
    of.unwrap_or(libc::EIO)
}

impl Pager for Custom {
    fn fills_in(&self) -> Context {
        Context::PagerThread
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn reads_ahead(&self) -> bool {
        true
    }

    fn fill(&self, _context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        for page in pages.iter_mut() {
            if !page.zeroed {
                page.bytes.clear();
            }
            let (index, bytes) = (page.index, page.bytes.get_mut());
            guarded(|| self.user.fill(index, bytes))?;
            self.noted.note(index, bytes);
        }
        Ok(pages.len() as u64 * PAGE_BYTES as u64)
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        if self.noted.is_as_noted(index, bytes) { Verdict::Clean } else { Verdict::Changed }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        for page in pages {
            page.outcome = guarded(|| self.user.save(page.index, page.bytes));
            match page.outcome {
                Ok(()) => self.noted.note(page.index, page.bytes),
                // Who knows what was kept.
                Err(_) => self.noted.forget(page.index),
            }
        }
    }

    fn given(&self, index: u64) {
        self.noted.forget(index);
    }

    fn forked(&self) {
        let _ = guarded(|| {
            self.user.forked();
            Ok(())
        });
    }

    fn sync(&self) -> Result<(), PagerError> {
        guarded(|| self.user.sync())
    }

    fn forget(&self, index: u64, count: u64) {
        for index in index..index + count {
            let _ = guarded(|| {
                self.user.forget(index);
                Ok(())
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_an_error_is_its_own_or_that_of_what_it_comes_from() {
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        assert_eq!(errno_of(&full()), libc::ENOSPC);
        let ours = crate::Error::system("save", "a page", full());
        assert_eq!(errno_of(&ours.into()), libc::ENOSPC);
        assert_eq!(error_of(&io::Error::other("five is out")), PagerError::Io(libc::EIO));
    }
}
