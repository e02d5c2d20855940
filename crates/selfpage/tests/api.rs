//! The library as its users meet it.

use std::collections::HashMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use selfpage::pager::UserPager;
use selfpage::store::MemoryStore;
use selfpage::{Config, Domain, FileAccess, Kind, Region, Trap};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;
/// Words of a page.
const WORDS: usize = PAGE / 8;
const TRAPS: [Trap; 2] = [Trap::Worker, Trap::Upcall];
/// Set in the process that [`alone`] starts.
const ALONE: &str = "SELFPAGE_API_ALONE";

/// The domain, or a loud skip where this machine cannot have one.
fn built(config: Config) -> Option<Domain> {
    match config.build() {
        Ok(domain) => Some(domain),
        Err(error) if error.kind() == Kind::Unsupported => {
            skip::skip("uffd", &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn domain(frames: usize) -> Option<Domain> {
    built(Domain::with_frames(frames * PAGE))
}

fn stored(domain: &Domain, pages: usize, trap: Trap) -> Region {
    let store = MemoryStore::new((2 * pages * PAGE) as u64).unwrap();
    domain.region(pages * PAGE).trap(trap).stored(store).unwrap()
}

/// What word 0 of page `page` is given.
fn mark(page: usize) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn write_marks(region: &mut Region) {
    for (page, words) in region.as_mut_slice::<u64>().chunks_mut(WORDS).enumerate() {
        words[0] = mark(page);
    }
}

fn check_marks(region: &Region) {
    for (page, words) in region.as_slice::<u64>().chunks(WORDS).enumerate() {
        assert_eq!(words[0], mark(page), "page {page}");
    }
}

fn in_core(region: &Region) -> usize {
    region.residency().iter().filter(|page| page.load(Ordering::Relaxed) != 0).count()
}

/// Waits for what other threads bring about.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within 10 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Does `work` in a process of its own, which runs `test` of this file alone: what would end this process, or what the others
/// would disturb. How it ended; `None` in that process.
fn alone(test: &str, case: &str, work: impl FnOnce()) -> Option<Output> {
    match std::env::var(ALONE) {
        Ok(wanted) if wanted == case => work(),
        Ok(_) => {}
        Err(_) => {
            let mut run = Command::new(std::env::current_exe().unwrap());
            return Some(run.args(["--exact", test, "--nocapture"]).env(ALONE, case).output().unwrap());
        }
    }
    None
}

/// A file with marks, and `len` bytes; removed at the end.
struct Marked(PathBuf);

impl Marked {
    fn new(name: &str, len: usize) -> Marked {
        let path = PathBuf::from(format!("/var/tmp/selfpage-api-{name}-{}", std::process::id()));
        let pages = len.div_ceil(PAGE);
        let mut bytes = vec![0u8; pages * PAGE];
        for (page, place) in bytes.chunks_mut(PAGE).enumerate() {
            place[..8].copy_from_slice(&mark(page).to_ne_bytes());
        }
        std::fs::write(&path, &bytes[..len]).unwrap();
        Marked(path)
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_region_is_zero_at_first_touch() {
    for trap in TRAPS {
        let Some(domain) = domain(64) else { return };
        let region = stored(&domain, 512, trap);
        assert_eq!(in_core(&region), 0);
        assert!(region.as_slice::<u64>().iter().all(|word| *word == 0));
        assert!(domain.stats().counts.evictions_total >= 512 - 64);
    }
}

#[test]
fn contents_survive_eviction() {
    for trap in TRAPS {
        let Some(domain) = domain(64) else { return };
        let mut region = stored(&domain, 32, trap);
        write_marks(&mut region);
        assert_eq!(in_core(&region), 32);
        assert_eq!(region.evict(0, region.len_bytes()).unwrap(), 32);
        assert_eq!(in_core(&region), 0);
        check_marks(&region);
    }
}

#[test]
fn evicting_twice_takes_the_frames_too() {
    let Some(domain) = domain(64) else { return };
    let mut region = stored(&domain, 16, Trap::Upcall);
    write_marks(&mut region);
    assert_eq!(region.evict(0, region.len_bytes()).unwrap(), 16);
    eventually("saves", || domain.stats().frames_standby > 0);
    let mut gone = 0;
    // What the first call left on standby loses its frame, and is counted.
    eventually("the rest", || {
        gone += region.evict(0, region.len_bytes()).unwrap();
        domain.stats().frames_standby == 0 && gone > 0
    });
    assert!(domain.stats().counts.evictions_total >= u64::from(gone), "{:?}", domain.stats());
    let filled = domain.stats().counts.bytes_filled;
    check_marks(&region);
    assert!(domain.stats().counts.bytes_filled > filled, "nothing was read back");
}

#[test]
fn discarded_pages_are_zero_and_leave_the_store() {
    for trap in TRAPS {
        let Some(domain) = domain(64) else { return };
        let store = Arc::new(MemoryStore::new((1024 * PAGE) as u64).unwrap());
        let mut region = domain.region(256 * PAGE).trap(trap).stored_in(store.clone()).unwrap();
        write_marks(&mut region);
        assert!(store.taken_bloks() > 0);
        region.discard(0, region.len_bytes()).unwrap();
        assert_eq!(store.taken_bloks(), 0, "garbage was kept");
        assert_eq!(in_core(&region), 0);
        assert!(region.as_slice::<u64>().iter().all(|word| *word == 0));
    }
}

#[test]
fn discarding_a_part_leaves_the_rest() {
    let Some(domain) = domain(64) else { return };
    let mut region = stored(&domain, 256, Trap::Worker);
    write_marks(&mut region);
    region.discard(100 * PAGE, 50 * PAGE).unwrap();
    for (page, words) in region.as_slice::<u64>().chunks(WORDS).enumerate() {
        assert_eq!(words[0], if (100..150).contains(&page) { 0 } else { mark(page) }, "page {page}");
    }
}

/// Has all of a region prefetched, and reads it without a fault. A page counts as in core just before it is mapped: the pin waits for that.
fn prefetch_and_check(domain: &Domain, region: &Region) {
    region.prefetch(0, region.len_bytes()).unwrap();
    eventually("prefetch", || in_core(region) == region.len_bytes() / PAGE);
    let before = domain.stats().counts.faults_total;
    region.pin(0, region.len_bytes()).unwrap();
    check_marks(region);
    assert_eq!(domain.stats().counts.faults_total, before);
}

#[test]
fn prefetched_pages_are_in_core_and_do_not_fault() {
    for trap in TRAPS {
        // As much as the frames can take beside the reserve, in one call.
        let Some(domain) = domain(2048) else { return };
        let file = Marked::new(&format!("prefetch-{trap:?}"), 1500 * PAGE);
        let region = domain.region(0).trap(trap).file(&file.0, 0, FileAccess::Read).unwrap();
        prefetch_and_check(&domain, &region);
    }
}

#[test]
fn evicted_pages_can_be_prefetched() {
    let Some(domain) = domain(256) else { return };
    let mut region = stored(&domain, 100, Trap::Upcall);
    write_marks(&mut region);
    assert_eq!(region.evict(0, region.len_bytes()).unwrap(), 100);
    region.flush(0, region.len_bytes()).unwrap();
    prefetch_and_check(&domain, &region);
}

#[test]
fn prefetch_makes_room_for_itself() {
    let Some(domain) = domain(2048) else { return };
    let mut other = stored(&domain, 4096, Trap::Upcall);
    write_marks(&mut other);
    let file = Marked::new("prefetch-room", 1000 * PAGE);
    let region = domain.region(0).trap(Trap::Upcall).file(&file.0, 0, FileAccess::Read).unwrap();
    eventually("prefetch", || {
        // Some of them may go again for pages of the other that cannot be saved as fast.
        region.prefetch(0, region.len_bytes()).unwrap();
        in_core(&region) >= 700
    });
    check_marks(&region);
}

#[test]
fn pinned_pages_stay_through_a_storm() {
    for trap in TRAPS {
        let Some(domain) = domain(128) else { return };
        let mut region = stored(&domain, 1024, trap);
        region.pin(10 * PAGE, 20 * PAGE).unwrap();
        for _ in 0..3 {
            write_marks(&mut region);
        }
        check_marks(&region);
        assert!(region.residency()[10..30].iter().all(|page| page.load(Ordering::Relaxed) == 1));
        let error = region.evict(10 * PAGE, 20 * PAGE).unwrap_err();
        assert_eq!(error.kind(), Kind::Held, "{error}");
        region.unpin(10 * PAGE, 20 * PAGE).unwrap();
        assert_eq!(region.evict(10 * PAGE, 20 * PAGE).unwrap(), 20);
        check_marks(&region);
    }
}

#[test]
fn pins_are_counted_and_unpin_says_when_there_is_none() {
    let Some(domain) = domain(64) else { return };
    let region = stored(&domain, 16, Trap::Worker);
    region.pin(0, PAGE).unwrap();
    region.pin(0, 2 * PAGE).unwrap();
    region.unpin(0, 2 * PAGE).unwrap();
    assert_eq!(region.evict(0, PAGE).unwrap_err().kind(), Kind::Held);
    region.unpin(0, PAGE).unwrap();
    let error = region.unpin(0, PAGE).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    assert!(error.to_string().contains("not pinned"), "{error}");
    assert_eq!(region.evict(0, PAGE).unwrap(), 1);
}

#[test]
fn pinning_more_than_the_frames_is_an_error_and_pins_nothing() {
    let Some(domain) = domain(64) else { return };
    let region = stored(&domain, 256, Trap::Worker);
    let error = region.pin(0, region.len_bytes()).unwrap_err();
    assert_eq!(error.kind(), Kind::Held, "{error}");
    assert_eq!(region.unpin(0, PAGE).unwrap_err().kind(), Kind::Invalid);
    assert!(region.as_slice::<u64>().iter().all(|word| *word == 0));
}

#[test]
fn ranges_outside_the_region_are_refused() {
    let Some(domain) = domain(64) else { return };
    let mut region = stored(&domain, 16, Trap::Worker);
    let len = region.len_bytes();
    let refused = [
        region.pin(len, 1).unwrap_err(),
        region.prefetch(0, len + 1).unwrap_err(),
        region.evict(usize::MAX, 2).unwrap_err(),
        region.flush(PAGE, len).unwrap_err(),
        region.discard(1, len).unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
        assert!(error.to_string().contains(&format!("{len} bytes")), "{error}");
    }
    assert_eq!(region.evict(len, 0).unwrap(), 0);
}

#[test]
fn a_flushed_file_has_what_was_written_and_its_own_length() {
    for trap in TRAPS {
        let len = 300 * PAGE + 123;
        let file = Marked::new(&format!("flush-{trap:?}"), len);
        let Some(domain) = domain(64) else { return };
        let mut region = domain.region(0).trap(trap).file(&file.0, 0, FileAccess::ReadWrite).unwrap();
        assert_eq!(region.len_bytes(), 301 * PAGE);
        check_marks(&region);
        let mut expected = std::fs::read(&file.0).unwrap();
        for (index, byte) in region.as_mut_slice::<u8>().iter_mut().enumerate().step_by(1000) {
            *byte = byte.wrapping_add(1);
            if let Some(same) = expected.get_mut(index) {
                *same = same.wrapping_add(1);
            }
        }
        region.flush(0, region.len_bytes()).unwrap();
        assert!(std::fs::read(&file.0).unwrap() == expected, "{trap:?}: the file differs");
        drop(region);
        drop(domain);
        assert!(std::fs::read(&file.0).unwrap() == expected, "{trap:?}: the file differs after the domain");
    }
}

#[test]
fn a_part_of_a_file_begins_at_its_offset() {
    let file = Marked::new("offset", 40 * PAGE);
    let Some(domain) = domain(64) else { return };
    let region = domain.region(5 * PAGE).file(&file.0, 30 * PAGE as u64, FileAccess::Read).unwrap();
    assert_eq!(region.as_slice::<u64>()[4 * WORDS], mark(34));
    let too_long = domain.region(11 * PAGE).file(&file.0, 30 * PAGE as u64, FileAccess::Read).unwrap_err();
    assert_eq!(too_long.kind(), Kind::Invalid, "{too_long}");
    let odd = domain.region(PAGE).file(&file.0, 100, FileAccess::Read).unwrap_err();
    assert!(odd.to_string().contains("multiple"), "{odd}");
    let none = domain.region(PAGE).file("/nonexistent", 0, FileAccess::Read).unwrap_err();
    assert!(none.to_string().contains("/nonexistent"), "{none}");
    let directory = domain.region(0).file("/", 0, FileAccess::Read).unwrap_err();
    assert_eq!(directory.kind(), Kind::Invalid, "{directory}");
}

#[test]
#[should_panic(expected = "read-only")]
fn a_read_only_region_gives_no_slice_to_write_to() {
    let Some(domain) = domain(64) else { panic!("read-only") };
    let file = Marked::new("read-only", 4 * PAGE);
    let mut region = domain.region(0).file(&file.0, 0, FileAccess::Read).unwrap();
    check_marks(&region);
    region.as_mut_slice::<u64>()[0] = 1;
}

#[test]
fn a_write_to_a_read_only_page_is_the_programs_own_segv() {
    for trap in TRAPS {
        let Some(domain) = domain(64) else { return };
        let file = Marked::new(&format!("violation-{trap:?}"), 4 * PAGE);
        let region = domain.region(0).trap(trap).file(&file.0, 0, FileAccess::Read).unwrap();
        let output = alone("a_write_to_a_read_only_page_is_the_programs_own_segv", &format!("{trap:?}"), || {
            std::fs::remove_file(&file.0).unwrap();
            // SAFETY: none: that is the point.
            unsafe { region.as_ptr().write_volatile(1) };
        });
        assert!(output.is_none_or(|output| output.status.signal() == Some(libc::SIGSEGV)), "{trap:?}");
    }
}

#[test]
fn frames_come_and_go_while_threads_run() {
    let Some(domain) = built(Domain::with_frames(128 * PAGE).most_frames(512 * PAGE)) else { return };
    let mut region = stored(&domain, 1024, Trap::Upcall);
    write_marks(&mut region);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    check_marks(&region);
                }
            });
        }
        for _ in 0..5 {
            domain.add_frames(384).unwrap();
            assert_eq!(domain.stats().frames_bytes, (512 * PAGE) as u64);
            std::thread::sleep(Duration::from_millis(30));
            domain.remove_frames(400).unwrap();
            assert_eq!(domain.contract().optimistic(), 112);
            assert!(in_core(&region) <= 112);
            domain.add_frames(16).unwrap();
        }
        ends.store(true, Ordering::Relaxed);
    });
    let error = domain.add_frames(385).unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
    let error = domain.remove_frames(120).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    check_marks(&region);
}

