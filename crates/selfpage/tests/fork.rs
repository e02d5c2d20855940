//! Parent and child both read right data after a fork at any moment, each within frames of its own.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use selfpage::pager::{Context, FillPage, Pager, PagerError, UserPager, Verdict};
use selfpage::store::{FileStore, MemoryStore};
use selfpage::{DescriptorTable, Domain, Region, Trap};
use selfpage_core::addr::PageBytes;

mod child;
#[allow(dead_code)]
#[path = "failure/scenario.rs"]
mod scenario;

use child::{FORKS, IS_CHILD, child_ends_after, fork_here, in_child, say};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

/// For tests that count the forks of a handler.
static FORKING: Mutex<()> = Mutex::new(());

/// Tells threads of a scope to end, also where a panic does: it waits for them.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn region(domain: &Domain, trap: Trap, pages: usize, memory: bool) -> Region {
    let builder = domain.region(pages * PAGE).trap(trap);
    let bytes = (pages * PAGE) as u64;
    match memory {
        true => builder.stored(MemoryStore::new(4 * bytes).unwrap()).unwrap(),
        // The children of tests beside are members, too, and hold what was saved before them.
        false => builder.stored(FileStore::unnamed_in("/var/tmp", 32 * bytes).unwrap()).unwrap(),
    }
}

/// Faults that this process has taken so far, each for a page of some table or other.
fn faults() -> i64 {
    // SAFETY: test: a plain structure that the call fills.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0);
        usage.ru_minflt
    }
}

/// What a region has addresses for, and never had in a frame, costs a fork nothing: neither here nor in the child. In a process where nobody
/// else has any.
#[test]
fn costs_what_the_frames_cost() {
    scenario::in_child(scenario::here!(), "", || {
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let mut region = region(&domain, Trap::Worker, 16 << 20, true);
        for page in 0..128 {
            region.as_mut_slice::<u64>()[page * WORDS] = page as u64 + 1;
        }
        let before = faults();
        let status = in_child(|| {
            let cost = faults();
            let right = (0..128).all(|page| region.as_slice::<u64>()[page * WORDS] == page as u64 + 1);
            // A word for each page of the region is 32,768 pages of words.
            right && cost < 16_000
        });
        assert_eq!(status, 0);
        assert!(faults() - before < 16_000, "{} faults", faults() - before);
    })
    .well();
}

/// The memory that this process has in core.
fn in_core_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
}

/// Its parent's threads have counts of the domain, which nobody takes back in the child.
#[test]
fn a_child_that_drops_its_domain_has_its_frames_back() {
    const BYTES: usize = 128 << 20;
    let domain = Domain::with_frames(BYTES).build().unwrap();
    let mut region = domain.region(BYTES / 8 * 7).zero().unwrap();
    region.as_mut_slice::<u8>().fill(7);
    let both = (domain, region);
    let status = in_child(|| {
        let full = in_core_bytes();
        // SAFETY: test: the child ends without dropping it a second time.
        drop(unsafe { std::ptr::read(&both) });
        let left = in_core_bytes();
        say(&format!("{full} bytes in core, {left} without the domain"));
        left + BYTES / 4 * 3 < full
    });
    assert_eq!(status, 0);
    let (_domain, region) = both;
    assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 7));
}

fn both_go_on(trap: Trap, memory: bool) {
    let (frames, pages) = (256, 1024);
    let domain = Domain::with_frames(frames * PAGE).build().unwrap();
    let mut region = region(&domain, trap, pages, memory);
    for (page, words) in region.as_mut_slice::<u64>().chunks_mut(WORDS).enumerate() {
        words[0] = page as u64 + 1;
    }
    for round in 0..3u64 {
        let status = in_child(|| {
            // It begins with what its parent has in core.
            let holds = domain.stats().resident_bytes_max >= (frames / 2 * PAGE) as u64;
            let words = region.as_mut_slice::<u64>();
            let read = (0..pages).all(|page| words[page * WORDS] == page as u64 + 1 + round * 10_000);
            for page in 0..pages {
                words[page * WORDS] = 7_000_000 + page as u64;
            }
            let wrote = (0..pages).all(|page| words[page * WORDS] == 7_000_000 + page as u64);
            let own = domain.stats();
            let within = own.resident_bytes_max <= (frames * PAGE) as u64 && own.counts.evictions_total > 0;
            if !(read && wrote && within && holds) {
                say(&format!("read {read}, wrote {wrote}, holds {holds}, {own:?}"));
            }
            read && wrote && within && holds
        });
        assert_eq!(status, 0, "child of round {round}");
        let words = region.as_mut_slice::<u64>();
        for page in 0..pages {
            assert_eq!(words[page * WORDS], page as u64 + 1 + round * 10_000, "page {page}, round {round}");
            words[page * WORDS] += 10_000;
        }
    }
}

