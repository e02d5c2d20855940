//! The heaps: which one a request goes to, and which one a block came from.
//!
//! Three of them. The *managed* heap is the program's: several shards of dlmalloc over the heap's region, and large blocks
//! straight from it. The *quiet* heap is for what must not be paged on the program's side: what the C library and the
//! dynamic loader allocate for themselves. The *own* heap is ours, and the pager threads'; it is used with signals blocked,
//! so that no handler comes in between a pager thread and its lock.

use std::alloc::{GlobalAlloc, Layout};
use std::arch::asm;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use dlmalloc::{Allocator, Dlmalloc};

use crate::lock::{Held, Lock};
use crate::managed;
use crate::space::{GRAIN, PAGE, Space};
use crate::sys::Quiet;

/// Requests from here on get pages of their own.
const LARGE_BYTES: usize = 1 << 20;
/// How much a shard asks for at least.
const GROWTH_BYTES: usize = 1 << 20;
const SHARDS: usize = 4;
const GRAINS: usize = managed::HEAP_BYTES / GRAIN;

static MANAGED: Space = Space::of_heap();
static QUIET: Space = Space::of_kernel(64 << 30);
static OWN: Space = Space::of_kernel(8 << 30);

/// What is at each grain of the managed heap: 0 nothing, a shard's number and one, or [`LARGE`] and a block's size in pages.
static GRAIN_MAP: [AtomicU32; GRAINS] = [const { AtomicU32::new(0) }; GRAINS];
const LARGE: u32 = 1 << 31;

static SHARD: [Lock<Dlmalloc<Pages>>; SHARDS] = [
    Lock::new(Dlmalloc::new_with_allocator(Pages { space: &MANAGED, mark: 1 })),
    Lock::new(Dlmalloc::new_with_allocator(Pages { space: &MANAGED, mark: 2 })),
    Lock::new(Dlmalloc::new_with_allocator(Pages { space: &MANAGED, mark: 3 })),
    Lock::new(Dlmalloc::new_with_allocator(Pages { space: &MANAGED, mark: 4 })),
];
static QUIET_HEAP: Lock<Dlmalloc<Pages>> = Lock::new(Dlmalloc::new_with_allocator(Pages { space: &QUIET, mark: 0 }));
static OWN_HEAP: Lock<Dlmalloc<Pages>> = Lock::new(Dlmalloc::new_with_allocator(Pages { space: &OWN, mark: 0 }));

/// dlmalloc's pages, out of a space.
struct Pages {
    space: &'static Space,
    /// What the grain map says of them; 0 outside the managed heap.
    mark: u32,
}

// SAFETY: space-pages: `alloc` gives a range that nobody else has, zeroed and open; `free` and `free_part` take such back.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let size = size.max(GROWTH_BYTES).next_multiple_of(GRAIN);
        let Some(start) = self.space.take(size, GRAIN) else { return (std::ptr::null_mut(), 0, 0) };
        set_grains(self.mark, start, size, self.mark);
        (start as *mut u8, size, 0)
    }

    fn remap(&self, _ptr: *mut u8, _old: usize, _new: usize, _can_move: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, ptr: *mut u8, old_size: usize, new_size: usize) -> bool {
        let start = ptr as usize;
        set_grains(self.mark, start + new_size, old_size - new_size, 0);
        // SAFETY: owned-range: dlmalloc gives back what it had from `alloc`.
        unsafe { self.space.give(start + new_size..start + old_size) };
        true
    }

    fn free(&self, ptr: *mut u8, size: usize) -> bool {
        self.free_part(ptr, size, 0)
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE
    }
}

fn set_grains(mark: u32, start: usize, len: usize, value: u32) {
    if mark == 0 {
        return;
    }
    let first = (start - managed::heap_range().start) / GRAIN;
    for grain in &GRAIN_MAP[first..first + len / GRAIN] {
        grain.store(value, Ordering::Release);
    }
}

fn grain_of(address: usize) -> &'static AtomicU32 {
    &GRAIN_MAP[(address - managed::heap_range().start) / GRAIN]
}

/// Who asks for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asker {
    /// The program.
    Program,
    /// The C library or the dynamic loader, for itself.
    Library,
    /// This library: Rust's own library asks past our allocator for what a thread's handle needs.
    Ourselves,
}

thread_local! {
    /// Whether this is a pager thread: no destructor and nothing to set up, so plain memory of the thread's.
    static IS_PAGER: Cell<bool> = const { Cell::new(false) };
}

/// Pager threads that are being started: what is allocated for them must not be managed.
static STARTING: AtomicU32 = AtomicU32::new(0);

/// This thread is a pager thread.
pub fn is_pager_from_now_on() {
    IS_PAGER.set(true);
}

/// Whether it is.
pub fn is_pager() -> bool {
    IS_PAGER.get()
}

/// The thread that holds the locks of the other heaps over a fork: what is allocated for the threads that it starts in the
/// child must not wait for them. 0: none.
static FORKING: AtomicUsize = AtomicUsize::new(0);

