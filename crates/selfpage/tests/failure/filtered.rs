//! A filter on system calls that comes after the domain: what it forbids fails with a line and a signal, and nobody waits for ever.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use selfpage::pager::UserPager;
use selfpage::snapshot::Snapshots;
use selfpage::store::{FileStore, MemoryStore};
use selfpage::{Answer, Domain, FaultHandler, FileAccess, MemoryFault, PageBytes, Protection, Region, Trap};

use crate::child::forked;
use crate::filter::Call;
use crate::formatted::Kind as FileSystem;
use crate::locked_file::on_ramfs;
use crate::own_file::{numbered as numbered_file, on};
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages, until};
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
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
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

/// It goes by way of the page cache then, as where the lock is taken.
#[test]
fn a_filter_that_forbids_what_files_are_written_by_past_their_lock() {
    for (trap, name) in TRAPS {
        for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES] {
            in_child(here!(), &format!("{name} {errno}"), || {
                let dir = tempfile::tempdir_in("/var/tmp").unwrap();
                let path = numbered_file(&dir, 4 * FRAMES);
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
                // No filter sees what io_uring is asked for.
                Call::any(libc::SYS_io_uring_enter).fails_everywhere(libc::EPERM).unwrap();
                Call::any(libc::SYS_pwritev2).fails_everywhere(errno).unwrap();
                limit_time();
                for page in region.as_mut_slice::<[u64; 512]>() {
                    page[511] += 1;
                }
                region.flush(0, region.len_bytes()).unwrap();
                let written = std::fs::read(&path).unwrap();
                for (index, page) in written.chunks_exact(PAGE).enumerate() {
                    let [first, last] =
                        [0, PAGE - 8].map(|at| u64::from_le_bytes(page[at..at + 8].try_into().unwrap()));
                    assert_eq!((first, last), (index as u64 + 1, index as u64 + 2), "page {index}");
                }
            })
            .well();
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

fn is_ended_by_a_filter() {
    // SAFETY: test: a call without arguments.
    unsafe { libc::getppid() };
}

fn ends_itself() {
    // SAFETY: test: ends this thread alone.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

/// As a filter that kills threads has it (`SECCOMP_RET_KILL_THREAD`), which they have from whoever made the region; or by a bare exit(2).
#[test]
fn a_thread_for_handlers_that_ends_in_one_refuses_the_access() {
    let ways: [(fn(), &str); 2] = [(is_ended_by_a_filter, "filter"), (ends_itself, "exit")];
    for (ends, name) in ways {
        let said = in_child(here!(), name, || {
            tried::catch();
            limit_time();
            // The thread that makes the first access has the filter as well, and makes no such call.
            Call::any(libc::SYS_getppid).ends_its_thread().unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let handler = move |fault: &MemoryFault<'_>| {
                if fault.offset_bytes() >= 2 * PAGE {
                    return unprotect(fault);
                }
                ends();
                Answer::Handled
            };
            let store = MemoryStore::new(1 << 20).unwrap();
            let mut region = domain.region(4 * PAGE).name("heap").handler(handler).stored(store).unwrap();
            number_pages(&mut region);
            region.protect(0, region.len_bytes(), Protection::Read).unwrap();
            for page in 0..2 {
                assert_eq!(tried::write(tried::word(&region, page), 6), Err(libc::SIGSEGV), "page {page}");
            }
            // Others are answered as before.
            assert_eq!(tried::write(tried::word(&region, 2), 3), Ok(()));
            check_pages(&region, 0..pages(&region));
            drop((region, domain));
            let is_one = |task: std::io::Result<std::fs::DirEntry>| {
                let name = task.and_then(|task| std::fs::read_to_string(task.path().join("comm")));
                name.is_ok_and(|name| name.contains("handler"))
            };
            until("no thread for handlers is left", || !std::fs::read_dir("/proc/self/task").unwrap().any(is_one));
        });
        if let Some(said) = said.and_said() {
            assert!(["heap", "seccomp", "SIGSEGV"].iter().all(|word| said.contains(word)), "{said}");
        }
    }
}

/// The thread that has ended was to answer what another handler has met: that one goes on.
#[test]
fn a_handler_goes_on_whose_own_access_a_thread_has_ended_on() {
    in_child(here!(), "", || {
        tried::catch();
        limit_time();
        let handler = |fault: &MemoryFault<'_>| match fault.offset_bytes() / PAGE {
            0 => {
                assert_eq!(tried::write((fault.address() + PAGE) as *mut u64, 6), Err(libc::SIGSEGV));
                unprotect(fault)
            }
            _ => {
                ends_itself();
                Answer::Handled
            }
        };
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let region = domain.region(2 * PAGE).handler(handler).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        region.protect(0, region.len_bytes(), Protection::Read).unwrap();
        assert_eq!(tried::write(tried::word(&region, 0), 3), Ok(()));
        assert_eq!(tried::read(tried::word(&region, 0)), Ok(3));
    })
    .well();
}

/// It passes every page: that of the first one's first fault on a thread that ends as it hands that on, and the second one's when it has
/// read the third.
#[derive(Default)]
struct PassesAndEnds {
    has_ended_one: AtomicBool,
}

impl FaultHandler for PassesAndEnds {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        match fault.offset_bytes() / PAGE {
            0 if !self.has_ended_one.swap(true, SeqCst) => {
                Call::any(libc::SYS_rt_sigprocmask).ends_its_thread().unwrap();
            }
            1 => assert_eq!(tried::read((fault.address() + PAGE) as *const u64), Ok(3)),
            _ => {}
        }
        Answer::Pass
    }

    fn asks_first(&self) -> bool {
        true
    }
}

/// Pages that begin with their numbers plus one.
struct Numbers;

impl UserPager for Numbers {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        bytes[0] = index as u8 + 1;
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// Its handler has done all that it was to do.
#[test]
fn a_page_comes_that_a_handler_has_passed_whose_thread_ends_then() {
    let said = in_child(here!(), "", || {
        tried::catch();
        limit_time();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let builder = domain.region(3 * PAGE).name("heap").handler(PassesAndEnds::default());
        let region = builder.user(Numbers).unwrap();
        for page in 0..3 {
            assert_eq!(tried::read(tried::word(&region, page)), Ok(page as u64 + 1), "page {page}");
        }
    });
    if let Some(said) = said.and_said() {
        assert!(!said.contains("heap"), "{said}");
    }
}

/// As such a kernel answers, up to Linux 6.15.
#[test]
fn a_kernel_without_huge_pages() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let advice = libc::MADV_NOHUGEPAGE as u32;
            Call::with(libc::SYS_madvise, 2, advice).fails_everywhere(libc::EINVAL).unwrap();
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let builder = domain.region(256 * PAGE).trap(trap);
            let mut region = builder.stored(MemoryStore::new(1 << 24).unwrap()).unwrap();
            number_pages(&mut region);
            forked(|| check_pages(&region, 0..256));
            check_pages(&region, 0..256);
        })
        .well();
    }
}
