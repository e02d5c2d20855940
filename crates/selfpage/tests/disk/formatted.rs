//! Disks with a file system of their own: behind each is a file on one of memory.

use std::ffi::OsStr;
use std::fs::{File, create_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::skip::skip;

/// Which file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Ext4,
    Xfs,
    Btrfs,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
        }
    }

    /// What makes one, and what is to be installed for that.
    const fn made_by(self) -> (&'static str, &'static [&'static str], &'static str) {
        match self {
            Kind::Ext4 => {
                ("mkfs.ext4", &["-q", "-F", "-b4096", "-O^has_journal", "-Elazy_itable_init=0"], "install e2fsprogs")
            }
            Kind::Xfs => ("mkfs.xfs", &["-q", "-f"], "install xfsprogs"),
            Kind::Btrfs => ("mkfs.btrfs", &["-q", "-f"], "install btrfs-progs"),
        }
    }

    /// How long a disk of it is: little more than the least that it takes.
    const fn disk_bytes(self) -> u64 {
        match self {
            Kind::Ext4 => 32 << 20,
            Kind::Xfs => 320 << 20,
            Kind::Btrfs => 128 << 20,
        }
    }

    /// What a test without it lacks.
    const fn lack(self) -> &'static str {
        match self {
            Kind::Ext4 => "mount",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
        }
    }
}

/// Whether a program did what it was to.
pub fn done(program: &str, arguments: &[&OsStr]) -> bool {
    let ended = Command::new(program).args(arguments).output();
    ended.is_ok_and(|ended| ended.status.success())
}

/// Mounts a disk with such a file system below `dir`. The memory behind it has room for so many bytes of it. `None`: it cannot be had here,
/// and that is said.
pub fn mount(kind: Kind, dir: &Path, room_bytes: usize) -> Option<PathBuf> {
    let image = image(kind, dir, room_bytes)?;
    let disk = dir.join("disk");
    create_dir(&disk).unwrap();
    if !done("mount", &["-oloop".as_ref(), image.as_os_str(), disk.as_os_str()]) {
        return lacks(kind, kind.lack(), "the kernel has no loop devices, or not this file system");
    }
    Some(disk)
}

/// What is on such a disk, in a file.
pub fn image(kind: Kind, dir: &Path, room_bytes: usize) -> Option<PathBuf> {
    let memory = dir.join("memory");
    create_dir(&memory).unwrap();
    if crate::disk::mount(&memory, room_bytes).is_err() {
        return lacks(kind, "mount", "run as root");
    }
    let image = memory.join("image");
    File::create(&image).unwrap().set_len(kind.disk_bytes()).unwrap();
    let (program, options, remedy) = kind.made_by();
    let options: Vec<&OsStr> = options.iter().map(OsStr::new).chain([image.as_os_str()]).collect();
    if done(program, &options) { Some(image) } else { lacks(kind, kind.lack(), remedy) }
}

fn lacks(kind: Kind, lack: &str, remedy: &str) -> Option<PathBuf> {
    skip(lack, &format!("there is no disk with {}: {remedy}", kind.name()));
    None
}
