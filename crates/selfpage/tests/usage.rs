//! Which pages are used, as a sample shows it, on a real kernel.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use selfpage::store::MemoryStore;
use selfpage::trace::{Record, Trace};
use selfpage::{Domain, Protection, Sampling, Trap};

mod sampled;

use sampled::{PAGE, domain, numbered, word};

#[test]
fn pages_that_are_read_are_found_every_round_and_others_are_not() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let Some(domain) = domain(512) else { return };
        let region = numbered(&domain, 256, trap);
        for round in 0..3 {
            let sample = region.sample(Sampling::Whole).unwrap();
            let before = sample.usage().unwrap();
            assert_eq!((before.in_core, before.sampled, before.referenced), (256, 256, 0), "round {round}");
            for page in (0..256).step_by(2) {
                assert_eq!(word(&region, page), page as u64 + 1);
            }
            for page in 0..256 {
                assert_eq!(sample.is_referenced(page).unwrap(), Some(page % 2 == 0), "page {page} in round {round}");
            }
            let usage = sample.usage().unwrap();
            assert_eq!((usage.referenced, usage.gone, usage.fetched), (128, 0, 0), "round {round}");
            assert_eq!(usage.working_set().bytes, 128 * PAGE as u64);
            assert_eq!(sample.referenced().unwrap().count(), 128);
        }
        let counts = domain.stats().counts;
        assert_eq!(counts.fills_total, 256, "a use of a sampled page is no fill");
        assert_eq!(counts.saves_total, 0, "a sample saves nothing");
        assert_eq!(counts.sampled_total, 3 * 256);
        // Workers, four at most, count when the program runs on already.
        assert!((3 * 128 - 4..=3 * 128).contains(&counts.referenced_total), "{counts:?}");
    }
}

#[test]
fn a_page_that_was_closed_for_a_while_was_not_sampled() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let Some(domain) = domain(512) else { return };
        let region = numbered(&domain, 8, trap);
        assert_eq!(word(&region, 3), 4);
        region.protect(0, region.len_bytes(), Protection::None).unwrap();
        region.protect(0, region.len_bytes(), Protection::ReadWrite).unwrap();
        assert_eq!(word(&region, 3), 4);
        // A worker counts when the program runs on already.
        while domain.stats().counts.soft_faults_total == 0 {
            std::thread::yield_now();
        }
        assert_eq!(domain.stats().counts.referenced_total, 0, "{trap:?}");
    }
}

#[test]
fn what_another_region_fetches_is_no_use_of_this_one() {
    let Some(domain) = domain(128) else { return };
    let (region, other) = (numbered(&domain, 16, Trap::Worker), numbered(&domain, 512, Trap::Worker));
    let before = domain.stats().counts.bytes_filled;
    let sample = region.sample(Sampling::Whole).unwrap();
    (0..512).for_each(|page| assert_eq!(word(&other, page), page as u64 + 1));
    assert!(domain.stats().counts.bytes_filled > before, "nothing was fetched");
    assert_eq!(sample.usage().unwrap().fetched, 0);
    (0..16).for_each(|page| assert_eq!(word(&region, page), page as u64 + 1));
    let fetched = sample.usage().unwrap().fetched;
    assert!((1..=16).contains(&fetched), "they had gone long before: {fetched}");
    drop(region);
    assert_eq!(sample.usage().unwrap().fetched, fetched, "the region is gone, and nothing of it is used any more");
}

#[test]
fn a_page_on_standby_is_used_like_any_other() {
    let Some(domain) = domain(512) else { return };
    let region = numbered(&domain, 64, Trap::Worker);
    region.flush(0, 64 * PAGE).unwrap(); // So that none is being saved when it goes.
    region.evict(0, 64 * PAGE).unwrap();
    let sample = region.sample(Sampling::Whole).unwrap();
    (0..16).for_each(|page| assert_eq!(word(&region, page), page as u64 + 1));
    let usage = sample.usage().unwrap();
    assert_eq!((usage.in_core, usage.sampled, usage.referenced, usage.gone, usage.fetched), (64, 64, 16, 0, 0));
    assert_eq!((sample.is_referenced(3).unwrap(), sample.is_referenced(20).unwrap()), (Some(true), Some(false)));
    // Back to standby: those that were used still count as such.
    region.evict(0, 16 * PAGE).unwrap();
    let usage = sample.usage().unwrap();
    assert_eq!((usage.referenced, usage.gone), (16, 0));
    assert_eq!(usage.working_set().bytes, 16 * PAGE as u64);
}

