//! The heaps: which one a request goes to, and which one a block came from.
//!
//! Three of them. The *managed* heap is the program's: the object heap over a region ([`crate::objects`]), and large
//! blocks, each a piece of another. The *quiet* heap is for what must not be paged on the program's side:
//! what the C library and the dynamic loader allocate for themselves. The *own* heap is ours, and the pager threads'; it is used
//! with signals blocked, so that no handler comes in between a pager thread and its lock. These two are dlmalloc's, each behind
//! one lock, which any thread may take at any moment. The object heap has no lock, but a part for each thread: pager threads, and
//! a thread that is about to fork, never enter it.

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use dlmalloc::{Allocator, Dlmalloc};
use selfpage::alloc::Culprit;
use selfpage::trap;
use selfpage_core::linux::thread;
use selfpage_heap::mark;

use crate::lock::Lock;
use crate::managed::Unmoved;
use crate::space::{GRAIN, PAGE, Room, Space};
use crate::sys::Quiet;
use crate::{limits, managed, maps, objects, promises};

/// Requests from here on get pages of their own.
const LARGE_BYTES: usize = 1 << 20;
/// How much a heap of dlmalloc's asks for at least.
const GROWTH_BYTES: usize = 1 << 20;
/// A page of the heap's has no more objects than this.
const MOST_ASIDE: usize = 8192;
const GRAINS: usize = limits::LARGE_BYTES / GRAIN;
const FREED: u32 = u32::MAX;

static LARGE: Space = Space::of_large_blocks();
static QUIET: Space = Space::of_kernel(limits::QUIET_BYTES);
static OWN: Space = Space::of_kernel(limits::OWN_BYTES);

/// How many pages the large block has that begins at each grain; 0: none ever did; [`FREED`]: the one that did was freed.
static LARGE_PAGES: [AtomicU32; GRAINS] = [const { AtomicU32::new(0) }; GRAINS];

static QUIET_HEAP: Lock<Dlmalloc<Pages>> = Lock::new(Dlmalloc::new_with_allocator(Pages(&QUIET)));
static OWN_HEAP: Lock<Dlmalloc<Pages>> = Lock::new(Dlmalloc::new_with_allocator(Pages(&OWN)));

/// dlmalloc's pages, out of a space.
struct Pages(&'static Space);

// SAFETY: space-pages: `alloc` gives a range that nobody else has, zeroed and open; `free` and `free_part` take such back.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let size = size.max(GROWTH_BYTES).next_multiple_of(GRAIN);
        let Some(start) = self.0.take(size, GRAIN, Room::None) else { return (std::ptr::null_mut(), 0, 0) };
        (start as *mut u8, size, 0)
    }

    fn remap(&self, _ptr: *mut u8, _old: usize, _new: usize, _can_move: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, ptr: *mut u8, old_size: usize, new_size: usize) -> bool {
        let start = ptr as usize;
        // SAFETY: owned-range: dlmalloc gives back what it had from `alloc`.
        unsafe { self.0.give(start + new_size..start + old_size) };
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

/// The pages of a large block that begins in this grain.
fn large_pages(address: usize) -> &'static AtomicU32 {
    &LARGE_PAGES[(address - managed::large_range().start) / GRAIN]
}

/// Who asks for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asker {
    /// The program.
    Program,
    /// The C library, for itself.
    Library,
    /// The dynamic loader.
    Loader,
    /// This library: Rust's own library asks past our allocator for what a thread's handle needs.
    Ourselves,
}

/// Pager threads that are being started: what is allocated for them must not be managed. That is the C library's and the loader's to ask for.
static STARTING: AtomicU32 = AtomicU32::new(0);

/// This thread is a pager thread.
pub fn is_pager_from_now_on() {
    mark::set();
}

