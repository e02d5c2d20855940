//! Programs that are their own allocators: compilers and interpreters that map memory in pieces of a few hundred KiB to a few MiB.
//!
//! Once a program has mapped some of that, pieces come out of mappings of ours, *stocks*, one after the other. What the kernel sees is
//! one mapping; a piece may be unmapped, protected or remapped like any other, for it is never handed out again. All else is passed on.
//!
//! A stock has huge pages where most of the one before turned out to be used: a program that maps much and touches little has
//! none, or each of the pages that it touches would take 2 MiB. It is a sample of one page in 64 that tells. With small pages those are
//! used that have a frame. The kernel knows huge pages only as a whole; there it is those that hold something other than zeros, which
//! are fewer, so less is enough. A stock that went wrong has cost 16 MiB at most. The first has medium pages where they are to be had,
//! which are judged like huge ones. Where the program has all that it maps locked in memory there are no new stocks: one would be filled
//! at once. The rest of one that was there before is handed out as it is.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use selfpage_heap::medium::{self, MEDIUM_BYTES};

/// Smaller pieces are not worth it; larger ones may be address space for later.
const PIECE_BYTES: std::ops::RangeInclusive<usize> = 256 << 10..=4 << 20;
/// Before a program has mapped so much it is small, and is left alone.
const BEFORE_BYTES: usize = 4 << 20;
/// How much the first stock has: nothing is known of the program, so it has small pages, or medium ones.
const FIRST_BYTES: usize = 12 << 20;
/// And each further one.
const STOCK_BYTES: usize = 16 << 20;
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// One page in so many bytes is looked at.
const SAMPLED_BYTES: usize = 64 * PAGE;
/// What is read of a page at a time: stacks may be small.
const READ_BYTES: usize = 512;

/// What the program asked for in such pieces.
static ASKED_BYTES: AtomicUsize = AtomicUsize::new(0);
static SERVED_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Of that, what lies in stocks with huge pages.
static HUGE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Taken by try only: a signal handler, or a forked child that finds it taken, has the kernel serve it.
static BUSY: AtomicBool = AtomicBool::new(false);
/// The stock: where it begins, the piece that was handed out last, and what is left.
static START: AtomicUsize = AtomicUsize::new(0);
static LAST: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
/// Whether it has huge pages.
static IS_HUGE: AtomicBool = AtomicBool::new(false);
/// Or medium ones.
static IS_MEDIUM: AtomicBool = AtomicBool::new(false);

/// Of its pages, how many were looked at, and how many of those were used.
static SEEN: AtomicUsize = AtomicUsize::new(0);
static USED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of pieces that came from us, and of those in stocks that have huge pages.
pub fn served_bytes() -> (usize, usize) {
    (SERVED_BYTES.load(Ordering::Relaxed), HUGE_BYTES.load(Ordering::Relaxed))
}

/// From now on the kernel serves all.
pub fn pass_on() {
    // Nobody gives it back.
    BUSY.store(true, Ordering::Relaxed);
}

fn kernel(at: *mut c_void, len: usize, prot: c_int, flags: c_int, file: c_int, offset: i64) -> *mut c_void {
    // SAFETY: raw-call: what the program asked for; the call sets errno as the C library's own function does.
    unsafe { libc::syscall(libc::SYS_mmap, at, len, prot, flags, file, offset) as *mut c_void }
}

fn unmap(at: *mut c_void, len: usize) -> c_int {
    // SAFETY: raw-call: what the program asked for, or what is ours; the call sets errno as the C library's own function does.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) as c_int }
}