#[test]
fn writes_are_seen_and_kept() {
    let Some(domain) = domain(512) else { return };
    let mut region = numbered(&domain, 64, Trap::Worker);
    let sample = region.sample(Sampling::Whole).unwrap();
    region.as_mut_slice::<u64>()[5 * PAGE / 8] = 99;
    assert_eq!(sample.is_referenced(5).unwrap(), Some(true));
    assert_eq!(sample.usage().unwrap().referenced, 1);
    // Sampled pages go to the store and come back like others.
    drop(sample);
    region.evict(0, 64 * PAGE).unwrap();
    assert_eq!(word(&region, 5), 99);
    for page in (0..64).filter(|page| *page != 5) {
        assert_eq!(word(&region, page), page as u64 + 1);
    }
}

#[test]
fn a_sample_of_some_pages_brackets_the_truth() {
    let Some(domain) = domain(2048) else { return };
    let region = numbered(&domain, 1024, Trap::Upcall);
    let mut inside = 0;
    for _ in 0..200 {
        let sample = domain.sample(Sampling::Pages(128)).unwrap();
        (0..1024).step_by(4).for_each(|page| assert_eq!(word(&region, page), page as u64 + 1));
        let usage = sample.usage().unwrap();
        assert_eq!((usage.in_core, usage.sampled), (1024, 128));
        let size = usage.working_set();
        // A quarter is used. That the upper bound comes to a half happens once in a quarter of a million samples, and there are 200.
        assert!(size.most_bytes < 1024 * PAGE as u64 * 5 / 8, "{size:?}");
        inside += u32::from((size.least_bytes..=size.most_bytes).contains(&(256 * PAGE as u64)));
    }
    // At 95 % 190 or more are to be expected. Bounds are whole pages, so that these hold at 96.2 %: fewer than 177 come once in a
    // million times.
    assert!(inside >= 177, "{inside} of 200");
}

#[test]
fn pinned_pages_are_no_part_and_a_later_sample_ends_the_one_before() {
    let Some(domain) = domain(512) else { return };
    let region = numbered(&domain, 64, Trap::Worker);
    region.pin(0, 8 * PAGE).unwrap();
    let first = region.sample(Sampling::Whole).unwrap();
    assert_eq!(first.usage().unwrap().sampled, 56);
    assert_eq!(first.is_referenced(3).unwrap(), None);
    region.unpin(0, 8 * PAGE).unwrap();
    // Those that nobody has used are unmapped already.
    let second = region.sample(Sampling::Whole).unwrap();
    assert_eq!(second.usage().unwrap().sampled, 64);
    assert!(first.usage().unwrap_err().to_string().contains("another sample"));
}

#[test]
fn discarded_pages_are_gone_and_flushed_ones_stay() {
    let Some(domain) = domain(512) else { return };
    let mut region = numbered(&domain, 64, Trap::Worker);
    let sample = region.sample(Sampling::Whole).unwrap();
    region.flush(0, 64 * PAGE).unwrap();
    assert_eq!(sample.usage().unwrap().referenced, 0, "a flush is no use");
    region.discard(0, 16 * PAGE).unwrap();
    let usage = sample.usage().unwrap();
    assert_eq!((usage.referenced, usage.gone), (0, 16));
    for page in 0..64 {
        assert_eq!(word(&region, page), if page < 16 { 0 } else { page as u64 + 1 });
    }
}

#[test]
fn the_next_page_in_a_frame_is_another() {
    let Some(domain) = domain(512) else { return };
    let mut region = numbered(&domain, 64, Trap::Worker);
    let sample = region.sample(Sampling::Whole).unwrap();
    region.discard(0, 64 * PAGE).unwrap();
    let other = numbered(&domain, 64, Trap::Worker);
    for round in 0..4 {
        // Onto standby, and back.
        other.evict(0, 64 * PAGE).unwrap();
        (0..64).for_each(|page| assert_eq!(word(&other, page), page as u64 + 1));
        let usage = sample.usage().unwrap();
        assert_eq!((usage.referenced, usage.gone), (0, 64), "round {round}");
    }
    assert!(domain.stats().counts.soft_faults_total > 0, "nothing came back from standby");
}

