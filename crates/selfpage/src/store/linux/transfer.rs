//! Pages on their way between memory and a file: runs of neighbouring bloks become requests, requests are worked off.

use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, RawFd};
use std::slice;

use rustix::io::{Errno, ReadWriteFlags, preadv, pwritev, pwritev2};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::PagerError;

use super::descriptor::borrow_number;
use crate::store::{ReadBlok, WriteBlok};

/// The most pages in one request: at 256 KiB a page costs a tenth of what it costs alone, and more gains little.
const REQUEST_PAGES: usize = 64;
/// How often in a row the kernel may say "again" before that is an error.
const RETRIES_MAX: u32 = 10_000;

/// The outcome of a write that would have had to wait.
pub const LOCKED: PagerError = PagerError::Io(libc::EAGAIN);

/// Whether a write met the end of the disk, of this user's quota, or of what a file may have: there may be room in what the file has already.
pub const fn has_no_room(outcome: Result<(), PagerError>) -> bool {
    matches!(outcome, Err(PagerError::Full | PagerError::Io(libc::EDQUOT | libc::EFBIG)))
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the file.
    Read,
    /// Into the file.
    Write,
    /// Into the file, unless that would wait for its lock: then the outcome is `EAGAIN`.
    WriteUnlessLocked,
}

/// Neighbouring bloks, moved by one system call or as many as it takes.
#[derive(Clone, Copy)]
pub struct Request {
    first_blok: u32,
    /// Where its pages begin in the batch.
    start: u16,
    pages: u16,
    done: u16,
    retries: u32,
    outcome: Option<Result<(), PagerError>>,
}

/// Up to `PAGES` pages and the requests that move them, on the caller's stack.
pub struct Window<'a, const PAGES: usize> {
    direction: Direction,
    vectors: [libc::iovec; PAGES],
    /// Which page of the caller's each vector is: vectors are in the order of their bloks.
    order: [u16; PAGES],
    requests: [Request; PAGES],
    requests_len: usize,
    borrowed: PhantomData<&'a mut PageBytes>,
}

/// What an executor works off.
pub struct Batch<'w> {
    pub(super) direction: Direction,
    pub(super) vectors: &'w [libc::iovec],
    pub(super) requests: &'w mut [Request],
}

impl<'a, const PAGES: usize> Window<'a, PAGES> {
    /// A window that reads these bloks, at most `PAGES`.
    pub fn to_read(bloks: &'a mut [ReadBlok<'_>]) -> Self {
        Window::new(Direction::Read, bloks.len(), |page| {
            let read = &mut bloks[page];
            (read.blok.0, read.bytes.as_mut_ptr())
        })
    }

    /// A window that writes these bloks, at most `PAGES`, in this way.
    pub fn to_write(direction: Direction, bloks: &'a [WriteBlok<'_>]) -> Self {
        Window::new(direction, bloks.len(), |page| (bloks[page].blok.0, bloks[page].bytes.as_ptr().cast_mut()))
    }

    fn new(direction: Direction, len: usize, mut page: impl FnMut(usize) -> (u32, *mut u8)) -> Self {
        assert!(len <= PAGES, "a window of {PAGES} pages was given {len}");
        let mut bloks = [0; PAGES];
        let mut bases = [std::ptr::null_mut(); PAGES];
        let mut window = Window {
            direction,
            vectors: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: PAGE_BYTES }; PAGES],
            order: [0; PAGES],
            requests: [Request { first_blok: 0, start: 0, pages: 0, done: 0, retries: 0, outcome: None }; PAGES],
            requests_len: 0,
            borrowed: PhantomData,
        };
        for index in 0..len {
            (bloks[index], bases[index]) = page(index);
            window.order[index] = index as u16;
        }
        window.order[..len].sort_unstable_by_key(|&index| bloks[index as usize]);
        for place in 0..len {
            let index = window.order[place] as usize;
            window.vectors[place].iov_base = bases[index].cast();
            window.add(bloks[index], place as u16);
        }
        window
    }

    fn add(&mut self, blok: u32, place: u16) {
        if let Some(last) = self.requests[..self.requests_len].last_mut()
            && last.first_blok.checked_add(last.pages as u32) == Some(blok)
            && (last.pages as usize) < REQUEST_PAGES
        {
            last.pages += 1;
            return;
        }
        let request = &mut self.requests[self.requests_len];
        (request.first_blok, request.start, request.pages) = (blok, place, 1);
        self.requests_len += 1;
    }

    /// The requests, for an executor.
    pub fn batch(&mut self) -> Batch<'_> {
        let requests = &mut self.requests[..self.requests_len];
        Batch { direction: self.direction, vectors: &self.vectors, requests }
    }

    /// Tells each page's outcome, by its place in the caller's slice.
    pub fn outcomes(&self, mut tell: impl FnMut(usize, Result<(), PagerError>)) {
        for request in &self.requests[..self.requests_len] {
            for page in 0..request.pages {
                let failed = request.outcome.unwrap_or(Err(PagerError::Panicked));
                let outcome = if page < request.done { Ok(()) } else { failed };
                tell(self.order[(request.start + page) as usize] as usize, outcome);
            }
        }
    }
}

