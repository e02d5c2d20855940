//! What a sequence of accesses brings along.

#[path = "../../../tests/physical.rs"]
mod physical;
#[path = "../../../tests/skip.rs"]
mod skip;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use selfpage::pager::UserPager;
use selfpage::store::MemoryStore;
use selfpage::trace::{Kind, Record, Trace};
use selfpage::{Answer, Domain, FaultHandler, MemoryFault, PageBytes, Protection, Trap};

const PAGE: usize = 4096;
const PAGES: usize = 2048;

#[test]
fn reading_ahead_ends_with_the_region() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let domain = Domain::with_frames(4096 * PAGE).build().unwrap();
        let store = || MemoryStore::new(64 << 20).unwrap();
        // A place for two regions side by side, where nothing else comes to lie.
        let place = domain.region(2 * PAGES * PAGE).far_from_all().zero().unwrap();
        let first = place.as_ptr() as usize;
        drop(place);
        let made = |at| domain.region(PAGES * PAGE).trap(trap).at(at).stored(store()).unwrap();
        let (read, beside) = (made(first), made(first + PAGES * PAGE));
        assert!(read.as_slice::<u64>().iter().step_by(512).all(|word| *word == 0));
        // What was asked of pager threads they may still be at.
        std::thread::sleep(Duration::from_millis(100));
        let brought = beside.residency().iter().filter(|byte| byte.load(Ordering::Relaxed) != 0).count();
        assert_eq!(brought, 0, "pages of a region that nobody has read");
        assert!(domain.stats().counts.fills_ahead_total > 0, "nothing was read ahead");
    }
}

#[test]
fn a_stride_brings_along_its_own_pages_and_no_others() {
    const STRIDE: usize = 7;
    let domain = Domain::with_frames(4096 * PAGE).build().unwrap();
    let store = || MemoryStore::new(64 << 20).unwrap();
    for stride in [STRIDE as isize, -(STRIDE as isize)] {
        let region = domain.region(PAGES * PAGE).stored(store()).unwrap();
        let words = region.as_slice::<u64>();
        let ahead_before = domain.stats().counts.fills_ahead_total;
        let (mut at, mut read) = (if stride > 0 { 0 } else { PAGES as isize - 1 }, 0);
        while (0..PAGES as isize / 2).contains(&(if stride > 0 { at } else { PAGES as isize - 1 - at })) {
            assert_eq!(words[at as usize * 512], 0);
            (at, read) = (at + stride, read + 1);
        }
        let ahead = domain.stats().counts.fills_ahead_total - ahead_before;
        assert!(ahead > read / 2, "{ahead} of {read} pages were there before they were asked for");
        let on_grid = |page: usize| (page as isize - at).rem_euclid(STRIDE as isize) == 0;
        let residency = region.residency();
        let beside = (0..PAGES).filter(|page| !on_grid(*page) && residency[*page].load(Ordering::Relaxed) != 0).count();
        assert_eq!(beside, 0, "pages that the program steps over");
    }
}

/// A device takes a request for neighbours in one piece only where the memory is in one piece, too.
#[test]
fn frames_that_come_in_order_are_neighbours_in_memory() {
    if !physical::can_be_neighbours() {
        return;
    }
    let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
    let region = domain.region(4 * PAGES * PAGE).stored(MemoryStore::new(64 << 20).unwrap()).unwrap();
    // Out of step.
    (0..35).for_each(|page| assert_eq!(region.as_slice::<u64>()[page * 97 * 512], 0));
    assert!(region.as_slice::<u64>().iter().step_by(512).all(|word| *word == 0));
    let pages = physical::pages(region.as_ptr() as usize, 4 * PAGES);
    // The first frames come a few at a time, for small programs.
    let neighbours = physical::neighbours(&pages[2 * PAGES..]);
    assert!(neighbours > 2 * PAGES * 9 / 10, "{neighbours} of {} lie side by side", 2 * PAGES);
}

