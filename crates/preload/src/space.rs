//! Address space that is handed out in pieces: reserved as a whole, open to access only where a piece is in use.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits;
use crate::lock::{Held, Lock};
use crate::managed;
use crate::ranges::{Ranges, Standing};
use crate::sys::{self, Quiet};

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

/// Whether a piece is to find its way free when it grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    /// Others may come right behind it.
    None,
    /// They come there last: it may double.
    ToGrow,
}

/// What is where in a space.
struct Places {
    /// Pieces.
    taken: Ranges,
    /// Pieces, and the room that some have right behind them.
    kept: Ranges,
}

impl Places {
    /// Whether one more piece can be noted, or a hole among pieces.
    fn has_room(&self) -> bool {
        self.taken.has_room(1) && self.kept.has_room(1)
    }

    /// Takes `len` bytes within `limits`, and keeps as many again behind them. Nobody's room if there is any other place, and else
    /// whatever is not taken.
    fn take(&mut self, limits: &Range<usize>, len: usize, align: usize, room: Room) -> Option<Range<usize>> {
        if !self.has_room() {
            return None;
        }
        let whole = if room == Room::ToGrow { len.saturating_mul(2) } else { len };
        let place = |start: usize, len: usize| start..start + len;
        let kept = (self.kept.gap(limits.clone(), whole, align).map(|start| place(start, whole)))
            .or_else(|| self.kept.gap(limits.clone(), len, align).map(|start| place(start, len)))
            .or_else(|| self.taken.gap(limits.clone(), len, align).map(|start| place(start, len)))?;
        let start = kept.start;
        self.kept.add(kept);
        self.taken.add(start..start + len);
        Some(start..start + len)
    }

    /// Takes what follows a piece, which is its room or nobody's. `false`: there is another piece.
    fn extend(&mut self, limits: &Range<usize>, more: &Range<usize>) -> bool {
        let is_free =
            self.has_room() && more.end <= limits.end && self.taken.gap(more.clone(), more.len(), 1).is_some();
        if is_free {
            self.kept.add(more.clone());
            self.taken.add(more.clone());
        }
        is_free
    }

    /// Ends a piece, or the end of one, and its room.
    fn give(&mut self, limits: &Range<usize>, range: Range<usize>) {
        let behind = range.end..limits.end;
        let (free_until, taken) = self.taken.stretch(&behind);
        let (room_until, kept) = self.kept.stretch(&behind);
        let end = if taken == Standing::Out && kept == Standing::In { free_until.min(room_until) } else { range.end };
        self.kept.remove(range.start..end);
        self.taken.remove(range);
    }
}

/// A reserved stretch of addresses.
pub struct Space {
    under: Under,
    len: usize,
    start: AtomicUsize,
    places: Lock<Places>,
    used_bytes: AtomicUsize,
}

impl Space {
    /// How many there are: large blocks, the quiet heap and our own, and what is known of threads that have objects.
    pub const COUNT: usize = 4;
    /// How many sets each has.
    pub const SETS: usize = 2;

    /// Addresses of our own, reserved when the first piece is taken.
    pub const fn of_kernel(len: usize) -> Space {
        Space {
            under: Under::Kernel,
            len,
            start: AtomicUsize::new(0),
            places: Lock::new(Places { taken: Ranges::new(), kept: Ranges::new() }),
            used_bytes: AtomicUsize::new(0),
        }
    }

    /// The region of large blocks.
    pub const fn of_large_blocks() -> Space {
        Space { under: Under::Domain, ..Space::of_kernel(limits::LARGE_BYTES) }
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

    /// What is where, with signals blocked: a handler that forks in the middle of a change of a region's would leave the child with half of it.
    fn places(&self) -> (Quiet, Held<'_, Places>) {
        (Quiet::begin(), self.places.take())
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
    pub fn take(&self, len: usize, align: usize, room: Room) -> Option<usize> {
        let whole = len.checked_next_multiple_of(GRAIN)?;
        let (_quiet, mut places) = self.places();
        if self.under == Under::Kernel && self.start.load(Ordering::Relaxed) == 0 {
            self.start.store(sys::reserve(self.len)?, Ordering::Relaxed);
        }
        let start = places.take(&self.range(), whole, align.max(GRAIN), room)?.start;
        self.open(&mut places, start..start + len).then_some(start)
    }

    /// Makes a piece larger where it stands. `false`: what follows it is in use.
    pub fn extend(&self, start: usize, len: usize, new_len: usize) -> bool {
        let end = start + len.next_multiple_of(GRAIN);
        let new_end = start + new_len.next_multiple_of(GRAIN);
        let (_quiet, mut places) = self.places();
        if new_end > end && !places.extend(&self.range(), &(end..new_end)) {
            return false;
        }
        self.open(&mut places, start + len..start + new_len)
    }

    /// The lock is held meanwhile: a fork finds no change half done.
    fn open(&self, places: &mut Places, range: Range<usize>) -> bool {
        let (access, len) = (libc::PROT_READ | libc::PROT_WRITE, range.len());
        self.tell_reach(places);
        let opened = match (self.under, managed::get()) {
            // SAFETY: owned-range: the piece was just taken.
            (Under::Domain, Some(managed)) => unsafe { managed.open(range.clone(), access) },
            (Under::Domain, None) => -libc::ENOMEM as isize,
            // SAFETY: owned-range: as above.
            (Under::Kernel, _) => unsafe { sys::protect(range.start, len, access) },
        };
        if opened < 0 {
            places.give(&self.range(), range.start.next_multiple_of(GRAIN)..range.end.next_multiple_of(GRAIN));
            return false;
        }
        self.used_bytes.fetch_add(len, Ordering::Relaxed);
        true
    }

    /// Nothing is fetched ahead beyond the last piece.
    fn tell_reach(&self, places: &Places) {
        if let (Under::Domain, Some(managed)) = (self.under, managed::get()) {
            let start = self.range().start;
            managed.large.set_reach(places.taken.end(start) - start);
        }
    }

    /// Gives the end of a piece back, from `range.start` on, which is a page's; the rest of its last grain stays the
    /// piece's. What the program sealed is never handed out again: its access could not be changed. Nor is what there is no room to note.
    ///
    /// # Safety
    /// *owned-range*: the range is a piece's, and nobody uses it any more.
    pub unsafe fn give(&self, range: Range<usize>) {
        let len = range.len();
        let (_quiet, mut places) = self.places();
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
            // What is there now is something else.
            (Under::Domain, None) => {}
            // SAFETY: owned-range: passed on from our caller.
            (Under::Kernel, _) => unsafe {
                sys::call(libc::SYS_madvise, [range.start, len, libc::MADV_DONTNEED as usize, 0, 0, 0]);
                sys::protect(range.start, len, libc::PROT_NONE);
            },
        }
        self.used_bytes.fetch_sub(len, Ordering::Relaxed);
        if !sealed && places.has_room() {
            places.give(&self.range(), range.start.next_multiple_of(GRAIN)..range.end.next_multiple_of(GRAIN));
        }
        self.tell_reach(&places);
    }

    /// Keeps it from changing over a fork.
    pub fn hold(&self) {
        self.places.hold();
    }

    /// Ends that.
    ///
    /// # Safety
    /// *lock-word*: the caller, or the thread it is a copy of, called [`Space::hold`].
    pub unsafe fn let_go(&self) {
        // SAFETY: lock-word: passed on from our caller.
        unsafe { self.places.let_go() };
    }
}