/// Whether it is.
pub fn is_pager() -> bool {
    mark::is_set()
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

/// In a forked child no thread of ours is being started: another thread may have been about to, with signals blocked, and is not there.
pub fn settle_in_child() {
    STARTING.store(0, Ordering::SeqCst);
}

/// Small requests of the C library's stay out of the pager's way: among them are what threads and the loader stand on.
const SMALL_BYTES: usize = 1024;
/// And what the loader knows of a library, with its name: a forked child reads that to start a pager, when there is none yet.
const LOADER_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Heap {
    Managed,
    Quiet,
    Own,
}

/// Whether this thread holds the locks over a fork.
pub fn is_forking() -> bool {
    let forking = FORKING.load(Ordering::Relaxed);
    forking != 0 && forking == thread::block()
}

/// Whether what the program's heaps stand on is held over a fork, by this thread, or by one that may be waiting for this pager.
fn are_held_over_fork() -> bool {
    FORKING.load(Ordering::Relaxed) != 0 && (is_pager() || is_forking())
}

fn heap_for(size: usize, asker: Asker) -> Heap {
    if asker == Asker::Ourselves || is_forking() {
        Heap::Own
    } else if managed::get().is_none() {
        Heap::Quiet
    } else if is_pager() || asker != Asker::Program && size < LARGE_BYTES && STARTING.load(Ordering::Relaxed) != 0 {
        Heap::Own
    } else if asker == Asker::Library && size <= SMALL_BYTES || asker == Asker::Loader && size <= LOADER_BYTES {
        Heap::Quiet
    } else {
        Heap::Managed
    }
}

/// Does `work` on the own heap, with signals blocked. Whoever brings a page of a managed stack in may need that heap: under its lock no such
/// stack is touched.
fn on_own<T>(work: impl FnOnce(&mut Dlmalloc<Pages>) -> T) -> T {
    let _quiet = Quiet::begin();
    if !managed::holds(&raw const work as usize) {
        return work(&mut OWN_HEAP.take());
    }
    trap::on_own_stack(move || {
        // Here, and the result too until the lock is free.
        let work = black_box(work);
        let result = work(&mut OWN_HEAP.take());
        black_box(result)
    })
}

/// A block of `size` bytes at a multiple of `align`, a power of two. Null: there is no room.
pub fn allocate(size: usize, align: usize, asker: Asker) -> *mut u8 {
    if size.checked_add(align).is_none_or(|most| most > isize::MAX as usize) {
        return std::ptr::null_mut();
    }
    // SAFETY: heap-block: any size and alignment may be asked for.
    unsafe {
        match heap_for(size, asker) {
            Heap::Managed if size.max(align) >= LARGE_BYTES => allocate_large(size, align, Room::None),
            Heap::Managed => allocate_object(size, align),
            Heap::Quiet => QUIET_HEAP.take().c_memalign(align, size),
            Heap::Own => on_own(|heap| heap.c_memalign(align, size)),
        }
    }
}

/// As [`allocate`], and all zero.
pub fn allocate_zeroed(size: usize, asker: Asker) -> *mut u8 {
    if heap_for(size, asker) == Heap::Managed && size < LARGE_BYTES && !promises::are_counted() {
        // It knows which of its pages are zero already, and does not touch those.
        return selfpage_heap::allocate_zeroed(1, size).cast();
    }
    let block = allocate(size, 1, asker);
    if !block.is_null() && !managed::large_range().contains(&(block as usize)) {
        // SAFETY: heap-block: just allocated, of that size.
        unsafe { block.write_bytes(0, size) };
    }
    block
}

fn object(size: usize, align: usize) -> *mut u8 {
    match align {
        1 => selfpage_heap::allocate(size).cast(),
        _ => selfpage_heap::allocate_aligned(align, size).cast(),
    }
}

/// An object, and where there is no store only one that the frames hold too.
fn allocate_object(size: usize, align: usize) -> *mut u8 {
    if !promises::are_counted() {
        return object(size, align);
    }
    let found = promised_object(size, align).or_else(|| {
        // What is free elsewhere need not have frames.
        selfpage_heap::trim();
        promised_object(size, align)
    });
    found.unwrap_or(std::ptr::null_mut())
}

/// The heap may have objects that are promised, and yet offer others first, again and again: those are kept aside meanwhile.
fn promised_object(size: usize, align: usize) -> Option<*mut u8> {
    let mut aside = std::ptr::null_mut::<u8>();
    let mut found = None;
    for _ in 0..MOST_ASIDE {
        let block = object(size, align);
        if block.is_null() {
            break;
        }
        if is_promised(block, align) {
            found = Some(block);
            break;
        }
        // SAFETY: heap-block: just allocated, with room for a link at least; nobody else has it.
        unsafe { block.cast::<*mut u8>().write(aside) };
        aside = block;
        if promises::are_overdrawn() {
            break;
        }
    }
    while !aside.is_null() {
        // SAFETY: heap-block: as above.
        unsafe {
            let next = aside.cast::<*mut u8>().read();
            selfpage_heap::free(aside.cast());
            aside = next;
        }
    }
    found
}

/// Whether a new object has frames, or will find them. The heap writes to where it begins, which may be before an aligned block.
fn is_promised(block: *mut u8, align: usize) -> bool {
    let (start, least) = (block as usize, managed::objects_range().start);
    // SAFETY: heap-block: just allocated, if there is one.
    let len = unsafe { selfpage_heap::usable_bytes(block.cast()) };
    len != 0 && promises::promise(&(start.saturating_sub(align - 1).max(least)..start + len))
}

/// Frames are the domain's: nothing is kept of freed blocks, which would only be paged out.
fn allocate_large(size: usize, align: usize, room: Room) -> *mut u8 {
    let len = size.max(1).next_multiple_of(PAGE);
    let start = LARGE.take(len, align, room).or_else(|| {
        // What is free among objects need not have frames.
        promises::are_counted().then(selfpage_heap::trim)?;
        LARGE.take(len, align, room)
    });
    let Some(start) = start else { return std::ptr::null_mut() };
    large_pages(start).store((len / PAGE) as u32, Ordering::Release);
    start as *mut u8
}

/// How many bytes a large block has, which begins with its first grain.
fn large_bytes(call: &str, start: usize) -> usize {
    match large_pages(start).load(Ordering::Acquire) {
        0 | FREED => culprit(start).die(call, start),
        _ if !start.is_multiple_of(GRAIN) => culprit(start).die(call, start),
        pages => pages as usize * PAGE,
    }
}

/// What an address among large blocks is that none begins at.
fn culprit(address: usize) -> Culprit {
    let first = managed::large_range().start;
    let live =
        (first..address + 1).step_by(GRAIN).rev().find_map(|start| match large_pages(start).load(Ordering::Acquire) {
            0 | FREED => None,
            pages => Some((start, pages as usize * PAGE)),
        });
    match live {
        Some((block, len_bytes)) if address < block + len_bytes => Culprit::Inside { block, len_bytes },
        _ if address.is_multiple_of(GRAIN) && large_pages(address).load(Ordering::Acquire) == FREED => Culprit::Freed,
        _ => Culprit::Foreign,
    }
}

/// Where a block came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Home {
    Object,
    Large,
    Quiet,
    Own,
}