fn piece(len: usize) -> Option<usize> {
    let len = len.checked_next_multiple_of(PAGE)?;
    if ASKED_BYTES.fetch_add(len, Ordering::Relaxed) < BEFORE_BYTES || BUSY.swap(true, Ordering::Acquire) {
        return None;
    }
    let mut start = beginning(NEXT.load(Ordering::Relaxed), len);
    if END.load(Ordering::Relaxed) < start + len {
        let stock = stock();
        if stock.is_some_and(is_locked) {
            give_back_stock();
            // Nor would a later one be any better: the kernel serves all, as after `pass_on`.
            return None;
        }
        start = stock.map_or(0, |stock| beginning(stock, len));
    }
    if start != 0 {
        if is_for_medium(len) {
            // SAFETY: own-mapping: a piece that is about to be handed out.
            unsafe { libc::madvise(start as *mut c_void, len, libc::MADV_HUGEPAGE) };
        }
        LAST.store(start, Ordering::Relaxed);
        NEXT.store(start + len, Ordering::Relaxed);
        SERVED_BYTES.fetch_add(len, Ordering::Relaxed);
        if IS_HUGE.load(Ordering::Relaxed) {
            HUGE_BYTES.fetch_add(len, Ordering::Relaxed);
        }
    }
    BUSY.store(false, Ordering::Release);
    (start != 0).then_some(start)
}

/// Whether a stock was locked in memory as it was mapped (`mlockall`), and has all its frames: the program is to have no more locked than it
/// maps.
fn is_locked(stock: usize) -> bool {
    // Advice that is refused for what is locked, and for all else that is empty comes to nothing; and a call for memory, which programs
    // have that filter their calls.
    // SAFETY: own-mapping: no contents change.
    let refused = unsafe { libc::madvise(stock as *mut c_void, PAGE, libc::MADV_COLD) } != 0;
    refused && crate::sys::errno() == libc::EINVAL
}

/// Unmaps a new stock, of which nothing is handed out.
fn give_back_stock() {
    let start = START.load(Ordering::Relaxed);
    unmap(start as *mut c_void, END.load(Ordering::Relaxed) - start);
}

/// Whether a piece of the stock gets medium pages. A longer one would often have a huge page.
fn is_for_medium(len: usize) -> bool {
    IS_MEDIUM.load(Ordering::Relaxed) && len <= HUGE_PAGE
}

/// Where a piece begins that may do so from `next` on. All of a piece must lie in one mapping, or the program could not remap it; and what
/// has medium pages may not cover a huge one, or the kernel would give that. So something is left out, with small pages, before each piece
/// that reaches the end of a huge one; and a piece as long as one does not begin where one begins.
fn beginning(next: usize, len: usize) -> usize {
    if !is_for_medium(len) || next % HUGE_PAGE + len < HUGE_PAGE {
        return next;
    }
    let start = next + MEDIUM_BYTES;
    if start.is_multiple_of(HUGE_PAGE) { start + MEDIUM_BYTES } else { start }
}

/// Pages that were looked at.
struct Sample {
    /// Those that are mapped.
    seen: usize,
    /// Those that have a frame.
    resident: usize,
    /// And of those, the ones that the program has touched, as far as can be told.
    used: usize,
}

impl Sample {
    /// Of what is still mapped of a range: the same pages whoever asks.
    fn of(from: usize, to: usize) -> Sample {
        let mut sample = Sample { seen: 0, resident: 0, used: 0 };
        for part in from / SAMPLED_BYTES..to.div_ceil(SAMPLED_BYTES) {
            // In each part another one, so that what repeats itself from piece to piece is seen as it is.
            let page = part * SAMPLED_BYTES + part * 37 % (SAMPLED_BYTES / PAGE) * PAGE;
            if (from..to).contains(&page) {
                sample.add(page);
            }
        }
        sample
    }

    fn add(&mut self, page: usize) {
        let mut state = 0u8;
        // SAFETY: out-pointer: one byte for one page.
        if unsafe { libc::mincore(page as *mut c_void, PAGE, &raw mut state) } != 0 {
            return;
        }
        self.seen += 1;
        if state & 1 == 1 {
            self.resident += 1;
            let single = !IS_HUGE.load(Ordering::Relaxed) && !IS_MEDIUM.load(Ordering::Relaxed);
            self.used += usize::from(single || (page..page + PAGE).step_by(READ_BYTES).any(holds_something));
        }
    }

