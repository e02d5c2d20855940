//! The control groups that the process is in: how much memory they let it have, and where they report that it is short.
//!
//! Whoever asks may be in the middle of an allocation, or the one who gives back when memory is used up: what there is no memory for is
//! not known, and ends nothing. Nor does it tell of no limit where the process has come to see no groups, or can open no files.

use std::collections::TryReserveError;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;

use super::file::File;

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

const FIRST: &Names = &Names {
    limits: &["memory.limit_in_bytes"],
    taken: ["total_active_anon", "total_inactive_anon", "total_unevictable"],
};
const SECOND: &Names =
    &Names { limits: &["memory.max", "memory.high"], taken: ["active_anon", "inactive_anon", "unevictable"] };

/// Why nothing is known of the groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unknown {
    /// There is no memory to ask.
    NoMemory,
    /// All descriptors are taken.
    NoDescriptor,
    /// The process does not see them: `chroot(2)` took them away, say.
    Unseen,
}

impl From<TryReserveError> for Unknown {
    fn from(_: TryReserveError) -> Unknown {
        Unknown::NoMemory
    }
}

/// What the file system has to say, if it can be asked.
type Asked<T> = Result<Option<T>, Unknown>;

/// A group that the process may be in, or one around it: where its hierarchy begins, and the way from there.
#[derive(Clone, Copy, Debug)]
struct Group<'a> {
    root: [&'a str; 2],
    way: &'a str,
    names: &'static Names,
}

impl<'a> Group<'a> {
    /// With those around it.
    fn and_around(self) -> impl Iterator<Item = Group<'a>> {
        let ways = std::iter::successors(Some(self.way), |way| way.rsplit_once('/').map(|(up, _)| up));
        ways.map(move |way| Group { way, ..self })
    }

    /// The path of one of its files, with a zero behind it.
    fn path(&self, file: &str) -> Result<Vec<u8>, TryReserveError> {
        let parts = [self.root[0], self.root[1], self.way, "/", file, "\0"];
        let mut path = Vec::new();
        path.try_reserve_exact(parts.iter().map(|part| part.len()).sum())?;
        parts.iter().for_each(|part| path.extend_from_slice(part.as_bytes()));
        Ok(path)
    }

    /// Whether its hierarchy is mounted: where it is not, there is often an empty directory, which each sysfs has.
    fn is_seen(self) -> Result<bool, Unknown> {
        let path = Group { way: "", ..self }.path("cgroup.procs")?;
        Ok(CStr::from_bytes_with_nul(&path).map_or(Ok(None), open)?.is_some())
    }

    fn text(&self, file: &str) -> Asked<String> {
        let path = self.path(file)?;
        CStr::from_bytes_with_nul(&path).map_or(Ok(None), text)
    }

    fn limit(&self) -> Asked<usize> {
        let mut least = None;
        for name in self.names.limits {
            // Where there is none, version 2 says "max", and version 1 as much as there are addresses.
            let limit = self.text(name)?.and_then(|text| text.trim().parse().ok()).filter(|bytes| *bytes < 1 << 60);
            least = least.into_iter().chain(limit).min();
        }
        Ok(least)
    }

    fn room(&self) -> Asked<Room> {
        let Some(limit_bytes) = self.limit()? else { return Ok(None) };
        let Some(stat) = self.text("memory.stat")? else { return Ok(None) };
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let taken = lines.filter(|(name, _)| self.names.taken.contains(name));
        let taken_bytes: usize = taken.filter_map(|(_, bytes)| bytes.parse::<usize>().ok()).sum();
        Ok(Some(Room { limit_bytes, free_bytes: limit_bytes.saturating_sub(taken_bytes) }))
    }
}

/// The groups that hold the process's memory; `groups` is what `/proc/thread-self/cgroup` says. Version 2 may be mounted beside version 1.
fn own<'a>(mounts: &'a str, groups: &'a str) -> impl Iterator<Item = Group<'a>> {
    groups.lines().flat_map(move |line| {
        let (controllers, way) = line.split_once(':').and_then(|(_, rest)| rest.split_once(':')).unwrap_or(("-", ""));
        let way = way.trim_end_matches('/');
        let group = |below, names| Some(Group { root: [mounts, below], way, names });
        let found = if controllers.is_empty() {
            [group("", SECOND), group("/unified", SECOND)]
        } else if controllers.split(',').any(|one| one == "memory") {
            [group("/memory", FIRST), None]
        } else {
            [None, None]
        };
        found.into_iter().flatten()
    })
}

