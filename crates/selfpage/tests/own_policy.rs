//! A policy of the program's own decides which pages go.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use selfpage::store::MemoryStore;
use selfpage::{Config, Domain, Frame, Kind, PageNo, Policy, Region, Use};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;
const FRAMES: usize = 1024;
const GOES: usize = 512;
const STAYS: usize = 128;
/// With the frames that are kept free, fewer pages have to go than there are that may.
const MORE: usize = 448;

/// Pages of one region go first, whatever was used when; the others in the order in which they came.
struct OneFirst {
    first_page: Arc<AtomicU64>,
    of_the_one: Vec<Frame>,
    others: Vec<Frame>,
}

impl Policy for OneFirst {
    fn admitted(&mut self, frame: Frame, page: PageNo, _priority: u8, _used: Use) {
        self.of_the_one.retain(|listed| *listed != frame);
        self.others.retain(|listed| *listed != frame);
        let first = self.first_page.load(SeqCst);
        if (first..first + GOES as u64).contains(&page.0) {
            self.of_the_one.push(frame);
        } else {
            self.others.push(frame);
        }
    }

    fn victim(&mut self) -> Option<Frame> {
        let list = if self.of_the_one.is_empty() { &mut self.others } else { &mut self.of_the_one };
        (!list.is_empty()).then(|| list.remove(0))
    }
}

/// What was listed first goes first, whatever has become of it.
#[derive(Default)]
struct Plain {
    order: VecDeque<Frame>,
    listed: HashSet<u32>,
    standby_share: u8,
    /// For so many suggestions from now on it takes a while.
    slow: Arc<AtomicU32>,
}

impl Policy for Plain {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, _used: Use) {
        if self.listed.insert(frame.0) {
            self.order.push_back(frame);
        }
    }

    fn victim(&mut self) -> Option<Frame> {
        if self.slow.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok_and(|left| left % 16 == 0) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let frame = self.order.pop_front()?;
        self.listed.remove(&frame.0);
        Some(frame)
    }

    fn standby_share(&self) -> u8 {
        self.standby_share
    }
}

/// `None`: the test was skipped.
fn built(config: Config) -> Option<Domain> {
    match config.build() {
        Err(error) if error.kind() == Kind::Unsupported => {
            skip::skip("uffd", &error.to_string());
            None
        }
        domain => Some(domain.unwrap()),
    }
}

fn region(domain: &Domain, pages: usize) -> Region {
    let store = MemoryStore::new((2 * pages * PAGE) as u64).unwrap();
    domain.region(pages * PAGE).stored(store).unwrap()
}

fn number(region: &mut Region) {
    let pages = region.as_mut_slice::<[u64; PAGE / 8]>();
    pages.iter_mut().enumerate().for_each(|(at, page)| page[0] = at as u64 + 1);
}

fn in_core(region: &Region) -> usize {
    region.residency().iter().filter(|page| page.load(SeqCst) == 1).count()
}

#[test]
fn the_pages_that_it_names_go_and_the_others_stay() {
    let first_page = Arc::new(AtomicU64::new(0));
    let policy = OneFirst { first_page: first_page.clone(), of_the_one: Vec::new(), others: Vec::new() };
    let Some(domain) = built(Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(policy))) else { return };
    let (mut stays, mut goes, mut more) = (region(&domain, STAYS), region(&domain, GOES), region(&domain, MORE));
    first_page.store((goes.as_ptr() as usize / PAGE) as u64, SeqCst);
    // What stays is the oldest, so that any other order would have it go first.
    for region in [&mut stays, &mut goes] {
        number(region);
        // Then none of them has to be saved first: while it is, more would go.
        region.flush(0, region.len_bytes()).unwrap();
    }
    number(&mut more);
    assert_eq!((in_core(&stays), in_core(&more)), (STAYS, MORE), "of {GOES} that go {} stayed", in_core(&goes));
    assert!(in_core(&goes) <= FRAMES - STAYS - MORE, "{} pages in {FRAMES} frames", in_core(&goes));
    // What went is in the store.
    let pages = goes.as_slice::<[u64; PAGE / 8]>();
    assert!(pages.iter().enumerate().all(|(at, page)| page[0] == at as u64 + 1));
}

/// Nobody takes a frame off a policy's list whose page was dropped, and that was then taken away.
#[test]
fn a_policy_with_many_frames_that_are_gone_is_asked_on_until_it_names_one_that_is_there() {
    const FRAMES: usize = 8192;
    const LEFT: usize = 512;
    let slow = Arc::new(AtomicU32::new(0));
    let policy = Plain { slow: slow.clone(), ..Plain::default() };
    let Some(domain) = built(Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(policy))) else { return };
    let mut first = region(&domain, FRAMES + LEFT);
    number(&mut first);
    drop(first);
    domain.remove_frames((FRAMES - LEFT) as u32).unwrap();
    // All that five evictions look at, which is longer than the evictor tries in vain; and behind those are dead ones still.
    slow.store(5 * 1024, SeqCst);
    let mut second = region(&domain, 2 * LEFT);
    for page in 0..2 * LEFT {
        // An access would be SIGBUS.
        second.pin(page * PAGE, PAGE).unwrap_or_else(|why| panic!("page {page}: {why}"));
        second.unpin(page * PAGE, PAGE).unwrap();
        second.as_mut_slice::<[u64; PAGE / 8]>()[page][0] = page as u64;
    }
    assert_eq!(slow.load(SeqCst), 0, "it had no frames listed that were gone");
}

#[test]
fn as_many_frames_are_on_standby_as_it_wants() {
    for standby_share in [16, 64, 128] {
        let policy = Plain { standby_share, ..Plain::default() };
        let Some(domain) = built(Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(policy))) else { return };
        let mut region = region(&domain, 2 * FRAMES);
        (0..2).for_each(|_| number(&mut region));
        let wanted = (FRAMES * usize::from(standby_share) / 256) as u32;
        // Some have come back, or were taken for other pages, and the evictor sees to others.
        let end = Instant::now() + Duration::from_secs(10);
        while domain.stats().frames_standby < wanted * 3 / 4 {
            let stats = domain.stats();
            let (standby, free) = (stats.frames_standby, stats.frames_free);
            assert!(Instant::now() < end, "of {wanted} wanted {standby} are on standby, and {free} free");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
