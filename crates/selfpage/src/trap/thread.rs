//! Threads of a domain: all signals blocked, and a stack that can be told from the program's.
//!
//! # Context
//! Normal, unless stated otherwise.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use selfpage_core::linux::signal;
use selfpage_core::linux::thread as this_thread;

use crate::error::{Error, Kind, Result};
use crate::fork::lineage;
use crate::pthread::{self, Pthread};
use crate::store::with_engines;

const STACK_BYTES: usize = 512 << 10;
const MOST_THREADS: usize = 256;
/// No thread has this number: a place that is just being given to one.
pub(super) const TAKEN: u32 = u32::MAX;

/// The stacks of pager threads: the address where each begins to be used, 0 for a free place.
static STACKS: [AtomicUsize; MOST_THREADS] = [const { AtomicUsize::new(0) }; MOST_THREADS];
static TIDS: [AtomicU32; MOST_THREADS] = [const { AtomicU32::new(0) }; MOST_THREADS];
static STARTING: AtomicU32 = AtomicU32::new(0);
/// The threads that are starting one, each at the place that it has for it: where their own blocks are.
static STARTERS: [AtomicUsize; MOST_THREADS] = [const { AtomicUsize::new(0) }; MOST_THREADS];

thread_local! {
    /// Whether the calling thread is one that a domain has, and at its end waits for. Without a destructor, which the C library would have to
    /// be told of.
    static IS_A_DOMAINS: Cell<bool> = const { Cell::new(false) };
    /// Whether the calling thread runs a pager of the program's.
    static IS_IN_A_PAGER: Cell<bool> = const { Cell::new(false) };
}

/// Notes it of the calling thread, which is just beginning.
pub(super) fn is_now_a_domains() {
    IS_A_DOMAINS.set(true);
}

/// Whether the calling thread is a domain's: one for handlers, or a pager thread.
///
/// # Context
/// Normal or PagerThread.
pub(crate) fn is_a_domains() -> bool {
    IS_A_DOMAINS.get()
}

/// Runs code of a pager of the program's, on whichever thread: a call of the program has its own drop pages.
///
/// # Context
/// Normal or PagerThread.
pub(crate) fn in_a_pager<T>(work: impl FnOnce() -> T) -> T {
    let before = IS_IN_A_PAGER.replace(true);
    let done = work();
    IS_IN_A_PAGER.set(before);
    done
}

/// Whether the caller may be code of the program's that a domain runs inside its gate, with a page claimed: it must wait for neither.
///
/// # Context
/// Normal or PagerThread.
pub(crate) fn may_be_inside() -> bool {
    IS_IN_A_PAGER.get() || is_pager_thread(this_thread::id())
}

/// Refuses to make regions and domains there: that waits for a fork, which waits until the caller is no longer inside.
///
/// # Context
/// Normal or PagerThread.
///
/// # Errors
/// The caller may be inside.
pub(crate) fn may_make(object: impl FnOnce() -> String) -> Result<()> {
    if !may_be_inside() {
        return Ok(());
    }
    let cause = "a pager, policy or store of the program's own would wait for a fork that waits for it: have a thread of the program's make it";
    Err(Error::new(Kind::Invalid, "make", object(), cause))
}

/// Whether the caller is a pager thread, or one is just being started (and the C library allocates for it). Memory that is
/// allocated then must not be managed: a pager thread that waits for itself never returns.
///
/// # Context
/// Trap.
pub fn on_pager_thread() -> bool {
    // Whoever it is: the new thread allocates before it is known.
    STARTING.load(Ordering::Acquire) != 0 || is_on_stack_of_one()
}

/// Whether a thread that the caller starts is the library's own: the caller is a pager thread, or is just starting one.
///
/// # Context
/// Trap.
pub fn starts_own_threads() -> bool {
    let own = this_thread::block();
    STARTERS.iter().any(|starter| starter.load(Ordering::Relaxed) == own) || is_on_stack_of_one()
}

fn is_on_stack_of_one() -> bool {
    let here = 0u8;
    let sp = &raw const here as usize;
    STACKS.iter().any(|stack| is_on(stack.load(Ordering::Relaxed), sp))
}

/// Whether `sp` is on the stack that a pager thread began to use at `began`, and on from there down. What lies above is another
/// thread's.
fn is_on(began: usize, sp: usize) -> bool {
    began != 0 && began.wrapping_sub(sp) < STACK_BYTES
}

/// Whether thread `tid` is a pager thread of any domain: a fault of its own is an epitaph, never a wait. In a child without its parent's domains
/// any thread may have the number of one.
///
/// # Context
/// PagerThread.
pub fn is_pager_thread(tid: u32) -> bool {
    tid != 0 && lineage::own() != 0 && TIDS.iter().any(|known| known.load(Ordering::Relaxed) == tid)
}