#[test]
fn the_frames_are_never_exceeded() {
    for trap in TRAPS {
        let Some(domain) = domain(256) else { return };
        let mut region = stored(&domain, 2048, trap);
        write_marks(&mut region);
        let stats = domain.stats();
        assert!(in_core(&region) <= 256);
        assert!(stats.resident_bytes_max <= (256 * PAGE) as u64, "{stats:?}");
        assert_eq!(stats.frames_bytes, (256 * PAGE) as u64);
    }
}

#[test]
fn a_pinned_region_never_faults() {
    let Some(domain) = domain(64) else { return };
    let mut region = domain.region(32 * PAGE).pinned().unwrap();
    let before = domain.stats().counts.faults_total;
    write_marks(&mut region);
    check_marks(&region);
    assert_eq!(domain.stats().counts.faults_total, before);
    let mut other = stored(&domain, 256, Trap::Worker);
    write_marks(&mut other);
    assert_eq!(in_core(&region), 32);
    let error = domain.region(64 * PAGE).pinned().unwrap_err();
    assert_eq!(error.kind(), Kind::Held, "{error}");
    check_marks(&other);
}

#[test]
fn physical_and_zero_regions_keep_what_is_in_them() {
    let Some(domain) = domain(128) else { return };
    let mut physical = domain.region(32 * PAGE).physical().unwrap();
    write_marks(&mut physical);
    // The frames that the physical region gets were used before; the zero pager clears them.
    let mut stored = stored(&domain, 512, Trap::Upcall);
    write_marks(&mut stored);
    let mut zero = domain.region(32 * PAGE).trap(Trap::Upcall).zero().unwrap();
    assert!(zero.as_slice::<u64>().iter().all(|word| *word == 0));
    write_marks(&mut zero);
    check_marks(&stored);
    check_marks(&physical);
    check_marks(&zero);
}

