//! Frames locked in memory: all of a domain or nothing of it, and what a program may do to that.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use selfpage::store::MemoryStore;
use selfpage::{Config, Domain, FileAccess, Locking, Region, Residence, Trap};
use selfpage_core::linux::memory::Access;

use crate::child::forked;
use crate::filter::Call;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::skip::skip;
use crate::tried;

const FRAMES: usize = 64;
const REGION: usize = 4 * FRAMES * PAGE;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

fn config() -> Config {
    Domain::with_frames(FRAMES * PAGE)
}

fn numbered(domain: &Domain, trap: Trap) -> Region {
    let mut region = domain.region(REGION).name("heap").trap(trap).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    number_pages(&mut region);
    region
}

/// A figure of this process, in bytes.
fn status_bytes(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("no such line");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

fn locked_bytes() -> usize {
    status_bytes("VmLck")
}

/// Whether this process may lock far more than there is.
pub fn may_lock() -> bool {
    let len = 1 << 40;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: test: a mapping of its own, which nobody touches.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0);
        let locked = at != libc::MAP_FAILED && libc::mlock2(at, len, libc::MLOCK_ONFAULT) == 0;
        libc::munmap(at, len);
        if !locked {
            skip("memlock", "this process may not lock as much as it likes (ulimit -l unlimited)");
        }
        locked
    }
}

/// A domain whose frames are locked, with a region of numbered pages. `None`: there is none here, and that is said.
fn locked(trap: Trap) -> Option<(Domain, Region)> {
    may_lock().then(|| {
        let domain = config().build().unwrap();
        let region = numbered(&domain, trap);
        (domain, region)
    })
}

/// The most that a process may lock by default.
pub const LIMIT: usize = 8 << 20;

/// Takes the right to lock more than that from the calling thread.
pub fn bound_locking() {
    let most = getrlimit(Resource::Memlock).maximum.unwrap_or(u64::MAX).min(LIMIT as u64);
    setrlimit(Resource::Memlock, Rlimit { current: Some(most), maximum: Some(most) }).unwrap();
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    sets.permitted.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
}

#[test]
fn pool_and_regions_are_locked_and_page() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            if !may_lock() {
                return;
            }
            let (before, resident) = (locked_bytes(), status_bytes("VmRSS"));
            let pool = 1 << 30;
            let domain = config().most_frames(pool).build().unwrap();
            assert_eq!(domain.pool().residence(), Residence::Locked);
            assert_eq!(locked_bytes() - before, pool);
            let region = numbered(&domain, trap);
            assert_eq!(locked_bytes() - before, pool + REGION);
            for _ in 0..3 {
                check_pages(&region, 0..pages(&region));
            }
            assert!(domain.stats().counts.evictions_total > 0);
            // Locked as they come: slots without a frame have no memory.
            let grown = status_bytes("VmRSS").saturating_sub(resident);
            assert!(grown < pool / 2, "{grown} bytes more in memory");
            drop(region);
            assert_eq!(locked_bytes() - before, pool);
            drop(domain);
            assert_eq!(locked_bytes(), before);
        })
        .well();
    }
}

#[test]
fn what_a_limit_covers_is_locked_until_a_region_comes_that_it_does_not() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            bound_locking();
            let domain = config().build().unwrap();
            let region = numbered(&domain, trap);
            assert_eq!(domain.pool().residence(), Residence::Locked);
            assert_eq!(locked_bytes(), FRAMES * PAGE + REGION);
            let small = domain.region(REGION).zero().unwrap();
            assert_eq!(locked_bytes(), FRAMES * PAGE + 2 * REGION);
            drop(small);
            forked(|| {
                assert_eq!(locked_bytes(), FRAMES * PAGE + REGION, "as much as its parent had");
                check_pages(&region, 0..pages(&region));
            });
            let ends = AtomicBool::new(false);
            std::thread::scope(|scope| {
                // Pages come and go all the while.
                let reader = scope.spawn(|| {
                    while !ends.load(Ordering::Relaxed) {
                        check_pages(&region, 0..pages(&region));
                    }
                });
                let store = MemoryStore::new(LIMIT as u64).unwrap();
                let mut late = domain.region(LIMIT).name("late").trap(trap).stored(store).unwrap();
                assert_ne!(domain.pool().residence(), Residence::Locked);
                assert_eq!(locked_bytes(), 0);
                number_pages(&mut late);
                check_pages(&late, 0..pages(&late));
                ends.store(true, Ordering::Relaxed);
                reader.join().unwrap();
            });
            let again = domain.region(REGION).zero().unwrap();
            assert_eq!(locked_bytes(), 0, "all of a domain, or nothing");
            drop(again);
            assert!(domain.stats().counts.evictions_total > 0);
        })
        .well();
    }
}

