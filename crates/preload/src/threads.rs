//! The program's threads: told from pager threads, and counted, because the C library ends a process whose last thread
//! ends, and pager threads never do.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use selfpage::cancel::Uncancelled;
use selfpage_core::linux::{signal, thread};
use selfpage_heap::next;

use crate::{filters, heap, maps, process, sys, watch};

/// What a thread runs.
pub type Start = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;
type C11Start = unsafe extern "C-unwind" fn(*mut c_void) -> c_int;
type Attributes = libc::pthread_attr_t;
type Destructor = unsafe extern "C" fn(*mut c_void);

next!(CREATE: c"pthread_create" as
    fn(*mut libc::pthread_t, *const Attributes, Start, *mut c_void) -> c_int, next_create);
next!(C11_CREATE: c"thrd_create" as fn(*mut c_void, C11Start, *mut c_void) -> c_int, next_c11_create);
next!(MUTEX_INIT: c"pthread_mutex_init" as
    fn(*mut libc::pthread_mutex_t, *const libc::pthread_mutexattr_t) -> c_int, next_mutex_init);

next!(AT_THREAD_EXIT: c"__cxa_thread_atexit_impl" as
    fn(Destructor, *mut c_void, *mut c_void) -> c_int, next_at_thread_exit);

/// The program's threads that have not ended. The upper half tells this process from its parent: a handler of a signal may fork between
/// the count and the thread.
static ALIVE: AtomicU64 = AtomicU64::new(1);
/// Whether the last of them has come to its end, and looks whether threads run that are not counted.
static IS_AWAITED: AtomicBool = AtomicBool::new(false);
/// Whether this process's first thread may end unheard: it was past its last round as it was forked, or is one that was not counted, and in
/// any. So may the one that it forks.
static UNHEARD: AtomicBool = AtomicBool::new(false);
/// The key whose destructor tells that a thread ends; `u32::MAX` before there is one.
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);
/// The C library calls destructors in this many rounds at most.
const ROUNDS: usize = 4;
/// The thread's own structures lie at the top of its stack: the kernel writes there when the thread has ended.
const TOP_BYTES: usize = 16 << 10;
/// The stack of a thread of ours that is no pager thread.
const OWN_STACK_BYTES: usize = 256 << 10;

thread_local! {
    /// The number of this thread, if it is counted. A child after vfork, or a thread that was made past the C library, may have the same
    /// thread-local data, and another number.
    static COUNTED: Cell<u32> = const { Cell::new(0) };
}

/// What a new thread is to do.
struct Begin<S> {
    start: S,
    argument: *mut c_void,
    /// The process that has counted it.
    counted_in: Option<u64>,
}

/// Counts a thread that is to begin, and returns in which process.
fn count() -> u64 {
    ALIVE.fetch_add(1, Ordering::SeqCst) >> 32
}

/// Begins to count, with the calling thread.
pub fn begin() {
    let mut key = 0;
    // SAFETY: c-library: the destructor stays loaded.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(round)) } == 0 {
        KEY.store(key, Ordering::Relaxed);
        watch();
        watch::attend();
    }
}

/// Whether threads that begin now are counted. Nobody would hear of the end of one that a constructor started before ours ran: while
/// it lives it is one of the others.
fn counts() -> bool {
    KEY.load(Ordering::Relaxed) != u32::MAX
}

/// Has the end of this thread noticed.
fn watch() {
    let key = KEY.load(Ordering::Relaxed);
    if key != u32::MAX {
        // A filter may forbid to ask, and `exit` does not look under one.
        if !filters::are_set() {
            COUNTED.set(thread::id());
        }
        // In a child that is forked as the thread ends the C library goes on with the round that it is in.
        if !is_watched() {
            // SAFETY: c-library: a key that was created; the value is a number, the round to come.
            unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(1)) };
        }
    }
}

/// Whether the end of this thread will be noticed.
fn is_watched() -> bool {
    // SAFETY: c-library: a key that was created, since threads begin to be counted after that.
    !unsafe { libc::pthread_getspecific(KEY.load(Ordering::Relaxed)) }.is_null()
}

/// Called as the thread ends, once in each round, so that all but the last leave room for the program's destructors.
unsafe extern "C" fn round(number: *mut c_void) {
    let number = number as usize;
    if number < ROUNDS {
        let key = KEY.load(Ordering::Relaxed);
        // SAFETY: c-library: as in `watch`.
        unsafe { libc::pthread_setspecific(key, std::ptr::without_provenance(number + 1)) };
    } else {
        ended();
    }
}

fn ended() {
    if ends_as_last() {
        // SAFETY: c-library: as the C library does when the last thread has ended.
        unsafe { libc::exit(0) };
    }
}

/// Takes the calling thread off the count. Whether no other is left, which is waited for where nobody else would. If one is, this one hears
/// no signals any more but its own faults: in a child that a handler forked it would be the last, and off the count.
fn ends_as_last() -> bool {
    // The rest of what the C library and the program do as a thread ends may take faults.
    let quiet = signal::Quiet::begin();
    let is_last = is_last();
    if !is_last {
        std::mem::forget(quiet);
    }
    is_last
}