/// Page `n` is full of `n` until it is saved.
#[derive(Default)]
struct Numbers {
    kept: Mutex<HashMap<u64, Vec<u8>>>,
    forgotten: Mutex<Vec<u64>>,
}

impl UserPager for &'static Numbers {
    fn fill(&self, index: u64, bytes: &mut [u8; PAGE]) -> io::Result<()> {
        match self.kept.lock().unwrap().get(&index) {
            Some(kept) => bytes.copy_from_slice(kept),
            None => bytes.fill(index as u8),
        }
        Ok(())
    }

    fn save(&self, index: u64, bytes: &[u8; PAGE]) -> io::Result<()> {
        self.kept.lock().unwrap().insert(index, bytes.to_vec());
        Ok(())
    }

    fn forget(&self, index: u64) {
        self.kept.lock().unwrap().remove(&index);
        self.forgotten.lock().unwrap().push(index);
    }
}

#[test]
fn a_pager_of_ones_own_is_asked_for_pages_and_given_changes() {
    for trap in TRAPS {
        let pager: &'static Numbers = Box::leak(Box::default());
        let Some(domain) = domain(64) else { return };
        let mut region = domain.region(256 * PAGE).trap(trap).user(pager).unwrap();
        for (page, bytes) in region.as_slice::<u8>().chunks(PAGE).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == page as u8), "page {page}");
        }
        assert!(pager.kept.lock().unwrap().is_empty(), "unchanged pages were saved");
        region.as_mut_slice::<u8>()[200 * PAGE + 7] = 99;
        region.flush(0, region.len_bytes()).unwrap();
        assert_eq!(pager.kept.lock().unwrap().keys().copied().collect::<Vec<_>>(), [200]);
        assert_eq!(pager.kept.lock().unwrap()[&200][7], 99);
        region.discard(200 * PAGE, PAGE).unwrap();
        assert_eq!(region.as_slice::<u8>()[200 * PAGE + 7], 200);
        assert!(pager.forgotten.lock().unwrap().contains(&200));
    }
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let error = Domain::with_frames(64 * PAGE).policy("lru2").build().err().unwrap();
    assert_eq!(error.kind(), Kind::Invalid);
    assert!(error.to_string().contains("lru2") && error.to_string().contains("fifo, lru, mru"), "{error}");
    for frames in [0, 1, 15 * PAGE, usize::MAX] {
        let error = Domain::with_frames(frames).build().err().unwrap();
        assert_eq!(error.kind(), Kind::Invalid, "{frames}: {error}");
    }
    let Some(domain) = domain(16) else { return };
    for len in [0, usize::MAX, isize::MAX as usize] {
        let error = domain.region(len).zero().unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{len}: {error}");
    }
    assert_eq!(stored(&domain, 64, Trap::Worker).as_slice::<u64>()[63 * WORDS], 0);
}

