//! Ends: of regions, domains and threads, while others are at work on them.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};

use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

fn four_times_the_frames(domain: &Domain, trap: Trap) -> Region {
    let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
    number_pages(&mut region);
    region
}

#[test]
fn a_domain_that_goes_before_its_regions() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
            let before = threads();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = four_times_the_frames(&domain, trap);
            drop(domain);
            check_pages(&region, 0..pages(&region));
            number_pages(&mut region);
            region.flush(0, region.len_bytes()).unwrap();
            check_pages(&region, (0..pages(&region)).rev());
            drop(region);
            crate::scenario::until("its threads have ended", || threads() == before);
        })
        .well();
    }
}

#[test]
fn regions_that_go_while_they_are_read_ahead() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            std::fs::write(file.path(), vec![1; 4 * FRAMES * PAGE]).unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            for turn in 0..300 {
                let region = domain.region(0).trap(trap).file(file.path(), 0, selfpage::FileAccess::ReadWrite).unwrap();
                for part in 0..8 {
                    region.prefetch(part * 32 * PAGE, 32 * PAGE).unwrap();
                }
                assert_eq!(region.as_slice::<u8>()[turn % 100 * PAGE], 1);
            }
            // All frames are there still.
            let pinned = domain.region((FRAMES - 8) * PAGE).trap(trap).pinned().unwrap();
            assert!(pinned.as_slice::<u64>().iter().all(|word| *word == 0));
            println!("{:?}", domain.stats());
        })
        .well();
    }
}

#[test]
fn regions_that_go_while_they_are_saved() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            for _ in 0..100 {
                drop(four_times_the_frames(&domain, trap));
            }
            let pinned = domain.region((FRAMES - 8) * PAGE).trap(trap).pinned().unwrap();
            assert!(pinned.as_slice::<u64>().iter().all(|word| *word == 0));
        })
        .well();
    }
}

#[test]
fn many_domains() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let mut domains = Vec::new();
            // As many as there is room for; one more is an error, and the others go on.
            let error = loop {
                let made = Domain::with_frames(FRAMES * PAGE).build().and_then(|domain| {
                    let mut region = domain.region(16 * PAGE).trap(trap).zero()?;
                    number_pages(&mut region);
                    Ok((domain, region))
                });
                match made {
                    Ok(made) => domains.push(made),
                    Err(error) => break error.to_string(),
                }
                if domains.len() == 200 {
                    break "threads".into();
                }
            };
            assert!(domains.len() > 10 && (error.contains("threads") || error.contains("open files")), "{error}");
            println!("{}: {error}", domains.len());
            for (_, region) in &domains {
                check_pages(region, 0..16);
            }
        })
        .well();
    }
}

#[test]
fn many_threads_on_one_page() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = four_times_the_frames(&domain, trap);
            let turn = AtomicU64::new(0);
            let threads = 16;
            let barrier = std::sync::Barrier::new(threads);
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let (region, turn, barrier) = (&region, &turn, &barrier);
                    scope.spawn(move || {
                        for round in 0..100 {
                            let index = round * 7 % pages(region);
                            if barrier.wait().is_leader() {
                                let _ = region.evict(index * PAGE, PAGE);
                                turn.fetch_add(1, SeqCst);
                            }
                            barrier.wait();
                            check_pages(region, [index]);
                            // SAFETY: test: a word that this thread alone writes.
                            unsafe {
                                let word = region.as_ptr().add(index * PAGE + 64 + 8 * thread).cast::<u64>();
                                word.write_volatile(round as u64);
                                assert_eq!(word.read_volatile(), round as u64);
                            }
                        }
                    });
                }
            });
            assert_eq!(turn.load(SeqCst), 100);
        })
        .well();
    }
}

/// Locks a robust mutex at `at` on a thread that ends without unlocking it; what the next one to lock it is told.
fn lock_and_die(at: *mut u8, before_the_end: impl FnOnce() + Send) -> libc::c_int {
    let at = at as usize;
    // SAFETY: test: memory of the region, aligned to a page, with room for a mutex.
    unsafe {
        let mutex = at as *mut libc::pthread_mutex_t;
        let mut how: libc::pthread_mutexattr_t = std::mem::zeroed();
        libc::pthread_mutexattr_init(&mut how);
        libc::pthread_mutexattr_setrobust(&mut how, libc::PTHREAD_MUTEX_ROBUST);
        assert_eq!(libc::pthread_mutex_init(mutex, &how), 0);
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // SAFETY: test: the mutex made above.
            assert_eq!(unsafe { libc::pthread_mutex_lock(at as *mut libc::pthread_mutex_t) }, 0);
            before_the_end();
        });
    });
    // SAFETY: test: as above.
    unsafe {
        let mut limit: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_REALTIME, &mut limit);
        limit.tv_sec += 5;
        libc::pthread_mutex_timedlock(at as *mut libc::pthread_mutex_t, &limit)
    }
}

#[test]
fn a_robust_mutex_of_a_thread_that_ended() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let region = four_times_the_frames(&domain, trap);
            // The kernel serves no fault of a thread that is ending: the page is to be pinned.
            region.pin(0, PAGE).unwrap();
            let told = lock_and_die(region.as_ptr(), || check_pages(&region, 1..pages(&region)));
            assert_eq!(told, libc::EOWNERDEAD);
            region.unpin(0, PAGE).unwrap();
        })
        .well();
    }
}
