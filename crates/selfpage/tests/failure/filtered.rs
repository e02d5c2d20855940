//! A filter on system calls that comes after the domain: what it forbids fails with a line and a signal, and nobody waits for ever.

use selfpage::snapshot::Snapshots;
use selfpage::store::{FileStore, MemoryStore};
use selfpage::{Answer, Domain, FileAccess, MemoryFault, Protection, Region, Trap};

use crate::filter::Call;
use crate::formatted::Kind as FileSystem;
use crate::locked_file::on_ramfs;
use crate::own_file::{numbered as numbered_file, on};
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::tried;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];
const MOVE: Call = Call::with(libc::SYS_ioctl, 1, 0xc028_aa05);
const WRITE_PROTECT: Call = Call::with(libc::SYS_ioctl, 1, 0xc018_aa06);
const EVERY_IOCTL: Call = Call::any(libc::SYS_ioctl);

/// Ends this process by a signal of its own where it would wait for ever.
fn limit_time() {
    // SAFETY: test: a number.
    unsafe { libc::alarm(10) };
}

fn numbered(domain: &Domain, len_pages: usize, trap: Trap) -> Region {
    let store = MemoryStore::new(1 << 20).unwrap();
    let mut region = domain.region(len_pages * PAGE).name("heap").trap(trap).stored(store).unwrap();
    number_pages(&mut region);
    region
}

#[test]
fn a_filter_that_forbids_moves() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = numbered(&domain, 4 * FRAMES, trap);
            // Frames are there: it is the fill that meets the filter, and not the evictor.
            region.evict(0, region.len_bytes()).unwrap();
            region.flush(0, region.len_bytes()).unwrap();
            MOVE.fails_everywhere(libc::EPERM).unwrap();
            check_pages(&region, 0..pages(&region));
        })
        .by(libc::SIGBUS, &["heap", "the kernel refused", "seccomp"]);
    }
}

/// Another one than those that map pages, on which the kernel's errno comes as any disk's would.
#[test]
fn a_filter_that_forbids_what_a_store_reads_and_writes_by() {
    for (call, name) in [(libc::SYS_preadv, "read"), (libc::SYS_pwritev, "write")] {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = FileStore::unnamed_in("/var/tmp", 1 << 20).unwrap();
            // The longest that the line has room for, and more.
            let mut region = domain.region(4 * FRAMES * PAGE).name(&"heap".repeat(60)).stored(store).unwrap();
            if name == "read" {
                number_pages(&mut region);
            }
            // Where there is io_uring, a filter of it comes first.
            Call::any(libc::SYS_io_uring_enter).fails_everywhere(libc::EPERM).unwrap();
            Call::any(call).fails_everywhere(libc::EPERM).unwrap();
            limit_time();
            number_pages(&mut region);
            check_pages(&region, 0..pages(&region));
        })
        .by(libc::SIGBUS, &["heap", "EPERM", "seccomp", "process_vm_readv", "allow them\n"]);
    }
}

/// They are only wanted where somebody might hold the lock.
#[test]
fn a_filter_that_forbids_what_files_are_read_by_past_their_lock() {
    for (trap, name) in TRAPS {
        for errno in [libc::EPERM, libc::ENOSYS] {
            for disk in ["ramfs", "xfs"] {
                in_child(here!(), &format!("{name} {disk} {errno}"), || {
                    let dir = if disk == "ramfs" { on_ramfs() } else { on(FileSystem::Xfs) };
                    let Some(dir) = dir else { return };
                    let path = numbered_file(&dir, 4 * FRAMES);
                    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                    let region = domain.region(0).trap(trap).file(&path, 0, FileAccess::Read).unwrap();
                    Call::any(libc::SYS_process_vm_readv).fails_everywhere(errno).unwrap();
                    limit_time();
                    for (index, page) in region.as_slice::<[u64; 512]>().iter().enumerate() {
                        assert_eq!((page[0], page[511]), (index as u64 + 1, index as u64 + 1));
                    }
                })
                .well();
            }
        }
    }
}

/// What protects the pages of a region against writes, without a handler of the program's.
#[derive(Clone, Copy, Debug)]
enum Armed {
    Snapshot,
    Clone,
}

