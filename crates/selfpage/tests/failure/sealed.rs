//! The program seals a region's mapping (`mseal`, Linux 6.10): it cannot be unmapped, protected or mapped over any more.

use std::ops::Range;

use selfpage::store::MemoryStore;
use selfpage::{Domain, FileAccess, Protection, Region, Trap};

use crate::child::forked;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::skip::skip;
use crate::tried;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

fn numbered(domain: &Domain, trap: Trap) -> Region {
    let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
    number_pages(&mut region);
    region
}

/// Whether it could be done.
pub fn seal(region: &Region) -> bool {
    seal_pages(region, 0..pages(region))
}

/// The same for some of its pages.
fn seal_pages(region: &Region, pages: Range<usize>) -> bool {
    const SYS_MSEAL: libc::c_long = 462;
    let at = region.as_ptr().wrapping_add(pages.start * PAGE);
    // SAFETY: test: memory of the region.
    let sealed = unsafe { libc::syscall(SYS_MSEAL, at, pages.len() * PAGE, 0) } == 0;
    if !sealed {
        skip("mseal", "the kernel is older than 6.10");
    }
    sealed
}

/// A worker can have the kernel send the signal only by the mapping: that cannot be protected, so the page goes.
#[track_caller]
fn refused(trap: Trap, access: Result<(), libc::c_int>) {
    let signals = if trap == Trap::Upcall { &[libc::SIGSEGV][..] } else { &[libc::SIGSEGV, libc::SIGBUS] };
    assert!(access.is_err_and(|signal| signals.contains(&signal)), "{access:?}");
}

#[test]
fn its_pages_go_and_come_and_its_frames_are_given_back() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = numbered(&domain, trap);
            if !seal(&region) {
                return;
            }
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
            let word = region.as_ptr().wrapping_add(64).cast::<u64>();
            region.protect(0, PAGE, Protection::Read).unwrap();
            assert_eq!(tried::read(word), Ok(0));
            refused(trap, tried::write(word, 1));
            region.protect(0, PAGE, Protection::ReadWrite).unwrap();
            if trap == Trap::Upcall {
                assert_eq!(tried::write(word, 1), Ok(()));
            }
            check_pages(&region, 1..pages(&region));
            region.discard(PAGE, PAGE).unwrap();
            assert_eq!(region.as_slice::<[u64; 512]>()[1][0], 0);
            drop(region);
            // All frames are there for others.
            let others = domain.region((FRAMES - 8) * PAGE).pinned().unwrap();
            assert!(others.as_slice::<u64>().iter().all(|word| *word == 0));
            drop(others);
            let next = numbered(&domain, trap);
            check_pages(&next, 0..pages(&next));
        })
        .well();
    }
}

#[test]
fn a_write_where_it_may_only_be_read() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            std::fs::write(file.path(), vec![1; 4 * FRAMES * PAGE]).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = domain.region(0).trap(trap).file(file.path(), 0, FileAccess::Read).unwrap();
            if !seal(&region) {
                return;
            }
            refused(trap, tried::write(region.as_ptr().cast(), 2));
            assert!(region.as_slice::<u8>()[PAGE..].iter().all(|byte| *byte == 1));
        })
        .well();
    }
}

/// A child that no handler of forks knew of, which reads a word of the region. How it ended.
fn bare_child_reads(region: &Region, page: usize) -> i32 {
    let word = region.as_ptr().wrapping_add(page * PAGE).cast::<u64>();
    // SAFETY: test: the child reads the word, or a signal ends it there, and it ends.
    unsafe {
        let child = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as libc::pid_t;
        if child == 0 {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            word.read_volatile();
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    }
}

/// What nobody may write the kernel keeps in children for good, once a fork has given it to one. All else is kept from those of bare clones.
#[test]
fn a_fork_where_what_is_sealed_may_not_be_written() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = numbered(&domain, trap);
            // Two mappings of it, and others around and between.
            for part in [20..30, 40..50] {
                let at = region.as_ptr().wrapping_add(part.start * PAGE);
                // SAFETY: test: memory of the region, which is only read from here on.
                assert_eq!(unsafe { libc::mprotect(at.cast(), part.len() * PAGE, libc::PROT_READ) }, 0);
                if !seal_pages(&region, part) {
                    return;
                }
            }
            let is_kept = |what: &str| {
                for page in [0, 19, 30, 39, 50, 4 * FRAMES - 1] {
                    assert_eq!(bare_child_reads(&region, page), libc::SIGSEGV, "page {page}, {what}");
                }
            };
            is_kept("before all forks");
            for _ in 0..2 {
                forked(|| {
                    is_kept("in a child");
                    check_pages(&region, 0..pages(&region));
                    forked(|| check_pages(&region, 0..pages(&region)));
                });
                is_kept("after a fork");
                check_pages(&region, 0..pages(&region));
            }
        })
        .well();
    }
}
