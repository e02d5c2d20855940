//! Whether frames stay in memory: locked, or with nowhere to be swapped to.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use selfpage_core::linux::limit::{self, Resource};
use selfpage_core::linux::probe;

use crate::alloc;
use crate::doctor::limits::MOUNT;
use crate::doctor::setting;
use crate::task;

const SWAPS: &str = "/proc/swaps";

/// Whether the kernel may swap the frames out behind the domain's back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Residence {
    /// Pool and regions are locked: never.
    Locked,
    /// There is nowhere to swap to as things are (no swap on the machine, or the cgroup allows none): not until that changes.
    NoSwap,
    /// It may. `selfpage doctor` says what to do.
    MaySwap,
}

/// How much this process may lock.
pub(crate) enum LockLimit {
    /// As much as it likes: `RLIMIT_MEMLOCK` is unlimited.
    Unlimited,
    /// As much as it likes, whatever the limit says (`CAP_IPC_LOCK`).
    Exempt { limit_bytes: u64 },
    /// So much, of addresses and not of memory, all its mappings together.
    Bounded { limit_bytes: u64 },
    /// A filter of system calls has it not told.
    Unknown,
}

impl LockLimit {
    pub(crate) fn of_this_process() -> LockLimit {
        let limit_bytes = match limit::of_this_process(Resource::LockedMemory) {
            Ok(Some(limit_bytes)) => limit_bytes,
            Ok(None) => return LockLimit::Unlimited,
            Err(_) => return LockLimit::Unknown,
        };
        // The capability is worth nothing in a user namespace, and no call tells: a mapping without memory is locked for trial.
        let beyond_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX).saturating_add(1 << 20) & !0xFFF;
        match probe::locks(beyond_bytes) {
            Ok(()) => LockLimit::Exempt { limit_bytes },
            Err(_) => LockLimit::Bounded { limit_bytes },
        }
    }
}

/// Whether anonymous memory of this process may be swapped out, and what decides it.
pub(crate) enum Swapping {
    /// It may not: why.
    Never(String),
    /// It may: why, and the command against it.
    May { why: String, remedy: String },
}

impl Swapping {
    pub(crate) fn of_this_process() -> Swapping {
        let areas = match fs::read(SWAPS) {
            // Below the line that names the columns. Of a file the name may be no text.
            Ok(swaps) => swaps.split(|byte| *byte == b'\n').skip(1).filter(|line| !line.is_empty()).count(),
            // A kernel that knows of no swap lacks this file alone.
            Err(why) if why.kind() == ErrorKind::NotFound && Path::new("/proc/meminfo").exists() => 0,
            Err(why) => {
                return Swapping::May { why: format!("{SWAPS} cannot be read ({why})"), remedy: MOUNT.to_owned() };
            }
        };
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
            return Swapping::in_v1(&group, areas);
        }
        Swapping::May { why: format!("{areas} swap area(s), and no memory cgroup"), remedy: "swapoff -a".to_owned() }
    }

    /// In a cgroup of version 1, where nothing keeps a group out of swap: equal limits with and without swap bound the group alone, and
    /// its swappiness only says what is taken first where the whole machine is short of memory.
    fn in_v1(group: &Path, areas: usize) -> Swapping {
        let file = group.join("memory.swappiness").display().to_string();
        match setting(&file).as_deref() {
            Some("0") => Swapping::May {
                why: format!("{areas} swap area(s), and {file} is 0: only under memory pressure of the whole machine"),
                remedy: "swapoff -a".to_owned(),
            },
            _ => Swapping::May {
                why: format!("{areas} swap area(s), and {} lets them be used", group.display()),
                remedy: format!("swapoff -a, or echo 0 > {file}: then only under memory pressure of the whole machine"),
            },
        }
    }
}

/// The directory of this process's cgroup for `controller` (empty: the unified tree, mounted as `kind`).
fn cgroup(controller: &str, kind: &str) -> Option<PathBuf> {
    let groups = task::text("/proc/thread-self/cgroup".as_ref()).ok()?;
    let path = alloc::cgroup::way(&groups, |controllers| controllers.split(',').any(|one| one == controller))?;
    let mounts = task::text("/proc/thread-self/mounts".as_ref()).ok()?;
    let root = mounts.lines().find_map(|line| {
        let fields: Vec<_> = line.split(' ').collect();
        let [_, place, mounted, options, ..] = fields[..] else {
            return None;
        };
        let right = mounted == kind && (controller.is_empty() || options.split(',').any(|one| one == controller));
        right.then(|| Path::new(place))
    })?;
    Some(group_in(root, path))
}

/// Where the process's group is in a tree, by the way to it.
fn group_in(root: &Path, way: &str) -> PathBuf {
    let mut groups = alloc::cgroup::ends(way).map(|end| root.join(end.trim_start_matches('/')));
    // In a container the tree may begin at our own group, or at one around it.
    groups.find(|group| group.exists()).unwrap_or_else(|| root.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_that_lies_below_the_one_where_the_mount_begins() {
        let mount = tempfile::tempdir().unwrap();
        let root = mount.path();
        fs::create_dir_all(root.join("system.slice/x")).unwrap();
        assert_eq!(group_in(root, "/system.slice/x"), root.join("system.slice/x"));
        assert_eq!(group_in(root, "/docker/ID/system.slice/x"), root.join("system.slice/x"));
        for not_below in ["", "/docker/ID", "/../system.slice/x"] {
            assert_eq!(group_in(root, not_below), root, "{not_below}");
        }
    }

    #[test]
    fn no_group_of_version_1_keeps_frames_in_memory() {
        let group = std::env::temp_dir().join(format!("selfpage-group-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        let told = |swappiness: &str, limit: &str| {
            for file in ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"] {
                fs::write(group.join(file), limit).unwrap();
            }
            fs::write(group.join("memory.swappiness"), swappiness).unwrap();
            Swapping::in_v1(&group, 1)
        };
        // As they are where nobody has set one, and as somebody may have set them.
        let limits = ["9223372036854771712\n", "1073741824\n"];
        let all: Vec<_> = limits.iter().flat_map(|limit| [told("60\n", limit), told("0\n", limit)]).collect();
        fs::remove_dir_all(&group).unwrap();
        for (at, swapping) in all.into_iter().enumerate() {
            let Swapping::May { why, remedy } = swapping else { panic!("{at}: frames stay in memory") };
            assert_eq!(why.contains("only under memory pressure of the whole machine"), at % 2 == 1, "{why}");
            assert_eq!(remedy.contains("memory.swappiness"), at % 2 == 0, "{remedy}");
        }
    }
}