impl Batch<'_> {
    /// Works off every request, one after the other, on this thread.
    ///
    /// # Context
    /// Trap: raw system calls, nothing else.
    pub fn run_serially(&mut self, file: RawFd) {
        for request in self.requests.iter_mut() {
            request.run(file, self.direction, self.vectors);
        }
    }

    /// How many requests there are.
    pub fn requests_len(&self) -> usize {
        self.requests.len()
    }

    /// The first failure.
    pub fn result(&self) -> Result<(), PagerError> {
        self.requests.iter().try_for_each(|request| request.outcome.unwrap_or(Err(PagerError::Panicked)))
    }
}

impl Request {
    pub(super) fn is_done(&self) -> bool {
        self.outcome.is_some()
    }

    /// Moves all of it.
    pub(super) fn run(&mut self, file: RawFd, direction: Direction, vectors: &[libc::iovec]) {
        while !self.is_done() {
            let (rest, offset) = self.rest(vectors);
            let file = borrow_number(file);
            // SAFETY: batch-borrowed: each vector is one borrowed page, and IoSlice has the layout of iovec.
            let moved = unsafe {
                match direction {
                    Direction::Read => preadv(
                        file,
                        slice::from_raw_parts_mut(rest.as_ptr() as *mut IoSliceMut<'_>, rest.len()),
                        offset,
                    ),
                    Direction::Write => {
                        pwritev(file, slice::from_raw_parts(rest.as_ptr() as *const IoSlice<'_>, rest.len()), offset)
                    }
                    Direction::WriteUnlessLocked => {
                        let rest = slice::from_raw_parts(rest.as_ptr() as *const IoSlice<'_>, rest.len());
                        pwritev2(file, rest, offset, ReadWriteFlags::NOWAIT).map_err(|why| unless_forbidden(file, why))
                    }
                }
            };
            self.took(moved, direction);
        }
    }

    /// What is left to move: where it is in memory, and its byte offset in the file.
    pub(super) fn rest<'v>(&self, vectors: &'v [libc::iovec]) -> (&'v [libc::iovec], u64) {
        let offset = (self.first_blok as u64 + self.done as u64) * PAGE_BYTES as u64;
        (&vectors[(self.start + self.done) as usize..(self.start + self.pages) as usize], offset)
    }

    /// Notes what the kernel said of the rest: how many bytes it moved, or why none. Pages moved in part count as not moved.
    pub(super) fn took(&mut self, moved: Result<usize, Errno>, direction: Direction) {
        match moved {
            Ok(len_bytes) if len_bytes < PAGE_BYTES => {
                self.outcome = Some(Err(match direction {
                    Direction::Read => PagerError::Truncated,
                    Direction::Write | Direction::WriteUnlessLocked => PagerError::Full,
                }));
            }
            Ok(len_bytes) => {
                self.retries = 0;
                self.done = (self.done + (len_bytes / PAGE_BYTES) as u16).min(self.pages);
                if self.done == self.pages {
                    self.outcome = Some(Ok(()));
                }
            }
            // The last: of a file system whose direct writes are of more than a page (XFS with larger blocks).
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL) if direction == Direction::WriteUnlessLocked => {
                self.outcome = Some(Err(LOCKED));
            }
            Err(Errno::INTR | Errno::AGAIN) if self.retries < RETRIES_MAX => self.retries += 1,
            Err(Errno::NOSPC) => self.outcome = Some(Err(PagerError::Full)),
            Err(errno) => self.outcome = Some(Err(PagerError::Io(errno.raw_os_error()))),
        }
    }
}

/// Why a write that must not wait has failed: where the process may make no such call, because it would have had to wait.
fn unless_forbidden(file: BorrowedFd<'_>, why: Errno) -> Errno {
    // A filter answers with any number. The file itself refuses no write of nothing, if it is there.
    match pwritev2(file, &[], 0, ReadWriteFlags::NOWAIT) {
        Err(of_nothing) if of_nothing == why && !matches!(why, Errno::INTR | Errno::BADF) => Errno::AGAIN,
        _ => why,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_cannot_be_written_past_the_lock_is_left_to_the_page_cache() {
        let took = |direction, errno| {
            let mut request =
                Request { first_blok: 1, start: 0, pages: 1, done: 0, retries: RETRIES_MAX, outcome: None };
            request.took(Err(errno), direction);
            request.outcome
        };
        for errno in [Errno::AGAIN, Errno::OPNOTSUPP, Errno::INVAL] {
            assert_eq!(took(Direction::WriteUnlessLocked, errno), Some(Err(LOCKED)), "{errno}");
            assert_eq!(took(Direction::Write, errno), Some(Err(PagerError::Io(errno.raw_os_error()))), "{errno}");
        }
        assert_eq!(took(Direction::WriteUnlessLocked, Errno::IO), Some(Err(PagerError::Io(libc::EIO))));
        assert_eq!(took(Direction::Write, Errno::NOSPC), Some(Err(PagerError::Full)));
        for errno in [Errno::DQUOT, Errno::FBIG] {
            assert_eq!(took(Direction::Write, errno), Some(Err(PagerError::Io(errno.raw_os_error()))), "{errno}");
        }
        assert!(
            [Errno::NOSPC, Errno::DQUOT, Errno::FBIG]
                .map(|errno| took(Direction::Write, errno))
                .into_iter()
                .flatten()
                .all(has_no_room)
        );
    }

    #[test]
    fn what_a_file_itself_refuses_is_no_filters() {
        let file = tempfile::tempfile().unwrap();
        for errno in [Errno::PERM, Errno::NOSYS, Errno::ACCESS, Errno::IO] {
            assert_eq!(unless_forbidden(file.as_fd(), errno), errno);
        }
    }
}
