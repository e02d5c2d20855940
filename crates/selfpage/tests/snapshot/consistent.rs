//! A snapshot is of one instant, whatever the program does meanwhile.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};

use super::{PAGE, Words, saved};

/// Pages of the region: more than there are frames, or fewer.
const PAGES: usize = 1024;
/// Pages that hold the same number, far apart and in no order.
const CHAIN: [usize; 8] = [900, 3, 511, 777, 64, 1000, 250, 130];

fn region(domain: &Domain, trap: Trap) -> Region {
    domain.region(PAGES * PAGE).name("words").trap(trap).stored(MemoryStore::new(16 << 20).unwrap()).unwrap()
}

/// Two threads in turn write a number to each page of the chain: at any instant the pages from some place on have it still to
/// come. Others write all over the region, so that the cut has much to arm. Meanwhile `body`, which is told how many writes to the
/// chain there were.
fn while_the_chain_is_written(words: Words, body: impl FnOnce(&AtomicU64)) {
    let (stop, turn) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for odd in [0, 1] {
            let (stop, turn) = (&stop, &turn);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let now = turn.load(Ordering::SeqCst);
                    if now % 2 == odd {
                        let (number, place) = (now / CHAIN.len() as u64 + 1, now as usize % CHAIN.len());
                        words.at(CHAIN[place], 7).store(number, Ordering::SeqCst);
                        turn.store(now + 1, Ordering::SeqCst);
                    } else {
                        // The other one may have no CPU.
                        std::thread::yield_now();
                    }
                }
            });
        }
        let stop_all = &stop;
        scope.spawn(move || {
            let mut number = 1u64;
            while !stop_all.load(Ordering::Relaxed) {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                words.at((number >> 40) as usize % PAGES, 9).store(number, Ordering::Relaxed);
                if number >> 60 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&turn)));
        stop.store(true, Ordering::Relaxed);
        ended.unwrap_or_else(|why| std::panic::resume_unwind(why));
    });
}

/// Whether the chain was ever so.
fn is_of_one_instant(found: &[u64]) -> bool {
    found.is_sorted_by(|left, right| left >= right) && found[0] - found[CHAIN.len() - 1] <= 1
}

fn one_instant(trap: Trap, frames: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("words.snap");
    let domain = Domain::with_frames(frames * PAGE).build().unwrap();
    let region = region(&domain, trap);
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    while_the_chain_is_written(Words::of(&region), |turn| {
        let mut newest = 0;
        for _ in 0..25 {
            let before = turn.load(Ordering::SeqCst) / CHAIN.len() as u64;
            snapshots.take().unwrap();
            let snapshot = Snapshot::open(&path).unwrap();
            let found: Vec<u64> = CHAIN.iter().map(|page| saved(&snapshot, 0, *page)[7]).collect();
            assert!(is_of_one_instant(&found), "{found:?}");
            let last = found[CHAIN.len() - 1];
            assert!(last >= before && last >= newest, "{found:?}, {before} before");
            newest = last;
        }
    });
}

/// What the tests below must catch: an image that is made page by page, while nobody is stopped.
#[test]
fn without_the_stop_the_invariant_breaks() {
    let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
    let region = region(&domain, Trap::Worker);
    let words = Words::of(&region);
    while_the_chain_is_written(words, |_| {
        let began = std::time::Instant::now();
        loop {
            let image: Vec<u64> = (0..PAGES).map(|page| words.at(page, 7).load(Ordering::SeqCst)).collect();
            if !is_of_one_instant(&CHAIN.map(|page| image[page])) {
                break;
            }
            assert!(began.elapsed().as_secs() < 60, "the writers do nothing that an image could show");
        }
    });
}

#[test]
fn two_threads_never_see_their_invariant_broken() {
    one_instant(Trap::Worker, 2 * PAGES);
}

#[test]
fn nor_in_upcall_regions() {
    one_instant(Trap::Upcall, 2 * PAGES);
}

#[test]
fn nor_while_pages_come_and_go() {
    one_instant(Trap::Worker, PAGES / 4);
}

#[test]
fn nor_while_pages_come_and_go_in_upcall_regions() {
    one_instant(Trap::Upcall, PAGES / 4);
}

