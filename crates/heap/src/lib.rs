//! The object heap: `malloc` and its family for whole programs, and Rust's global allocator.
//!
//! Objects below 1 MiB come from mimalloc, which is kept as it is; its pages lie in one range of addresses that this crate lays
//! out. Larger blocks are blocks of the page allocator, `selfpage::alloc`. So what a pointer is can be told from its address.
//!
//! # Examples
//! ```
//! #[global_allocator]
//! static HEAP: selfpage_heap::Allocator = selfpage_heap::Allocator;
//!
//! fn main() {
//!     let mut numbers: Vec<u64> = Vec::new();
//!     numbers.extend(0..1_000_000); // From 4 MiB on it grows by frames that move, and no byte is copied.
//!     assert_eq!(numbers.iter().sum::<u64>(), 499_999_500_000);
//! }
//! ```

mod allocator;
#[cfg(target_arch = "x86_64")]
mod by_handle;
mod items;
mod large;
#[doc(hidden)]
pub mod mark;
mod misuse;
mod next;
#[doc(hidden)]
pub mod panics;

pub use allocator::Allocator;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub use by_handle::{look_up, next_dlsym};
pub use large::hold_streams_over_forks;
pub use next::Next;

use std::ffi::{c_long, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    fn selfpage_heap_attend_forks();
    fn selfpage_heap_begin(purge_delay_ms: c_long);
    fn selfpage_heap_begin_over(
        ground: &'static Ground,
        start: *mut c_void,
        len: usize,
        purge_delay_ms: c_long,
    ) -> bool;
    /// As [`allocate`], to be jumped to.
    pub fn selfpage_heap_malloc(size: usize) -> *mut c_void;
    fn selfpage_heap_calloc(count: usize, size: usize) -> *mut c_void;
    fn selfpage_heap_aligned(align: usize, size: usize) -> *mut c_void;
    fn selfpage_heap_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    /// As [`free`], to be jumped to.
    ///
    /// # Safety
    /// As [`free`].
    pub fn selfpage_heap_free(block: *mut c_void);
    fn selfpage_heap_usable(block: *mut c_void) -> usize;
    fn selfpage_heap_check_pointers();
    fn selfpage_heap_collect();
    fn selfpage_heap_look_around_soon();
    fn selfpage_heap_look_in_free();
    fn selfpage_heap_stats(now: *mut usize, most: *mut usize);
    fn selfpage_heap_try_hold_over_fork() -> bool;
    fn selfpage_heap_let_go_after_fork();
    fn selfpage_heap_settle_in_child();
    fn selfpage_streams_hold_over_fork();
    fn selfpage_streams_let_go_after_fork();
    fn selfpage_streams_let_go_in_child();
}

/// How long pages of freed objects stay, in case they are needed again soon.
const PURGE_DELAY_MS: c_long = 100;

/// A block of `size` bytes. Null, and `errno` set: there is no room.
#[inline]
pub fn allocate(size: usize) -> *mut c_void {
    // SAFETY: heap-block: any size may be asked for.
    unsafe { selfpage_heap_malloc(size) }
}

/// A block of `count` times `size` bytes, all zero. Null, and `errno` set: there is no room, or the product is none.
#[inline]
pub fn allocate_zeroed(count: usize, size: usize) -> *mut c_void {
    // SAFETY: heap-block: any size may be asked for.
    unsafe { selfpage_heap_calloc(count, size) }
}

/// A block at a multiple of `align`, a power of two. Null, and `errno` set: there is no room.
#[inline]
pub fn allocate_aligned(align: usize, size: usize) -> *mut c_void {
    // SAFETY: heap-block: any size and any power of two may be asked for.
    unsafe { selfpage_heap_aligned(align, size) }
}

/// Makes a block larger or smaller; it may move. Null, and `errno` set: there is no room, and the block is as it was.
///
/// # Safety
/// *heap-block*: null, or a live block from here, of which only the result is used afterwards.
#[inline]
pub unsafe fn reallocate(block: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: heap-block: passed on from our caller.
    unsafe { selfpage_heap_realloc(block, size) }
}

/// Ends the life of a block; of null, nothing.
///
/// # Safety
/// *heap-block*: null, or a live block from here that nobody uses any more.
#[inline]
pub unsafe fn free(block: *mut c_void) {
    // SAFETY: heap-block: passed on from our caller.
    unsafe { selfpage_heap_free(block) }
}

/// How many bytes a block has; null has none.
///
/// # Safety
/// *heap-block*: null, or a live block from here.
#[inline]
pub unsafe fn usable_bytes(block: *mut c_void) -> usize {
    // SAFETY: heap-block: passed on from our caller.
    unsafe { selfpage_heap_usable(block) }
}

/// What the heap holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of pages for objects below 1 MiB, used or not.
    pub object_bytes: usize,
    /// The most of them so far.
    pub object_bytes_max: usize,
    /// Bytes of larger blocks.
    pub large_bytes: usize,
    /// Bytes of these, and of freed ones whose frames are kept.
    pub large_retained_bytes: usize,
    /// The most bytes of larger blocks so far.
    pub large_bytes_max: usize,
}

/// Bytes of pages for objects below 1 MiB, used or not, and the most of them so far.
pub fn object_bytes() -> (usize, usize) {
    let (mut now, mut most) = (0, 0);
    // SAFETY: out-pointer: two numbers that outlive the call.
    unsafe { selfpage_heap_stats(&raw mut now, &raw mut most) };
    (now, most)
}

