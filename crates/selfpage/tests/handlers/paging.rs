//! Protection and paging: neither loses anything of the other's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, MemoryFault, Protection, Region, Trap};

use crate::child::forked;
use crate::scenario::{here, in_child, until};
use crate::{FRAMES, PAGE, TRAPS, WORDS, handled, read, tried, unprotect, word, write};

const PAGES: usize = 4 * FRAMES;

fn counting(count: &Arc<AtomicU32>) -> impl Fn(&MemoryFault<'_>) -> Answer + Send + Sync + 'static {
    let count = count.clone();
    move |fault| {
        count.fetch_add(1, SeqCst);
        fault.protect_page(Protection::ReadWrite).unwrap();
        Answer::Handled
    }
}

#[test]
fn protection_survives_paging() {
    for (trap, name) in TRAPS {
        let asked = Arc::new(AtomicU32::new(0));
        let (domain, region) = handled(trap, counting(&asked));
        for round in 0..3 {
            region.protect(0, PAGES * PAGE, Protection::Read).unwrap();
            for page in (0..PAGES).chain((0..PAGES).rev()) {
                assert_eq!(read(&region, page), page as u64 + 1 + round, "{name}");
            }
            assert_eq!(asked.swap(0, SeqCst), 0, "{name}");
            for page in 0..PAGES {
                write(&region, page, page as u64 + 2 + round);
            }
            let asked = asked.swap(0, SeqCst);
            // A worker may hear of one access twice: seen with 16 CPUs, once of 256.
            let most = if trap == Trap::Worker { PAGES + PAGES / 32 } else { PAGES };
            assert!((PAGES..=most).contains(&(asked as usize)), "{name}: {asked}");
        }
        assert!(domain.stats().counts.evictions_total > PAGES as u64, "{name}");
    }
}

#[test]
fn no_write_is_missed_while_pages_come_and_go() {
    for (trap, name) in TRAPS {
        let noted: Arc<Vec<AtomicU32>> = Arc::new((0..PAGES).map(|_| AtomicU32::new(0)).collect());
        let notes = noted.clone();
        let (_domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
            notes[fault.offset_bytes() / PAGE].store(1, SeqCst);
            fault.protect_page(Protection::ReadWrite).unwrap();
            Answer::Handled
        });
        // Words 1 to 4 are the threads' own.
        // SAFETY: test: atomics over words of the region.
        let at = |page: usize, thread: usize| unsafe { AtomicU64::from_ptr(word(&region, page).add(1 + thread)) };
        let mut before = vec![[0; 4]; PAGES];
        for round in 0..12u64 {
            noted.iter().for_each(|note| note.store(0, SeqCst));
            region.protect(0, PAGES * PAGE, Protection::Read).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..4usize {
                    let at = &at;
                    scope.spawn(move || {
                        let mut dice = (round << 8) + thread as u64 + 1;
                        for _ in 0..400 {
                            dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                            let page = (dice >> 33) as usize % PAGES;
                            match dice >> 60 {
                                0..4 => drop(at(page, thread).fetch_add(1, SeqCst)),
                                _ => drop(at(page, thread).load(SeqCst)),
                            }
                        }
                    });
                }
            });
            for page in 0..PAGES {
                let now = [0, 1, 2, 3].map(|thread| at(page, thread).load(SeqCst));
                let written = now != before[page];
                assert_eq!(noted[page].load(SeqCst) != 0, written, "{name}, round {round}, page {page}");
                before[page] = now;
            }
        }
    }
}

