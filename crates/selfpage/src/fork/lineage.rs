//! Whose domains a process has: a number for it and the children that it forks by the handlers, in a page that the kernel empties in every
//! child.
//!
//! A child that was made past the handlers (a bare clone(2)) has a copy of all else that is known of its parent's domains, and neither their
//! memory nor their threads. The process's own number does not tell: in a namespace of its own it may be the parent's, and a child that
//! shares its parent's memory (vfork) has another one, and the domains.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{Errno, thread as own_thread};

use crate::trap::{thread, upcall};

/// The page; null before the first domain.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
/// In the number's place while one begins.
const BEGINNING: u32 = u32::MAX;
/// The last number that was given: a child that was made past the handlers, and builds a domain of its own, gives a further one.
static LAST: AtomicU32 = AtomicU32::new(0);

fn word() -> Option<&'static AtomicU32> {
    // SAFETY: made-once: the page was mapped before it was published, and stays.
    unsafe { PAGE.load(Ordering::Acquire).as_ref() }
}

/// The number of this process's lineage; 0: it has no domain.
pub(crate) fn own() -> u32 {
    let number = word().map_or(0, |word| word.load(Ordering::Acquire));
    if number == BEGINNING { 0 } else { number }
}

/// The same. Where there is none, one begins here, without any threads and domains: those that are known of were a parent's.
///
/// # Context
/// Normal, with signals blocked.
///
/// # Errors
/// There is no room for a page.
pub(crate) fn begin() -> Result<u32, Errno> {
    let word = word().map_or_else(publish, Ok)?;
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

/// Has there be a page, unless another thread has one first.
fn publish() -> Result<&'static AtomicU32, Errno> {
    // SAFETY: owned-range: the kernel chooses an address that is free.
    let addr = unsafe { memory::map_anonymous(Place::Anywhere, PAGE_BYTES, Access::ReadWrite) }?;
    // SAFETY: owned-range: just mapped.
    let emptied = unsafe { memory::advise(addr, PAGE_BYTES, Advice::WipeForChild) };
    let new = addr as *mut AtomicU32;
    let published =
        emptied.is_ok() && PAGE.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if !published {
        // SAFETY: owned-range: nobody else knows of it.
        let _ = unsafe { memory::unmap(addr, PAGE_BYTES) };
    }
    emptied?;
    // By now there is one, whoever made it.
    word().ok_or(Errno::AGAIN)
}

/// In a child that was forked by the handlers: it is of its parent's lineage.
pub(super) fn go_on(parents: u32) {
    if let Some(word) = word() {
        word.store(parents, Ordering::Release);
    }
}
