//! A flush of many pages: how it saves them, and whom it lets through meanwhile.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use selfpage::pager::{Context, FillPage, Pager, PagerError, SavePage, UserPager, Verdict};
use selfpage::{Config, Domain, Kind, PageBytes, Region, Trap};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

/// The domain, or a loud skip where this machine cannot have one.
fn built(config: Config) -> Option<Domain> {
    match config.build() {
        Err(error) if error.kind() == Kind::Unsupported => {
            skip::skip("uffd", &error.to_string());
            None
        }
        built => Some(built.unwrap()),
    }
}

/// Saves nothing, and says what it was asked to save.
#[derive(Default)]
struct Asked {
    batches: Mutex<Vec<Vec<u64>>>,
    fails: Option<u64>,
    begun: AtomicU32,
    /// Saves wait for this, if not for ever.
    access: Option<Arc<Access>>,
    went_on: AtomicBool,
}

/// An access that has to wait for a pager thread.
#[derive(Default)]
struct Access {
    begins: AtomicBool,
    served: AtomicBool,
}

struct Asks(Arc<Asked>);

impl Pager for Asks {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn fill(&self, _context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        pages.iter_mut().for_each(|page| page.bytes.clear());
        Ok(0)
    }

    fn changed(&self, _index: u64, bytes: &PageBytes) -> Verdict {
        if bytes[0] == 0 { Verdict::Clean } else { Verdict::Changed }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        self.0.batches.lock().unwrap().push(pages.iter().map(|page| page.index).collect());
        for page in pages {
            page.outcome = if self.0.fails == Some(page.index) { Err(PagerError::Full) } else { Ok(()) };
        }
        let before = self.0.begun.fetch_add(1, SeqCst);
        let Some(access) = &self.0.access else { return };
        if before == 0 {
            // Until it waits. All pager threads may be here, so that it is not served meanwhile.
            until(Duration::from_secs(10), || access.begins.load(SeqCst));
            std::thread::sleep(Duration::from_millis(100));
        } else if before < 4 {
            until(Duration::from_secs(3), || access.served.load(SeqCst));
        }
        self.0.went_on.store(access.served.load(SeqCst), SeqCst);
    }

    fn forget(&self, _index: u64, _count: u64) {}
}

fn until(limit: Duration, done: impl Fn() -> bool) {
    let began = Instant::now();
    while !done() && began.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn asking(domain: &Domain, pages: usize, asked: &Arc<Asked>) -> Region {
    domain.region(pages * PAGE).pager(Box::new(Asks(asked.clone()))).unwrap()
}

/// Changes all pages but every eighth.
fn change(region: &mut Region) {
    for (index, page) in region.as_mut_slice::<[u8; PAGE]>().iter_mut().enumerate() {
        page[0] = u8::from(!index.is_multiple_of(8));
    }
}

#[test]
fn changed_pages_are_saved_together() {
    const PAGES: u64 = 800;
    let Some(domain) = built(Domain::with_frames(4096 * PAGE)) else { return };
    let asked = Arc::new(Asked::default());
    let mut region = asking(&domain, PAGES as usize, &asked);
    change(&mut region);
    region.flush(0, region.len_bytes()).unwrap();
    let batches = asked.batches.lock().unwrap();
    let changed: Vec<u64> = (0..PAGES).filter(|index| !index.is_multiple_of(8)).collect();
    assert_eq!(batches.concat(), changed);
    assert!(batches.len() <= 8, "{} batches", batches.len());
}

#[test]
fn the_first_page_that_fails_is_named_and_those_before_it_are_saved() {
    let Some(domain) = built(Domain::with_frames(4096 * PAGE)) else { return };
    let asked = Arc::new(Asked { fails: Some(333), ..Asked::default() });
    let mut region = asking(&domain, 400, &asked);
    change(&mut region);
    let error = region.flush(0, region.len_bytes()).unwrap_err().to_string();
    assert!(error.contains(&format!("bytes {}..{}", 333 * PAGE, 334 * PAGE)), "{error}");
    let saved: BTreeSet<u64> = asked.batches.lock().unwrap().concat().into_iter().collect();
    assert!((0..333u64).filter(|index| !index.is_multiple_of(8)).all(|index| saved.contains(&index)));
    assert_eq!(domain.stats().counts.save_errors_total, 1);
    // It is in core, and changed, still.
    assert_eq!(region.as_slice::<[u8; PAGE]>()[333][0], 1);
}

/// Fills on pager threads alone.
struct Sevens;

impl UserPager for Sevens {
    fn fill(&self, _index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        bytes.fill(7);
        Ok(())
    }

    fn save(&self, _index: u64, _bytes: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// As many at once as there are pager threads, and more.
#[test]
fn faults_are_served_between_the_batches_of_flushes() {
    const FLUSHES: usize = 4;
    // More pages than a batch has, and frames for all of that and for what flushes save from: none is evicted.
    let Some(domain) = built(Domain::with_frames(4096 * PAGE)) else { return };
    let sevens = domain.region(4 * PAGE).trap(Trap::Upcall).user(Sevens).unwrap();
    let access = Arc::new(Access::default());
    let asked = [(); FLUSHES].map(|()| Arc::new(Asked { access: Some(access.clone()), ..Asked::default() }));
    let regions: Vec<Region> = asked
        .iter()
        .map(|asked| {
            let mut region = asking(&domain, 300, asked);
            region.as_mut_slice::<[u8; PAGE]>().iter_mut().for_each(|page| page[0] = 1);
            region
        })
        .collect();
    std::thread::scope(|scope| {
        for region in &regions {
            scope.spawn(|| region.flush(0, region.len_bytes()).unwrap());
        }
        until(Duration::from_secs(2), || asked.iter().filter(|asked| asked.begun.load(SeqCst) > 0).count() >= 3);
        access.begins.store(true, SeqCst);
        assert_eq!(sevens.as_slice::<u8>()[PAGE], 7);
        access.served.store(true, SeqCst);
    });
    let went_on = |asked: &Arc<Asked>| asked.went_on.load(SeqCst);
    assert!(asked.iter().all(went_on), "a flush saved its last pages before a fault was served");
}
