//! The descriptors that a domain works through: its userfaultfds, and what the kernel tells of its memory.

use std::os::fd::RawFd;

use selfpage_core::linux::Errno;
use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::mmu::Descriptors;
use selfpage_core::linux::pagemap::Pagemap;
use selfpage_core::linux::uffd::{Features, Reach, Reading, Uffd};

use crate::config::Settings;
use crate::doctor::limits::unfilter;
use crate::doctor::userfaultfd as remedy;
use crate::error::{Error, Kind, Result, SystemError};
use crate::store::{raised, release_number};

/// How the kernel calls what the domain's descriptors name.
const OURS: [&str; 3] = ["anon_inode:[userfaultfd]", "/mem", "/pagemap"];

const MEMORY: &str = "/proc/thread-self/mem";

/// Whether a child that were forked now could open its memory. A process that is not dumpable may not, and to make the child dumpable
/// meanwhile would be to open it to others just then.
pub(crate) fn memory_can_be_opened() -> Result<()> {
    let opened = Descriptor::open_memory().map_err(|errno| Error::system("open", MEMORY, errno))?;
    let _ = opened.close();
    Ok(())
}

/// Whether a child that were forked now could have its faults told, by system calls too where the domain needs that.
pub(crate) fn faults_can_be_told(config: &Settings) -> Result<()> {
    let reach = if config.needs_system_calls { Reach::EveryFault } else { Reach::UserFaults };
    let opened = Uffd::open(reach, Reading::Polls).map_err(|errno| no_userfaultfd(reach, errno))?;
    let _ = opened.0.close();
    Ok(())
}

/// Opens a domain's descriptors, or none.
pub(crate) fn open(config: &Settings) -> Result<(Descriptors, Reach)> {
    let mut opened = Vec::new();
    open_into(&mut opened, config).inspect_err(|_| close_all(&opened))
}

fn close_all(descriptors: &[Descriptor]) {
    for descriptor in descriptors {
        let _ = descriptor.close();
        release_number(descriptor.raw());
    }
}

fn open_into(opened: &mut Vec<Descriptor>, config: &Settings) -> Result<(Descriptors, Reach)> {
    let mut open = |reach, features: Features| -> Result<Uffd> {
        let uffd = Uffd(raised(Uffd::open(reach, Reading::Polls).map_err(|errno| no_userfaultfd(reach, errno))?.0));
        opened.push(uffd.0);
        uffd.agree(features).map_err(|errno| not_agreed("UFFDIO_MOVE", remedy::NEWER_6_8, errno))?;
        Ok(uffd)
    };
    let moves = Features::MOVE.and(Features::POISON).and(Features::WP);
    // A kernel with UFFDIO_MOVE has WP_ASYNC too. Nothing protects slots, but a page that is swapped out takes its protection along.
    let pool = open(Reach::UserFaults, moves.and(Features::WP_ASYNC))?;
    let upcall = open(Reach::UserFaults, moves.and(Features::SIGBUS))?;
    let worker_features = moves.and(Features::THREAD_ID).and(Features::EXACT_ADDRESS);
    let (worker, reach) = match open(Reach::EveryFault, worker_features) {
        Ok(uffd) => (uffd, Reach::EveryFault),
        Err(error) if config.needs_system_calls => return Err(error),
        Err(_) => (open(Reach::UserFaults, worker_features)?, Reach::UserFaults),
    };
    let tracked_worker = open(reach, worker_features.and(Features::WP_ASYNC))?;
    let tracked_upcall = open(Reach::UserFaults, moves.and(Features::SIGBUS).and(Features::WP_ASYNC))?;
    let mut high = |descriptor: std::result::Result<Descriptor, Errno>, object: &str| -> Result<Descriptor> {
        let descriptor = raised(descriptor.map_err(|errno| Error::system("open", object, errno))?);
        opened.push(descriptor);
        Ok(descriptor)
    };
    let memory = high(Descriptor::open_memory(), MEMORY)?;
    let pagemap = Pagemap(high(Descriptor::open_pagemap(), "/proc/thread-self/pagemap")?);
    Ok((Descriptors { pool, worker, upcall, tracked_worker, tracked_upcall, memory, pagemap }, reach))
}

/// Why a userfaultfd cannot be had with `feature`, which the kernels of `newer` have. One that lacks it says so in one way alone.
pub(crate) fn not_agreed(feature: &str, newer: &str, errno: Errno) -> Error {
    const CALL: &str = "ioctl(UFFDIO_API)";
    let cause = match errno {
        Errno::INVAL => format!("this kernel has no {feature} ({errno:?}); {newer}"),
        _ => format!("{CALL} refused ({}); {}", SystemError::into_io(errno), unfilter(CALL)),
    };
    Error::new(Kind::Unsupported, "use", "userfaultfd", cause)
}

pub(crate) fn no_userfaultfd(reach: Reach, errno: Errno) -> Error {
    let why = SystemError::into_io(errno);
    if matches!(why.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
        return Error::system("open", "userfaultfd", errno);
    }
    let cause = match (errno, reach) {
        (Errno::NOSYS, _) => format!("this kernel has none ({why}); {}", remedy::BUILD),
        // It has no flag for them.
        (Errno::INVAL, Reach::UserFaults) => format!("this kernel is too old ({why}); {}", remedy::NEWER_6_8),
        (_, Reach::UserFaults) => format!("refused ({why}); {}", remedy::UNFILTER),
        (_, Reach::EveryFault) => format!(
            "faults inside system calls cannot be served ({why}); {}, or give the program CAP_SYS_PTRACE \
             (`selfpage run`: as an ambient capability, by setpriv --inh-caps +sys_ptrace --ambient-caps +sys_ptrace), or the right to \
             open /dev/userfaultfd",
            remedy::ALLOW
        ),
    };
    Error::new(Kind::Unsupported, "open", "userfaultfd", cause)
}

/// Their numbers.
pub(crate) fn numbers(descriptors: &Descriptors) -> [RawFd; 7] {
    let [pool, worker, upcall, tracked_worker, tracked_upcall] = descriptors.userfaultfds();
    let Descriptors { memory, pagemap, .. } = *descriptors;
    [pool, worker, upcall, tracked_worker, tracked_upcall, memory, pagemap.0].map(Descriptor::raw)
}

/// Closes them, where the program has them and has not closed them itself.
pub(crate) fn close_ours(descriptors: &Descriptors) {
    numbers(descriptors).into_iter().for_each(close_number);
}

/// Closes one.
pub(crate) fn close_number(number: RawFd) {
    // The program may have closed ours, and opened its own at the number. `/proc/self` shows none where the first thread has ended.
    let names = std::fs::read_link(format!("/proc/thread-self/fd/{number}")).unwrap_or_default();
    if OURS.iter().any(|end| names.as_os_str().as_encoded_bytes().ends_with(end.as_bytes())) {
        let _ = Descriptor::from_raw(number).close();
    }
    release_number(number);
}
