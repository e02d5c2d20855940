//! The disk itself: O_DIRECT requests, one at a time on each thread. Only the time inside requests counts: making and checking
//! contents is not the disk's.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::access::{Run, on_threads};
use super::super::case::Access;
use super::super::content::{self, Versions};
use super::super::data::Buffer;
use super::super::error::Error;
use super::super::histogram::Histogram;
use super::super::raw::{PAGE_BYTES, WORDS};

/// The data file and what must be in it.
#[derive(Clone, Copy)]
pub struct Requests<'a> {
    /// Opened without the page cache.
    pub file: &'a File,
    /// How much of it is touched.
    pub data_bytes: u64,
    /// Of one request.
    pub len_bytes: usize,
    /// How often each page was written.
    pub versions: &'a Versions,
    /// Read or write.
    pub access: Access,
}

impl Requests<'_> {
    /// All requests of the data in order; each of `threads` threads has a contiguous part.
    pub fn in_order(self, threads: usize) -> Result<Run, Error> {
        let size = self.size();
        self.timed(threads, |thread, each| {
            (size * thread / threads..size * (thread + 1) / threads).try_for_each(|request| each(request).map(drop))
        })
    }

    /// `accesses` on each thread, or as many as fit into `limit` of disk time, chosen uniformly at random.
    pub fn at_random(self, threads: usize, accesses: usize, limit: Duration, seed: u64) -> Result<Run, Error> {
        let own = (self.size() / threads) as u64;
        self.timed(threads, |thread, each| {
            for turn in 0..accesses {
                let chance = content::chance(seed, thread, turn);
                if each((chance % own) as usize * threads + thread)? > limit {
                    break;
                }
            }
            Ok(())
        })
    }

    fn size(self) -> usize {
        self.data_bytes as usize / self.len_bytes
    }

    /// Runs `order` on each thread; what it calls with the number of a request makes it and returns the thread's disk time.
    fn timed<O>(self, threads: usize, order: O) -> Result<Run, Error>
    where
        O: Fn(usize, &mut dyn FnMut(usize) -> Result<Duration, Error>) -> Result<(), Error> + Sync,
    {
        let longest_ns = AtomicU64::new(0);
        let run = on_threads(threads, |thread| {
            let mut latency = Histogram::new();
            let mut buffer = Buffer::new(self.len_bytes);
            let mut spent = Duration::ZERO;
            order(thread, &mut |request| {
                let took = self.one(request, buffer.bytes())?;
                latency.record(took.as_nanos() as u64);
                spent += took;
                Ok(spent)
            })?;
            longest_ns.fetch_max(spent.as_nanos() as u64, Ordering::Relaxed);
            Ok(latency)
        })?;
        Ok(Run { elapsed_s: longest_ns.into_inner() as f64 / 1e9, ..run })
    }

    fn one(self, request: usize, bytes: &mut [u8]) -> Result<Duration, Error> {
        let offset = (request * self.len_bytes) as u64;
        let first = offset as usize / PAGE_BYTES;
        let failed = |error| Error::Failed(format!("request of {} bytes at {offset}: {error}", self.len_bytes));
        if self.access == Access::Write {
            for (index, page) in bytes.chunks_exact_mut(PAGE_BYTES).enumerate() {
                content::fill_page(page, first + index, self.versions.bump(first + index));
            }
            let start = Instant::now();
            self.file.write_all_at(bytes, offset).map_err(failed)?;
            return Ok(start.elapsed());
        }
        let start = Instant::now();
        self.file.read_exact_at(bytes, offset).map_err(failed)?;
        let took = start.elapsed();
        for (index, page) in bytes.chunks_exact(PAGE_BYTES).enumerate() {
            let number = first + index;
            let expected = content::first_word(number, self.versions.get(number));
            content::check(number, 0, word_of(page, 0), expected)?;
            content::check(number, WORDS - 1, word_of(page, WORDS - 1), content::word(number, WORDS - 1))?;
        }
        Ok(took)
    }
}

fn word_of(page: &[u8], word: usize) -> u64 {
    page[word * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