#[test]
fn pages_without_access_give_their_frames() {
    for (trap, name) in TRAPS {
        let asked = Arc::new(AtomicU32::new(0));
        let (domain, region) = handled(trap, counting(&asked));
        let other = domain.region(PAGES * PAGE).trap(trap).stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
        for round in 0..3 {
            // What is in core has changed since it was saved.
            (0..PAGES).for_each(|page| write(&region, page, page as u64 + 1 + round));
            region.protect(0, PAGES * PAGE, Protection::None).unwrap();
            asked.store(0, SeqCst);
            (0..PAGES).for_each(|page| write(&other, page, 7));
            let _ = region.flush(0, PAGES * PAGE);
            region.prefetch(0, PAGES * PAGE).unwrap();
            assert!(region.pin(0, PAGE).is_err(), "{name}");
            assert_eq!(asked.load(SeqCst), 0, "{name}");
            assert!((0..PAGES).all(|page| region.residency()[page].load(SeqCst) == 0), "{name}");
            assert!((0..PAGES).all(|page| read(&region, page) == page as u64 + 1 + round), "{name}");
            assert_eq!(asked.load(SeqCst), PAGES as u32, "{name}");
        }
    }
}

#[test]
fn pages_without_access_are_evicted_and_discarded_by_name() {
    for (trap, name) in TRAPS {
        let asked = Arc::new(AtomicU32::new(0));
        let (domain, mut region) = handled(trap, counting(&asked));
        let in_core: Vec<usize> =
            (0..PAGES).filter(|page| region.residency()[*page].load(SeqCst) == 1).take(8).collect();
        for page in &in_core {
            region.protect(page * PAGE, PAGE, Protection::None).unwrap();
        }
        for (at, page) in in_core.iter().enumerate() {
            match at % 2 {
                0 => drop(region.evict(page * PAGE, PAGE).unwrap()),
                _ => region.discard(page * PAGE, PAGE).unwrap(),
            }
            assert_eq!(region.protection(page * PAGE).unwrap(), Protection::None, "{name}");
        }
        until("all is saved", || domain.stats().counts.saves_total > 0);
        for (at, page) in in_core.iter().enumerate() {
            let expected = if at % 2 == 0 { *page as u64 + 1 } else { 0 };
            assert_eq!(read(&region, *page), expected, "{name}");
        }
        assert_eq!(asked.load(SeqCst), in_core.len() as u32, "{name}");
    }
}

#[test]
fn a_page_without_access_that_cannot_be_saved_stays() {
    for (trap, name) in TRAPS {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = MemoryStore::new(4 * PAGE as u64).unwrap();
        let region = domain.region(16 * PAGE).trap(trap).stored(store).unwrap();
        (0..16).for_each(|page| write(&region, page, page as u64 + 1));
        region.protect(0, 16 * PAGE, Protection::None).unwrap();
        let _ = region.evict(0, 16 * PAGE);
        until("saves have failed", || domain.stats().counts.save_errors_total > 0);
        region.protect(0, 16 * PAGE, Protection::ReadWrite).unwrap();
        assert!((0..16).all(|page| read(&region, page) == page as u64 + 1), "{name}");
    }
}