/// What one operation of the log does, by its number.
fn operation(number: u64) -> (usize, bool) {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as usize % (PAGES - 1) + 1, mixed >> 60 == 0)
}

/// One thread writes and drops pages in an order that is known, and counts; an image must be the state after some operation.
fn a_state_of_the_log(trap: Trap, frames: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("words.snap");
    let domain = Domain::with_frames(frames * PAGE).build().unwrap();
    let mut region = region(&domain, trap);
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stopper = &stop;
        scope.spawn(move || {
            for number in 1u64.. {
                let (page, drops) = operation(number);
                region.as_mut_slice::<u64>()[0] = number;
                if drops {
                    region.discard(page * PAGE, PAGE).unwrap();
                } else {
                    region.as_mut_slice::<u64>()[page * super::WORDS + 5] = number;
                }
                region.as_mut_slice::<u64>()[1] = number;
                if stopper.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut model = vec![0u64; PAGES];
            let mut done = 0;
            for _ in 0..15 {
                snapshots.take().unwrap();
                let snapshot = Snapshot::open(&path).unwrap();
                let counts = saved(&snapshot, 0, 0);
                let (begun, ended) = (counts[0], counts[1]);
                assert!(begun == ended || begun == ended + 1, "{begun} begun, {ended} ended");
                assert!(ended >= done);
                for number in done + 1..=ended {
                    let (page, drops) = operation(number);
                    model[page] = if drops { 0 } else { number };
                }
                done = ended;
                for (page, expected) in model.iter().enumerate().skip(1) {
                    let found = saved(&snapshot, 0, page)[5];
                    let under_way = begun > ended && operation(begun).0 == page;
                    assert!(found == *expected || under_way, "page {page} after {ended}: {found}, not {expected}");
                }
            }
        }));
        stop.store(true, Ordering::Relaxed);
        ended.unwrap_or_else(|why| std::panic::resume_unwind(why));
    });
}

#[test]
fn an_image_is_a_state_that_there_was() {
    a_state_of_the_log(Trap::Worker, 2 * PAGES);
}

#[test]
fn also_of_pages_that_are_dropped_evicted_and_saved() {
    a_state_of_the_log(Trap::Worker, PAGES / 4);
    a_state_of_the_log(Trap::Upcall, PAGES / 4);
}

/// A child that is forked while a snapshot is taken has its own pages, and may take snapshots of its own.
#[test]
fn a_fork_in_the_middle_disturbs_neither() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("words.snap");
    let domain = Domain::with_frames(512 * PAGE).build().unwrap();
    let region = region(&domain, Trap::Worker);
    let words = Words::of(&region);
    for page in 0..PAGES {
        words.at(page, 0).store(page as u64 + 1, Ordering::Relaxed);
    }
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stopper = &stop;
        let taker = scope.spawn(move || {
            let mut count = 0;
            while !stopper.load(Ordering::Relaxed) {
                words.at(count % PAGES, 1).fetch_add(1, Ordering::Relaxed);
                snapshots.take().unwrap();
                count += 1;
            }
            count
        });
        let own = dir.path().join("child.snap");
        for _ in 0..10 {
            let ended = super::child::in_child(|| {
                (0..PAGES).all(|page| {
                    let right = words.at(page, 0).load(Ordering::Relaxed) == page as u64 + 1;
                    words.at(page, 2).store(7, Ordering::Relaxed);
                    right
                }) && Snapshots::of(&[&region], &own).and_then(|mut snapshots| snapshots.take()).is_ok()
                    && saved(&Snapshot::open(&own).unwrap(), 0, 5)[2] == 7
            });
            assert_eq!(ended, 0);
            std::thread::sleep(Duration::from_millis(3));
        }
        stop.store(true, Ordering::Relaxed);
        assert!(taker.join().unwrap() > 0);
    });
    let snapshot = Snapshot::open(&path).unwrap();
    snapshot.verify().unwrap();
    assert!(
        (0..PAGES).all(|page| saved(&snapshot, 0, page)[0] == page as u64 + 1 && saved(&snapshot, 0, page)[2] == 0)
    );
}
