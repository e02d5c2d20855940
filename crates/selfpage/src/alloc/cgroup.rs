//! The control groups that the process is in: how much memory they let it have, and where they report that it is short.

use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

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

/// The places that hold the process's memory; `groups` is what `/proc/thread-self/cgroup` says. Version 2 may be mounted beside version 1.
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

/// A file's text. Not by the C library: whoever asks may be in the middle of an allocation, which is no place to be cancelled at.
fn text(path: &Path) -> Option<String> {
    let file = rustix::fs::open(path, OFlags::CLOEXEC, Mode::empty()).ok()?;
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match rustix::io::read(&file, &mut part) {
            Ok(0) => return String::from_utf8(bytes).ok(),
            Ok(len) => bytes.extend_from_slice(part.get(..len)?),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

fn groups() -> String {
    text(Path::new("/proc/thread-self/cgroup")).unwrap_or_default()
}

/// Where the process's group would report pressure.
pub(super) fn pressure_files() -> Vec<PathBuf> {
    places(Path::new(MOUNTS), &groups()).iter().map(|place| place.group.join("memory.pressure")).collect()
}

/// The least that any of the process's groups may have, those around them included. `None`: none has a limit.
pub(super) fn limit() -> Option<usize> {
    around(&places(Path::new(MOUNTS), &groups()), limit_of).into_iter().min()
}

/// What is free in each of them that has a limit.
pub(super) fn rooms() -> Vec<Room> {
    around(&places(Path::new(MOUNTS), &groups()), room_of)
}

/// What `ask` says of the groups at `places`, and of those around them.
fn around<T>(places: &[Place], ask: impl Fn(&Path, &Names) -> Option<T>) -> Vec<T> {
    let mut found = Vec::new();
    for place in places {
        let up = place.group.ancestors().take_while(|group| group.starts_with(&place.root));
        found.extend(up.filter_map(|group| ask(group, &place.names)));
    }
    found
}

fn limit_of(group: &Path, names: &Names) -> Option<usize> {
    let limit = |name: &&str| text(&group.join(name))?.trim().parse::<usize>().ok();
    // Where there is none, version 2 says "max", and version 1 as much as there are addresses.
    names.limits.iter().filter_map(limit).min().filter(|bytes| *bytes < 1 << 60)
}

fn room_of(group: &Path, names: &Names) -> Option<Room> {
    let limit_bytes = limit_of(group, names)?;
    let stat = text(&group.join("memory.stat"))?;
    let taken = stat.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| names.taken.contains(name));
    let taken_bytes: usize = taken.filter_map(|(_, bytes)| bytes.parse::<usize>().ok()).sum();
    Some(Room { limit_bytes, free_bytes: limit_bytes.saturating_sub(taken_bytes) })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn limit_in(mounts: &Path, groups: &str) -> Option<usize> {
        around(&places(mounts, groups), limit_of).into_iter().min()
    }

    /// As limit and what is free.
    fn fullest(mounts: &Path, groups: &str) -> Option<(usize, usize)> {
        let rooms = around(&places(mounts, groups), room_of).into_iter();
        rooms.min_by_key(|room| room.free_bytes).map(|room| (room.limit_bytes, room.free_bytes))
    }

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
        assert_eq!(fullest(mounts.path(), "0::/a/b/c\n"), Some((600, 200)));
        assert_eq!(fullest(mounts.path(), "0::/a\n"), Some((900, 500)));
        assert_eq!(fullest(mounts.path(), "0::/\n"), None);
        assert_eq!(limit_in(mounts.path(), "0::/a/b/c\n"), Some(600));
        assert_eq!(limit_in(mounts.path(), "0::/\n"), None);
        // Where the process's group lies elsewhere than the mount shows, what is around it still counts.
        assert_eq!(fullest(mounts.path(), "0::/a/gone\n"), Some((900, 500)));
    }

    #[test]
    fn both_versions_are_looked_at() {
        let mounts = tempfile::tempdir().unwrap();
        let stat = "active_anon 1\ntotal_active_anon 30\ntotal_inactive_anon 20\ntotal_unevictable 0\n";
        group(mounts.path(), "memory", &[("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.stat", stat)]);
        group(mounts.path(), "memory/x", &[("memory.limit_in_bytes", "80\n"), ("memory.stat", stat)]);
        let groups = "4:memory,hugetlb:/x\n3:cpu:/\n0::/y\n";
        assert_eq!(fullest(mounts.path(), groups), Some((80, 30)));
        group(mounts.path(), "unified/y", &[("memory.max", "70"), ("memory.stat", "active_anon 90\n")]);
        assert_eq!(fullest(mounts.path(), groups), Some((70, 0)));
        assert_eq!(limit_in(mounts.path(), "4:memory,hugetlb:/x\n"), Some(80));
    }
}