/// The pager threads of all domains.
pub fn pager_threads() -> impl Iterator<Item = u32> {
    TIDS.iter().map(|tid| tid.load(Ordering::Acquire)).filter(|tid| ![0, TAKEN].contains(tid))
}

/// Starts a pager thread. When this returns the thread runs and is known.
///
/// # Errors
/// The system has no thread to give, or ends it at once.
pub(crate) fn start(name: &'static CStr, work: impl FnOnce() + Send + 'static) -> io::Result<Pthread> {
    start_at(name, work).map(|(thread, _)| thread)
}

/// The same, and what the thread says.
///
/// # Errors
/// As [`start`], and also where it ends before it has said something.
pub(crate) fn start_and_hear<T: Send + 'static>(
    name: &'static CStr,
    work: impl FnOnce(SyncSender<T>) + Send + 'static,
) -> io::Result<(Pthread, T)> {
    let (say, said) = sync_channel(1);
    let (thread, place) = start_at(name, move || work(say))?;
    thread.hear(|limit| said.recv_timeout(limit).ok()).inspect_err(|_| vacate(place))
}

/// Starts one: it, and the place where it is known.
fn start_at(name: &'static CStr, work: impl FnOnce() + Send + 'static) -> io::Result<(Pthread, usize)> {
    let taken = |tid: &AtomicU32| tid.compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let Some(place) = TIDS.iter().position(taken) else {
        let cause = format!("this process has {MOST_THREADS} of them; have fewer domains, or fewer workers in each");
        return Err(io::Error::new(io::ErrorKind::QuotaExceeded, cause));
    };
    // First: a handler that forked once it is counted would leave the child with a start too many to end.
    let mask = signal::block_all();
    STARTING.fetch_add(1, Ordering::SeqCst);
    STARTERS[place].store(this_thread::block(), Ordering::Relaxed);
    let (up, is_up) = sync_channel(1);
    let thread = pthread::start(name, STACK_BYTES, move || {
        signal::block_for_good();
        is_now_a_domains();
        // Whoever starts it may be in a protection domain; a pager of the program's own may touch what that cannot.
        crate::protection::allow_everything();
        let here = 0u8;
        STACKS[place].store(&raw const here as usize, Ordering::Release);
        TIDS[place].store(this_thread::id(), Ordering::Release);
        let _ = up.send(());
        drop(up);
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| with_engines(work))) {
            let words = panic.downcast_ref::<&str>().copied();
            let words =
                words.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a word");
            // The domain's tables may be half changed, and threads wait for this one.
            crate::die(&format!("a pager thread panicked: {words}"));
        }
        vacate(place);
    });
    STARTERS[place].store(0, Ordering::Relaxed);
    let thread =
        thread.and_then(|thread| thread.hear(|limit| is_up.recv_timeout(limit).ok())).inspect_err(|_| vacate(place));
    STARTING.fetch_sub(1, Ordering::SeqCst);
    signal::restore(mask);
    thread.map(|(thread, ())| (thread, place))
}

/// The thread at this place is known no more.
fn vacate(place: usize) {
    STACKS[place].store(0, Ordering::Release);
    TIDS[place].store(0, Ordering::Release);
}

/// A thread that a pager thread has started to move data for it, known as one of them until this is dropped. It is bare: it allocates
/// nothing, so nobody asks what its stack is.
pub(crate) struct Known(Option<&'static AtomicU32>);

impl Known {
    /// The calling thread. Where there is no place for it, nobody knows it.
    pub(crate) fn enter() -> Known {
        let own = this_thread::id();
        let taken = |tid: &&AtomicU32| tid.compare_exchange(0, own, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        Known(TIDS.iter().find(taken))
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        if let Some(tid) = self.0 {
            tid.store(0, Ordering::Release);
        }
    }
}

/// In a child there are no pager threads but those that it starts.
pub(crate) fn forget_all() {
    for word in STACKS.iter().chain(&STARTERS) {
        word.store(0, Ordering::Relaxed);
    }
    TIDS.iter().for_each(|tid| tid.store(0, Ordering::Relaxed));
    STARTING.store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_ends_without_a_word_is_nobody_to_wait_for() {
        // SAFETY: the call takes a number, and ends the calling thread as a filter of system calls does.
        let ended = start_and_hear(c"unheard", |_say: SyncSender<()>| unsafe {
            libc::syscall(libc::SYS_exit, 0);
        });
        assert!(ended.is_err());
        assert!(pager_threads().all(this_thread::exists), "nobody who has ended is known");
    }

    #[test]
    fn a_stack_just_above_or_below_is_another_threads() {
        let began = 64 << 20;
        assert!(is_on(began, began - 100) && is_on(began, began - STACK_BYTES + 1));
        // The C library puts stacks side by side, and other threads may have small ones.
        assert!(!is_on(began, began + 100) && !is_on(began, began - STACK_BYTES));
        assert!(!is_on(0, usize::MAX - 100), "a free place");
    }
}