fn home(call: &str, address: usize) -> Home {
    if managed::objects_range().contains(&address) {
        Home::Object
    } else if managed::large_range().contains(&address) {
        Home::Large
    } else if QUIET.holds(address) {
        Home::Quiet
    } else if OWN.holds(address) {
        Home::Own
    } else {
        Culprit::Foreign.die(call, address)
    }
}

/// Ends the life of a block.
///
/// # Safety
/// *heap-block*: it came from here, is live, and is not used again.
pub unsafe fn free(block: *mut u8) {
    // SAFETY: heap-block: passed on from our caller.
    unsafe {
        match home("free", block as usize) {
            // What a thread had that a forked child does not have, as the C library gives its stack to a pager: it is lost.
            Home::Object | Home::Large | Home::Quiet if are_held_over_fork() => {}
            Home::Object => selfpage_heap::free(block.cast()),
            Home::Large => free_large(block as usize),
            Home::Quiet => QUIET_HEAP.take().c_free(block),
            Home::Own => on_own(|heap| heap.c_free(block)),
        }
    }
}

unsafe fn free_large(start: usize) {
    let len = large_bytes("free", start);
    let is_ours = maps::forget(start..start + len);
    large_pages(start).store(FREED, Ordering::Release);
    if is_ours {
        // SAFETY: owned-range, heap-block: the block's pages, which nobody uses any more: garbage, and never saved.
        unsafe { LARGE.give(start..start + len) };
    }
}

/// How many bytes a block has.
///
/// # Safety
/// *heap-block*: it came from here, and is live.
pub unsafe fn usable_bytes(block: *mut u8) -> usize {
    match home("malloc_usable_size", block as usize) {
        // SAFETY: heap-block: passed on from our caller.
        Home::Object => unsafe { selfpage_heap::usable_bytes(block.cast()) },
        Home::Large => large_bytes("malloc_usable_size", block as usize),
        // SAFETY: heap-block, chunk-head: the word before a dlmalloc block is its size, with three flags below; what the owner
        // may use of it is all but that word.
        Home::Quiet | Home::Own => unsafe { (block.cast::<usize>().sub(1).read() & !7) - size_of::<usize>() },
    }
}