#[test]
fn a_region_outlives_the_handle_of_its_domain() {
    for trap in TRAPS {
        let Some(domain) = domain(64) else { return };
        let mut region = stored(&domain, 256, trap);
        write_marks(&mut region);
        drop(domain);
        check_marks(&region);
        region.evict(0, region.len_bytes()).unwrap();
        check_marks(&region);
    }
}

#[test]
fn a_domain_leaves_nothing_behind() {
    if domain(64).is_some()
        && let Some(output) = alone("a_domain_leaves_nothing_behind", "counting", make_and_drop_domains)
    {
        assert!(output.status.success(), "{output:?}");
    }
}

fn make_and_drop_domains() {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let mut before = None;
    for round in 0..8 {
        let Some(domain) = domain(64) else { return };
        for trap in TRAPS {
            write_marks(&mut stored(&domain, 128, trap));
        }
        drop(domain);
        let now = (count("/proc/self/fd"), count("/proc/self/task"), mappings());
        // The first rounds make what stays: stacks for traps, the allocator's own.
        if round == 3 {
            before = Some(now);
        }
        if let Some((descriptors, threads, maps)) = before {
            assert_eq!(now.0, descriptors, "descriptors, round {round}");
            assert!(now.2 <= maps + 2, "mappings: {maps} then {}", now.2);
            // A thread that was joined may be listed for a moment more.
            eventually("threads", || count("/proc/self/task") <= threads);
        }
    }
}