#[test]
fn a_pool_beyond_the_limit_is_not_locked() {
    in_child(here!(), "", || {
        bound_locking();
        let domain = config().most_frames(LIMIT + PAGE).build().unwrap();
        let region = numbered(&domain, Trap::Worker);
        assert_ne!(domain.pool().residence(), Residence::Locked);
        assert_eq!(locked_bytes(), 0);
        check_pages(&region, 0..pages(&region));
    })
    .well();
}

#[test]
fn nothing_is_locked_that_shall_not() {
    in_child(here!(), "", || {
        let domain = config().locking(Locking::Never).build().unwrap();
        let region = numbered(&domain, Trap::Worker);
        assert_ne!(domain.pool().residence(), Residence::Locked);
        assert_eq!(locked_bytes(), 0);
        check_pages(&region, 0..pages(&region));
    })
    .well();
}

#[test]
fn a_forked_child_locks_again() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let Some((domain, mut region)) = locked(trap) else { return };
            forked(|| {
                assert_eq!(domain.pool().residence(), Residence::Locked);
                assert_eq!(locked_bytes(), FRAMES * PAGE + REGION);
                for _ in 0..2 {
                    check_pages(&region, 0..pages(&region));
                    number_pages(&mut region);
                }
                assert!(domain.stats().counts.evictions_total > 0);
            });
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

#[test]
fn the_right_is_given_up_later() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let Some((domain, mut region)) = locked(trap) else { return };
            let wide = domain.region(2 * LIMIT).trap(trap).stored(MemoryStore::new(PAGE as u64).unwrap()).unwrap();
            bound_locking();
            check_pages(&region, 0..pages(&region));
            assert_eq!(locked_bytes(), FRAMES * PAGE + REGION + 2 * LIMIT, "what is locked stays locked");
            // The child could lock the pool and not every region: it locks nothing.
            forked(|| {
                assert_ne!(domain.pool().residence(), Residence::Locked);
                assert_eq!(locked_bytes(), 0);
                for _ in 0..2 {
                    check_pages(&region, 0..pages(&region));
                    number_pages(&mut region);
                }
                assert!(wide.as_slice::<u64>().iter().all(|word| *word == 0));
            });
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

#[test]
fn unlocked_behind_our_back() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let Some((_domain, region)) = locked(trap) else { return };
            let (start, len) = (region.as_ptr().cast::<libc::c_void>(), region.len_bytes());
            // SAFETY: test: takes the lock on the region alone.
            assert_eq!(unsafe { libc::munlock(start, len) }, 0);
            // Pages come in, and do not go: never a wrong one, and a clear end when all frames are held.
            let failed = (0..pages(&region)).find(|index| {
                match tried::read(start.wrapping_byte_add(index * PAGE).cast()) {
                    Ok(word) => assert_eq!(word, *index as u64 + 1),
                    Err(signal) => assert_eq!(signal, libc::SIGBUS),
                }
                tried::read(start.wrapping_byte_add(index * PAGE).cast()).is_err()
            });
            let failed = failed.expect("more pages in core than frames");
            // SAFETY: test: locks it again, as it was.
            assert_eq!(unsafe { libc::mlock2(start, len, libc::MLOCK_ONFAULT) }, 0);
            region.pin(failed * PAGE, PAGE).unwrap();
            region.unpin(failed * PAGE, PAGE).unwrap();
            for _ in 0..2 {
                check_pages(&region, 0..pages(&region));
            }
            // Pool and region alike.
            // SAFETY: test: takes every lock.
            assert_eq!(unsafe { libc::munlockall() }, 0);
            for _ in 0..2 {
                check_pages(&region, 0..pages(&region));
            }
        })
        .well();
    }
}