    /// Has it count for the stock.
    fn count(&self) {
        SEEN.fetch_add(self.seen, Ordering::Relaxed);
        USED.fetch_add(self.used, Ordering::Relaxed);
    }
}

/// Whether a part of a page is other than zero.
fn holds_something(at: usize) -> bool {
    let mut words = [0u64; READ_BYTES / 8];
    let to = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: READ_BYTES };
    let from = libc::iovec { iov_base: at as *mut c_void, iov_len: READ_BYTES };
    // By the kernel: the program may have forbidden the page, or unmap it now. The process goes by the calling thread's number: its own is
    // that of the first thread, which may have ended.
    // SAFETY: out-pointer: as many bytes as are read at most.
    unsafe { libc::process_vm_readv(libc::gettid(), &raw const to, 1, &raw const from, 1, 0) };
    words.iter().any(|word| *word != 0)
}

/// Maps a new stock; what was left of the last one, less than a piece, is unmapped.
fn stock() -> Option<usize> {
    let (next, end) = (NEXT.load(Ordering::Relaxed), END.load(Ordering::Relaxed));
    let before = START.load(Ordering::Relaxed);
    // The last piece may not have been touched yet.
    Sample::of(before, LAST.load(Ordering::Relaxed)).count();
    let (used, seen) = (USED.swap(0, Ordering::Relaxed), SEEN.swap(0, Ordering::Relaxed));
    let was_huge = IS_HUGE.load(Ordering::Relaxed);
    let was_single = !was_huge && !IS_MEDIUM.load(Ordering::Relaxed);
    // Of what compilers touch up to a third holds zeros.
    let enough = if was_single { 4 * used >= 3 * seen } else { 2 * used >= seen };
    let is_huge = if seen > 0 { enough } else { was_huge };
    let len = if before == 0 { FIRST_BYTES } else { STOCK_BYTES };
    selfpage_heap::make_room(len);
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let found = kernel(std::ptr::null_mut(), len + HUGE_PAGE, read_write, flags, -1, 0) as usize;
    if found as isize == -1 {
        return None;
    }
    let start = found.next_multiple_of(HUGE_PAGE);
    // SAFETY: own-mapping: what is not handed out, and the edges of what was just mapped, are ours.
    unsafe {
        for (from, to) in [(next, end), (found, start), (start + len, found + len + HUGE_PAGE)] {
            if from < to {
                unmap(from as *mut c_void, to - from);
            }
        }
        if is_huge {
            libc::madvise(start as *mut c_void, len, libc::MADV_HUGEPAGE);
        }
    }
    IS_HUGE.store(is_huge, Ordering::Relaxed);
    IS_MEDIUM.store(before == 0 && medium::are_allowed(), Ordering::Relaxed);
    START.store(start, Ordering::Relaxed);
    NEXT.store(start, Ordering::Relaxed);
    END.store(start + len, Ordering::Relaxed);
    Some(start)
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    let wanted = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    if (prot, flags) == wanted && at.is_null() && PIECE_BYTES.contains(&len) {
        let before = crate::sys::errno();
        let start = piece(len);
        // Also where there is no room for a stock: for the piece alone there may be.
        crate::sys::set_errno(before);
        if let Some(start) = start {
            return start as *mut c_void;
        }
    }
    kernel(at, len, prot, flags, file, offset)
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn mmap64(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    mmap(at, len, prot, flags, file, offset)
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(at: *mut c_void, len: usize) -> c_int {
    let (from, handed_out) = (at as usize, START.load(Ordering::Relaxed)..NEXT.load(Ordering::Relaxed));
    // Later nobody can tell what it was used for. What was never touched is cut off to align the rest, mostly.
    // A longer one is seen while the stock changes, and has other mappings in it.
    if handed_out.contains(&from) && handed_out.len() <= STOCK_BYTES {
        let before = crate::sys::errno();
        let sample = Sample::of(from, from.saturating_add(len).min(handed_out.end));
        if sample.resident > 0 {
            sample.count();
        }
        crate::sys::set_errno(before);
    }
    unmap(at, len)
}
