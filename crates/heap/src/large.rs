//! Large blocks, as the C side asks for them: blocks of the page allocator.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use selfpage::alloc::fork::Outer;
use selfpage::alloc::{self, keeper, limit};

use crate::RANGE_ALIGN;

/// How long nothing is collected again for want of room, at least.
const PAUSE_MS: u64 = 10;

/// Bytes of blocks now, with what is kept for later, and at most so far.
pub fn stats() -> (usize, usize, usize) {
    let stats = alloc::stats();
    (stats.live_bytes, stats.retained_bytes, stats.most_live_bytes)
}

/// Gives back what is kept. Whether there was something.
pub fn trim() -> bool {
    alloc::trim(0) != 0
}

/// Has the C library's fork take care of all blocks, large or not: called once, for the first of them.
#[unsafe(no_mangle)]
extern "C" fn selfpage_prepare_for_forks() {
    alloc::fork::register_with(Outer { try_hold, let_go, let_go_in_child });
}

/// The list of streams, as in [`hold_streams_over_forks`], and then mimalloc's of what threads leave.
fn try_hold() -> bool {
    // SAFETY: no-pointers: nothing is passed. What is taken is given back, here or by the two below.
    unsafe {
        crate::selfpage_streams_hold_over_fork();
        let held = crate::selfpage_heap_try_hold_over_fork();
        if !held {
            crate::selfpage_streams_let_go_after_fork();
        }
        held
    }
}

fn let_go() {
    // SAFETY: no-pointers: nothing is passed. `try_hold` came before.
    unsafe {
        crate::selfpage_heap_let_go_after_fork();
        crate::selfpage_streams_let_go_after_fork();
    }
}

fn let_go_in_child() {
    // SAFETY: heap-block, no-pointers: a fork calls this in its child, where `try_hold` came before, in the parent: no other thread is there, and
    // this one is in no call of the heap's.
    unsafe {
        crate::settle_in_child();
        crate::selfpage_streams_let_go_in_child();
    }
}

/// Has the C library's list of streams locked over forks, as it does itself after all handlers: nobody who has it, or waits for a stream
/// whose reader allocates, may wait for what handlers hold that were installed before this.
pub fn hold_streams_over_forks() {
    let (hold, let_go) = (crate::selfpage_streams_hold_over_fork, crate::selfpage_streams_let_go_after_fork);
    // SAFETY: c-library: functions that stay loaded.
    unsafe { libc::pthread_atfork(Some(hold), Some(let_go), Some(crate::selfpage_streams_let_go_in_child)) };
}

/// Whether the keeper is wanted.
static KEEPS: AtomicBool = AtomicBool::new(false);

/// From now on the keeper is started when it pays. When memory is short it gives back what objects have left, too.
pub fn keep() {
    stay_loaded();
    // SAFETY: heap-block: frees what nobody has.
    keeper::on_pressure(|| unsafe { crate::selfpage_heap_collect() });
    keeper::read_environment();
    KEEPS.store(true, Ordering::Relaxed);
}

