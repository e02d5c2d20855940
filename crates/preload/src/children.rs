//! Whether a forked child could have its memory. Where it certainly could not, it is better that there is none: a program knows what to do
//! when a fork fails, and not when a child ends before its first line.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use selfpage::Kind;
use selfpage_heap::next;

use crate::limits::Stored;
use crate::space::PAGE;
use crate::sys::{self, call};
use crate::{filters, managed};

next!(FORK: c"fork" as fn() -> libc::pid_t, next_fork);

/// What a child opens for its domain, and besides where its pages go to a file.
const FOR_DOMAIN: usize = 9;
const FOR_FILE: usize = 2;

/// What the table of a child's pager threads has besides: at the numbers of the standard streams, and what stands there for those that are
/// closed.
const IN_TABLE: usize = 4;

/// How many descriptors a child opens; 0 without a domain.
static NEEDED: AtomicUsize = AtomicUsize::new(0);
static TOLD: AtomicBool = AtomicBool::new(false);

/// From now on children need a domain.
pub fn begin(stored: Stored) {
    NEEDED.store(FOR_DOMAIN + if stored == Stored::InFile { FOR_FILE } else { 0 }, Ordering::Relaxed);
}

/// As in the C library, but `EAGAIN` or `ENOMEM` where limits, or a store that has no room for another process, would not let the child have
/// its memory, and `EPERM` where it may not open it.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> libc::pid_t {
    let errno_before = sys::errno();
    // Under a filter it is for the child to find.
    let needed = if filters::are_set() { 0 } else { NEEDED.load(Ordering::Relaxed) };
    let refusal = if needed == 0 { None } else { refusal(needed) };
    let Some((why, errno)) = refusal else {
        sys::set_errno(errno_before);
        // SAFETY: c-library: fork takes no arguments.
        return unsafe { next_fork()() };
    };
    if !TOLD.swap(true, Ordering::Relaxed) {
        sys::say(&format!("selfpage: no fork: {why}\n"));
    }
    sys::set_errno(errno);
    -1
}

/// Why there is to be no child, and the number of the error. A process that has no domain, such as a bare clone's child, has children without.
fn refusal(needed: usize) -> Option<(String, i32)> {
    let managed = managed::get()?;
    let lacking = |what: &str| format!("a child would have no {what}");
    if lacks_descriptors(needed) {
        return Some((lacking("descriptors to bring its pages with: raise ulimit -n"), libc::EAGAIN));
    }
    if lacks(libc::RLIMIT_AS, ADDRESSES) {
        return Some((lacking("addresses for its pages: raise ulimit -v"), libc::ENOMEM));
    }
    if lacks(libc::RLIMIT_DATA, DATA) {
        return Some((lacking("memory for its pages: raise ulimit -d"), libc::ENOMEM));
    }
    let why = managed.domain.check_fork().err()?;
    let errno = if why.kind() == Kind::OutOfSpace { libc::EAGAIN } else { libc::EPERM };
    Some((why.to_string(), errno))
}

/// Whether fewer than `needed` numbers below the limit are free, or the table of pager threads would have no room. Nothing is opened to find
/// that out: a child that another thread forks just then would have it too, and that thread itself might find no number free. Nor are the open
/// ones counted (`/proc/self/fd`): some may lie above a limit that was lowered. The highest are asked for first, which are seldom in use. The
/// limit of the whole system is for the child to find.
fn lacks_descriptors(needed: usize) -> bool {
    let limit = sys::limit(libc::RLIMIT_NOFILE).min(i32::MAX as u64) as usize;
    // SAFETY: raw-call: no memory is passed.
    let is_free = |number: &usize| unsafe { call(libc::SYS_fcntl, [*number, libc::F_GETFD as usize, 0, 0, 0, 0]) < 0 };
    limit < needed + IN_TABLE || (0..limit).rev().filter(is_free).take(needed).count() < needed
}

/// Where `/proc/thread-self/statm` has what a limit counts: addresses, and memory to write to, which is told with the first thread's stack.
const ADDRESSES: usize = 0;
const DATA: usize = 5;

/// Before a thread of ours starts, so much has to be free: its stack, and what it begins with.
const THREAD_BYTES: u64 = 1 << 20;

/// Whether the process has as much of something as it may, but for a thread's. A child maps as much anew as it does not get.
fn lacks(resource: libc::__rlimit_resource_t, field: usize) -> bool {
    let limit = sys::limit(resource);
    if limit == libc::RLIM_INFINITY {
        return false;
    }
    let mut text = [0u8; 128];
    // `/proc/self` counts nothing where the first thread has ended.
    let mut numbers = sys::read_small(c"/proc/thread-self/statm", &mut text).split(|byte| *byte == b' ');
    let digits = numbers.nth(field).unwrap_or_default();
    let pages = digits.iter().fold(0u64, |number, digit| number * 10 + u64::from(digit - b'0'));
    pages * PAGE as u64 + THREAD_BYTES > limit
}
