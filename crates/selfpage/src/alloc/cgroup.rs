//! The control groups that the process is in: how much memory they let it have, and where they report that it is short.
//!
//! Whoever asks may be in the middle of an allocation, or the one who gives back when memory is used up: what there is no memory for is
//! not known, and ends nothing. Nor does it tell of no limit where the process has come to see no groups, or can open no files.

use std::collections::TryReserveError;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use selfpage_core::linux::thread;

use super::file::File;

const MOUNTS: &str = "/sys/fs/cgroup";
/// No path is longer, with the zero behind it.
const PATH_BYTES: usize = 4096;
/// Each group has it.
const MEMBERS: &str = "cgroup.procs";
/// A group that may have so much has no limit.
const NO_LIMIT: usize = 1 << 60;

/// What a group has free, of what it may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Room {
    pub(super) limit_bytes: usize,
    pub(super) free_bytes: usize,
}

/// What a version of control groups calls its files, and the lines of `memory.stat` that say what of all that counts becomes free without
/// swapping: files' pages, and with them what a process has left to the kernel. What the kernel has for processes, as in pipes and page
/// tables, does not.
#[derive(Debug)]
struct Names {
    limits: &'static [&'static str],
    usage: &'static str,
    reclaimable: &'static [&'static str],
}

const FIRST: &Names = &Names {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    reclaimable: &["total_active_file", "total_inactive_file"],
};
const SECOND: &Names = &Names {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    reclaimable: &["active_file", "inactive_file", "slab_reclaimable"],
};

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

    /// As it is mounted: a mount may begin at a group around it, as a container's does. Where it is not there at all, as it is.
    fn as_mounted(self) -> Result<Group<'a>, Unknown> {
        for way in ends(self.way) {
            let group = Group { way, ..self };
            if group.open(MEMBERS)?.is_some() {
                return Ok(group);
            }
        }
        Ok(self)
    }

    /// Tells `look` the path of one of its files, which nothing is allocated for: the first large block of a process waits for this.
    fn at<T>(&self, file: &str, look: impl FnOnce(&CStr) -> Option<T>) -> Option<T> {
        let (mut path, mut len) = ([0; PATH_BYTES], 0);
        for part in [self.root[0], self.root[1], self.way, "/", file, "\0"] {
            path.get_mut(len..len + part.len())?.copy_from_slice(part.as_bytes());
            len += part.len();
        }
        look(CStr::from_bytes_with_nul(path.get(..len)?).ok()?)
    }

    fn open(&self, file: &str) -> Asked<File> {
        self.at(file, |path| open(path).transpose()).transpose()
    }

    /// Whether its hierarchy is mounted: where it is not, there is often an empty directory, which each sysfs has.
    fn is_seen(self) -> Result<bool, Unknown> {
        Ok(Group { way: "", ..self }.open(MEMBERS)?.is_some())
    }

    /// The least that it may have. `None`: it is not here, or nothing limits it, as the root of version 2.
    fn limit(&self) -> Asked<usize> {
        let mut least = None;
        for name in self.names.limits {
            let Some(limit) = self.number(name)? else { break };
            least = least.into_iter().chain([limit]).min();
        }
        Ok(least)
    }

    /// What one of its files says. Where there is no limit, version 2 says "max", and version 1 as much as there are addresses.
    fn number(&self, name: &str) -> Asked<usize> {
        let Some(file) = self.open(name)? else { return Ok(None) };
        let mut text = [0; 32];
        let Some(len) = read(|bytes| file.read(bytes), &mut text)? else { return Ok(None) };
        let text = text.get(..len).and_then(|text| str::from_utf8(text).ok());
        Ok(Some(text.and_then(|text| text.trim().parse().ok()).unwrap_or(NO_LIMIT)))
    }

    /// What cannot be had of a group that tells of a limit is not taken for a group without one.
    fn room(&self, limit_bytes: usize) -> Result<Room, Unknown> {
        let usage_bytes = self.number(self.names.usage)?.ok_or(Unknown::Unseen)?;
        let file = self.open("memory.stat")?.ok_or(Unknown::Unseen)?;
        let stat = text(|bytes| file.read(bytes))?.ok_or(Unknown::Unseen)?;
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let reclaimable = lines.filter(|(name, _)| self.names.reclaimable.contains(name));
        let reclaimable_bytes: usize = reclaimable.filter_map(|(_, bytes)| bytes.parse::<usize>().ok()).sum();
        let taken_bytes = usage_bytes.saturating_sub(reclaimable_bytes);
        Ok(Room { limit_bytes, free_bytes: limit_bytes.saturating_sub(taken_bytes) })
    }
}

