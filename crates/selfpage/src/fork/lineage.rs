//! Whose domains a process has: a number for it and the children that it forks by the handlers, in a page that the kernel empties in every
//! child.
//!
//! A child that was made past the handlers (a bare clone(2)) has a copy of all else that is known of its parent's domains, and neither their
//! memory nor their threads. The process's own number does not tell: in a namespace of its own it may be the parent's, and a child that
//! shares its parent's memory (vfork) has another one, and the domains. In the same page there is a number for the process alone: for what is
//! not even a forked child's, of which it has a copy.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{Errno, thread as own_thread};

use crate::error::{Error, Result};
use crate::trap::{thread, upcall};

/// What is in the page.
struct Words {
    lineage: AtomicU32,
    process: AtomicU32,
}

/// The page; null before anybody wants a number.
static PAGE: AtomicPtr<Words> = AtomicPtr::new(ptr::null_mut());
/// In the number's place while one begins.
const BEGINNING: u32 = u32::MAX;
/// The last number that was given: a child, which needs one of its own, gives a further one.
static LAST: AtomicU32 = AtomicU32::new(0);

/// A process, as it tells itself from all that have a copy of its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// This one.
    ///
    /// # Errors
    /// There is no room for a page.
    pub(crate) fn this() -> Result<Process> {
        let word = &words_or_new()?.process;
        let had = word.load(Ordering::Acquire);
        if had != 0 {
            return Ok(Process(had));
        }
        let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        // Another thread may have given it one just now.
        let had = word.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
        Ok(Process(had.map_or_else(|had| had, |_| new)))
    }

    /// Whether this is it.
    pub(crate) fn is_this(self) -> bool {
        words().is_some_and(|words| words.process.load(Ordering::Acquire) == self.0)
    }
}

fn words() -> Option<&'static Words> {
    // SAFETY: made-once: the page was mapped before it was published, and stays.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

/// The number of this process's lineage; 0: it has no domain.
pub(crate) fn own() -> u32 {
    let number = words().map_or(0, |words| words.lineage.load(Ordering::Acquire));
    if number == BEGINNING { 0 } else { number }
}

/// The same. Where there is none, one begins here, without any threads and domains: those that are known of were a parent's.
///
/// # Context
/// Normal, with signals blocked.
///
/// # Errors
/// There is no room for a page.
pub(crate) fn begin() -> Result<u32> {
    let word = &words_or_new()?.lineage;
    loop {
        match word.compare_exchange(0, BEGINNING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                thread::forget_all();
                upcall::forget_all();
                let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                word.store(new, Ordering::Release);
                return Ok(new);
            }
            // Another thread is at it.
            Err(BEGINNING) => own_thread::give_way(),
            Err(number) => return Ok(number),
        }
    }
}

/// Has there be a page, unless there is one, or another thread has one first.
fn words_or_new() -> Result<&'static Words> {
    words().map_or_else(publish, Ok).map_err(|errno| Error::system("map", "the page that tells children apart", errno))
}

fn publish() -> std::result::Result<&'static Words, Errno> {
    // SAFETY: owned-range: the kernel chooses an address that is free.
    let addr = unsafe { memory::map_anonymous(Place::Anywhere, PAGE_BYTES, Access::ReadWrite) }?;
    // SAFETY: owned-range: just mapped.
    let emptied = unsafe { memory::advise(addr, PAGE_BYTES, Advice::WipeForChild) };
    let new = addr as *mut Words;
    let published =
        emptied.is_ok() && PAGE.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !published {
        // SAFETY: owned-range: nobody else knows of it.
        let _ = unsafe { memory::unmap(addr, PAGE_BYTES) };
    }
    emptied?;
    // By now there is one, whoever made it.
    words().ok_or(Errno::AGAIN)
}

/// In a child that was forked by the handlers: it is of its parent's lineage.
pub(super) fn go_on(parents: u32) {
    if let Some(words) = words() {
        words.lineage.store(parents, Ordering::Release);
    }
}
