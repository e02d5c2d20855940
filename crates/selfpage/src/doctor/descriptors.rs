//! Whether pager threads can have a descriptor table of their own, and files of the program's in it.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::Errno as IoErrno;
use rustix::process::{PidfdFlags, pidfd_open};
use rustix::thread::{Pid, gettid};
use selfpage_core::linux::Errno;
use selfpage_core::linux::probe::{Answer, Shortfall};
use selfpage_core::linux::thread;

use super::limits::unfilter;
use super::userfaultfd::{for_a_thread, of_start};
use super::{Finding, State, probed};
use crate::pthread;
use crate::store::{borrow_number, copied_descriptor, place_descriptor};

pub(super) const UNSHARE: &str = "unshare(CLONE_FILES)";
pub(crate) const ALLOW_PIDFDS: &str = "allow pidfd_open and pidfd_getfd in the container's seccomp profile";
const PIDFD_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(libc::O_EXCL as u32);

/// A line for each feature.
pub(super) fn examine() -> Vec<Finding> {
    let (unshared, taken) = try_both().unwrap_or_else(|why| (Err(why.into()), Err(why.into())));
    vec![leaves(unshared), takes(taken, pidfd_open(gettid(), PIDFD_THREAD).map(drop))]
}

/// Leaves the shared table, and takes a file out of it: what each of the two said.
fn try_both() -> Result<(Answer, Answer), Errno> {
    // Not one by its name: a root without /dev will do.
    let file = memfd_create("selfpage-doctor", MemfdFlags::CLOEXEC).map_err(of)?;
    let from = gettid();
    // The trial costs a thread its table: one that does nothing else.
    let tries = || {
        let unshared = thread::unshare_descriptors();
        (unshared.map_err(Shortfall::from), unshared.map_err(Shortfall::from).and_then(|()| take(from, &file)))
    };
    pthread::beside(tries, || ()).map(|(tried, ())| tried).map_err(of_start)
}

/// Closes the file in the calling thread's table, and takes it from that of another thread.
fn take(from: Pid, file: &OwnedFd) -> Answer {
    let (number, inode) = (file.as_raw_fd(), fstat(file).map_err(of)?.st_ino);
    thread::close_descriptors(number as u32, number as u32)?;
    copied_descriptor(from.as_raw_pid() as u32, number)
        .and_then(|copy| place_descriptor(copy, number))
        .map_err(|why| Errno::from_raw_os_error(why.raw_os_error().unwrap_or(libc::EIO)))?;
    let taken = fstat(borrow_number(number)).map_err(of)?;
    if taken.st_ino == inode { Ok(()) } else { Err(Shortfall::Wrong) }
}

/// The remedy where no thread could be started to try it, and where it was refused.
fn remedy(answer: Answer, of_calls: String) -> String {
    answer.err().and_then(for_a_thread).map_or(of_calls, str::to_owned)
}

fn leaves(unshared: Answer) -> Finding {
    let gain = "pager threads have descriptor tables of their own, which hold open nothing of the program's";
    probed(UNSHARE, unshared, gain, "selfpage cannot run", &remedy(unshared, unfilter("unshare")))
}

fn takes(taken: Answer, of_threads: Result<(), IoErrno>) -> Finding {
    const FEATURE: &str = "pidfd_getfd";
    match (taken, of_threads) {
        (Ok(()), Err(IoErrno::INVAL)) => Finding::new(
            FEATURE,
            State::Degraded,
            "of the first thread's table only (no PIDFD_THREAD): a program that has left that table has no regions over files",
        )
        .remedy("boot Linux 6.9 or newer"),
        (taken, _) => probed(
            FEATURE,
            taken,
            "pager threads get the files of regions and stores, from any thread's table",
            "no regions over files and no stores on disk",
            &remedy(taken, ALLOW_PIDFDS.into()),
        ),
    }
}

fn of(why: IoErrno) -> Errno {
    Errno::from_raw_os_error(why.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_without_pidfds_of_threads_cannot_do_is_told() {
        for (taken, of_threads, state, word) in [
            (Ok(()), Ok(()), State::Present, "any thread's table"),
            (Ok(()), Err(IoErrno::INVAL), State::Degraded, "first thread's table only"),
            (Err(Errno::PERM.into()), Ok(()), State::Refused, "no stores on disk"),
            (Err(Errno::NOSYS.into()), Err(IoErrno::NOSYS), State::Absent, "no stores on disk"),
        ] {
            let finding = takes(taken, of_threads);
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.remedy.is_some(), state != State::Present, "{finding:?}");
            assert!(finding.why.contains(word), "{finding:?}");
        }
        let none = Err(Errno::AGAIN.into());
        for finding in [leaves(none), takes(none, Ok(()))] {
            assert!(finding.remedy.is_some_and(|remedy| remedy.contains("ulimit -u")), "no thread could be started");
        }
    }
}
