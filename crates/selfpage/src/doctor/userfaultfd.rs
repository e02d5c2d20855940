//! userfaultfd and what its descriptors do.

use super::{Finding, State, name, probed, state};
use crate::pthread;
use selfpage_core::linux::Errno;
use selfpage_core::linux::probe::{self, Answer, Shortfall, ThreadTrial, Toucher};
use selfpage_core::linux::uffd::Reach;

pub(super) const UFFD: &str = "userfaultfd";
pub(super) const DEVICE: &str = "/dev/userfaultfd";
pub(super) const MOVE: &str = "UFFDIO_MOVE";
pub(super) const MOVE_KEEPS_WP: &str = "UFFDIO_MOVE keeps uffd-wp";

pub(crate) const ALLOW: &str = "sysctl -w vm.unprivileged_userfaultfd=1";
pub(crate) const UNFILTER: &str =
    "allow userfaultfd in the container's seccomp profile (docker run --security-opt seccomp=unconfined)";
pub(crate) const MORE_THREADS: &str = "raise the limit on threads (ulimit -u, or pids.max of the control group)";
pub(crate) const MORE_ADDRESSES: &str =
    "raise the limits on addresses (ulimit -v, ulimit -d, sysctl vm.overcommit_memory)";
pub(crate) const NEWER_6_8: &str = "boot Linux 6.8 or newer";
pub(crate) const NEWER_6_7: &str = "boot Linux 6.7 or newer";
pub(crate) const BUILD: &str = "boot a kernel built with CONFIG_USERFAULTFD=y";

/// A line for each feature.
pub(super) fn examine() -> Vec<Finding> {
    vec![
        descriptors(),
        device(),
        needs_move(),
        probed(
            "UFFD_FEATURE_SIGBUS",
            probe::signals_faults(),
            "upcall regions: a fault is a signal on the thread that took it",
            "no upcall regions, workers serve all",
            or_newer(BUILD),
        ),
        thread_id(),
        probed(
            "UFFDIO_POISON",
            probe::poisons(),
            "a page that its store lost fails with SIGBUS",
            "a page that its store lost is guarded instead (SIGSEGV)",
            "boot Linux 6.6 or newer",
        ),
        probed(
            "UFFD_FEATURE_PAGEFAULT_FLAG_WP",
            probe::protects(),
            "a write to a protected page is a fault: Region::protect, snapshots",
            "Region::protect and snapshots fail",
            or_newer(
                "boot Linux 5.7 or newer; in a container allow the ioctl UFFDIO_WRITEPROTECT in the seccomp profile",
            ),
        ),
        probed(
            "UFFDIO_COPY",
            probe::copies(),
            "pages come in where the program may not write, or may not yet",
            "pages that the program may not write cannot come in",
            or_newer("allow the ioctl UFFDIO_COPY in the container's seccomp profile"),
        ),
        probed(
            "UFFD_FEATURE_WP_ASYNC",
            probe::notes_writes(),
            "the kernel notes which pages are written: DirtyTracker, tracked regions",
            "DirtyTracker works by mprotect traps, and system calls that write fail",
            NEWER_6_7,
        ),
        keeps_protection(),
        soft_dirty(),
        probed(
            "UFFDIO_CONTINUE",
            probe::maps_existing(),
            "not used yet: pages of shared memory can be mapped on demand (MINOR_SHMEM)",
            "nothing is lost yet: no frames are shared between processes",
            "boot Linux 5.14 or newer, built with CONFIG_HAVE_ARCH_USERFAULTFD_MINOR=y",
        ),
    ]
}

/// Why a thread could not be started.
pub(super) fn of_start(why: std::io::Error) -> Errno {
    Errno::from_raw_os_error(why.raw_os_error().unwrap_or(libc::EIO))
}

/// What helps where there was no thread for a trial.
pub(super) fn for_a_thread(shortfall: Shortfall) -> Option<&'static str> {
    match shortfall {
        Shortfall::Refused(Errno::AGAIN) => Some(MORE_THREADS),
        Shortfall::Refused(Errno::NOMEM) => Some(MORE_ADDRESSES),
        _ => None,
    }
}