/// Has all but one of its pages.
struct LacksOne;

impl UserPager for LacksOne {
    fn fill(&self, index: u64, _bytes: &mut PageBytes) -> io::Result<()> {
        if index == 9 { Err(io::Error::from(io::ErrorKind::NotFound)) } else { Ok(()) }
    }

    fn save(&self, _index: u64, _bytes: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_fill_that_fails_counts_though_nobody_had_asked_for_it_yet() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let domain = Domain::with_frames(4096 * PAGE).build().unwrap();
        let region = domain.region(32 * PAGE).trap(trap).user(LacksOne).unwrap();
        region.prefetch(0, 32 * PAGE).unwrap();
        let began = Instant::now();
        while domain.stats().counts.fill_errors_total == 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "{trap:?}: {:?}", domain.stats().counts);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(domain.stats().counts.fill_errors_total, 1, "{trap:?}");
        assert!(region.pin(9 * PAGE, 1).is_err());
        assert_eq!(domain.stats().counts.fill_errors_total, 2, "{trap:?}");
    }
}

/// Gives every page its contents.
struct Gives;

impl FaultHandler for Gives {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        // SAFETY: test: the same each time.
        if unsafe { fault.map(&[7; PAGE]) }.is_ok() { Answer::Handled } else { Answer::Pass }
    }

    fn asks_first(&self) -> bool {
        true
    }
}

#[test]
fn each_page_that_comes_in_is_traced_once_before_its_first_use() {
    let place = tempfile::tempdir().unwrap();
    for (at, trap) in [Trap::Worker, Trap::Upcall].into_iter().enumerate() {
        let path = place.path().join(format!("trace {at}"));
        let domain = Domain::with_frames(4096 * PAGE).trace(&path, Duration::ZERO).build().unwrap();
        let store = || MemoryStore::new(64 << 20).unwrap();
        let mut read = domain.region(PAGES * PAGE).trap(trap).stored(store()).unwrap();
        read.as_mut_slice::<u64>().iter_mut().step_by(512).for_each(|word| *word = 1);
        // Once more, as read ahead: what was saved comes from a store.
        read.flush(0, PAGES * PAGE).unwrap();
        read.evict(0, PAGES * PAGE).unwrap();
        assert!(read.as_slice::<u64>().iter().step_by(512).all(|word| *word == 1));
        let given = domain.region(16 * PAGE).trap(trap).handler(Gives).stored(store()).unwrap();
        assert!(given.as_slice::<u8>().iter().all(|byte| *byte == 7));
        // What was asked of pager threads they may still be at.
        std::thread::sleep(Duration::from_millis(100));
        let counts = domain.stats().counts;
        assert!(counts.fills_ahead_total > 0, "nothing was read ahead");
        drop((read, given));
        drop(domain);
        let mut came = BTreeMap::new();
        for record in Trace::read(&path).unwrap().records {
            assert!(!matches!(record, Record::Dropped(_)), "{record:?}");
            let Record::Event(event) = record else { continue };
            let times = came.entry(event.page).or_insert(0u64);
            match event.kind {
                Kind::First | Kind::Fill | Kind::Ahead => *times += 1,
                Kind::Soft => assert!(*times > 0, "{trap:?}: {event:?} of a page that never came"),
                _ => {}
            }
        }
        assert_eq!(came.values().sum::<u64>(), counts.fills_total, "{trap:?}: {counts:?}");
    }
}