/// Has the library that this is in stay where its host closes it (dlclose(3)): the keeper runs its code.
fn stay_loaded() {
    let (mut symbol, mut library) = (MaybeUninit::<libc::Dl_info>::uninit(), std::ptr::null_mut());
    // SAFETY: out-pointer, c-library: places for what is found; the name is the loader's own, and empty for the program itself, of which that is no more
    // than true.
    unsafe {
        let known = libc::dladdr1(keep as *const c_void, symbol.as_mut_ptr(), &raw mut library, RTLD_DL_LINKMAP);
        if let Some(library) = library.cast::<LinkMap>().as_ref().filter(|_| known != 0) {
            libc::dlopen(library.name, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}

/// What the loader knows of a library, from the beginning (`struct link_map`).
#[repr(C)]
struct LinkMap {
    offset: usize,
    name: *const c_char,
}
const RTLD_DL_LINKMAP: c_int = 2;

fn or_enomem(block: Option<NonNull<u8>>) -> *mut c_void {
    if let Some(block) = block {
        return block.as_ptr().cast();
    }
    // SAFETY: thread-local-c: the C library's own location.
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    std::ptr::null_mut()
}

/// A block of whole pages, or null.
#[unsafe(no_mangle)]
pub extern "C" fn selfpage_large_allocate(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    if size > isize::MAX as usize {
        return or_enomem(None);
    }
    let size = size.max(1);
    look_around();
    make_room(size);
    let block = or_enomem(if zeroed { alloc::allocate_zeroed(size, align) } else { alloc::allocate(size, align) });
    look_behind_block();
    block
}

/// What the process has come to may be worth a look at its limit. It allocates in its turn, and counts as done by then.
fn look_for_limit() {
    if limit::is_due() {
        let _errno = Errno::kept();
        // What objects open first, they do not say.
        limit::share(RANGE_ALIGN);
        limit::look();
    }
}

/// Behind the block that makes the look due: a program may take its memory first, and then forbid itself to open files. Where that block
/// has made a keeper due too, which opens files as well, the next call looks, be it that which frees the block: nothing to speak of is
/// kept before it, and a program that has one long block for good waits for neither.
fn look_behind_block() {
    if !keeper_is_due() {
        look_for_limit();
    }
}

fn keeper_is_due() -> bool {
    KEEPS.load(Ordering::Relaxed) && keeper::pays()
}

/// And a thread. It allocates as well. A block counts from the next call on: nothing is kept before that, and a program that takes one for
/// later does not wait for this.
fn begin_to_keep() {
    if keeper_is_due() {
        let _errno = Errno::kept();
        // Without a thread all goes on.
        let _ = keeper::start();
    }
}

/// What blocks so far have made due. First the limit, which says what the next one may take.
fn look_around() {
    look_for_limit();
    begin_to_keep();
}

/// What a free has found to be due, where memory is asked for next: who gives some back may have a lock of the C library's that a new thread
/// needs.
#[unsafe(no_mangle)]
extern "C" fn selfpage_look_around() {
    look_around();
}

/// The look of a free, which [`crate::selfpage_heap_look_in_free`] tells from others.
#[unsafe(no_mangle)]
extern "C" fn selfpage_look_for_limit() {
    look_for_limit();
}

/// What something fails in that is no business of the caller's, whose `errno` stays.
struct Errno(i32);

impl Errno {
    fn kept() -> Errno {
        // SAFETY: thread-local-c: the C library's own location.
        Errno(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: thread-local-c: as above.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Where the process would pass its limit with `bytes` more in blocks, what is free of objects goes back, now and then.
fn make_room(bytes: usize) {
    if bytes != 0 && limit::would_pass(crate::object_bytes().0, bytes) && collects_again() {
        // SAFETY: heap-block: frees what nobody has. It leaves errno as it is.
        unsafe { crate::selfpage_heap_collect() };
    }
}

/// Whether the last time is [`PAUSE_MS`] ago: near a limit with nothing to give back, every block would go through all that is free.
fn collects_again() -> bool {
    static LAST_MS: AtomicU64 = AtomicU64::new(0);
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: out-pointer: a time that outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    let now_ms = now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000;
    now_ms.wrapping_sub(LAST_MS.load(Ordering::Relaxed)) >= PAUSE_MS && {
        LAST_MS.store(now_ms, Ordering::Relaxed);
        true
    }
}

/// The range of objects is open up to `bytes`, which may be touched at any time: what is kept of blocks makes room.
#[unsafe(no_mangle)]
extern "C" fn selfpage_heap_opened(bytes: usize) {
    limit::share(bytes);
}

/// Whether a part of the range that is advised for huge pages, and has no room for one, gets medium ones.
#[unsafe(no_mangle)]
extern "C" fn selfpage_heap_may_have_medium_pages() -> bool {
    alloc::medium::are_allowed()
}

/// Makes a block larger or smaller; frames move where it does. Null: it is as it was.
///
/// # Safety
/// *heap-block*: a live block of the page allocator, `before` bytes long, of which only the result is used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn selfpage_large_reallocate(block: *mut c_void, before: usize, size: usize) -> *mut c_void {
    let block = NonNull::new(block.cast()).filter(|_| size <= isize::MAX as usize);
    // SAFETY: heap-block: the caller found it to be a block of the page allocator.
    or_enomem(block.and_then(|block| with_room(size.saturating_sub(before), || unsafe { alloc::resize(block, size) })))
}

/// Resizes a block that lacks so much, with what comes before and behind that.
fn with_room<T>(bytes: usize, resize: impl FnOnce() -> T) -> T {
    look_around();
    make_room(bytes);
    let resized = resize();
    look_behind_block();
    resized
}

/// Makes a block larger or smaller where it is. `false`: it is as it was.
///
/// # Safety
/// *heap-block*: a live block of the page allocator, `before` bytes long, and nobody uses what is cut off.
pub unsafe fn resize_in_place(block: *mut u8, before: usize, size: usize) -> bool {
    NonNull::new(block).is_some_and(|block| {
        // SAFETY: heap-block: passed on from our caller.
        with_room(size.saturating_sub(before), || unsafe { alloc::resize_in_place(block, size) })
    })
}

/// Whether its address is of these blocks'.
#[unsafe(no_mangle)]
unsafe extern "C" fn selfpage_large_free(block: *mut c_void) -> bool {
    match NonNull::new(block.cast()) {
        Some(block) if alloc::owns(block.addr().get()) => {
            // What was put off: from here on something is kept.
            if keeper_is_due() {
                // SAFETY: no-pointers: nothing is passed.
                unsafe { crate::selfpage_heap_look_in_free() };
            }
            // SAFETY: heap-block: passed on from our caller; what is no block is found there.
            unsafe { alloc::free(block) };
            // Where memory was used up there is some for it now. And it may be the last large one: the next object will do.
            if limit::is_due() || keeper_is_due() {
                // SAFETY: no-pointers: nothing is passed.
                unsafe { crate::selfpage_heap_look_around_soon() };
            }
            true
        }
        _ => false,
    }
}

/// Whether a block that cannot be had here is not to be had in the objects' range either, nor from the kernel.
#[unsafe(no_mangle)]
extern "C" fn selfpage_large_is_all(size: usize) -> bool {
    alloc::lacks_memory_alone(size)
}

/// Whether long objects are in the range because there are no mappings for blocks: those that are touched sparsely are not to have huge pages, and
/// they would take a mapping more for each part of the range.
#[unsafe(no_mangle)]
extern "C" fn selfpage_heap_has_blocks() -> bool {
    alloc::lacked_mappings()
}

/// How long one of these blocks is; 0: it is none of them, or was freed.
#[unsafe(no_mangle)]
extern "C" fn selfpage_large_usable(block: *const c_void) -> usize {
    NonNull::new(block.cast_mut().cast()).and_then(alloc::usable_bytes).unwrap_or(0)
}

/// Whether an address is of these blocks', in use or not.
#[unsafe(no_mangle)]
extern "C" fn selfpage_large_owns(block: *const c_void) -> bool {
    alloc::owns(block.addr())
}