fn is_last() -> bool {
    // One that is not counted may have begun this one while another waits for it. Who waits sees this one go, too: of two that wait each
    // would be another to the other.
    if ALIVE.fetch_sub(1, Ordering::SeqCst) as u32 != 1 || IS_AWAITED.swap(true, Ordering::SeqCst) {
        return false;
    }
    // The process ends now. A thread that was cancelled, and has met no point of that, would end by itself where the first one is met.
    std::mem::forget(Uncancelled::begin());
    // A filter may forbid to look.
    if filters::are_set() {
        return true;
    }
    // One that ended a moment ago may not be gone yet, and nobody would be left to tell that it is.
    let mut pause = sys::MOMENT;
    loop {
        match others_run() {
            Some(true) => sys::pause(pause),
            Some(false) => return true,
            // There is no descriptor left, or the root is another one. A thread of ours has its own of both.
            None => return watch::tells_the_last(),
        }
        // Such as the C library starts for timers may run for as long as the program does.
        pause = (2 * pause).min(watch::LOOK_EVERY);
        // Whoever sets it runs, and is not to end with this thread: from here on the watch looks.
        if filters::are_set() {
            return watch::tid().is_none();
        }
    }
}

/// Ends the calling thread as exit(2) does, and with the same status the process where it was the last.
pub fn exit(status: c_int) -> ! {
    // Under a filter this may be the only call that is left: the watch ends the process.
    if !filters::are_set() && COUNTED.get() == thread::id() && ends_as_last() {
        process::exit(status);
    }
    loop {
        // SAFETY: raw-call: no memory is passed.
        unsafe { sys::call(libc::SYS_exit, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Whether a thread is ours.
pub fn is_own(tid: u32) -> bool {
    selfpage::trap::is_pager_thread(tid) || watch::tid() == Some(tid)
}

/// Whether there are threads of the program's beside the calling one and the one that has the watch look, also such as nobody counted: made
/// by clone(2), past the C library. One that ends meanwhile is one: it may have begun another, which the list lacks. `None` where there is no
/// telling.
pub fn others_run() -> Option<bool> {
    let (own, asks, first, mut all_known) = (thread::id(), watch::asked_by(), sys::pid(), true);
    for (tid, folder) in selfpage::task::each().ok()? {
        if tid.is_some_and(|tid| tid == own || asks == Some(tid) || is_own(tid)) {
            continue;
        }
        match selfpage::task::text(&folder.join("stat")) {
            // The first one stays until all others are gone.
            Ok(stat) if tid == Some(first) && has_ended(&stat) => {}
            // The kernel keeps it for I/O.
            Ok(stat) if is_for_io(&stat) && !has_ended(&stat) => {}
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => all_known = false,
            _ => return Some(true),
        }
    }
    all_known.then_some(false)
}

fn is_for_io(stat: &str) -> bool {
    stat.split_once('(').is_some_and(|(_, name)| name.starts_with("iou-"))
}

fn has_ended(stat: &str) -> bool {
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// In a forked child one thread is left.
pub fn settle_in_child() {
    ALIVE.store((ALIVE.load(Ordering::SeqCst) >> 32).wrapping_add(1) << 32 | 1, Ordering::SeqCst);
    IS_AWAITED.store(false, Ordering::SeqCst);
    if counts() && !is_watched() {
        UNHEARD.store(true, Ordering::SeqCst);
    }
    watch();
    watch::settle_in_child();
}

/// Whether nobody but a watch may hear of the end of the process's first thread.
pub fn first_may_end_unheard() -> bool {
    UNHEARD.load(Ordering::SeqCst)
}

/// Starts a thread of ours, which is not counted, and has the caller's signals blocked: all of them. Its name, which is to be detached, if
/// there is one.
pub fn start_own(body: Start) -> Option<libc::pthread_t> {
    let (mut thread, mut attributes) = (0, MaybeUninit::uninit());
    // SAFETY: c-library: attributes that are set up, and a function that stays loaded and takes nothing.
    let error = heap::starting_a_pager(|| unsafe {
        libc::pthread_attr_init(attributes.as_mut_ptr());
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), OWN_STACK_BYTES);
        next_create()(&raw mut thread, attributes.as_ptr(), body, std::ptr::null_mut())
    });
    (error == 0).then_some(thread)
}

/// The calling thread is a new one.
fn begins(counted_in: Option<u64>) {
    // A handler has forked this process where it was made, and only the parent counts it. If one forks on this thread it counts as the first.
    let with = |alive: u64| (!is_watched() && counted_in != Some(alive >> 32)).then(|| alive + 1);
    let _ = ALIVE.fetch_update(Ordering::SeqCst, Ordering::SeqCst, with);
    watch();
}

unsafe extern "C-unwind" fn run(begin: *mut c_void) -> *mut c_void {
    // SAFETY: thread-begin: `create` leaked it for this thread alone.
    let Begin { start, argument, counted_in } = unsafe { *Box::from_raw(begin.cast::<Begin<Start>>()) };
    begins(counted_in);
    // SAFETY: c-library: the program's own function and argument.
    unsafe { start(argument) }
}

unsafe extern "C-unwind" fn run_c11(begin: *mut c_void) -> c_int {
    // SAFETY: thread-begin: as above.
    let Begin { start, argument, counted_in } = unsafe { *Box::from_raw(begin.cast::<Begin<C11Start>>()) };
    begins(counted_in);
    // SAFETY: c-library: as above.
    unsafe { start(argument) }
}

unsafe extern "C-unwind" fn run_pager(begin: *mut c_void) -> *mut c_void {
    heap::is_pager_from_now_on();
    // SAFETY: thread-begin: as above.
    let Begin { start, argument, .. } = unsafe { *Box::from_raw(begin.cast::<Begin<Start>>()) };
    // SAFETY: c-library: the library's own function and argument.
    unsafe { start(argument) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const Attributes,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let pager = selfpage::trap::starts_own_threads();
    if !pager && !counts() {
        // SAFETY: c-library: passed on from our caller.
        return unsafe { next_create()(thread, attributes, start, argument) };
    }
    let begin = Box::into_raw(Box::new(Begin { start, argument, counted_in: (!pager).then(count) }));
    if !pager {
        keep_top(attributes);
    }
    // SAFETY: c-library, thread-begin: passed on from our caller; the new thread takes `begin`.
    let result = unsafe {
        if pager {
            heap::starting_a_pager(|| next_create()(thread, attributes, run_pager, begin.cast()))
        } else {
            next_create()(thread, attributes, run, begin.cast())
        }
    };
    if result != 0 {
        forget(begin);
    }
    result
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_create(thread: *mut c_void, start: C11Start, argument: *mut c_void) -> c_int {
    if !counts() {
        // SAFETY: c-library: passed on from our caller.
        return unsafe { next_c11_create()(thread, start, argument) };
    }
    let begin = Box::into_raw(Box::new(Begin { start, argument, counted_in: Some(count()) }));
    // SAFETY: c-library, thread-begin: as above.
    let result = unsafe { next_c11_create()(thread, run_c11, begin.cast()) };
    if result != 0 {
        forget(begin);
    }
    result
}

/// There is no new thread.
fn forget<S>(begin: *mut Begin<S>) {
    // SAFETY: thread-begin: no thread took it.
    let counted_in = unsafe { Box::from_raw(begin) }.counted_in;
    // In a child that a handler has forked meanwhile it does not count.
    let without = |alive: u64| (counted_in == Some(alive >> 32)).then(|| alive - 1);
    let _ = ALIVE.fetch_update(Ordering::SeqCst, Ordering::SeqCst, without);
}

/// Keeps the top of a stack of the program's own in core.
fn keep_top(attributes: *const Attributes) {
    if attributes.is_null() {
        return;
    }
    let (mut lowest, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: c-library: the program passes attributes that are set up.
    let found = unsafe { libc::pthread_attr_getstack(attributes, &raw mut lowest, &raw mut len) } == 0;
    // Where only a size was set, the stack is said to end at 0.
    let top = (lowest as usize).wrapping_add(len);
    if found && top != 0 {
        maps::keep(top - len.min(TOP_BYTES), len.min(TOP_BYTES));
    }
}

/// As in the C library. The kernel writes into a robust mutex when the thread that holds it ends, and into one with priority inheritance when
/// threads contend for it, and waits for no pager: such a mutex stays in core.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutex_init(
    mutex: *mut libc::pthread_mutex_t,
    attributes: *const libc::pthread_mutexattr_t,
) -> c_int {
    let (mut robust, mut protocol) = (libc::PTHREAD_MUTEX_STALLED, libc::PTHREAD_PRIO_NONE);
    // SAFETY: c-library: the program passes attributes that are set up, or none.
    unsafe {
        if !attributes.is_null() {
            libc::pthread_mutexattr_getrobust(attributes, &raw mut robust);
            libc::pthread_mutexattr_getprotocol(attributes, &raw mut protocol);
        }
        if robust == libc::PTHREAD_MUTEX_ROBUST || protocol == libc::PTHREAD_PRIO_INHERIT {
            maps::keep(mutex as usize, size_of::<libc::pthread_mutex_t>());
        }
        next_mutex_init()(mutex, attributes)
    }
}

/// As in the C library, but on pager threads, which do not end: there it would take the loader's lock, whose holder a forked child may not
/// have, and memory from a `malloc` of the program's own.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cxa_thread_atexit_impl(
    destructor: Destructor,
    object: *mut c_void,
    library: *mut c_void,
) -> c_int {
    if heap::is_pager() {
        return 0;
    }
    // SAFETY: c-library: passed on from our caller.
    unsafe { next_at_thread_exit()(destructor, object, library) }
}