#[test]
fn two_domains_each_keep_to_their_own_frames() {
    let (Some(small), Some(large)) = (domain(64), domain(512)) else { return };
    std::thread::scope(|scope| {
        for domain in [&small, &large] {
            scope.spawn(move || {
                let mut regions: Vec<Region> = TRAPS.map(|trap| stored(domain, 512, trap)).into();
                for region in &mut regions {
                    write_marks(region);
                }
                for region in &regions {
                    check_marks(region);
                }
                let held: usize = regions.iter().map(in_core).sum();
                assert!(held * PAGE <= domain.stats().frames_bytes as usize);
            });
        }
    });
    assert!(small.stats().resident_bytes_max <= (64 * PAGE) as u64);
    assert!(large.stats().resident_bytes_max <= (512 * PAGE) as u64);
}

#[test]
fn a_thousand_regions_and_no_more() {
    let Some(domain) = domain(256) else { return };
    let store = Arc::new(MemoryStore::new((4096 * PAGE) as u64).unwrap());
    let make = |number: usize| domain.region(3 * PAGE).trap(TRAPS[number % 2]).stored_in(store.clone());
    let mut regions: Vec<Region> = (0..1024).map(|number| make(number).unwrap()).collect();
    let error = make(0).unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
    for (number, region) in regions.iter_mut().enumerate() {
        region.as_mut_slice::<u64>()[WORDS] = mark(number);
    }
    for number in (0..1024).rev().step_by(2) {
        regions.swap_remove(number / 2 * 2);
    }
    assert_eq!(regions.len(), 512);
    let again = make(1).unwrap();
    assert_eq!(again.as_slice::<u64>()[WORDS], 0);
    let mut seen: Vec<u64> = regions.iter().map(|region| region.as_slice::<u64>()[WORDS]).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 512);
    drop(regions);
    drop(again);
    assert_eq!(store.taken_bloks(), 0);
}

#[test]
fn views_have_the_type_that_is_asked_for() {
    let Some(domain) = domain(64) else { return };
    let mut region = stored(&domain, 128, Trap::Worker);
    assert_eq!(region.as_slice::<u8>().len(), 128 * PAGE);
    assert_eq!(region.as_slice::<[f32; 3]>().len(), 128 * PAGE / 12);
    region.as_mut_slice::<f64>()[1000] = 2.5;
    assert_eq!(region.as_slice::<u64>()[1000], 2.5f64.to_bits());
    assert_eq!(region.as_slice::<[u32; 2]>()[1000], [0, 0x4004_0000]);
}