/// The C library's figures, as far as they mean something here: what is mapped for objects, in large blocks, and kept beside those.
pub fn mallinfo2(object_bytes: usize, large_bytes: usize, kept_bytes: usize) -> libc::mallinfo2 {
    libc::mallinfo2 {
        arena: object_bytes,
        ordblks: 0,
        smblks: 0,
        hblks: 0,
        hblkhd: large_bytes,
        usmblks: 0,
        fsmblks: 0,
        uordblks: object_bytes + large_bytes,
        fordblks: kept_bytes,
        keepcost: 0,
    }
}

/// What the heap holds at this moment.
pub fn stats() -> Stats {
    let (object_bytes, object_bytes_max) = object_bytes();
    let (large_bytes, large_retained_bytes, large_bytes_max) = large::stats();
    Stats { object_bytes, object_bytes_max, large_bytes, large_retained_bytes, large_bytes_max }
}

/// Gives back to the kernel what is free, as far as the calling thread knows of it. Whether larger blocks had left some.
pub fn trim() -> bool {
    // SAFETY: heap-block: frees what nobody has.
    unsafe { selfpage_heap_collect() };
    large::trim()
}

/// Says how much freed memory stays in the process beside what is live; 0: none. Unless it is said, both together have at most 1.25 times
/// what was live at most lately. Only the first call counts. A heap that nobody told works as well.
pub fn begin(retain_bytes: Option<usize>) {
    // Not a `Once`: its code would be one more place of the library that every small program has in memory.
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if BEGUN.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: no-pointers: a number is passed.
    unsafe { selfpage_heap_begin(if retain_bytes == Some(0) { 0 } else { PURGE_DELAY_MS }) };
    if retain_bytes.is_some() {
        selfpage::alloc::set_retention(retain_bytes);
    }
}

/// Has forks of this process take care of the heap from now on, and not only from its first block on. Handlers of a fork that are registered
/// later may take locks in `prepare` under which others allocate; those that came before may not.
pub fn attend_forks() {
    // SAFETY: no-pointers: nothing is passed.
    unsafe { selfpage_heap_attend_forks() };
}

/// From now on a pointer into the middle of an object below 1 MiB ends the process where it is freed, resized or measured, with a line that
/// names it; but not every one into a page that has objects at greater alignments than 16.
pub fn check_pointers() {
    // SAFETY: no-pointers: nothing is passed.
    unsafe { selfpage_heap_check_pointers() };
}

/// From now on a touch of a larger block that was freed is a `SIGSEGV`, at once. Objects below 1 MiB are as before.
pub use selfpage::alloc::trap_on_use_after_free;

/// What the objects' range begins at a multiple of, and has whole ones of.
pub const RANGE_ALIGN: usize = 32 << 20;

/// What the objects' range stands on, where that is not the kernel.
///
/// These are called while an object is allocated or freed, on that thread, with no lock of the heap's held.
#[derive(Debug)]
#[repr(C)]
pub struct Ground {
    /// Memory beside the range for what is known of a thread: whole pages, all zero. Null: there is none.
    pub map: extern "C" fn(len: usize) -> *mut c_void,
    /// Takes that back.
    pub unmap: unsafe extern "C" fn(at: *mut c_void, len: usize),
    /// A part of the range, within one multiple of [`RANGE_ALIGN`], is used for the first time. `false`: it cannot be.
    pub open: unsafe extern "C" fn(at: *mut c_void, len: usize) -> bool,
    /// What is in a part of the range is garbage: it may read as anything from now on.
    pub drop: unsafe extern "C" fn(at: *mut c_void, len: usize),
}

/// Gets ready in place of [`begin`], over a range of somebody else's: objects alone, for blocks from 1 MiB on are the caller's
/// business, and so is [`settle_in_child`]. `false`: there is no room for tables, or a variable has mimalloc use other memory.
///
/// # Safety
/// *heap-block*: `len` bytes at `start`, multiples of [`RANGE_ALIGN`] and at most 256 GiB, are the heap's for good, all zero; nothing was
/// allocated yet.
pub unsafe fn begin_over(ground: &'static Ground, start: *mut c_void, len: usize) -> bool {
    // SAFETY: heap-block: passed on from our caller.
    unsafe { selfpage_heap_begin_over(ground, start, len, PURGE_DELAY_MS) }
}

/// From now on a thread of ours forgets old peaks and gives back under memory pressure ([`selfpage::alloc::keeper`]), once the
/// process has taken so much memory that the thread is worth its cost. Unless this is called there is none. It reads the variables that
/// name where pressure is reported: call it before there are threads that change the environment. A library that is loaded by dlopen(3) and calls
/// it is not unloaded any more.
pub fn keep() {
    large::keep();
}

/// The process is about to take `bytes` from the kernel that no block or object has: what is kept of freed blocks makes room for
/// them, where a control group's limit is known and would be passed.
pub use selfpage::alloc::limit::make_room;

/// Whether the kernel gives memory 64 KiB at a time, on request.
pub use selfpage::alloc::medium;

/// In a forked child, before its first call: what threads that it does not have were about to do is done for them. A heap that
/// stands on nothing but the kernel sees to it by itself.
///
/// # Safety
/// *heap-block*: this is a forked child that has this thread alone, which is in no call of the heap's.
pub unsafe extern "C" fn settle_in_child() {
    // SAFETY: heap-block: passed on from our caller.
    unsafe { selfpage_heap_settle_in_child() };
}
