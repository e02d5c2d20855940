//! What bounds this process: the kernel's version, filters, locking, swapping, mappings.

use super::{Finding, State, readable, setting};
use crate::residence::{LockLimit, Swapping};
use crate::task;
use rustix::process::{DumpableBehavior, dumpable_behavior};
use selfpage_core::linux::Errno;
use selfpage_core::linux::limit::{self, Resource};
use std::fs;
use std::io::ErrorKind;

/// The kernel's own default, and what a heap of protected pages needs at least.
const MAPPINGS_MIN: u64 = 65_530;

/// The line of /proc.
pub(super) const PROC: &str = "/proc";
pub(crate) const MOUNT: &str = "mount -t proc proc /proc";
/// What helps a process whose files there are root's, as they are once it has changed its user.
const DUMPABLE: &str = "the process is not dumpable, as after a change of its user: call prctl(PR_SET_DUMPABLE, 1) before a domain is \
                        built and before a fork, or do both before the change";

/// What helps where a process has as many mappings as it may.
pub(crate) const MORE_MAPPINGS: &str = "raise the limit on mappings (sysctl -w vm.max_map_count), or unmap something";

/// What helps where the kernel's settings cannot be looked at.
pub(super) const MOUNT_SYS: &str = "mount -t sysfs sysfs /sys";

/// Whether /sys has the kernel's settings: a setting that is not there is not in this kernel.
pub(super) fn has_sys() -> bool {
    fs::exists("/sys/kernel").unwrap_or(false)
}

/// What helps where a filter refuses a call.
pub(crate) fn unfilter(call: &str) -> String {
    format!("allow {call} in the container's seccomp profile (docker run --security-opt seccomp=unconfined)")
}

/// What helps where a limit cannot be asked for.
pub(crate) const TELL: &str = "let the filter of system calls allow prlimit64, which tells the process's limits";

/// The line of descriptors.
pub(super) const FILES: &str = "RLIMIT_NOFILE";
/// Fewer open files, and there is no region over a store or a file, even in a program that has none open but the standard streams: the seven
/// of a domain, and what its pager threads begin with. It was measured.
const FILES_LEAST: u64 = 16;
/// Fewer open files, and a domain with a store or two has no descriptors left.
const FILES_MIN: u64 = 64;

/// A line for each limit.
pub(super) fn examine() -> Vec<Finding> {
    let (limit, swapping) = (LockLimit::of_this_process(), Swapping::of_this_process());
    let open_files = limit::of_this_process(Resource::OpenFiles);
    vec![locking(&limit, &swapping), swap(&limit, swapping), mappings(), files(open_files)]
}

/// The kernel's version. What it can do, the other lines tell.
pub(super) fn kernel() -> Finding {
    let release = setting("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
    Finding::new("kernel", State::Present, format!("Linux {release}"))
}

/// Where the kernel tells of this process's memory, and of itself.
pub(super) fn proc() -> Finding {
    // What the library opens.
    match fs::File::open("/proc/thread-self/mem") {
        Ok(_) => Finding::new(PROC, State::Present, "mounted"),
        Err(why) => match undumpable() {
            Some(remedy) if why.kind() == ErrorKind::PermissionDenied => {
                let why =
                    format!("mounted, and this process may not open its own files there ({why}); selfpage cannot run");
                Finding::new(PROC, State::Absent, why).remedy(remedy)
            }
            _ => Finding::new(PROC, State::Absent, format!("not mounted ({why}); selfpage cannot run")).remedy(MOUNT),
        },
    }
}

/// Why this process may not open its own files in /proc, and what helps, if it is not dumpable.
pub(crate) fn undumpable() -> Option<&'static str> {
    let is_dumpable = matches!(dumpable_behavior(), Ok(DumpableBehavior::Dumpable));
    (!is_dumpable).then_some(DUMPABLE)
}

/// The filter on this process's system calls.
pub(super) fn seccomp() -> Finding {
    let Ok(status) = task::text("/proc/self/status".as_ref()) else {
        return Finding::new("seccomp", State::Degraded, "unknown: /proc/self/status cannot be read").remedy(MOUNT);
    };
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).map(str::trim);
    match mode {
        Some("0") | None => Finding::new("seccomp", State::Present, "no filter on system calls"),
        Some(mode) => Finding::new(
            "seccomp",
            State::Degraded,
            format!("mode {mode}: system calls are filtered; what is refused below may be so by the filter"),
        )
        .remedy("docker run --security-opt seccomp=unconfined, or a profile that allows userfaultfd, unshare, pidfd_getfd and io_uring"),
    }
}