#[test]
fn a_page_that_is_not_in_the_region_is_an_error() {
    let (_domain, region) = handled(Trap::Worker, |_: &MemoryFault<'_>| Answer::Refuse);
    for (offset, len) in [(0, PAGES * PAGE + 1), (PAGES * PAGE, 1), (usize::MAX, 2)] {
        let why = region.protect(offset, len, Protection::None).unwrap_err();
        assert_eq!(why.kind(), selfpage::Kind::Invalid, "{why}");
    }
    assert!((0..PAGES).all(|page| read(&region, page) == page as u64 + 1));
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    std::fs::write(file.path(), vec![1; PAGE]).unwrap();
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let region = domain.region(0).file(file.path(), 0, selfpage::FileAccess::Read).unwrap();
    assert_eq!(region.protect(0, PAGE, Protection::ReadWrite).unwrap_err().kind(), selfpage::Kind::Invalid);
}

fn asks_of_all(region: &Region, asked: &AtomicU32, name: &str) {
    for page in 0..16 {
        let before = asked.load(SeqCst);
        assert_eq!(read(region, page), page as u64 + 1, "{name}");
        write(region, page, page as u64 + 1);
        assert_eq!(asked.load(SeqCst) - before, 1, "{name}, page {page}");
    }
}

#[test]
fn a_forked_child_has_the_same_protections() {
    for (trap, name) in TRAPS {
        for store in ["stored", "zero"] {
            in_child(here!(), &format!("{name}-{store}"), || {
                let asked = Arc::new(AtomicU32::new(0));
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let builder = domain.region(16 * PAGE).trap(trap).handler(counting(&asked));
                let region = match store {
                    "zero" => builder.zero().unwrap(),
                    _ => builder.stored(MemoryStore::new(1 << 24).unwrap()).unwrap(),
                };
                (0..16).for_each(|page| write(&region, page, page as u64 + 1));
                region.protect(0, 8 * PAGE, Protection::Read).unwrap();
                region.protect(8 * PAGE, 8 * PAGE, Protection::None).unwrap();
                forked(|| {
                    asks_of_all(&region, &asked, name);
                    forked(|| assert!((0..16).all(|page| read(&region, page) == page as u64 + 1)));
                });
                asks_of_all(&region, &asked, name);
            })
            .well();
        }
    }
}

/// Whoever was in a handler is not there to let the region go.
#[test]
fn a_child_has_the_addresses_of_a_region_whose_handler_was_asked_at_the_fork() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let [asked, go_on] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
            let (is_asked, goes_on) = (asked.clone(), go_on.clone());
            let (domain, region) = handled(trap, move |fault: &MemoryFault<'_>| {
                is_asked.store(true, SeqCst);
                until("the child has ended", || goes_on.load(SeqCst));
                unprotect(fault)
            });
            region.protect(0, PAGE, Protection::None).unwrap();
            let addr = region.as_ptr().addr();
            // SAFETY: test: a word of the region, which is there until the thread has ended.
            let reader = std::thread::spawn(move || unsafe { (addr as *const u64).read_volatile() });
            until("it is asked", || asked.load(SeqCst));
            let mut region = Some(region);
            forked(|| {
                drop(region.take());
                drop(domain.region(PAGE).at(addr).zero().unwrap());
            });
            go_on.store(true, SeqCst);
            assert_eq!(reader.join().unwrap(), 1);
        })
        .well();
    }
}

#[test]
fn protected_pages_that_a_child_shared_are_evicted() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let asked = Arc::new(AtomicU32::new(0));
            let (_domain, region) = handled(trap, counting(&asked));
            region.protect(0, PAGES * PAGE, Protection::Read).unwrap();
            forked(|| {});
            let in_core: Vec<usize> = (0..PAGES).filter(|page| region.residency()[*page].load(SeqCst) == 1).collect();
            assert!(in_core.len() > 8);
            let gone: u32 = in_core.iter().map(|page| region.evict(page * PAGE, PAGE).unwrap_or(0)).sum();
            assert_eq!(gone as usize, in_core.len(), "protected pages stay");
            assert!((0..PAGES).all(|page| read(&region, page) == page as u64 + 1));
            assert_eq!(asked.load(SeqCst), 0);
        })
        .well();
    }
}

#[test]
fn a_region_that_goes_while_pages_are_protected() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let (domain, region) = handled(trap, |_: &MemoryFault<'_>| Answer::Refuse);
            region.protect(0, PAGES / 2 * PAGE, Protection::None).unwrap();
            region.protect(PAGES / 2 * PAGE, PAGES / 2 * PAGE, Protection::Read).unwrap();
            assert_eq!(tried::read(word(&region, 1)), Err(libc::SIGSEGV));
            drop(region);
            let (_, other) = handled(trap, |_: &MemoryFault<'_>| Answer::Refuse);
            assert_eq!(other.as_slice::<u64>()[WORDS], 2);
            let again = domain.region(PAGES * PAGE).trap(trap).stored(MemoryStore::new(1 << 24).unwrap()).unwrap();
            (0..PAGES).for_each(|page| write(&again, page, 1));
        })
        .well();
    }
}
