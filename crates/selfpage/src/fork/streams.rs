//! The C library's list of streams, over a fork.
//!
//! glibc's fork locks it when all handlers have prepared, and so when ours hold the domains still. A thread that reads a stream into an
//! absent page has that stream until then, and another that flushes all streams has the list, and waits for that stream: none of the three
//! would get on. So the list is locked before anything of ours is.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::sync::Weak;
use std::sync::atomic::Ordering;

use super::Once;
use crate::domain::Inner;

type Call = unsafe extern "C" fn();

/// A C library that lacks one of them has no such order.
pub(super) struct List {
    lock: Call,
    unlock: Call,
    reset: Call,
}

static LIST: Once<Option<List>> = Once::new();

/// Finds the list. For when the handlers of forks are installed.
pub(super) fn attend() {
    LIST.get_or_make(List::find);
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

/// The list, locked by this thread.
pub(super) struct Held(&'static List);

impl Held {
    pub(super) fn hold(list: &'static List) -> Held {
        // SAFETY: c-library: given back when this goes.
        unsafe { (list.lock)() };
        Held(list)
    }

    /// In a forked child. glibc has let go of it before handlers come, and others that had it may have, too.
    pub(super) fn let_go_in_child(self) {
        // SAFETY: c-library: the child has no other thread.
        unsafe { (self.0.reset)() };
        std::mem::forget(self);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: c-library: this thread has it.
        unsafe { (self.0.unlock)() };
    }
}

/// The list, where a fork is to hold it: a fork waits for pager threads, and in code of the program's own they may want the list for a stream
/// that they open.
pub(super) fn wanted(domains: &[Weak<Inner>]) -> Option<&'static List> {
    let mut alive = domains.iter().filter_map(Weak::upgrade);
    let is_safe = alive.all(|inner| !inner.runs_own_code.load(Ordering::Relaxed));
    LIST.get()?.as_ref().filter(|_| is_safe)
}
