//! Where saved pages would go by default, and how.

use std::os::fd::OwnedFd;

use super::limits::untold;
use super::{Finding, State, name, probed, readable, setting};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open, statvfs};
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2, pwrite, pwritev2};
use selfpage_core::linux::limit::{self, Resource};
use selfpage_core::linux::probe::{Answer, Shortfall};

use crate::store::page_cache;

/// Where a store goes that has no path: unlike `/tmp`, a disk on every distribution.
const DIRECTORY: &str = "/var/tmp";
/// Less than this is soon full.
const SPACE_MIN_BYTES: u64 = 1 << 30;

/// A line for each feature.
pub(super) fn examine() -> Vec<Finding> {
    let (reads, writes) = without_waiting();
    vec![
        io_uring(),
        probed(
            "preadv2",
            reads,
            "files are read past the page cache",
            "files are read by way of the page cache, and cached twice",
            "allow preadv2 in the container's seccomp profile",
        ),
        probed(
            "pwritev2",
            writes,
            "changed pages of files are saved past the page cache",
            "changed pages of files are saved by way of the page cache where io_uring does not do it, and cached twice",
            "allow pwritev2 in the container's seccomp profile",
        ),
        direct(),
        space(),
    ]
}

fn io_uring() -> Finding {
    const FEATURE: &str = "io_uring";
    let Err(why) = io_uring::IoUring::new(8) else {
        return Finding::new(FEATURE, State::Present, "many pages are read and written in one system call");
    };
    let disabled = setting("/proc/sys/kernel/io_uring_disabled").filter(|mode| mode != "0");
    let (cause, remedy) = match (why.raw_os_error(), disabled) {
        (_, Some(mode)) => (format!("{why}; kernel.io_uring_disabled={mode}"), "sysctl -w kernel.io_uring_disabled=0"),
        (Some(libc::EPERM), None) => (
            format!("{why}, by a seccomp filter"),
            "docker run --security-opt seccomp=unconfined, or a profile that allows io_uring",
        ),
        (Some(libc::ENOMEM), None) => (why.to_string(), "ulimit -l unlimited"),
        _ => (why.to_string(), "boot a kernel built with CONFIG_IO_URING=y"),
    };
    let state = if why.raw_os_error() == Some(libc::EPERM) { State::Refused } else { State::Absent };
    Finding::new(FEATURE, state, format!("{cause}; threads with pread and pwrite stand in")).remedy(remedy)
}

/// Whether reads and writes can be told not to wait. Of nothing, no file refuses them.
fn without_waiting() -> (Answer, Answer) {
    let refused = |why: Errno| Shortfall::Refused(selfpage_core::linux::Errno::from_raw_os_error(why.raw_os_error()));
    match memfd_create("selfpage-doctor", MemfdFlags::CLOEXEC).or_else(|_| open_nameless(OFlags::empty())) {
        Err(why) => (Err(refused(why)), Err(refused(why))),
        Ok(file) => (
            preadv2(&file, &mut [], 0, ReadWriteFlags::NOWAIT).map(drop).map_err(refused),
            pwritev2(&file, &[], 0, ReadWriteFlags::NOWAIT).map(drop).map_err(refused),
        ),
    }
}

/// A file without a name, on disk.
fn open_nameless(flags: OFlags) -> Result<OwnedFd, Errno> {
    open(DIRECTORY, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | flags, Mode::RUSR | Mode::WUSR)
}

/// A page where direct I/O can reach it.
#[repr(align(4096))]
struct Page([u8; 4096]);

/// Writes a page past the page cache into a file without a name, and reads it back.
fn write_directly() -> Result<(), Errno> {
    let file = open_nameless(OFlags::DIRECT)?;
    let (written, mut read) = (Page([0xA5; 4096]), Page([0; 4096]));
    let whole = pwrite(&file, &written.0, 0)? == 4096 && pread(&file, &mut read.0, 0)? == 4096;
    if whole && read.0 == written.0 { Ok(()) } else { Err(Errno::IO) }
}

fn direct() -> Finding {
    const FEATURE: &str = "O_DIRECT";
    // Beyond the limit the kernel would send SIGXFSZ.
    match limit::of_this_process(Resource::FileSize) {
        Err(_) => return untold(FEATURE),
        Ok(Some(limit_bytes)) if limit_bytes < size_of::<Page>() as u64 => {
            let why = format!("files may have {limit_bytes} bytes: nothing can be stored in {DIRECTORY}");
            return Finding::new(FEATURE, State::Absent, why)
                .remedy("raise `ulimit -f`, or selfpage run --store memory");
        }
        Ok(_) => {}
    }
    if let Ok(file) = open_nameless(OFlags::empty())
        && page_cache::is_always_cached(&file)
    {
        let why = match page_cache::is_memory(&file) {
            true => format!("{DIRECTORY} is memory; pages that are saved there stay in it, beside the frames"),
            false => format!("files in {DIRECTORY} are cached whatever is asked for; a store there is cached twice"),
        };
        return Finding::new(FEATURE, State::Degraded, why).remedy("selfpage run --store PATH, with PATH on a disk");
    }
    match write_directly() {
        Ok(()) => Finding::new(FEATURE, State::Present, format!("stores in {DIRECTORY} go past the page cache")),
        Err(why) => {
            let state =
                if matches!(why, Errno::ACCESS | Errno::PERM | Errno::ROFS) { State::Refused } else { State::Absent };
            Finding::new(
                FEATURE,
                state,
                format!(
                    "{} in {DIRECTORY}; a store there does not work or is cached twice",
                    name(selfpage_core::linux::Errno::from_raw_os_error(why.raw_os_error()))
                ),
            )
            .remedy(match why {
                Errno::NOSPC | Errno::DQUOT => {
                    "make room there, or selfpage run --store PATH, with PATH on another disk"
                }
                _ => "selfpage run --store PATH, with PATH on ext4, XFS or Btrfs",
            })
        }
    }
}

fn space() -> Finding {
    const FEATURE: &str = "store space";
    const ELSEWHERE: &str = "selfpage run --store PATH, with PATH on a disk with more room";
    match statvfs(DIRECTORY) {
        Err(why) => Finding::new(
            FEATURE,
            State::Absent,
            format!("{DIRECTORY}: {}", name(selfpage_core::linux::Errno::from_raw_os_error(why.raw_os_error()))),
        )
        .remedy(ELSEWHERE),
        Ok(disk) if disk.f_blocks == 0 => {
            Finding::new(FEATURE, State::Present, format!("any, as far as {DIRECTORY} says"))
        }
        Ok(disk) => {
            let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
            let why = format!("{} free in {DIRECTORY}", readable(free_bytes));
            if free_bytes >= SPACE_MIN_BYTES {
                Finding::new(FEATURE, State::Present, why)
            } else {
                Finding::new(FEATURE, State::Degraded, why).remedy(ELSEWHERE)
            }
        }
    }
}
