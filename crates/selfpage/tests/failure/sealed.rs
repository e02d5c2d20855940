//! The program seals a region's mapping (`mseal`, Linux 6.10): it cannot be unmapped, protected or mapped over any more.

use selfpage::store::MemoryStore;
use selfpage::{Domain, Protection, Region, Rights, Trap};

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
fn seal(region: &Region) -> bool {
    const SYS_MSEAL: libc::c_long = 462;
    // SAFETY: test: memory of the region.
    let sealed = unsafe { libc::syscall(SYS_MSEAL, region.as_ptr(), region.len_bytes(), 0) } == 0;
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
            let region = domain.region(0).trap(trap).file(file.path(), 0, Rights::Read).unwrap();
            if !seal(&region) {
                return;
            }
            refused(trap, tried::write(region.as_ptr().cast(), 2));
            assert!(region.as_slice::<u8>()[PAGE..].iter().all(|byte| *byte == 1));
        })
        .well();
    }
}
