//! Address space that is handed out in pieces: reserved as a whole, open to access only where a piece is in use.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::lock::Lock;
use crate::managed;
use crate::ranges::Ranges;
use crate::sys;

/// Pieces begin at multiples of this.
pub const GRAIN: usize = 64 << 10;
pub const PAGE: usize = 4096;

/// Whose frames are under a space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Under {
    /// The domain's.
    Domain,
    /// The kernel's: never paged by us.
    Kernel,
}

/// A reserved stretch of addresses.
pub struct Space {
    under: Under,
    len: usize,
    start: AtomicUsize,
    taken: Lock<Ranges>,
    used_bytes: AtomicUsize,
}

impl Space {
    /// Addresses of our own, reserved when the first piece is taken.
    pub const fn of_kernel(len: usize) -> Space {
        Space {
            under: Under::Kernel,
            len,
            start: AtomicUsize::new(0),
            taken: Lock::new(Ranges::new()),
            used_bytes: AtomicUsize::new(0),
        }
    }

    /// The region of large blocks.
    pub const fn of_large_blocks() -> Space {
        Space { under: Under::Domain, ..Space::of_kernel(managed::LARGE_BYTES) }
    }

    fn range(&self) -> Range<usize> {
        match self.under {
            Under::Domain => managed::large_range(),
            Under::Kernel => {
                let start = self.start.load(Ordering::Relaxed);
                start..start + if start == 0 { 0 } else { self.len }
            }
        }
    }

    /// Whether a piece of it was at `address`.
    pub fn holds(&self, address: usize) -> bool {
        self.range().contains(&address)
    }

    /// How many bytes of pieces are in use.
    pub fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// A piece of `len` bytes, whole pages, all zero, that begins at a multiple of `align`.
    pub fn take(&self, len: usize, align: usize) -> Option<usize> {
        let room = len.checked_next_multiple_of(GRAIN)?;
        let mut taken = self.taken.take();
        if self.under == Under::Kernel && self.start.load(Ordering::Relaxed) == 0 {
            self.start.store(sys::reserve(self.len)?, Ordering::Relaxed);
        }
        let start = taken.gap(self.range(), room, align.max(GRAIN))?;
        taken.add(start..start + room);
        self.open(&mut taken, start..start + len).then_some(start)
    }

    /// Makes a piece larger where it stands. `false`: what follows it is in use.
    pub fn extend(&self, start: usize, len: usize, new_len: usize) -> bool {
        let end = start + len.next_multiple_of(GRAIN);
        let new_end = start + new_len.next_multiple_of(GRAIN);
        let mut taken = self.taken.take();
        if new_end > end {
            if new_end > self.range().end || taken.gap(end..new_end, new_end - end, 1).is_none() {
                return false;
            }
            taken.add(end..new_end);
        }
        self.open(&mut taken, start + len..start + new_len)
    }

    /// The lock is held meanwhile: a fork finds no change half done.
    fn open(&self, taken: &mut Ranges, range: Range<usize>) -> bool {
        let (access, len) = (libc::PROT_READ | libc::PROT_WRITE, range.len());
        self.tell_reach(taken);
        let opened = match (self.under, managed::get()) {
            // SAFETY: owned-range: the piece was just taken.
            (Under::Domain, Some(managed)) => unsafe { managed.open(range.clone(), access) },
            // SAFETY: owned-range: as above.
            _ => unsafe { sys::protect(range.start, len, access) },
        };
        if opened < 0 {
            taken.remove(range.start.next_multiple_of(GRAIN)..range.end.next_multiple_of(GRAIN));
            return false;
        }
        self.used_bytes.fetch_add(len, Ordering::Relaxed);
        true
    }

    /// Nothing is fetched ahead beyond the last piece.
    fn tell_reach(&self, taken: &Ranges) {
        if let (Under::Domain, Some(managed)) = (self.under, managed::get()) {
            let start = self.range().start;
            managed.large.set_reach(taken.end(start) - start);
        }
    }

    /// Gives the end of a piece back, from `range.start` on, which is a page's; the rest of its last grain stays the
    /// piece's. What the program sealed is never handed out again: its access could not be changed.
    ///
    /// # Safety
    /// *owned-range*: the range is a piece's, and nobody uses it any more.
    pub unsafe fn give(&self, range: Range<usize>) {
        let len = range.len();
        let mut taken = self.taken.take();
        let mut sealed = false;
        match (self.under, managed::get()) {
            // SAFETY: owned-range: passed on from our caller. What cannot be closed is empty all the same.
            (Under::Domain, Some(managed)) => unsafe {
                let closed = managed.close(range.clone());
                sealed = closed == -libc::EPERM as isize;
                if closed < 0 {
                    managed.end(range.clone());
                }
            },
            // SAFETY: owned-range: passed on from our caller.
            _ => unsafe {
                sys::call(libc::SYS_madvise, [range.start, len, libc::MADV_DONTNEED as usize, 0, 0, 0]);
                sys::protect(range.start, len, libc::PROT_NONE);
            },
        }
        self.used_bytes.fetch_sub(len, Ordering::Relaxed);
        if !sealed {
            taken.remove(range.start.next_multiple_of(GRAIN)..range.end.next_multiple_of(GRAIN));
        }
        self.tell_reach(&taken);
    }

    /// Keeps it from changing over a fork.
    pub fn hold(&self) {
        self.taken.hold();
    }

    /// Ends that.
    ///
    /// # Safety
    /// *lock-word*: the caller, or the thread it is a copy of, called [`Space::hold`].
    pub unsafe fn let_go(&self) {
        // SAFETY: lock-word: passed on from our caller.
        unsafe { self.taken.let_go() };
    }
}
