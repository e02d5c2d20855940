//! Programs that are their own allocators: compilers and interpreters that map memory in pieces of a few hundred KiB to a few MiB.
//!
//! Once a program has mapped some of that, pieces come out of mappings of ours, one after the other, which have huge pages.
//! What the kernel sees is one mapping; a piece may be unmapped, protected or remapped like any other, for it is never handed out
//! again. All else is passed on.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Smaller pieces are not worth it; larger ones may be address space for later.
const PIECE_BYTES: std::ops::RangeInclusive<usize> = 256 << 10..=4 << 20;
/// Before a program has mapped so much it is small, and a huge page that it does not fill would be felt.
const BEFORE_BYTES: usize = 16 << 20;
/// How much is mapped at once.
const STOCK_BYTES: usize = 16 << 20;
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// What the program asked for in such pieces.
static ASKED_BYTES: AtomicUsize = AtomicUsize::new(0);
static SERVED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Taken by try only: a signal handler, or a forked child that finds it taken, has the kernel serve it.
static BUSY: AtomicBool = AtomicBool::new(false);
/// What is left of the stock.
static NEXT: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Bytes of pieces that came from us.
pub fn served_bytes() -> usize {
    SERVED_BYTES.load(Ordering::Relaxed)
}

fn kernel(at: *mut c_void, len: usize, prot: c_int, flags: c_int, file: c_int, offset: i64) -> *mut c_void {
    // SAFETY: raw-call: what the program asked for; the call sets errno as the C library's own function does.
    unsafe { libc::syscall(libc::SYS_mmap, at, len, prot, flags, file, offset) as *mut c_void }
}

fn piece(len: usize) -> Option<usize> {
    let len = len.checked_next_multiple_of(PAGE)?;
    if ASKED_BYTES.fetch_add(len, Ordering::Relaxed) < BEFORE_BYTES || BUSY.swap(true, Ordering::Acquire) {
        return None;
    }
    let mut start = NEXT.load(Ordering::Relaxed);
    if END.load(Ordering::Relaxed) - start < len {
        start = stock().unwrap_or(0);
    }
    if start != 0 {
        NEXT.store(start + len, Ordering::Relaxed);
        SERVED_BYTES.fetch_add(len, Ordering::Relaxed);
    }
    BUSY.store(false, Ordering::Release);
    (start != 0).then_some(start)
}

/// Maps a new stock; what was left of the last one, less than a piece, is unmapped.
fn stock() -> Option<usize> {
    let (next, end) = (NEXT.load(Ordering::Relaxed), END.load(Ordering::Relaxed));
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let found = kernel(std::ptr::null_mut(), STOCK_BYTES + HUGE_PAGE, read_write, flags, -1, 0) as usize;
    if found as isize == -1 {
        return None;
    }
    let start = found.next_multiple_of(HUGE_PAGE);
    // SAFETY: own-mapping: what is not handed out, and the edges of what was just mapped, are ours.
    unsafe {
        for (from, to) in [(next, end), (found, start), (start + STOCK_BYTES, found + STOCK_BYTES + HUGE_PAGE)] {
            if from < to {
                libc::munmap(from as *mut c_void, to - from);
            }
        }
        libc::madvise(start as *mut c_void, STOCK_BYTES, libc::MADV_HUGEPAGE);
    }
    NEXT.store(start, Ordering::Relaxed);
    END.store(start + STOCK_BYTES, Ordering::Relaxed);
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
        if let Some(start) = piece(len) {
            crate::sys::set_errno(before);
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