fn locking(limit: &LockLimit, swapping: &Swapping) -> Finding {
    const FEATURE: &str = "RLIMIT_MEMLOCK";
    let limit_bytes = match limit {
        LockLimit::Unlimited => {
            return Finding::new(FEATURE, State::Present, "unlimited: pools and regions are locked in memory");
        }
        LockLimit::Exempt { limit_bytes } => {
            let why = format!(
                "{}, and this process may lock more (CAP_IPC_LOCK): pools and regions are locked in memory",
                readable(*limit_bytes)
            );
            return Finding::new(FEATURE, State::Present, why);
        }
        LockLimit::Bounded { limit_bytes } => readable(*limit_bytes),
        LockLimit::Unknown => return untold(FEATURE),
    };
    match swapping {
        Swapping::Never(why) => Finding::new(
            FEATURE,
            State::Present,
            format!("{limit_bytes}: pools and regions beyond it are not locked; frames stay in memory even so: {why}"),
        ),
        Swapping::May { .. } => Finding::new(
            FEATURE,
            State::Degraded,
            format!("{limit_bytes}: pools and regions beyond it are not locked, and frames may be swapped out"),
        )
        .remedy("ulimit -l unlimited (as root; to last: '* - memlock unlimited' in /etc/security/limits.conf)"),
    }
}

fn swap(limit: &LockLimit, swapping: Swapping) -> Finding {
    let (why, remedy) = match swapping {
        Swapping::Never(why) => return Finding::new("swap", State::Present, format!("frames stay in memory: {why}")),
        Swapping::May { why, remedy } => (why, remedy),
    };
    let whose = match limit {
        LockLimit::Bounded { .. } | LockLimit::Unknown => "frames may be swapped out",
        LockLimit::Unlimited | LockLimit::Exempt { .. } => {
            "frames of `selfpage run`, which locks none, may be swapped out"
        }
    };
    Finding::new("swap", State::Degraded, format!("{whose}: {why}")).remedy(remedy)
}

fn mappings() -> Finding {
    const FEATURE: &str = "vm.max_map_count";
    let maps = task::text("/proc/thread-self/maps".as_ref());
    let used = maps.map_or_else(|_| "an unknown number".to_owned(), |maps| maps.lines().count().to_string());
    let limit = setting("/proc/sys/vm/max_map_count").and_then(|limit| limit.parse::<u64>().ok());
    match limit {
        Some(limit) if limit >= MAPPINGS_MIN => {
            Finding::new(FEATURE, State::Present, format!("{limit} mappings, {used} in use"))
        }
        limit => Finding::new(
            FEATURE,
            State::Degraded,
            format!(
                "{}: a program that protects single pages runs out of mappings early",
                limit.map_or_else(|| "unreadable".to_owned(), |limit| limit.to_string())
            ),
        )
        .remedy(format!("sysctl -w vm.max_map_count={MAPPINGS_MIN}")),
    }
}

/// A limit that a filter of system calls has not told.
pub(super) fn untold(feature: &'static str) -> Finding {
    Finding::new(feature, State::Degraded, "unknown: prlimit64 is refused").remedy(TELL)
}

fn files(limit: Result<Option<u64>, Errno>) -> Finding {
    let Ok(limit) = limit else { return untold(FILES) };
    match limit {
        Some(limit) if limit < FILES_MIN => {
            let (state, why) = if limit < FILES_LEAST {
                (
                    State::Refused,
                    format!("a domain with a store or a file wants {FILES_LEAST} at least; selfpage cannot run"),
                )
            } else {
                (State::Degraded, format!("a domain with one store or file wants {FILES_LEAST}, and each other more"))
            };
            Finding::new(FILES, state, format!("{limit} open files: {why}"))
                .remedy(format!("ulimit -n {FILES_MIN}, or more"))
        }
        limit => {
            let most = limit.map_or_else(|| "any number of".to_owned(), |limit| limit.to_string());
            Finding::new(FILES, State::Present, format!("{most} open files"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_open_files_are_told_with_a_remedy() {
        for (limit, state) in [
            (Some(FILES_LEAST - 1), State::Refused),
            (Some(FILES_LEAST), State::Degraded),
            (Some(FILES_MIN - 1), State::Degraded),
            (Some(FILES_MIN), State::Present),
            (None, State::Present),
        ] {
            let finding = files(Ok(limit));
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.remedy.is_some_and(|remedy| remedy.contains("ulimit -n")), state != State::Present);
        }
    }

    #[test]
    fn each_residence_has_its_words_and_its_remedy() {
        let may = || Swapping::May { why: "a swap area".into(), remedy: "swapoff -a".into() };
        let never = || Swapping::Never("no swap area".into());
        let (exempt, bounded) = (LockLimit::Exempt { limit_bytes: 8 << 20 }, LockLimit::Bounded { limit_bytes: 0 });
        for (limit, swapping, states, words) in [
            (&LockLimit::Unlimited, may(), [State::Present, State::Degraded], ["are locked", "`selfpage run`"]),
            (&exempt, may(), [State::Present, State::Degraded], ["are locked", "`selfpage run`"]),
            (&bounded, never(), [State::Present, State::Present], ["even so: no swap", "stay in memory"]),
            (&bounded, may(), [State::Degraded, State::Degraded], ["may be swapped out", "frames may be swapped out"]),
        ] {
            let findings = [locking(limit, &swapping), swap(limit, swapping)];
            for ((finding, state), word) in findings.iter().zip(states).zip(words) {
                assert_eq!(finding.state, state, "{finding:?}");
                assert_eq!(finding.remedy.is_some(), state == State::Degraded, "{finding:?}");
                assert!(finding.why.contains(word), "{word:?} is missing from {finding:?}");
            }
        }
    }
}
