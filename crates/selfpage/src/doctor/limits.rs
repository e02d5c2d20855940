//! What bounds this process: the kernel's version, filters, locking, swapping, mappings.

use super::{Finding, State, readable, setting};
use rustix::process::{Resource, getrlimit};
use selfpage_core::linux::probe;
use std::fs;
use std::path::{Path, PathBuf};

/// The kernel's own default, and what a heap of protected pages needs at least.
const MAPPINGS_MIN: u64 = 65_530;

/// A line for each limit.
pub(super) fn examine() -> Vec<Finding> {
    let swapping = swapping();
    vec![locking(&swapping), swap(swapping), mappings()]
}

/// The kernel's version. What it can do, the other lines tell.
pub(super) fn kernel() -> Finding {
    let release = setting("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned());
    Finding::new("kernel", State::Present, format!("Linux {release}"))
}

/// The filter on this process's system calls.
pub(super) fn seccomp() -> Finding {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).map(str::trim);
    match mode {
        Some("0") | None => Finding::new("seccomp", State::Present, "no filter on system calls"),
        Some(mode) => Finding::new(
            "seccomp",
            State::Degraded,
            format!("mode {mode}: system calls are filtered; what is refused below may be so by the filter"),
        )
        .remedy("docker run --security-opt seccomp=unconfined, or a profile that allows userfaultfd and io_uring"),
    }
}

/// Whether anonymous memory of this process may be swapped out, and what decides it.
enum Swapping {
    /// It may not: why.
    Never(String),
    /// It may: why, and the command against it.
    May { why: String, remedy: String },
}

fn swapping() -> Swapping {
    let areas = fs::read_to_string("/proc/swaps").map_or(0, |swaps| swaps.lines().skip(1).count());
    if areas == 0 {
        return Swapping::Never("no swap area is in use".to_owned());
    }
    if let Some(group) = cgroup("", "cgroup2").filter(|group| group.join("memory.swap.max").exists()) {
        let file = group.join("memory.swap.max").display().to_string();
        return match setting(&file).as_deref() {
            Some("0") => Swapping::Never(format!("{file} is 0")),
            limit => Swapping::May {
                why: format!("{file} is {}", limit.unwrap_or("unreadable")),
                remedy: format!("echo 0 > {file}"),
            },
        };
    }
    if let Some(group) = cgroup("memory", "cgroup") {
        let read = |file: &str| setting(&group.join(file).display().to_string());
        let swappiness = group.join("memory.swappiness").display().to_string();
        return match (read("memory.swappiness"), read("memory.memsw.limit_in_bytes"), read("memory.limit_in_bytes")) {
            (Some(zero), _, _) if zero == "0" => Swapping::Never(format!("{swappiness} is 0")),
            (_, Some(both), Some(memory)) if both == memory => {
                Swapping::Never(format!("{}: the limits with and without swap are equal", group.display()))
            }
            _ => Swapping::May {
                why: format!("{areas} swap area(s), and {} lets them be used", group.display()),
                remedy: format!("echo 0 > {swappiness}"),
            },
        };
    }
    Swapping::May { why: format!("{areas} swap area(s), and no memory cgroup"), remedy: "swapoff -a".to_owned() }
}

/// The directory of this process's cgroup for `controller` (empty: the unified tree, mounted as `kind`).
fn cgroup(controller: &str, kind: &str) -> Option<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        controllers.split(',').any(|one| one == controller).then_some(path)
    })?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let root = mounts.lines().find_map(|line| {
        let fields: Vec<_> = line.split(' ').collect();
        let [_, place, mounted, options, ..] = fields[..] else {
            return None;
        };
        let right = mounted == kind && (controller.is_empty() || options.split(',').any(|one| one == controller));
        right.then(|| Path::new(place))
    })?;
    let group = root.join(path.trim_start_matches('/'));
    // In a container the tree may begin at our own group.
    Some(if group.exists() { group } else { root.to_owned() })
}

fn locking(swapping: &Swapping) -> Finding {
    const FEATURE: &str = "RLIMIT_MEMLOCK";
    let Some(limit_bytes) = getrlimit(Resource::Memlock).current else {
        return Finding::new(FEATURE, State::Present, "unlimited: pools and regions are locked in memory");
    };
    let beyond_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX).saturating_add(1 << 20) & !0xFFF;
    let limit = readable(limit_bytes);
    if probe::locks(beyond_bytes).is_ok() {
        return Finding::new(
            FEATURE,
            State::Present,
            format!("{limit}, and this process may lock more (CAP_IPC_LOCK)"),
        );
    }
    match swapping {
        Swapping::Never(why) => {
            Finding::new(FEATURE, State::Present, format!("{limit}; frames stay in memory even so: {why}"))
        }
        Swapping::May { .. } => Finding::new(
            FEATURE,
            State::Degraded,
            format!("{limit}: larger pools and regions are not locked, and their frames may be swapped out"),
        )
        .remedy("ulimit -l unlimited (as root; to last: '* - memlock unlimited' in /etc/security/limits.conf)"),
    }
}

fn swap(swapping: Swapping) -> Finding {
    match swapping {
        Swapping::Never(why) => Finding::new("swap", State::Present, format!("frames stay in memory: {why}")),
        Swapping::May { why, remedy } => {
            Finding::new("swap", State::Degraded, format!("frames that are not locked may be swapped out: {why}"))
                .remedy(remedy)
        }
    }
}

fn mappings() -> Finding {
    const FEATURE: &str = "vm.max_map_count";
    let used = fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count());
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