/// What helps where a feature is missing, unless the kernel is so old that it serves nothing for the program alone: it has no flag for that.
fn or_newer(remedy: &'static str) -> &'static str {
    if probe::features() == Err(Errno::INVAL) { NEWER_6_8 } else { remedy }
}

/// Lets another thread touch an absent page, and tells whether the kernel named that thread.
fn serve(reach: Reach, toucher: Toucher) -> Answer {
    let trial = ThreadTrial::new(reach)?;
    let (touched, named) = pthread::beside(|| trial.touch(toucher), || trial.answer()).map_err(of_start)?;
    if touched? == named? { Ok(()) } else { Err(Shortfall::Wrong) }
}

fn soft_dirty() -> Finding {
    const FEATURE: &str = "soft-dirty bits";
    match probe::has_soft_dirty() {
        Ok(()) => Finding::new(
            FEATURE,
            State::Present,
            "not used: a write between the look at them and the call that clears them is missed",
        ),
        Err(_) => Finding::new(FEATURE, State::Absent, "nothing is lost: DirtyTracker would not use them")
            .remedy("boot a kernel built with CONFIG_MEM_SOFT_DIRTY=y"),
    }
}

fn descriptors() -> Finding {
    let every = match serve(Reach::EveryFault, Toucher::Kernel) {
        Ok(()) => {
            return Finding::new(UFFD, State::Present, "serves every fault, those inside system calls too");
        }
        Err(Shortfall::Wrong) => "a fault inside a system call was not told".to_owned(),
        Err(Shortfall::Refused(why)) => name(why),
    };
    match serve(Reach::UserFaults, Toucher::Program) {
        Ok(()) => Finding::new(
            UFFD,
            State::Degraded,
            format!("user mode only ({every}): a system call on an absent page fails with EFAULT, and `selfpage run --frames` cannot start; pin around system calls"),
        )
        .remedy(format!("{ALLOW} (or see /dev/userfaultfd; for a program that links the library: setcap cap_sys_ptrace+ep PROGRAM, which calls prctl(PR_SET_DUMPABLE, 1) before its first domain: else its files in /proc are root's)")),
        Err(shortfall) => {
            if let Some(remedy) = for_a_thread(shortfall) {
                let why = "no thread can be started to serve faults; no program can be paged";
                return Finding::new(UFFD, State::Absent, why).remedy(remedy);
            }
            let remedy = if shortfall == Shortfall::Refused(Errno::NOSYS) { BUILD } else { or_newer(UNFILTER) };
            Finding::new(UFFD, state(shortfall), format!("{every}; no program can be paged")).remedy(remedy)
        }
    }
}

fn device() -> Finding {
    let answer = probe::opens_device();
    let remedy = match answer {
        Err(Shortfall::Refused(Errno::NOENT | Errno::NXIO | Errno::NODEV)) => {
            "boot Linux 6.1 or newer; in a container pass --device /dev/userfaultfd"
        }
        _ => {
            "chmod 0666 /dev/userfaultfd (to last: echo 'KERNEL==\"userfaultfd\", MODE=\"0666\"' > /etc/udev/rules.d/60-userfaultfd.rules)"
        }
    };
    probed(DEVICE, answer, "gives the right to serve every fault", "the system call must serve", remedy)
}

fn needs_move() -> Finding {
    let answer = probe::moves_pages();
    // The descriptors' own line tells why none is to be had.
    let remedy = if probe::features().is_ok() { NEWER_6_8 } else { or_newer(UNFILTER) };
    probed(MOVE, answer, "pages move between frames and regions without a copy", "selfpage cannot run", remedy)
}

fn thread_id() -> Finding {
    let named = serve(Reach::UserFaults, Toucher::Program);
    probed(
        "UFFD_FEATURE_THREAD_ID",
        named,
        "a fault names its thread",
        "a fault of a pager thread of our own cannot be told from others",
        named.err().and_then(for_a_thread).unwrap_or_else(|| or_newer(UNFILTER)),
    )
}

fn keeps_protection() -> Finding {
    match probe::moves_keep_protection() {
        Ok(()) => Finding::new(MOVE_KEEPS_WP, State::Present, "pages move in write-protected"),
        Err(Shortfall::Wrong) => {
            let why = "MOVE drops the bit here, and protected pages are copied in; nothing to do: this only makes protected pages dearer";
            Finding::new(MOVE_KEEPS_WP, State::Degraded, why)
        }
        Err(shortfall) => probed(MOVE_KEEPS_WP, Err(shortfall), "", "protected pages are copied in", NEWER_6_8),
    }
}