#[test]
fn worker_with_a_file_store() {
    both_go_on(Trap::Worker, false);
}

#[test]
fn upcall_with_a_file_store() {
    both_go_on(Trap::Upcall, false);
}

#[test]
fn worker_with_a_memory_store() {
    both_go_on(Trap::Worker, true);
}

#[test]
fn forks_while_other_threads_fault() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let (frames, pages) = (128, 1024);
        let domain = Domain::with_frames(frames * PAGE).build().unwrap();
        let region = region(&domain, trap, pages, false);
        let words = region.as_slice::<u64>();
        // SAFETY: region-view: atomics over plain words of the region; every thread goes through atomics.
        let word = |at: usize| unsafe { AtomicU64::from_ptr((&raw const words[at]).cast_mut()) };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _ends = Ends(&done);
            for thread in 0..3usize {
                let (word, done) = (&word, &done);
                scope.spawn(move || {
                    let mut dice = thread as u64 + 1;
                    while !done.load(Ordering::Relaxed) {
                        dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        let page = (dice >> 33) as usize % (pages / 3) * 3 + thread;
                        // Both words of a page say the same, or the first is ahead by one write.
                        let next = word(page * WORDS).load(Ordering::Relaxed) + 1;
                        word(page * WORDS).store(next, Ordering::SeqCst);
                        word(page * WORDS + 9).store(next, Ordering::SeqCst);
                    }
                });
            }
            for round in 0..10 {
                let status = in_child(|| {
                    (0..pages).all(|page| {
                        let (first, second) =
                            (word(page * WORDS).load(Ordering::SeqCst), word(page * WORDS + 9).load(Ordering::SeqCst));
                        let right = first == second || first == second + 1;
                        if !right {
                            say(&format!("round {round}, page {page}: {first} and {second}"));
                        }
                        word(page * WORDS + 20).store(first, Ordering::SeqCst);
                        right
                    })
                });
                assert_eq!(status, 0, "{trap:?}, round {round}");
            }
        });
        for page in 0..pages {
            assert_eq!(word(page * WORDS).load(Ordering::SeqCst), word(page * WORDS + 9).load(Ordering::SeqCst));
            assert_eq!(word(page * WORDS + 20).load(Ordering::SeqCst), 0, "the child wrote into its parent");
        }
    }
}

/// std has a lock that each of its threads takes as it starts and as it ends, and that nobody can hold over a fork: where the parent's were at
/// that, none of std's can start in the child. The pager threads there are none of std's.
#[test]
fn forks_while_threads_start_and_end() {
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let region = domain.region(32 * PAGE).zero().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&done);
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::thread::spawn(|| ()).join().unwrap();
                }
            });
        }
        (0..1000).for_each(|_| assert_eq!(in_child(|| region.as_slice::<u64>()[0] == 0), 0));
    });
}

#[test]
fn a_child_forks_too() {
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let region = region(&domain, Trap::Worker, 512, false);
    let words = region.as_slice::<u64>();
    // SAFETY: region-view: as above.
    let word = |at: usize| unsafe { AtomicU64::from_ptr((&raw const words[at]).cast_mut()) };
    (0..512).for_each(|page| word(page * WORDS).store(page as u64 + 5, Ordering::Relaxed));
    let right = || (0..512).all(|page| word(page * WORDS).load(Ordering::Relaxed) == page as u64 + 5);
    assert_eq!(in_child(|| right() && in_child(|| right() && in_child(right) == 0) == 0 && right()), 0);
    assert!(right());
}

/// The child has no thread that knows of its parent's errand.
#[test]
fn a_handler_forks_while_its_thread_waits_for_a_pager_thread() {
    let _one = FORKING.lock();
    let before = FORKS.load(Ordering::Relaxed);
    let domain = Domain::with_frames(64 * PAGE).descriptor_table(DescriptorTable::Private).build().unwrap();
    let mut region = region(&domain, Trap::Worker, 48, false);
    // SAFETY: test: a handler for a signal that nobody else uses, sent to a thread that lives.
    unsafe { libc::signal(libc::SIGUSR1, fork_here as *const () as libc::sighandler_t) };
    // SAFETY: test: as above.
    let own = unsafe { libc::pthread_self() };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for turn in 0..200 {
                std::thread::sleep(Duration::from_micros(u64::from(turn) * 7919 % 3000));
                // SAFETY: test: as above.
                unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                while FORKS.load(Ordering::Relaxed) == before + turn {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        });
        while FORKS.load(Ordering::Relaxed) < before + 200 {
            region.as_mut_slice::<u64>().iter_mut().step_by(WORDS).for_each(|word| *word += 1);
            if let Err(why) = region.flush(0, 48 * PAGE) {
                // A panic would wait for the other thread, which a child does not have.
                say(&format!("{why}"));
                std::process::abort();
            }
            if IS_CHILD.load(Ordering::Relaxed) {
                // SAFETY: test: ends the child.
                unsafe { libc::_exit(0) };
            }
        }
    });
}