/// Has `then` use a region whose pages are armed.
fn with_armed(armed: Armed, trap: Trap, then: impl FnOnce(&mut Region)) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut region = numbered(&domain, FRAMES / 4, trap);
    match armed {
        Armed::Snapshot => {
            let folder = tempfile::tempdir().unwrap();
            let mut snapshots = Snapshots::of(&[&region], folder.path().join("snapshot")).unwrap();
            snapshots.take().unwrap();
            then(&mut region);
        }
        Armed::Clone => {
            let _clone = region.cow_clone(MemoryStore::new(1 << 20).unwrap()).unwrap();
            then(&mut region);
        }
    }
}

#[test]
fn a_write_whose_page_cannot_be_made_writable_again_is_refused() {
    for (trap, name) in TRAPS {
        for armed in [Armed::Snapshot, Armed::Clone] {
            in_child(here!(), &format!("{name} {armed:?}"), || {
                with_armed(armed, trap, |region| {
                    WRITE_PROTECT.fails_everywhere(libc::EPERM).unwrap();
                    limit_time();
                    region.as_mut_slice::<u64>()[1] = 6;
                });
            })
            .by(
                if trap == Trap::Worker { libc::SIGSEGV } else { libc::SIGBUS },
                &["heap", "the kernel refused", "seccomp"],
            );
        }
    }
}

/// Nor by several threads at once; and what the page holds can be read on.
#[test]
fn a_page_keeps_its_contents_where_writes_to_it_are_refused() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            with_armed(Armed::Snapshot, trap, |region| {
                WRITE_PROTECT.fails_everywhere(libc::EPERM).unwrap();
                limit_time();
                let at = |page: usize| (region.as_ptr().addr() + page * PAGE + 8) as *mut u64;
                std::thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| {
                            for page in 0..pages(region) {
                                assert!(tried::write(at(page), 6).is_err(), "page {page}");
                                assert_eq!(tried::read(at(page)), Ok(0));
                            }
                        });
                    }
                });
                check_pages(region, 0..pages(region));
            });
        })
        .well();
    }
}

fn unprotect(fault: &MemoryFault<'_>) -> Answer {
    match fault.protect_page(Protection::ReadWrite) {
        Ok(()) => Answer::Handled,
        Err(_) => Answer::Refuse,
    }
}

/// The usual filter names calls and no requests. A worker cannot even tell a stopped thread that it is to try again.
#[test]
fn a_filter_that_forbids_every_ioctl() {
    const SAID: &[&str] = &["heap", "the kernel refused", "seccomp"];
    for (trap, name) in TRAPS {
        let signal = if trap == Trap::Worker { libc::SIGABRT } else { libc::SIGBUS };
        in_child(here!(), &format!("{name} absent"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = numbered(&domain, FRAMES / 4, trap);
            region.flush(0, region.len_bytes()).unwrap();
            region.evict(0, region.len_bytes()).unwrap();
            EVERY_IOCTL.fails_everywhere(libc::EPERM).unwrap();
            limit_time();
            check_pages(&region, 0..pages(&region));
        })
        .by(signal, SAID);
        in_child(here!(), &format!("{name} armed"), || {
            with_armed(Armed::Snapshot, trap, |region| {
                EVERY_IOCTL.fails_everywhere(libc::EPERM).unwrap();
                limit_time();
                region.as_mut_slice::<u64>()[1] = 6;
            });
        })
        .by(signal, SAID);
        in_child(here!(), &format!("{name} protected"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = MemoryStore::new(1 << 20).unwrap();
            let mut region = domain.region(4 * PAGE).trap(trap).handler(unprotect).stored(store).unwrap();
            number_pages(&mut region);
            region.protect(0, PAGE, Protection::Read).unwrap();
            EVERY_IOCTL.fails_everywhere(libc::EPERM).unwrap();
            limit_time();
            region.as_mut_slice::<u64>()[1] = 6;
        })
        .by(
            if trap == Trap::Worker { libc::SIGABRT } else { libc::SIGSEGV },
            if trap == Trap::Worker { &["seccomp", "UFFDIO_WAKE"] } else { &[] },
        );
    }
}

/// What it starts has the filter as well, and ends at a call that threads for handlers make as they begin.
#[test]
fn a_filter_that_ends_threads_for_handlers_as_they_begin() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        Call::with(libc::SYS_prctl, 0, libc::PR_SET_NAME as u32).ends_its_thread().unwrap();
        limit_time();
        let why = domain.region(PAGE).handler(unprotect).zero().unwrap_err();
        assert!(["handlers", "seccomp"].iter().all(|word| why.to_string().contains(word)), "{why}");
        drop(domain);
    })
    .well();
}