#[test]
fn all_that_is_mapped_later_is_locked_by_the_program() {
    for locking in [Locking::WherePermitted, Locking::Never] {
        in_child(here!(), &format!("{locking:?}"), || {
            if !may_lock() {
                return;
            }
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), [7; REGION]).unwrap();
            // SAFETY: test: the kernel locks every new mapping, and fills it at once.
            assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE) }, 0);
            let domain = config().locking(locking).build().unwrap();
            for (trap, _) in TRAPS {
                let region = domain.region(0).trap(trap).file(file.path(), 0, FileAccess::Read).unwrap();
                assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 7), "{trap:?}: zeros of the kernel's");
                let region = numbered(&domain, trap);
                for _ in 0..2 {
                    check_pages(&region, 0..pages(&region));
                }
            }
        })
        .well();
    }
}

#[test]
fn all_that_is_mapped_is_locked_by_the_program() {
    for locking in [Locking::WherePermitted, Locking::Never] {
        for (trap, name) in TRAPS {
            in_child(here!(), &format!("{locking:?}-{name}"), || {
                if !may_lock() {
                    return;
                }
                let domain = config().locking(locking).build().unwrap();
                let region = numbered(&domain, trap);
                // SAFETY: test: the kernel locks every mapping, and touches each of its pages: those of regions, and slots whose
                // frames are mapped.
                assert_eq!(unsafe { libc::mlockall(libc::MCL_CURRENT) }, 0);
                for _ in 0..3 {
                    check_pages(&region, 0..pages(&region));
                }
                // All has come through the frames again, and faults are still served.
                drop(region);
                let domain = config().locking(locking).build().unwrap();
                let later = numbered(&domain, trap);
                check_pages(&later, 0..pages(&later));
            })
            .well();
        }
    }
}

#[test]
fn advice_that_locked_pages_refuse() {
    in_child(here!(), "", || {
        if !may_lock() {
            return;
        }
        let domain = config().build().unwrap();
        let region = numbered(&domain, Trap::Worker);
        for advice in [libc::MADV_DONTNEED, libc::MADV_FREE] {
            // SAFETY: test: memory of the region, and it is refused.
            assert_eq!(unsafe { libc::madvise(region.as_ptr().cast(), region.len_bytes(), advice) }, -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
        }
        check_pages(&region, 0..pages(&region));
    })
    .well();
}

#[test]
fn a_violation_where_there_are_no_more_mappings() {
    for locking in [Locking::WherePermitted, Locking::Never] {
        in_child(here!(), &format!("{locking:?}"), || {
            tried::catch();
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(REGION as u64).unwrap();
            let domain = config().locking(locking).build().unwrap();
            let region = domain.region(0).file(file.path(), 0, FileAccess::Read).unwrap();
            let page = region.as_ptr().wrapping_add(8 * PAGE).cast::<u64>();
            assert_eq!(tried::read(page), Ok(0));
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            for turn in 0.. {
                // Neighbours that differ stay mappings of their own.
                let rights = if turn % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
                // SAFETY: test: fresh mappings.
                if unsafe { libc::mmap(std::ptr::null_mut(), PAGE, rights, flags, -1, 0) } == libc::MAP_FAILED {
                    break;
                }
            }
            let signal = tried::write(page, 1).unwrap_err();
            assert!([libc::SIGSEGV, libc::SIGBUS].contains(&signal), "{signal}");
        })
        .well();
    }
}

/// What is mapped anew and cannot be locked, or unlocked, as the pool is nobody hears of: it must not be there to be read as zero.
#[test]
fn a_part_that_cannot_be_locked_alike_when_it_is_restored() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = config().build().unwrap();
            let region = numbered(&domain, trap);
            for call in [libc::SYS_mlock2, libc::SYS_munlock] {
                Call::any(call).fails_everywhere(libc::EPERM).unwrap();
            }
            // SAFETY: test: nobody holds a reference into the pages.
            let why = unsafe {
                region.while_empty(8 * PAGE, 2 * PAGE, || ()).unwrap();
                region.restore(8 * PAGE, 2 * PAGE, Access::ReadWrite).unwrap_err()
            };
            assert!(why.to_string().contains("restore"), "{why}");
            for page in 8..10 {
                assert_eq!(tried::read(region.as_ptr().wrapping_add(page * PAGE).cast()), Err(libc::SIGSEGV));
            }
            check_pages(&region, (0..pages(&region)).filter(|page| !(8..10).contains(page)));
        })
        .well();
    }
}