/// Holds a lock for as long as it syncs.
#[derive(Default)]
struct SyncsLong {
    saved: Mutex<HashMap<u64, PageBytes>>,
    syncs: AtomicBool,
}

impl UserPager for SyncsLong {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        *bytes = self.saved.lock().unwrap().get(&index).copied().unwrap_or([0; PAGE]);
        Ok(())
    }
    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()> {
        self.saved.lock().unwrap().insert(index, *bytes);
        Ok(())
    }
    fn forked(&self) {
        drop(self.saved.lock().unwrap());
    }
    fn sync(&self) -> io::Result<()> {
        let _saved = self.saved.lock().unwrap();
        self.syncs.store(true, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    }
}

#[test]
fn while_a_pager_syncs() {
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let pager = Arc::new(SyncsLong::default());
    let mut region = domain.region(128 * PAGE).user(pager.clone()).unwrap();
    for page in 0..128 {
        region.as_mut_slice::<u64>()[page * WORDS] = page as u64 + 1;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| region.flush(0, 128 * PAGE).unwrap());
        while !pager.syncs.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let right = || (0..128).all(|page| region.as_slice::<u64>()[page * WORDS] == page as u64 + 1);
        assert_eq!(in_child(right), 0);
    });
}

/// Syncs until a fork is over.
#[derive(Default)]
struct SyncsOver {
    /// How many threads are at it.
    syncs: AtomicU32,
    most_syncs: AtomicU32,
    forked: AtomicBool,
    missed_fork: AtomicBool,
}

struct Over(Arc<SyncsOver>);

impl Pager for Over {
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
    fn changed(&self, _index: u64, _bytes: &PageBytes) -> Verdict {
        Verdict::Clean
    }
    fn forked(&self) {
        self.0.forked.store(true, Ordering::SeqCst);
    }
    fn sync(&self) -> Result<(), PagerError> {
        self.0.most_syncs.fetch_max(self.0.syncs.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let began = Instant::now();
        while !self.0.forked.load(Ordering::SeqCst) && began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.missed_fork.fetch_or(!self.0.forked.load(Ordering::SeqCst), Ordering::SeqCst);
        self.0.syncs.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
    fn syncs_over_forks(&self) -> bool {
        true
    }
    fn forget(&self, _index: u64, _count: u64) {}
}

/// As many as there are pager threads: one is at it, and the others wait where handlers of signals may come, and fork.
#[test]
fn while_pagers_sync_over_forks() {
    let _one = FORKING.lock();
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let (pager, before) = (Arc::new(SyncsOver::default()), FORKS.load(Ordering::SeqCst));
    let regions = [(); 3].map(|()| domain.region(4 * PAGE).pager(Box::new(Over(pager.clone()))).unwrap());
    let other = domain.region(PAGE).zero().unwrap();
    // SAFETY: test: a handler for a signal that nobody else uses meanwhile.
    unsafe { libc::signal(libc::SIGUSR1, fork_here as *const () as libc::sighandler_t) };
    std::thread::scope(|scope| {
        let (tell, told) = channel();
        for region in &regions {
            let tell = tell.clone();
            scope.spawn(move || {
                // SAFETY: test: it has no preconditions.
                tell.send(unsafe { libc::pthread_self() }).unwrap();
                child_ends_after(|| region.flush(0, PAGE).unwrap());
            });
        }
        scenario::until("one of them syncs", || pager.syncs.load(Ordering::SeqCst) > 0);
        // Time for the others to come to it.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(pager.syncs.load(Ordering::SeqCst), 1);
        domain.region(PAGE).zero().unwrap();
        drop(other);
        assert_eq!(regions[0].as_slice::<u64>()[0], 0);
        assert_eq!(regions[0].evict(0, PAGE).unwrap(), 1);
        let child = || {
            // SAFETY: test: where it hangs, it ends.
            unsafe { libc::alarm(10) };
            regions[1].as_slice::<u64>()[WORDS] == 0 && regions[1].flush(0, PAGE).is_ok()
        };
        assert_eq!(in_child(child), 0);
        for thread in told.iter().take(regions.len()) {
            // SAFETY: test: a thread that waits for this one.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        }
        while FORKS.load(Ordering::SeqCst) < before + 2 && !pager.missed_fork.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        pager.forked.store(true, Ordering::SeqCst);
    });
    assert!(!pager.missed_fork.load(Ordering::SeqCst), "something waited for the sync");
    assert_eq!(pager.most_syncs.load(Ordering::SeqCst), 1);
}
