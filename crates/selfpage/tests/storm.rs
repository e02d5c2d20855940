//! Threads that read and write at random over eight times the frames, against a shadow of every word.

use std::sync::atomic::{AtomicU64, Ordering};

use selfpage::store::FileStore;
use selfpage::{Domain, Region, Trap};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const THREADS: usize = 4;

fn accesses() -> usize {
    if cfg!(debug_assertions) { 50_000 } else { 1_000_000 }
}

/// A region and what it must hold. Each page is written by one thread, and read by all.
struct Storm<'a> {
    words: &'a [u64],
    shadow: Vec<AtomicU64>,
}

impl Storm<'_> {
    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: region-view: atomics over plain words of the region; every thread goes through atomics.
        unsafe { AtomicU64::from_ptr((&raw const self.words[at]).cast_mut()) }
    }

    /// By the thread that writes the page. Values only ever grow, and say who wrote them.
    fn write(&self, at: usize, turn: usize, thread: usize) {
        let next = (turn as u64) << 8 | thread as u64;
        self.word(at).store(next, Ordering::Release);
        self.shadow[at].store(next, Ordering::Release);
    }

    /// By any thread, while another may write.
    fn look_at(&self, at: usize) {
        let before = self.shadow[at].load(Ordering::Acquire);
        let seen = self.word(at).load(Ordering::Acquire);
        assert!(seen >= before, "word {at}: {seen:#x} is older than {before:#x}");
        assert!(seen == 0 || seen & 0xff == (at / WORDS % THREADS) as u64, "word {at}: {seen:#x}");
    }

    /// All of a page, which nobody else writes just now.
    fn compare(&self, page: usize) {
        for at in page * WORDS..(page + 1) * WORDS {
            let (seen, wanted) = (self.word(at).load(Ordering::Relaxed), self.shadow[at].load(Ordering::Relaxed));
            assert_eq!(seen, wanted, "page {page}, word {}", at % WORDS);
        }
    }

    fn rage(&self, thread: usize) {
        let mut dice = 0x9e3779b97f4a7c15u64.wrapping_mul(thread as u64 + 1);
        for turn in 1..=accesses() / THREADS {
            dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // From bits of their own, else some pages would never be written.
            let page = (dice >> 33) as usize % (self.words.len() / WORDS);
            let at = page * WORDS + (dice >> 20) as usize % WORDS;
            match dice >> 29 & 7 {
                0..4 if page % THREADS == thread => self.write(at, turn, thread),
                4 if page % THREADS == thread => self.compare(page),
                _ => self.look_at(at),
            }
        }
    }
}

/// Tells what the domain came to, however the test ends.
struct Told<'a>(&'a Domain);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        println!("{:?}", self.0.stats().counts);
    }
}

fn storm(trap: Trap) {
    let frames = 512;
    let pages = 8 * frames;
    let domain = Domain::with_frames(frames * PAGE).build().unwrap();
    let _told = Told(&domain);
    let store = FileStore::unnamed_in("/var/tmp", (4 * pages * PAGE) as u64).unwrap();
    let region: Region = domain.region(pages * PAGE).trap(trap).stored(store).unwrap();
    let shadow = (0..pages * WORDS).map(|_| AtomicU64::new(0)).collect();
    let storm = Storm { words: region.as_slice::<u64>(), shadow };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let storm = &storm;
            scope.spawn(move || storm.rage(thread));
        }
    });
    (0..pages).for_each(|page| storm.compare(page));
    let counts = domain.stats().counts;
    assert!(counts.evictions_total > pages as u64);
    assert_eq!(counts.lost_total, 0, "the kernel took pages, or was taken to have taken them");
}

#[test]
fn worker() {
    storm(Trap::Worker);
}

#[test]
fn upcall() {
    storm(Trap::Upcall);
}
