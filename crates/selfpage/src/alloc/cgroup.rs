//! The control groups that the process is in: how much memory they let it have, and where they report that it is short.

use std::fs;
use std::path::{Path, PathBuf};

const MOUNTS: &str = "/sys/fs/cgroup";

/// What a group has free, of what it may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Room {
    pub(super) limit_bytes: usize,
    pub(super) free_bytes: usize,
}

/// What a version of control groups calls its files, and the lines of `memory.stat` that say what only swapping would make free. What a
/// process has left to the kernel is not among it, nor are files' pages.
#[derive(Debug)]
struct Names {
    limits: &'static [&'static str],
    taken: [&'static str; 3],
}

const FIRST: Names = Names {
    limits: &["memory.limit_in_bytes"],
    taken: ["total_active_anon", "total_inactive_anon", "total_unevictable"],
};
const SECOND: Names =
    Names { limits: &["memory.max", "memory.high"], taken: ["active_anon", "inactive_anon", "unevictable"] };

/// Where the process's group may be, with the directory that its hierarchy begins at.
struct Place {
    root: PathBuf,
    group: PathBuf,
    names: Names,
}

/// The places that hold the process's memory; `groups` is what `/proc/self/cgroup` says. Version 2 may be mounted beside version 1.
fn places(mounts: &Path, groups: &str) -> Vec<Place> {
    let place = |root: PathBuf, group: &str, names| {
        let group = root.join(group.trim_start_matches('/'));
        Place { root, group, names }
    };
    let mut places = Vec::new();
    for line in groups.lines() {
        let Some((controllers, group)) = line.split_once(':').and_then(|(_, rest)| rest.split_once(':')) else {
            continue;
        };
        if controllers.is_empty() {
            places.push(place(mounts.to_owned(), group, SECOND));
            places.push(place(mounts.join("unified"), group, SECOND));
        } else if controllers.split(',').any(|one| one == "memory") {
            places.push(place(mounts.join("memory"), group, FIRST));
        }
    }
    places
}

fn groups() -> String {
    fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// Where the process's group would report pressure.
pub(super) fn pressure_files() -> Vec<PathBuf> {
    places(Path::new(MOUNTS), &groups()).iter().map(|place| place.group.join("memory.pressure")).collect()
}

/// What is free in the fullest of the process's groups, those around them included. `None`: none has a limit.
pub(super) fn room() -> Option<Room> {
    room_in(Path::new(MOUNTS), &groups())
}

fn room_in(mounts: &Path, groups: &str) -> Option<Room> {
    let places = places(mounts, groups);
    let rooms = places.iter().flat_map(|place| {
        let up = place.group.ancestors().take_while(|group| group.starts_with(&place.root));
        up.filter_map(|group| room_of(group, &place.names))
    });
    rooms.min_by_key(|room| room.free_bytes)
}

fn room_of(group: &Path, names: &Names) -> Option<Room> {
    let limit = |name: &&str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<usize>().ok();
    // Where there is none, version 2 says "max", and version 1 as much as there are addresses.
    let limit_bytes = names.limits.iter().filter_map(limit).min().filter(|bytes| *bytes < 1 << 60)?;
    let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
    let taken = stat.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| names.taken.contains(name));
    let taken_bytes: usize = taken.filter_map(|(_, bytes)| bytes.parse::<usize>().ok()).sum();
    Some(Room { limit_bytes, free_bytes: limit_bytes.saturating_sub(taken_bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(mounts: &Path, group: &str, files: &[(&str, &str)]) {
        let group = mounts.join(group);
        fs::create_dir_all(&group).unwrap();
        files.iter().for_each(|(name, text)| fs::write(group.join(name), text).unwrap());
    }

    #[test]
    fn the_fullest_group_counts_of_those_around_the_process() {
        let mounts = tempfile::tempdir().unwrap();
        let stat = "anon 9999\nfile 5000\nactive_anon 300\ninactive_anon 60\nunevictable 40\n";
        group(mounts.path(), "a", &[("memory.max", "1000\n"), ("memory.high", "900\n"), ("memory.stat", stat)]);
        group(mounts.path(), "a/b", &[("memory.max", "max\n"), ("memory.high", "600\n"), ("memory.stat", stat)]);
        group(mounts.path(), "a/b/c", &[("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.stat", stat)]);
        assert_eq!(room_in(mounts.path(), "0::/a/b/c\n"), Some(Room { limit_bytes: 600, free_bytes: 200 }));
        assert_eq!(room_in(mounts.path(), "0::/a\n"), Some(Room { limit_bytes: 900, free_bytes: 500 }));
        assert_eq!(room_in(mounts.path(), "0::/\n"), None);
        // Where the process's group lies elsewhere than the mount shows, what is around it still counts.
        assert_eq!(room_in(mounts.path(), "0::/a/gone\n"), Some(Room { limit_bytes: 900, free_bytes: 500 }));
    }

    #[test]
    fn both_versions_are_looked_at() {
        let mounts = tempfile::tempdir().unwrap();
        let stat = "active_anon 1\ntotal_active_anon 30\ntotal_inactive_anon 20\ntotal_unevictable 0\n";
        group(mounts.path(), "memory", &[("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.stat", stat)]);
        group(mounts.path(), "memory/x", &[("memory.limit_in_bytes", "80\n"), ("memory.stat", stat)]);
        let groups = "4:memory,hugetlb:/x\n3:cpu:/\n0::/y\n";
        assert_eq!(room_in(mounts.path(), groups), Some(Room { limit_bytes: 80, free_bytes: 30 }));
        group(mounts.path(), "unified/y", &[("memory.max", "70"), ("memory.stat", "active_anon 90\n")]);
        assert_eq!(room_in(mounts.path(), groups), Some(Room { limit_bytes: 70, free_bytes: 0 }));
    }
}