/// Runs `start`, which starts a pager thread.
pub fn starting_a_pager<T>(start: impl FnOnce() -> T) -> T {
    STARTING.fetch_add(1, Ordering::SeqCst);
    let result = start();
    STARTING.fetch_sub(1, Ordering::SeqCst);
    result
}

/// Small requests of the C library's stay out of the pager's way: among them are what threads and the loader stand on.
const SMALL_BYTES: usize = 1024;

enum Heap {
    Managed,
    Quiet,
    Own,
}

fn heap_for(size: usize, asker: Asker) -> Heap {
    let forking = FORKING.load(Ordering::Relaxed);
    if asker == Asker::Ourselves || (forking != 0 && forking == this_thread()) {
        Heap::Own
    } else if managed::get().is_none() {
        Heap::Quiet
    } else if is_pager() || STARTING.load(Ordering::Relaxed) != 0 {
        Heap::Own
    } else if asker == Asker::Library && size <= SMALL_BYTES {
        Heap::Quiet
    } else {
        Heap::Managed
    }
}

/// Does `work` on the own heap, with signals blocked.
fn on_own<T>(work: impl FnOnce(&mut Dlmalloc<Pages>) -> T) -> T {
    let _quiet = Quiet::begin();
    work(&mut OWN_HEAP.take())
}

/// A number that is this thread's alone, and the same after a fork.
fn this_thread() -> usize {
    let pointer: usize;
    // SAFETY: thread-local-c: on x86-64 the first word of a thread's block is its own address.
    unsafe { asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly)) };
    pointer
}

/// A shard for this thread: the one it had, if nobody else is there.
fn any_shard() -> Held<'static, Dlmalloc<Pages>> {
    let first = (this_thread() >> 12).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62;
    for step in 0..SHARDS {
        if let Some(shard) = SHARD[(first + step) % SHARDS].try_take() {
            return shard;
        }
    }
    SHARD[first % SHARDS].take()
}

/// A block of `size` bytes at a multiple of `align`, a power of two. Null: there is no room.
pub fn allocate(size: usize, align: usize, asker: Asker) -> *mut u8 {
    if size > isize::MAX as usize - align {
        return std::ptr::null_mut();
    }
    // SAFETY: heap-block: any size and alignment may be asked for.
    unsafe {
        match heap_for(size, asker) {
            Heap::Managed if size >= LARGE_BYTES => allocate_large(size, align),
            Heap::Managed => any_shard().c_memalign(align, size),
            Heap::Quiet => QUIET_HEAP.take().c_memalign(align, size),
            Heap::Own => on_own(|heap| heap.c_memalign(align, size)),
        }
    }
}

/// As [`allocate`], and all zero.
pub fn allocate_zeroed(size: usize, asker: Asker) -> *mut u8 {
    let block = allocate(size, 1, asker);
    if !block.is_null() && !is_large(block as usize) {
        // SAFETY: heap-block: just allocated, of that size.
        unsafe { block.write_bytes(0, size) };
    }
    block
}

fn allocate_large(size: usize, align: usize) -> *mut u8 {
    let len = size.next_multiple_of(PAGE);
    let Some(start) = MANAGED.take(len, align) else { return std::ptr::null_mut() };
    grain_of(start).store(LARGE | (len / PAGE) as u32, Ordering::Release);
    start as *mut u8
}

fn is_large(address: usize) -> bool {
    managed::heap_range().contains(&address) && grain_of(address).load(Ordering::Acquire) & LARGE != 0
}

fn large_bytes(address: usize) -> usize {
    (grain_of(address).load(Ordering::Acquire) & !LARGE) as usize * PAGE
}

