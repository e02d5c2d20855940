//! The loops that every system runs alike: they touch memory, check each word that they read, and time each access.
//!
//! The clock is read once for an access (about 25 ns): a latency runs from the end of the access before to the moment at which
//! the first word is there. So the latencies of a thread add up to its time, and nothing hides between them.

use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::case::Access;
use super::content::{self, Versions, WrongData};
use super::error::Error;
use super::histogram::Histogram;
use super::raw::{Memory, WORDS};

/// Words of a cache line.
const LINE: usize = 8;

/// What the threads of one phase did.
pub struct Run {
    /// From the start of the first thread to the end of the last.
    pub elapsed_s: f64,
    /// One for each page touched, each time.
    pub latency: Histogram,
}

/// Runs `work` on `threads` threads that start together; each returns its latencies.
pub fn on_threads<W>(threads: usize, work: W) -> Result<Run, Error>
where
    W: Fn(usize) -> Result<Histogram, Error> + Sync,
{
    let barrier = Barrier::new(threads);
    let timed = |thread: usize| {
        barrier.wait();
        let start = Instant::now();
        work(thread).map(|latency| (start, Instant::now(), latency))
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(Error::Failed("a thread of the access loop panicked".into())))
        };
        running.into_iter().map(join).collect::<Result<_, Error>>()
    })?;
    let start = results.iter().map(|result| result.0).min();
    let end = results.iter().map(|result| result.1).max();
    let elapsed_s = start.zip(end).map_or(0.0, |(start, end)| (end - start).as_secs_f64());
    let mut latency = Histogram::new();
    results.iter().for_each(|result| latency.merge(&result.2));
    Ok(Run { elapsed_s, latency })
}

/// The memory under test and what must be in it.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Where.
    pub memory: Memory,
    /// How often each page was written.
    pub versions: &'a Versions,
    /// What to do to each page.
    pub access: Access,
}

impl Subject<'_> {
    /// Reads word 0, which brings the page in, checks it, and in a write case writes the next version.
    #[inline(always)]
    fn touch(self, page: usize) -> Result<(), WrongData> {
        let found = self.memory.read(page, 0);
        content::check(page, 0, found, content::first_word(page, self.versions.get(page)))?;
        if self.access == Access::Write {
            self.memory.write(page, 0, content::first_word(page, self.versions.bump(page)));
        }
        Ok(())
    }

    /// Reads and checks one word of every other cache line of the page.
    #[inline(always)]
    fn lines(self, page: usize) -> Result<(), WrongData> {
        let words = (LINE..WORDS).step_by(LINE);
        let (found, expected) = words.fold((0, 0), |(found, expected), word| {
            (found ^ self.memory.read(page, word), expected ^ content::word(page, word))
        });
        content::check(page, LINE, found, expected)
    }

    /// `passes` passes over all pages in order; each of `threads` threads has a contiguous part, and begins no pass before all have ended the
    /// one before: else one whose part is in core would have it for itself, and be through while the others wait for the disk.
    pub fn in_order(self, threads: usize, passes: usize) -> Result<Run, Error> {
        let (size, ended) = (self.memory.size_pages(), Barrier::new(threads));
        on_threads(threads, |thread| {
            let mut latency = Histogram::new();
            let mut right = Ok(());
            for _ in 0..passes {
                if right.is_ok() {
                    right = self.pass(size * thread / threads..size * (thread + 1) / threads, &mut latency);
                }
                ended.wait();
            }
            right.map(|()| latency)
        })
    }

    #[inline(always)]
    fn pass(self, pages: Range<usize>, latency: &mut Histogram) -> Result<(), Error> {
        let mut before = Instant::now();
        for page in pages {
            self.touch(page)?;
            let now = Instant::now();
            latency.record((now - before).as_nanos() as u64);
            before = now;
            self.lines(page)?;
        }
        Ok(())
    }

    /// `accesses` on each thread, or as many as fit into `limit`, to pages chosen uniformly at random. Each thread has every
    /// `threads`th page, so that no two write one page.
    pub fn at_random(self, threads: usize, accesses: usize, limit: Duration, seed: u64) -> Result<Run, Error> {
        let own_pages = (self.memory.size_pages() / threads) as u64;
        on_threads(threads, |thread| {
            let mut latency = Histogram::new();
            let start = Instant::now();
            let mut before = start;
            for turn in 0..accesses {
                let chance = content::chance(seed, thread, turn);
                let page = (chance % own_pages) as usize * threads + thread;
                self.touch(page)?;
                let word = 1 + (chance >> 32) as usize % (WORDS - 1);
                content::check(page, word, self.memory.read(page, word), content::word(page, word))?;
                let now = Instant::now();
                latency.record((now - before).as_nanos() as u64);
                before = now;
                if now - start > limit {
                    break;
                }
            }
            Ok(latency)
        })
    }
}