#[test]
fn a_region_in_anothers_place_is_traced_by_its_own_name() {
    if domain(16).is_none() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("trace");
    let domain = Domain::with_frames(16 * PAGE).trace(&path, Duration::ZERO).build().unwrap();
    // Far from where the kernel puts what tests beside this one map.
    let addr = 0x1234_5600_0000;
    let first = domain.region(PAGE).at(addr).name("first").zero().unwrap();
    domain.flush_trace();
    drop(first);
    let second = domain.region(PAGE).at(addr).name("second").zero().unwrap();
    domain.flush_trace();
    drop(second);
    drop(domain);
    let trace = Trace::read(&path).unwrap();
    let names = trace.records.iter().filter_map(|record| match record {
        Record::Region { first, name, .. } if first.addr().0 == addr => Some(name.as_str()),
        _ => None,
    });
    assert_eq!(names.collect::<Vec<_>>(), ["first", "second"]);
}

#[test]
fn a_working_set_is_asked_for_as_seldom_as_one_likes() {
    if domain(16).is_none() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("trace");
    let domain = Domain::with_frames(64 * PAGE).trace(&path, Duration::MAX).build().unwrap();
    let region = numbered(&domain, 32, Trap::Worker);
    for _ in 0..3 {
        assert_eq!(word(&region, 7), 8);
        domain.flush_trace();
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(region);
    drop(domain);
    let trace = Trace::read(&path).unwrap();
    assert!(!trace.records.iter().any(|record| matches!(record, Record::WorkingSet { .. })));
}

#[test]
fn a_trace_lets_the_programs_own_sample_be() {
    if domain(16).is_none() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("trace");
    let every = Duration::from_millis(5);
    let domain = Domain::with_frames(64 * PAGE).trace(&path, every).build().unwrap();
    let region = numbered(&domain, 32, Trap::Worker);
    let sets = || {
        domain.flush_trace();
        let trace = Trace::read(&path).unwrap();
        trace.records.iter().filter(|record| matches!(record, Record::WorkingSet { .. })).count()
    };
    let wait_for_more_than = |before: usize| {
        let began = Instant::now();
        while sets() <= before {
            assert!(began.elapsed() < Duration::from_secs(60), "the trace has no working set any more");
            std::thread::sleep(every);
        }
    };
    for _ in 0..3 {
        wait_for_more_than(sets());
        let sample = region.sample(Sampling::Whole).unwrap();
        let before = sets();
        for _ in 0..20 {
            std::thread::sleep(every);
            assert_eq!(sets(), before, "the time of a sample of the program's has no other");
        }
        assert_eq!(word(&region, 7), 8);
        assert_eq!(sample.usage().unwrap().referenced, 1);
        // One that a later one has ended keeps nobody from anything.
        let later = domain.sample(Sampling::Pages(4)).unwrap();
        drop(sample);
        (0..20).for_each(|_| {
            std::thread::sleep(every);
            domain.flush_trace();
        });
        later.usage().unwrap();
    }
    wait_for_more_than(sets());
}

#[test]
fn a_later_sample_has_all_that_is_used_beside_an_earlier_one_that_is_drawn() {
    const FEW: usize = 200;
    let Some(domain) = domain(20_000 + 2 * FEW) else { return };
    let (_many, few) = (numbered(&domain, 20_000, Trap::Worker), numbered(&domain, FEW, Trap::Worker));
    for delay in (0..6000).step_by(200).map(Duration::from_micros) {
        std::thread::scope(|scope| {
            let earlier = scope.spawn(|| domain.sample(Sampling::Whole).map(drop));
            std::thread::sleep(delay);
            let sample = few.sample(Sampling::Whole).unwrap();
            (0..FEW).for_each(|page| assert_eq!(word(&few, page), page as u64 + 1));
            earlier.join().unwrap().unwrap();
            // Where the other was begun later after all, it has ended this one.
            if let Ok(usage) = sample.usage() {
                assert_eq!((usage.referenced, usage.gone), (usage.sampled, 0), "{delay:?}: {usage:?}");
            }
        });
    }
}

/// Four threads count in words of their own, with fewer frames than pages, while samples are taken one after the other.
#[test]
fn nothing_is_lost_while_threads_run() {
    const PAGES: usize = 400;
    for trap in [Trap::Worker, Trap::Upcall] {
        let Some(domain) = domain(200) else { return };
        let store = MemoryStore::new((4 * PAGES * PAGE) as u64).unwrap();
        let region = domain.region(PAGES * PAGE).trap(trap).stored(store).unwrap();
        // SAFETY: atomics may be shared, and any bits are one; the region outlives the threads.
        let words = unsafe {
            std::slice::from_raw_parts(region.as_ptr().cast::<AtomicU64>(), region.len_bytes() / size_of::<AtomicU64>())
        };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let counters: Vec<_> = (0..4)
                .map(|me| {
                    scope.spawn(move || {
                        for round in 0..40u64 {
                            for page in 0..PAGES {
                                let before = words[page * PAGE / 8 + me].fetch_add(1, Ordering::Relaxed);
                                assert_eq!(before, round, "thread {me}, page {page}");
                            }
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let usage = domain.sample(Sampling::Whole).unwrap().usage().unwrap();
                    assert!(usage.referenced + usage.gone <= usage.sampled, "{usage:?}");
                }
            });
            let counted: Vec<_> = counters.into_iter().map(|counter| counter.join()).collect();
            done.store(true, Ordering::Relaxed);
            counted.into_iter().for_each(|counted| counted.unwrap());
        });
        assert!((0..PAGES).all(|page| (0..4).all(|me| words[page * PAGE / 8 + me].load(Ordering::Relaxed) == 40)));
        assert!(domain.stats().counts.referenced_total > 0);
    }
}

/// Fills pages on a pager thread, to which an upcall hands them over.
struct Sevens;

impl selfpage::pager::UserPager for Sevens {
    fn fill(&self, _: u64, bytes: &mut [u8; PAGE]) -> std::io::Result<()> {
        bytes.fill(7);
        Ok(())
    }

    fn save(&self, _: u64, _: &[u8; PAGE]) -> std::io::Result<()> {
        Ok(())
    }

    fn forget(&self, _: u64) {}
}

/// A pager that is stuck in one of its calls for as long as a test holds this.
#[derive(Clone, Default)]
struct Stuck {
    fill: Arc<Mutex<()>>,
    save: Arc<Mutex<()>>,
    begun: Arc<AtomicBool>,
}

impl Stuck {
    fn wait_at(&self, lock: &Mutex<()>) {
        if lock.try_lock().is_err() {
            self.begun.store(true, Ordering::SeqCst);
            drop(lock.lock());
        }
    }

    /// Waits until it is stuck, and then sees that `work` ends all the same. `held` is let go of before the test fails, which would else
    /// wait for it.
    fn while_stuck(&self, held: MutexGuard<'_, ()>, what: &str, work: impl FnOnce() + Send) {
        while !self.begun.swap(false, Ordering::SeqCst) {
            std::thread::yield_now();
        }
        std::thread::scope(|scope| {
            let working = scope.spawn(work);
            let began = Instant::now();
            while !working.is_finished() && began.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let ended = working.is_finished();
            drop(held);
            assert!(ended, "{what} waits for the pager");
        });
    }
}

impl selfpage::pager::UserPager for Stuck {
    fn fill(&self, _: u64, bytes: &mut [u8; PAGE]) -> std::io::Result<()> {
        bytes.fill(7);
        self.wait_at(&self.fill);
        Ok(())
    }

    fn save(&self, _: u64, _: &[u8; PAGE]) -> std::io::Result<()> {
        self.wait_at(&self.save);
        Ok(())
    }
}

#[test]
fn a_sample_waits_for_no_pager() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let Some(domain) = domain(512) else { return };
        let others = numbered(&domain, 16, trap);
        let stuck = Stuck::default();
        let mut region = domain.region(16 * PAGE).trap(trap).user(stuck.clone()).unwrap();
        let sampled = |least, most| {
            let sample = domain.sample(Sampling::Whole).unwrap();
            let usage = sample.usage().unwrap();
            assert!((least..=most).contains(&usage.sampled), "{trap:?}: {usage:?}");
            assert_eq!(usage.in_core, usage.sampled);
            assert_eq!(sample.is_referenced(others.as_ptr().addr() as u64 / PAGE as u64).unwrap(), Some(false));
        };
        let first = region.as_ptr().addr();
        std::thread::scope(|scope| {
            let held = stuck.fill.lock().unwrap();
            // SAFETY: the region outlives the scope.
            scope.spawn(move || unsafe { std::ptr::read_volatile(first as *const u8) });
            stuck.while_stuck(held, "a sample beside a fill", || sampled(16, 16));
        });
        region.as_mut_slice::<u8>()[0] = 8;
        std::thread::scope(|scope| {
            let held = stuck.save.lock().unwrap();
            scope.spawn(|| region.flush(0, PAGE).unwrap());
            stuck.while_stuck(held, "a sample beside a flush", || sampled(16, 31));
        });
        sampled(17, 32);
    }
}