/// The way to the process's group in the hierarchy whose controllers are meant; `groups` is what `/proc/thread-self/cgroup` says.
pub(crate) fn way(groups: &str, is_meant: impl Fn(&str) -> bool) -> Option<&str> {
    let mut ways = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    ways.find(|(controllers, _)| is_meant(controllers)).map(|(_, way)| way.trim_end_matches('/'))
}

/// A way, and what there is of it below each of the groups that it leads through, the longest first. One that leads out of what the process sees has no
/// other end.
pub(crate) fn ends(way: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(way), |way| {
        let below = way.strip_prefix('/').filter(|below| !below.starts_with("../"))?;
        below.get(below.find('/')?..)
    })
}

/// The process's group of version 2, in both places where that may be mounted: it may be beside version 1.
fn second<'a>(mounts: &'a str, groups: &'a str) -> impl Iterator<Item = Group<'a>> {
    let way = way(groups, str::is_empty);
    way.into_iter()
        .flat_map(move |way| ["", "/unified"].map(|below| Group { root: [mounts, below], way, names: SECOND }))
}

/// The group that holds the process's memory, wherever it may be mounted. One hierarchy has the controller of memory: version 2 has not what
/// version 1 has.
fn holding<'a>(mounts: &'a str, groups: &'a str) -> impl Iterator<Item = Group<'a>> {
    let first = way(groups, |controllers| controllers.split(',').any(|one| one == "memory"));
    let second = second(mounts, groups).filter(move |_| first.is_none());
    first.map(|way| Group { root: [mounts, "/memory"], way, names: FIRST }).into_iter().chain(second)
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

/// How much `read` reads into `bytes`. `None`: its group is gone. Any other failure tells of no group: the kernel reads such a file into
/// memory of the group's own, and has none just where the group has used up all.
fn read(read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>, bytes: &mut [u8]) -> Asked<usize> {
    loop {
        match read(bytes) {
            Ok(len) => return Ok(Some(len)),
            Err(Errno::INTR) => {}
            Err(Errno::NODEV) => return Ok(None),
            Err(Errno::NOMEM) => return Err(Unknown::NoMemory),
            Err(_) => return Err(Unknown::Unseen),
        }
    }
}

/// All that `reads` reads.
fn text(reads: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> Asked<String> {
    let (mut bytes, mut part) = (Vec::new(), [0; 1024]);
    loop {
        let Some(len) = read(&reads, &mut part)? else { return Ok(None) };
        bytes.try_reserve(len)?;
        bytes.extend_from_slice(part.get(..len).unwrap_or_default());
        // The kernel has all of such a text ready: it gives less than it is asked for at the end alone.
        if len < part.len() {
            return Ok(String::from_utf8(bytes).ok());
        }
    }
}

/// Those that the process is in. `/proc/self` tells of its first thread, which may have ended; but while that asks itself, it is the shorter way.
pub(super) fn groups() -> Result<String, Unknown> {
    let is_first = thread::id() == std::process::id();
    let path = if is_first { c"/proc/self/cgroup" } else { c"/proc/thread-self/cgroup" };
    let file = open(path)?.ok_or(Unknown::Unseen)?;
    text(|bytes| file.read(bytes))?.ok_or(Unknown::Unseen)
}

/// The first thing that `open` finds where the process's group would report pressure, as version 2 alone does.
pub(super) fn find_pressure<T>(open: impl Fn(&Path) -> Option<T>) -> Option<T> {
    let groups = groups().ok()?;
    second(MOUNTS, &groups).find_map(|group| {
        group.as_mounted().ok()?.at("memory.pressure", |path| open(Path::new(OsStr::from_bytes(path.to_bytes()))))
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
    each_limit_in(mounts, groups, |_, limit_bytes| {
        least = least.into_iter().chain([limit_bytes]).min();
        Ok(())
    })?;
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
    each_limit_in(mounts, groups, |group, limit_bytes| {
        see(group.room(limit_bytes)?);
        Ok(())
    })
}

/// Tells `see` of each that has a limit, and of that. A mounted hierarchy is known by a file that tells of one; it is looked for where no group
/// has such a file.
fn each_limit_in<'a>(
    mounts: &'a str,
    groups: &'a str,
    mut see: impl FnMut(Group<'a>, usize) -> Result<(), Unknown>,
) -> Result<(), Unknown> {
    for own in holding(mounts, groups) {
        let mut told = false;
        for group in own.as_mounted()?.and_around() {
            let limit = group.limit()?;
            told |= limit.is_some();
            if let Some(limit_bytes) = limit.filter(|bytes| *bytes < NO_LIMIT) {
                see(group, limit_bytes)?;
            }
        }
        if told || own.is_seen()? {
            return Ok(());
        }
    }
    Err(Unknown::Unseen)
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
        // Of what the kernel has for a group, 60, a part can be had back.
        let stat = "anon 300\nfile 5000\nkernel 60\nactive_file 4000\ninactive_file 990\nslab_reclaimable 10\n";
        let taken = [("memory.current", "5400\n"), ("memory.stat", stat)];
        let limited = |name, max, high| {
            group(mounts.path(), name, &[("memory.max", max), ("memory.high", high), taken[0], taken[1]]);
        };
        group(mounts.path(), "", &[("cgroup.procs", "")]);
        limited("a", "1000\n", "900\n");
        limited("a/b", "max\n", "600\n");
        limited("a/b/c", "max\n", "max\n");
        assert_eq!(fullest(mounts.path(), "0::/a/b/c\n"), Some((600, 200)));
        assert_eq!(fullest(mounts.path(), "0::/a\n"), Some((900, 500)));
        assert_eq!(fullest(mounts.path(), "0::/\n"), None);
        assert_eq!(limit_in(mounts.path(), "0::/a/b/c\n"), Some(600));
        assert_eq!(limit_in(mounts.path(), "0::/\n"), None);
        // Where the process's group lies elsewhere than the mount shows, what is around it still counts.
        assert_eq!(fullest(mounts.path(), "0::/a/gone\n"), Some((900, 500)));
    }

    #[test]
    fn a_group_counts_that_lies_below_the_one_where_the_mount_begins() {
        let mounts = tempfile::tempdir().unwrap();
        // As a container without a namespace of groups has it: the mount is of `/docker/ID`.
        let taken = [("memory.usage_in_bytes", "60\n"), ("memory.stat", "total_active_file 6\n")];
        for (name, limit) in [("memory", "200\n"), ("memory/system.slice", "90\n"), ("memory/system.slice/x", "80\n")] {
            let files = [("cgroup.procs", ""), ("memory.limit_in_bytes", limit), taken[0], taken[1]];
            group(mounts.path(), name, &files);
        }
        let groups = "4:memory:/docker/ID/system.slice/x\n";
        assert_eq!((fullest(mounts.path(), groups), limit_in(mounts.path(), groups)), (Some((80, 26)), Some(80)));
        assert_eq!(limit_in(mounts.path(), "4:memory:/docker/ID\n"), Some(200));
        // The way itself comes first, and one that leads out of what is mounted has no end here.
        assert_eq!(limit_in(mounts.path(), "4:memory:/system.slice\n"), Some(90));
        assert_eq!(limit_in(mounts.path(), "4:memory:/../system.slice/x\n"), Some(200));
    }

    #[test]
    fn the_version_is_looked_at_that_has_the_controller_of_memory() {
        let mounts = tempfile::tempdir().unwrap();
        let stat = "active_file 1\ntotal_active_file 6\ntotal_inactive_file 4\ntotal_active_anon 30\n";
        for (name, limit) in [("memory", "9223372036854771712\n"), ("memory/x", "80\n")] {
            let taken = [("memory.usage_in_bytes", "60\n"), ("memory.stat", stat)];
            group(mounts.path(), name, &[("memory.limit_in_bytes", limit), taken[0], taken[1]]);
        }
        let taken = [("memory.current", "95"), ("memory.stat", "active_file 5\n")];
        group(mounts.path(), "unified/y", &[("memory.max", "70"), taken[0], taken[1]]);
        let groups = "4:memory,hugetlb:/x\n3:cpu:/\n0::/y\n";
        assert_eq!((fullest(mounts.path(), groups), limit_in(mounts.path(), groups)), (Some((80, 30)), Some(80)));
        let groups = "3:cpu:/\n0::/y\n";
        assert_eq!((fullest(mounts.path(), groups), limit_in(mounts.path(), groups)), (Some((70, 0)), Some(70)));
    }

    #[test]
    fn a_hierarchy_without_limits_is_told_from_one_that_is_not_mounted() {
        let mounts = tempfile::tempdir().unwrap();
        let limit_in = |groups| super::limit_in(mounts.path().to_str().unwrap(), groups);
        for groups in ["4:memory:/x\n0::/y\n", "0::/y\n", "3:cpu:/\n", ""] {
            assert_eq!(limit_in(groups), Err(Unknown::Unseen), "{groups}");
        }
        group(mounts.path(), "unified", &[("cgroup.procs", "")]);
        assert_eq!(limit_in("0::/y\n"), Ok(None));
        // What holds no memory tells nothing of it.
        assert_eq!(limit_in("4:memory:/x\n0::/y\n"), Err(Unknown::Unseen));
        group(mounts.path(), "memory", &[("cgroup.procs", "")]);
        assert_eq!(limit_in("4:memory:/x\n0::/y\n"), Ok(None));
    }

    #[test]
    fn what_opens_and_cannot_be_read_tells_of_no_group() {
        let told = |error| text(|_| Err(error));
        assert_eq!(told(Errno::NOMEM), Err(Unknown::NoMemory));
        assert_eq!(told(Errno::IO), Err(Unknown::Unseen));
        assert_eq!(told(Errno::NODEV), Ok(None), "a group that is gone");
        // A directory opens.
        for (file, unreadable) in [("memory.stat", "memory.max"), ("memory.max", "memory.stat")] {
            let mounts = tempfile::tempdir().unwrap();
            group(mounts.path(), "a", &[("cgroup.procs", ""), (file, "9000\n")]);
            fs::create_dir(mounts.path().join("a").join(unreadable)).unwrap();
            let mut rooms = 0;
            let seen = each_room_in(mounts.path().to_str().unwrap(), "0::/a\n", |_| rooms += 1);
            assert_eq!((seen, rooms), (Err(Unknown::Unseen), 0), "{unreadable}");
        }
    }

    #[test]
    fn a_limit_beside_which_nobody_says_what_is_taken_is_not_taken_for_none() {
        for told in ["memory.stat", "memory.current", ""] {
            let mounts = tempfile::tempdir().unwrap();
            group(mounts.path(), "a", &[("cgroup.procs", ""), ("memory.max", "9000\n")]);
            if !told.is_empty() {
                group(mounts.path(), "a", &[(told, "9000\n")]);
            }
            let mut rooms = 0;
            let seen = each_room_in(mounts.path().to_str().unwrap(), "0::/a\n", |_| rooms += 1);
            assert_eq!((seen, rooms), (Err(Unknown::Unseen), 0), "{told}");
        }
    }

    #[test]
    fn a_text_is_read_to_its_end() {
        for len in [0, 1, 1023, 1024, 1025, 5000] {
            let mounts = tempfile::tempdir().unwrap();
            let path = mounts.path().join("text");
            fs::write(&path, "x".repeat(len)).unwrap();
            let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            let file = open(&path).unwrap().unwrap();
            assert_eq!(text(|bytes| file.read(bytes)), Ok(Some("x".repeat(len))));
        }
    }
}