/// In which order pages are touched first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Page after page.
    Ascending,
    /// Every page once, never two neighbours in a row.
    Scattered,
}

/// Writes one word of each page, `threads` threads taking turns in the order: nothing was there before, so nothing is checked but that
/// it stays.
pub fn first_touch(memory: Memory, order: Order, threads: usize) -> Result<Run, Error> {
    let pages = memory.size_pages();
    // Odd and coprime to any number of pages in use here: every page once, and never two neighbours in a row.
    let step = if order == Order::Scattered { 2_654_435_761 } else { 1 };
    let run = on_threads(threads, |thread| {
        let mut latency = Histogram::new();
        let mut before = Instant::now();
        for turn in (thread..pages).step_by(threads) {
            let page = (turn as u64 * step % pages as u64) as usize;
            memory.write(page, 0, content::word(page, 0));
            let now = Instant::now();
            latency.record((now - before).as_nanos() as u64);
            before = now;
        }
        Ok(latency)
    })?;
    for page in 0..memory.size_pages() {
        content::check(page, 0, memory.read(page, 0), content::word(page, 0))?;
    }
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::super::raw::Mapping;
    use super::*;

    const PAGES: usize = 64;

    fn subject<'a>(memory: Memory, versions: &'a Versions, access: Access) -> Subject<'a> {
        content::fill_memory(memory);
        Subject { memory, versions, access }
    }

    #[test]
    fn right_data_passes_and_is_counted() {
        let mapping = Mapping::anonymous(PAGES * 4096).unwrap();
        let versions = Versions::zero(PAGES);
        let writes = subject(mapping.memory(), &versions, Access::Write);
        assert_eq!(writes.in_order(2, 3).unwrap().latency.total(), 3 * PAGES as u64);
        assert_eq!(writes.at_random(2, 1000, Duration::from_secs(60), 1).unwrap().latency.total(), 2000);
        let written: u32 = (0..PAGES).map(|page| versions.get(page)).sum();
        assert_eq!(written, 3 * PAGES as u32 + 2000);
        let reads = Subject { access: Access::Read, ..writes };
        assert!(reads.in_order(1, 1).is_ok());
    }

    #[test]
    fn one_wrong_word_is_noticed() {
        for word in [0, 8, 504] {
            let mapping = Mapping::anonymous(PAGES * 4096).unwrap();
            let versions = Versions::zero(PAGES);
            let reads = subject(mapping.memory(), &versions, Access::Read);
            reads.memory.write(40, word, reads.memory.read(40, word) ^ 1);
            assert!(matches!(reads.in_order(2, 1), Err(Error::Failed(reason)) if reason.contains("page 40")));
        }
    }

    #[test]
    fn a_lost_write_is_noticed_at_random() {
        let mapping = Mapping::anonymous(PAGES * 4096).unwrap();
        let versions = Versions::zero(PAGES);
        let writes = subject(mapping.memory(), &versions, Access::Write);
        writes.in_order(1, 1).unwrap();
        // The page comes back as it was before the write.
        writes.memory.write(9, 0, content::first_word(9, 0));
        let found = writes.at_random(1, 2000, Duration::from_secs(60), 5);
        assert!(matches!(found, Err(Error::Failed(reason)) if reason.contains("page 9 word 0")));
    }
}