/// Whatever has a page come in: a trace that misses it takes the page for gone.
#[test]
fn pages_that_come_by_clones_moves_and_advice_are_traced() {
    const COUNT: usize = 16;
    let place = tempfile::tempdir().unwrap();
    for (at, trap) in [Trap::Worker, Trap::Upcall].into_iter().enumerate() {
        let path = place.path().join(format!("trace {at}"));
        let domain = Domain::with_frames(1024 * PAGE).trace(&path, Duration::ZERO).build().unwrap();
        let store = || MemoryStore::new(64 << 20).unwrap();
        let mut source = domain.region(3 * COUNT * PAGE).trap(trap).stored(store()).unwrap();
        let write = |words: &mut [u64]| words.iter_mut().step_by(512).for_each(|word| *word += 1);
        write(&mut source.as_mut_slice::<u64>()[..COUNT * 512]);
        let clone = source.cow_clone(store()).unwrap();
        // Of the clone's pages half come by faults on them, half by writes to the source's.
        write(&mut source.as_mut_slice::<u64>()[..COUNT / 2 * 512]);
        assert!(clone.as_slice::<u64>()[..COUNT * 512].iter().step_by(512).all(|word| *word == 1));
        // On standby they move, and on standby they are asked for.
        source.flush(0, COUNT * PAGE).unwrap();
        source.evict(0, COUNT * PAGE).unwrap();
        // SAFETY: region-contents: nobody refers to what is in there.
        unsafe { source.move_contents(0, COUNT / 2 * PAGE, &source, 2 * COUNT * PAGE) }.unwrap();
        assert!(
            source.as_slice::<u64>()[2 * COUNT * 512..][..COUNT / 2 * 512].iter().step_by(512).all(|word| *word == 2)
        );
        // The last of them is in core, aside, and then gone.
        source.as_mut_slice::<u64>()[(3 * COUNT - 1) * 512] = 1;
        source.protect((3 * COUNT - 1) * PAGE, PAGE, Protection::None).unwrap();
        source.discard((3 * COUNT - 1) * PAGE, PAGE).unwrap();
        source.prefetch(0, COUNT * PAGE).unwrap();
        let began = Instant::now();
        while source.residency()[..COUNT].iter().any(|byte| byte.load(Ordering::Relaxed) == 0) {
            assert!(began.elapsed() < Duration::from_secs(20), "{trap:?}: what is asked for does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        // A moment for what is told of the last of it.
        std::thread::sleep(Duration::from_millis(200));
        domain.flush_trace();
        let gone = source.as_ptr() as u64 / PAGE as u64 + 3 * COUNT as u64 - 1;
        let mut in_core = Vec::new();
        for region in [&source, &clone] {
            let first = region.as_ptr() as u64 / PAGE as u64;
            let bytes = (first..).zip(region.residency());
            in_core.extend(bytes.filter(|(_, byte)| byte.load(Ordering::Relaxed) == 1).map(|(page, _)| page));
        }
        // Read before they end, which drops all pages.
        let trace = Trace::read(&path).unwrap();
        let event = |record| if let Record::Event(event) = record { Some(event) } else { None };
        let mut events: Vec<_> = trace.records.into_iter().filter_map(event).collect();
        // Whoever brought a page in may tell of it when another has told that it went.
        events.sort_by_key(|event| event.time_ns);
        let mut came = BTreeMap::new();
        for event in events {
            match event.kind {
                Kind::Soft | Kind::Referenced => {
                    assert!(came.contains_key(&event.page.0), "{trap:?}: {event:?} never came")
                }
                _ => {}
            }
            came.insert(event.page.0, event.kind);
        }
        assert!(in_core.len() >= 2 * COUNT, "{trap:?}: {} pages are in core", in_core.len());
        for page in in_core {
            let last = came.get(&page);
            let is_in = last.is_some_and(|kind| !matches!(kind, Kind::Evict | Kind::Save | Kind::Discard));
            assert!(is_in, "{trap:?}: page {page:#x} is in core, and the last that is told of it is {last:?}");
        }
        assert_eq!(came.get(&gone), Some(&Kind::Discard), "{trap:?}");
        let first = clone.as_ptr() as u64 / PAGE as u64;
        let told: Vec<_> = (first..).take(COUNT).map(|page| came[&page]).collect();
        assert_eq!(
            told,
            [[Kind::Ahead; COUNT / 2], [Kind::First; COUNT / 2]].concat(),
            "{trap:?}: how the clone's came"
        );
    }
}