/// Makes a block larger or smaller; it may move. Null: there is no room, and it is as it was.
///
/// # Safety
/// *heap-block*: it came from here, is live, and only the result is used afterwards.
pub unsafe fn reallocate(block: *mut u8, size: usize, asker: Asker) -> *mut u8 {
    if size > isize::MAX as usize / 2 {
        return std::ptr::null_mut();
    }
    // What cannot be read cannot be copied to an object.
    let stays_large = size >= LARGE_BYTES || large_hides(block as usize, size);
    let most_quiet_bytes = if managed::get().is_some() { SMALL_BYTES } else { usize::MAX };
    // SAFETY: heap-block: passed on from our caller.
    unsafe {
        match home("realloc", block as usize) {
            Home::Object if promises::are_counted() => {
                let before = usable_bytes(block);
                if size <= before && size >= before / 2 {
                    return block;
                }
            }
            Home::Object if size < LARGE_BYTES => return selfpage_heap::reallocate(block.cast(), size).cast(),
            Home::Large if stays_large && resize_large(block as usize, size) => return block,
            // The C library's table of such a thread's storage is too short where libraries were opened since.
            Home::Quiet if size <= most_quiet_bytes && !are_held_over_fork() => {
                return QUIET_HEAP.take().c_realloc(block, size);
            }
            Home::Own => return on_own(|heap| heap.c_realloc(block, size)),
            _ => {}
        }
        let new = match heap_for(size, asker) {
            // What has grown once may grow on.
            Heap::Managed if stays_large => allocate_large(size, 1, Room::ToGrow),
            _ => allocate(size, 1, asker),
        };
        // That memory is used up is no reason to refuse less of it.
        let refused = || if size <= usable_bytes(block) { block } else { std::ptr::null_mut() };
        if new.is_null() {
            return refused();
        }
        match move_large(block as usize, new as usize) {
            Ok(()) => {}
            Err(Unmoved::Unmanaged) => new.copy_from_nonoverlapping(block, usable_bytes(block).min(size)),
            Err(Unmoved::Short) => {
                maps::renew_locks(block as usize..block as usize + usable_bytes(block));
                free(new);
                return refused();
            }
        }
        free(block);
        new
    }
}

/// Moves the frames of a large block to a new one, which is no smaller. [`Unmoved::Unmanaged`]: one of the two is no large block, or has
/// something else mapped over it.
///
/// # Safety
/// *heap-block*: both came from here and are live, and nobody else uses either.
unsafe fn move_large(block: usize, new: usize) -> Result<(), Unmoved> {
    let large = managed::large_range();
    let managed =
        managed::get().filter(|_| large.contains(&block) && large.contains(&new)).ok_or(Unmoved::Unmanaged)?;
    let old = block..block + large_bytes("realloc", block);
    if !maps::is_all_managed(&old) {
        // What the program mapped over a part of it is no page of ours, and is read as the program would.
        return Err(Unmoved::Unmanaged);
    }
    // SAFETY: owned-range, heap-block: passed on from our caller; the program may use all of both.
    unsafe { managed.move_contents(old.clone(), new) }?;
    maps::carry(old, new..new + large_bytes("realloc", new));
    Ok(())
}

/// Whether a block is a large one with pages that cannot be read, among those that it keeps when it is `size` long. Nobody can tell while a fork
/// holds what is known of them.
fn large_hides(block: usize, size: usize) -> bool {
    managed::large_range().contains(&block) && !are_held_over_fork() && {
        let kept = size.min(large_bytes("realloc", block));
        maps::hides_any(&(block..block + kept))
    }
}

/// Drops what is free in pages of objects, as far as this thread knows of it.
pub fn trim() {
    if heap_for(0, Asker::Program) == Heap::Managed {
        selfpage_heap::trim();
    }
}

/// Makes a large block larger or smaller where it stands.
unsafe fn resize_large(start: usize, size: usize) -> bool {
    let (len, new_len) = (large_bytes("realloc", start), size.next_multiple_of(PAGE));
    if new_len < len {
        if maps::forget(start + new_len..start + len) {
            // SAFETY: owned-range, heap-block: the end of the block, which its owner gave up.
            unsafe { LARGE.give(start + new_len..start + len) };
        }
    } else if new_len > len {
        if !LARGE.extend(start, len, new_len) {
            return false;
        }
        maps::spread(&(start..start + len), start + len..start + new_len);
    }
    large_pages(start).store((new_len / PAGE) as u32, Ordering::Release);
    true
}

/// Bytes of pages for objects, and of large blocks.
pub fn used_bytes() -> (usize, usize) {
    (selfpage_heap::object_bytes().0, LARGE.used_bytes())
}

/// Bytes of memory that malloc gave out and that no domain manages.
pub fn unmanaged_bytes() -> usize {
    QUIET.used_bytes() + OWN.used_bytes() + objects::unmanaged_bytes()
}

/// Takes the locks of the program's heaps, so that a forked child finds them whole. Pager threads go on meanwhile: a
/// holder may wait for them.
pub fn hold() {
    QUIET_HEAP.hold();
    LARGE.hold();
    QUIET.hold();
    objects::hold();
    FORKING.store(thread::block(), Ordering::Relaxed);
}

/// Ends that.
///
/// # Safety
/// *lock-word*: the caller, or the thread it is a copy of, called [`hold`].
pub unsafe fn let_go() {
    FORKING.store(0, Ordering::Relaxed);
    // SAFETY: lock-word: passed on from our caller.
    unsafe {
        objects::let_go();
        QUIET.let_go();
        LARGE.let_go();
        QUIET_HEAP.let_go();
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