/// Where a block came from.
enum Home {
    Large,
    Heap(&'static Lock<Dlmalloc<Pages>>),
    Own,
}

fn home(address: usize) -> Home {
    if managed::heap_range().contains(&address) {
        match grain_of(address).load(Ordering::Acquire) {
            mark if mark & LARGE != 0 => Home::Large,
            0 => wrong(),
            shard => Home::Heap(&SHARD[shard as usize - 1]),
        }
    } else if QUIET.holds(address) {
        Home::Heap(&QUIET_HEAP)
    } else if OWN.holds(address) {
        Home::Own
    } else {
        wrong()
    }
}

/// The program freed what it never had. The C library says so too, and ends.
fn wrong() -> ! {
    crate::sys::say("selfpage: the program freed or resized memory that malloc did not give it\n");
    std::process::abort()
}

/// Ends the life of a block.
///
/// # Safety
/// *heap-block*: it came from here, is live, and is not used again.
pub unsafe fn free(block: *mut u8) {
    // SAFETY: heap-block: passed on from our caller.
    unsafe {
        match home(block as usize) {
            Home::Large => free_large(block as usize),
            Home::Heap(heap) => heap.take().c_free(block),
            Home::Own => on_own(|heap| heap.c_free(block)),
        }
    }
}

unsafe fn free_large(start: usize) {
    let len = large_bytes(start);
    grain_of(start).store(0, Ordering::Release);
    // SAFETY: owned-range, heap-block: the block's pages, which nobody uses any more: garbage, and never saved.
    unsafe { MANAGED.give(start..start + len) };
}

/// How many bytes a block has.
///
/// # Safety
/// *heap-block*: it came from here, and is live.
pub unsafe fn usable_bytes(block: *mut u8) -> usize {
    if is_large(block as usize) {
        return large_bytes(block as usize);
    }
    // SAFETY: heap-block, chunk-head: the word before a dlmalloc block is its size, with three flags below; what the owner
    // may use of it is all but that word.
    unsafe { (block.cast::<usize>().sub(1).read() & !7) - size_of::<usize>() }
}

/// Makes a block larger or smaller; it may move. Null: there is no room, and it is as it was.
///
/// # Safety
/// *heap-block*: it came from here, is live, and only the result is used afterwards.
pub unsafe fn reallocate(block: *mut u8, size: usize, asker: Asker) -> *mut u8 {
    if size > isize::MAX as usize / 2 {
        return std::ptr::null_mut();
    }
    // SAFETY: heap-block: passed on from our caller.
    unsafe {
        match home(block as usize) {
            Home::Large if size >= LARGE_BYTES && resize_large(block as usize, size) => return block,
            Home::Heap(heap) if size < LARGE_BYTES && !outgrows(heap, size) => {
                return heap.take().c_realloc(block, size);
            }
            Home::Own => return on_own(|heap| heap.c_realloc(block, size)),
            Home::Large | Home::Heap(_) => {}
        }
        let new = allocate(size, 1, asker);
        if !new.is_null() {
            new.copy_from_nonoverlapping(block, usable_bytes(block).min(size));
            free(block);
        }
        new
    }
}

/// Whether a block becomes too large for the quiet heap.
fn outgrows(heap: &Lock<Dlmalloc<Pages>>, size: usize) -> bool {
    std::ptr::eq(heap, &QUIET_HEAP) && size > SMALL_BYTES && managed::get().is_some()
}

/// Makes a large block larger or smaller where it stands.
unsafe fn resize_large(start: usize, size: usize) -> bool {
    let (len, new_len) = (large_bytes(start), size.next_multiple_of(PAGE));
    if new_len < len {
        // SAFETY: owned-range, heap-block: the end of the block, which its owner gave up.
        unsafe { MANAGED.give(start + new_len..start + len) };
    } else if new_len > len && !MANAGED.extend(start, len, new_len) {
        return false;
    }
    grain_of(start).store(LARGE | (new_len / PAGE) as u32, Ordering::Release);
    true
}

/// Bytes of memory that malloc gave out and that no domain manages.
pub fn unmanaged_bytes() -> usize {
    QUIET.used_bytes() + OWN.used_bytes()
}

/// Takes the locks of the program's heaps, so that a forked child finds them whole. Pager threads go on meanwhile: a
/// holder may wait for them.
pub fn hold() {
    SHARD.iter().for_each(Lock::hold);
    QUIET_HEAP.hold();
    MANAGED.hold();
    QUIET.hold();
    FORKING.store(this_thread(), Ordering::Relaxed);
}

/// Ends that.
///
/// # Safety
/// *lock-word*: the caller, or the thread it is a copy of, called [`hold`].
pub unsafe fn let_go() {
    FORKING.store(0, Ordering::Relaxed);
    // SAFETY: lock-word: passed on from our caller.
    unsafe {
        QUIET.let_go();
        MANAGED.let_go();
        QUIET_HEAP.let_go();
        SHARD.iter().for_each(|shard| shard.let_go());
    }
}

/// Takes the lock of our own heap, last of all before a fork.
pub fn hold_own() {
    OWN_HEAP.hold();
    OWN.hold();
}

/// Ends that, first of all after a fork.
///
/// # Safety
/// *lock-word*: the caller, or the thread it is a copy of, called [`hold_own`].
pub unsafe fn let_go_own() {
    // SAFETY: lock-word: passed on from our caller.
    unsafe {
        OWN.let_go();
        OWN_HEAP.let_go();
    }
}

/// Rust's own memory.
pub struct OwnHeap;

// SAFETY: heap-block: dlmalloc's blocks have the size and alignment asked for, and are freed once.
unsafe impl GlobalAlloc for OwnHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: heap-block: any size and alignment may be asked for.
        on_own(|heap| unsafe { heap.c_memalign(layout.align(), layout.size()) })
    }

    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        // SAFETY: heap-block: passed on from our caller.
        on_own(|heap| unsafe { heap.c_free(block) });
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: heap-block: passed on from our caller.
        on_own(|heap| unsafe { heap.realloc(block, layout.size(), layout.align(), size) })
    }
}