/// Not by the C library: the middle of an allocation is no place to be cancelled at.
fn open(path: &CStr) -> Asked<File> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::NOMEM) => Err(Unknown::NoMemory),
        Err(Errno::MFILE | Errno::NFILE) => Err(Unknown::NoDescriptor),
        Err(_) => Ok(None),
    }
}

/// A file's text. `None`: there is no such file, or its group is gone. Any other failure tells of no group: the kernel reads such a file into memory
/// of the group's own, and has none just where the group has used up all.
fn text(path: &CStr) -> Asked<String> {
    let Some(file) = open(path)? else { return Ok(None) };
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match file.read(&mut part) {
            Ok(0) => return Ok(String::from_utf8(bytes).ok()),
            Ok(len) => {
                bytes.try_reserve(len)?;
                bytes.extend_from_slice(part.get(..len).unwrap_or_default());
            }
            Err(Errno::INTR) => {}
            Err(Errno::NODEV) => return Ok(None),
            Err(Errno::NOMEM) => return Err(Unknown::NoMemory),
            Err(_) => return Err(Unknown::Unseen),
        }
    }
}

/// Those that the process is in, where it sees what they may have.
fn groups() -> Result<String, Unknown> {
    let groups = text(c"/proc/thread-self/cgroup")?.ok_or(Unknown::Unseen)?;
    let mut seen = false;
    for group in own(MOUNTS, &groups) {
        seen |= group.is_seen()?;
    }
    if seen { Ok(groups) } else { Err(Unknown::Unseen) }
}

/// The first thing that `open` finds where the process's group would report pressure.
pub(super) fn find_pressure<T>(open: impl Fn(&Path) -> Option<T>) -> Option<T> {
    let groups = groups().ok()?;
    own(MOUNTS, &groups).find_map(|group| {
        let path = group.path("memory.pressure").ok()?;
        open(Path::new(OsStr::from_bytes(path.strip_suffix(b"\0")?)))
    })
}

/// The least that any of the process's groups may have, those around them included. `None`: none has a limit.
///
/// # Errors
/// They cannot be asked.
pub(super) fn limit() -> Asked<usize> {
    limit_in(MOUNTS, &groups()?)
}

fn limit_in(mounts: &str, groups: &str) -> Asked<usize> {
    let mut least = None;
    for group in own(mounts, groups).flat_map(Group::and_around) {
        least = least.into_iter().chain(group.limit()?).min();
    }
    Ok(least)
}

/// Tells `see` what is free in each of them that has a limit.
///
/// # Errors
/// They cannot be asked.
pub(super) fn each_room(see: impl FnMut(Room)) -> Result<(), Unknown> {
    each_room_in(MOUNTS, &groups()?, see)
}

fn each_room_in(mounts: &str, groups: &str, mut see: impl FnMut(Room)) -> Result<(), Unknown> {
    for group in own(mounts, groups).flat_map(Group::and_around) {
        group.room()?.into_iter().for_each(&mut see);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn limit_in(mounts: &Path, groups: &str) -> Option<usize> {
        super::limit_in(mounts.to_str().unwrap(), groups).unwrap()
    }

    /// As limit and what is free.
    fn fullest(mounts: &Path, groups: &str) -> Option<(usize, usize)> {
        let mut rooms = Vec::new();
        each_room_in(mounts.to_str().unwrap(), groups, |room| rooms.push(room)).unwrap();
        let fullest = rooms.into_iter().min_by_key(|room| room.free_bytes);
        fullest.map(|room| (room.limit_bytes, room.free_bytes))
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

    #[test]
    fn what_opens_and_cannot_be_read_tells_of_no_group() {
        // A directory opens.
        for (file, unreadable) in [("memory.stat", "memory.max"), ("memory.max", "memory.stat")] {
            let mounts = tempfile::tempdir().unwrap();
            group(mounts.path(), "a", &[(file, "9000\n")]);
            fs::create_dir(mounts.path().join("a").join(unreadable)).unwrap();
            let mut rooms = 0;
            let seen = each_room_in(mounts.path().to_str().unwrap(), "0::/a\n", |_| rooms += 1);
            assert_eq!((seen, rooms), (Err(Unknown::Unseen), 0), "{unreadable}");
        }
    }
}
