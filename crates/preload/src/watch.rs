//! A thread of ours that sees when the program has none left. Where a filter of system calls ends the last one nobody else would hear of it,
//! and pager threads would keep the process for ever. It is started before the first filter is set; where there is one already, as in a
//! container with a seccomp profile (Docker's default), as the program is loaded. So it is in a child that was forked as its thread ended.
//! It also looks for the last thread that is counted, where that one cannot see what /proc says of threads: it has a table of descriptors of
//! its own, and the root that was the process's when it began, which is before the program changes it.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use selfpage::pthread;
use selfpage_core::linux::{futex, signal, thread};

use crate::sys::{self, Quiet, call};
use crate::{filters, heap, managed, process, record, threads};

/// How often it looks once the first thread has ended and others run. So does the last thread that is counted.
pub const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The watch's number; 0: there is none.
static TID: AtomicU32 = AtomicU32::new(0);

/// The last thread that is counted, while it waits to be told that no other is left; 0: it does not.
static ASKED_BY: AtomicU32 = AtomicU32::new(0);

/// How long it sleeps before it looks whether there is a filter.
const LOOK_US: u32 = LOOK_EVERY.as_micros() as u32;

/// A lock that the process's first thread has until it ends, or asks. Where it ends, the kernel gives it to who waits, however the thread has
/// ended.
static FIRST_LIVES: Held = Held(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

struct Held(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: c-library: what is in it is the C library's, for any thread.
unsafe impl Sync for Held {}

/// The calling thread is the process's first one.
pub fn attend() {
    // SAFETY: c-library: nobody else has the lock: no other thread is there yet.
    unsafe {
        let mut attributes = MaybeUninit::uninit();
        libc::pthread_mutexattr_init(attributes.as_mut_ptr());
        libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
        libc::pthread_mutex_init(FIRST_LIVES.0.get(), attributes.as_ptr());
        libc::pthread_mutex_lock(FIRST_LIVES.0.get());
    }
}

/// In a forked child there is none of its parent's threads.
pub fn settle_in_child() {
    TID.store(0, Ordering::SeqCst);
    ASKED_BY.store(0, Ordering::SeqCst);
    attend();
    if filters::may_end_threads() || threads::first_may_end_unheard() {
        begin();
    }
}

/// Has it watch. When this returns it is known, or there is no thread to be had, or a filter that was there before has ended it.
pub fn begin() {
    // A child that a handler forked while this one waits would wait for a thread that it does not have.
    let _quiet = Quiet::begin();
    // Two threads that come here at once start one each, and the second ends.
    if TID.load(Ordering::SeqCst) == 0
        && let Some(thread) = threads::start_own(watch)
    {
        // SAFETY: thread-joined-once: it was started, and is left to itself only below.
        while TID.load(Ordering::SeqCst) == 0 && !unsafe { pthread::has_ended(thread) } {
            let _ = futex::wait(&TID, 0, pthread::LOOK_EVERY.as_micros() as u32);
        }
        // SAFETY: c-library: it was started, and nobody will join it.
        unsafe { libc::pthread_detach(thread) };
    }
}

/// The watch's number, if there is one.
pub fn tid() -> Option<u32> {
    Some(TID.load(Ordering::SeqCst)).filter(|tid| *tid != 0)
}

/// The thread that the watch looks for, if there is one.
pub fn asked_by() -> Option<u32> {
    Some(ASKED_BY.load(Ordering::SeqCst)).filter(|tid| *tid != 0)
}

/// Has the watch look, and waits until the calling thread, the last that is counted, is the last of all. Whether it is to end the process: also
/// where there is no watch to be had, or one that sees no more.
pub fn tells_the_last() -> bool {
    begin();
    if tid().is_none() {
        return true;
    }
    let own = thread::id();
    ASKED_BY.store(own, Ordering::SeqCst);
    // What the watch waits for, where this is the first thread. Another one has not got it, which is no error.
    // SAFETY: c-library: the lock was set up before there was another thread.
    unsafe { libc::pthread_mutex_unlock(FIRST_LIVES.0.get()) };
    while ASKED_BY.load(Ordering::SeqCst) == own {
        let _ = futex::wait(&ASKED_BY, own, LOOK_US);
        // Whoever sets it runs, and is not to end with this thread: it goes, and the watch looks on.
        if filters::are_set() {
            return ASKED_BY.compare_exchange(own, 0, Ordering::SeqCst, Ordering::SeqCst).is_err();
        }
    }
    true
}

unsafe extern "C-unwind" fn watch(_: *mut c_void) -> *mut c_void {
    // Where it ends the process in the first thread's stead, the program's own functions run here: in its directory, with its descriptors and
    // its heap.
    if !threads::first_may_end_unheard() {
        heap::is_pager_from_now_on();
        prepare();
    }
    let is_only = TID.compare_exchange(0, thread::id(), Ordering::SeqCst, Ordering::SeqCst).is_ok();
    futex::wake(&TID, 1);
    // SAFETY: c-library: the lock was set up before there was another thread.
    if is_only && matches!(unsafe { libc::pthread_mutex_lock(FIRST_LIVES.0.get()) }, 0 | libc::EOWNERDEAD) {
        look_until_one_is_the_last();
    }
    std::ptr::null_mut()
}

/// Ends the process where no thread is left, and tells the one that asks where no other is.
fn look_until_one_is_the_last() {
    // One that ended a moment ago may not be gone yet.
    let mut pause = sys::MOMENT;
    loop {
        // In this order: the one that asks is no other to the look.
        match (threads::others_run(), asked_by()) {
            (Some(true), _) | (None, None) => {}
            (Some(false), None) => end_as_first(),
            // Where nobody can see whether there are others, as in a child that is forked under another root, it goes on as if there were none.
            (Some(false) | None, Some(asks)) => {
                // It may have gone meanwhile, and asks no more.
                if ASKED_BY.compare_exchange(asks, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                    futex::wake(&ASKED_BY, 1);
                    return;
                }
            }
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(LOOK_EVERY);
    }
}

/// What is to be done before the program goes on.
fn prepare() {
    // A program may close all that it has not opened, and would close what is opened here. Pager threads have made such calls already, under the
    // same filters.
    if managed::get().is_some() {
        let _ = thread::leave_descriptors();
    }
    // /proc must be within reach even where the program changes its root later. A child of a filtered process may not ask.
    // SAFETY: raw-call: the string ends with NUL.
    unsafe {
        if !filters::are_set() && call(libc::SYS_unshare, [libc::CLONE_FS as usize, 0, 0, 0, 0, 0]) == 0 {
            call(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0, 0, 0, 0]);
        }
    }
}

/// Ends the process as the kernel does when the last thread has ended: with what its first one ended with; or as the C library does, where that
/// has let it end unheard. The watch has no name of its own, and so the program's is on the record.
fn end_as_first() -> ! {
    let stat = selfpage::task::text("/proc/self/stat".as_ref()).unwrap_or_default();
    let status: c_int = stat.split_whitespace().next_back().and_then(|code| code.parse().ok()).unwrap_or(0);
    // Under a filter it may not have been the C library.
    if status == 0 && threads::first_may_end_unheard() && !filters::are_set() {
        // As a thread has them that is off the count.
        signal::let_faults_in();
        // SAFETY: c-library: as the C library does when the last thread has ended.
        unsafe { libc::exit(0) };
    }
    record::end();
    let signal = status & 0x7f;
    if signal != 0 {
        // SAFETY: c-library, raw-call: no function of the program's is left to be called; the calls take plain numbers.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            open_signal(signal);
            call(libc::SYS_tgkill, [sys::pid() as usize, thread::id() as usize, signal as usize, 0, 0, 0]);
        }
    }
    process::exit(status >> 8 & 0xff)
}

/// Lets a signal in.
fn open_signal(signal: c_int) {
    let mask = 1u64 << (signal - 1);
    // SAFETY: raw-call: the mask outlives the call, and has the kernel's 8 bytes.
    unsafe { call(libc::SYS_rt_sigprocmask, [libc::SIG_UNBLOCK as usize, &raw const mask as usize, 0, 8, 0, 0]) };
}