#[test]
fn a_trace_waits_for_no_pager_and_loses_nothing() {
    const PAGES: usize = 256;
    if domain(16).is_none() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    for (at, trap) in [Trap::Worker, Trap::Upcall].into_iter().enumerate() {
        let path = place.path().join(format!("trace {at}"));
        // A working set each time that the queue is emptied.
        let domain = Domain::with_frames(2 * PAGES * PAGE).trace(&path, Duration::from_nanos(1)).build().unwrap();
        let mut others = numbered(&domain, PAGES, trap);
        let stuck = Stuck::default();
        let region = domain.region(PAGE).trap(trap).user(stuck.clone()).unwrap();
        let first = region.as_ptr().addr();
        std::thread::scope(|scope| {
            let held = stuck.fill.lock().unwrap();
            // SAFETY: the region outlives the scope.
            scope.spawn(move || unsafe { std::ptr::read_volatile(first as *const u8) });
            let (domain, others) = (&domain, &mut others);
            stuck.while_stuck(held, "a trace", move || {
                domain.flush_trace();
                // More events than the queue has places for.
                for round in 0..140 {
                    others.discard(0, PAGES * PAGE).unwrap();
                    (0..PAGES).for_each(|page| others.as_mut_slice::<u8>()[page * PAGE] = round);
                    if round % 16 == 0 {
                        domain.flush_trace();
                    }
                }
            });
        });
        drop((region, others));
        drop(domain);
        let trace = Trace::read(&path).unwrap();
        assert!(trace.records.iter().any(|record| matches!(record, Record::WorkingSet { .. })));
        let lost = trace.records.iter().find(|record| matches!(record, Record::Dropped(_)));
        assert_eq!(lost, None, "{trap:?}: of {} records", trace.records.len());
    }
}

