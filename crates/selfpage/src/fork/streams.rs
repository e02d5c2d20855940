//! The C library's list of streams, over a fork.
//!
//! glibc's fork locks it when all handlers have prepared, and so when ours hold the domains still. A thread that reads a stream into an
//! absent page has that stream until then, and another that flushes all streams has the list, and waits for that stream: none of the three
//! would get on. So the list is locked before anything of ours is.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage_core::linux::thread;

use super::{DOMAINS, Once, PAUSE};
use crate::undisturbed;

type Call = unsafe extern "C" fn();

/// A C library that lacks one of them has no such order.
struct List {
    lock: Call,
    unlock: Call,
    reset: Call,
}

static LIST: Once<Option<List>> = Once::new();
/// The block of the thread that has it for a fork; 0 for none.
static HOLDER: AtomicUsize = AtomicUsize::new(0);
/// How often that has taken it: a handler of a signal may fork in the middle of a fork, and handlers of forks may be installed twice.
static TIMES: AtomicUsize = AtomicUsize::new(0);

/// Has forks lock the list from here on. For when the library's own handlers are installed, which the later ones come before.
pub(super) fn attend() {
    LIST.get_or_make(List::find);
    // SAFETY: fork-handlers: as for the library's own.
    unsafe { libc::pthread_atfork(Some(hold), Some(let_go), Some(let_go_in_child)) };
}

impl List {
    fn find() -> Option<List> {
        let [lock, unlock, reset] = [c"_IO_list_lock", c"_IO_list_unlock", c"_IO_list_resetlock"].map(call);
        Some(List { lock: lock?, unlock: unlock?, reset: reset? })
    }
}

fn call(name: &CStr) -> Option<Call> {
    // SAFETY: c-library: the name ends; what glibc has under it is a function without arguments or result.
    unsafe {
        let at = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        std::mem::transmute::<*mut libc::c_void, Option<Call>>(at)
    }
}

extern "C" fn hold() {
    let Some(Some(list)) = LIST.get() else { return };
    let own = thread::block();
    if HOLDER.load(Ordering::Relaxed) != own && (PAUSE.is_held_here() || !is_of_use()) {
        return;
    }
    // SAFETY: c-library: given back by the handlers that come after the fork.
    unsafe { (list.lock)() };
    HOLDER.store(own, Ordering::Relaxed);
    TIMES.fetch_add(1, Ordering::Relaxed);
}

/// Where there is no domain nobody waits for a page, and in a process with one thread glibc leaves a child the lock as it is. And a fork
/// waits for pager threads: in code of the program's own they may want the list for a stream that they open.
fn is_of_use() -> bool {
    let domains = undisturbed::lock(&DOMAINS);
    let mut alive = domains.iter().filter_map(Weak::upgrade).peekable();
    alive.peek().is_some() && alive.all(|inner| !inner.runs_own_code.load(Ordering::Relaxed))
}

extern "C" fn let_go() {
    let Some(Some(list)) = LIST.get() else { return };
    if HOLDER.load(Ordering::Relaxed) != thread::block() {
        return;
    }
    if TIMES.fetch_sub(1, Ordering::Relaxed) == 1 {
        HOLDER.store(0, Ordering::Relaxed);
    }
    // SAFETY: c-library: this thread has it.
    unsafe { (list.unlock)() };
}

extern "C" fn let_go_in_child() {
    let Some(Some(list)) = LIST.get() else { return };
    TIMES.store(0, Ordering::Relaxed);
    if HOLDER.swap(0, Ordering::Relaxed) == thread::block() {
        // glibc has done so before handlers come, and others that had it may have, too: it is in nobody's hands.
        // SAFETY: c-library: the child has no other thread.
        unsafe { (list.reset)() };
    }
}