#[test]
fn a_fault_counts_once_whoever_ends_it() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let Some(domain) = domain(512) else { return };
        let region = domain.region(256 * PAGE).trap(trap).user(Sevens).unwrap();
        // Far from each other, and in no order that a stream has.
        let pages = (0..16u64).map(|at| (at * at * 37 % 256) as usize);
        pages.for_each(|page| assert_eq!(region.as_slice::<u8>()[page * PAGE], 7));
        let counts = domain.stats().counts;
        let most = counts.fills_total - counts.fills_ahead_total;
        assert!(counts.faults_total > 0 && counts.faults_total <= most, "{counts:?}");
        let passes = |_: &selfpage::MemoryFault<'_>| selfpage::Answer::Pass;
        let region = domain.region(16 * PAGE).trap(trap).handler(AsksFirst(passes)).zero().unwrap();
        let before = domain.stats().counts.faults_total;
        (0..16).for_each(|page| assert_eq!(region.as_slice::<u8>()[page * PAGE], 0));
        // A worker may be told of a page twice.
        assert!((16..24).contains(&(domain.stats().counts.faults_total - before)));
    }
}

struct AsksFirst<F>(F);

impl<F: Fn(&selfpage::MemoryFault<'_>) -> selfpage::Answer + Send + Sync> selfpage::FaultHandler for AsksFirst<F> {
    fn handle(&self, fault: &selfpage::MemoryFault<'_>) -> selfpage::Answer {
        (self.0)(fault)
    }

    fn asks_first(&self) -> bool {
        true
    }
}
