//! An array several times larger than its frames.

use std::sync::atomic::Ordering;
use std::time::Instant;

use selfpage::store::FileStore;
use selfpage::{Domain, Region, Trap};

use super::screen::Screen;
use super::{PAGE_BYTES, Row, Sizes, Stop, mib, scratch};
use crate::process;

const WORDS: usize = PAGE_BYTES / 8;
/// Pages between two looks at the clock.
const STEP: usize = 64;

/// Bytes of `region` that are in core: plain loads from its residency map, no system call.
pub fn in_core_bytes(region: &Region) -> u64 {
    let pages = region.residency().iter().filter(|page| page.load(Ordering::Relaxed) != 0).count();
    (pages * PAGE_BYTES) as u64
}

/// What the process has in memory, as the kernel counts it.
fn resident_bytes() -> u64 {
    process::status_bytes("VmRSS").unwrap_or(0)
}

/// The highest that was seen.
#[derive(Default)]
struct Highest {
    in_core_bytes: u64,
    process_bytes: u64,
}

impl Highest {
    /// Looks once more; returns what is now.
    fn look(&mut self, region: &Region) -> (u64, u64) {
        let (in_core, process) = (in_core_bytes(region), resident_bytes());
        self.in_core_bytes = self.in_core_bytes.max(in_core);
        self.process_bytes = self.process_bytes.max(process);
        (in_core, process)
    }
}

/// What the array holds.
fn value(at: usize) -> u64 {
    (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// Writes the whole array, and reads it back.
pub fn work(screen: &mut Screen, sizes: &Sizes) -> Result<Vec<Row>, Stop> {
    screen.say(&format!(
        "1. An array of {} in {} of frames. Watch how much of it is in core: it grows to the frames and stays there.",
        mib(sizes.array_bytes as u64),
        mib(sizes.frames_bytes as u64)
    ));
    let before = resident_bytes();
    let domain = Domain::with_frames(sizes.frames_bytes).policy("lru").build()?;
    let store =
        FileStore::unnamed_in(&scratch::directory(), 2 * sizes.array_bytes as u64).map_err(selfpage::Error::from)?;
    let mut region = domain.region(sizes.array_bytes).name("the tour's array").trap(Trap::Upcall).stored(store)?;
    let mut highest = Highest::default();
    let began = Instant::now();
    pass(screen, &domain, &mut region, "writing", &mut highest, |words, first| {
        words.iter_mut().enumerate().for_each(|(at, word)| *word = value(first + at));
        true
    })?;
    let wrote = began.elapsed();
    let began = Instant::now();
    pass(screen, &domain, &mut region, "reading", &mut highest, |words, first| {
        words.iter().enumerate().all(|(at, word)| *word == value(first + at))
    })?;
    let counts = domain.stats().counts;
    let grown = highest.process_bytes.saturating_sub(before);
    screen.say(&format!(
        "   Every word came back right. At most {} were in core at once, and the whole process never grew by more than {}:\n   \
         a program that must stay within a limit does, by itself, and what it needs next it can choose to keep.\n",
        mib(highest.in_core_bytes),
        mib(grown)
    ));
    let figures = format!("{} in core at most; the process grew by {}", mib(highest.in_core_bytes), mib(grown));
    let size = mib(sizes.array_bytes as u64);
    let written = Row { step: format!("write {size} of array"), figures, took: wrote };
    let figures = format!("{} faults, {} evictions in both", counts.faults_total, counts.evictions_total);
    Ok(vec![written, Row { step: format!("read it back, {size}"), figures, took: began.elapsed() }])
}

/// One pass over the array: `visit` gets a few pages of words and the number of the first, and says whether they are right.
fn pass(
    screen: &mut Screen,
    domain: &Domain,
    region: &mut Region,
    verb: &str,
    highest: &mut Highest,
    visit: impl Fn(&mut [u64], usize) -> bool,
) -> Result<(), Stop> {
    let pages = region.len_bytes() / PAGE_BYTES;
    let began = Instant::now();
    screen.begin(pages);
    for page in (0..pages).step_by(STEP) {
        let words = page * WORDS..(page + STEP).min(pages) * WORDS;
        if !visit(&mut region.as_mut_slice::<u64>()[words], page * WORDS) {
            return Err(Stop::Failed(format!("the array lost data near page {page}: this is a bug of selfpage")));
        }
        let done = (page + STEP).min(pages);
        if screen.is_due() || done == pages {
            let (in_core, process) = highest.look(region);
            let stats = domain.stats();
            let rate = done as f64 / began.elapsed().as_secs_f64() / 1000.0;
            let line = format!(
                "{verb}: in core {} of {}, process {} | {rate:.0} k pages/s, {} faults, {} evictions",
                mib(in_core),
                mib(stats.frames_bytes),
                mib(process),
                stats.counts.faults_total,
                stats.counts.evictions_total,
            );
            screen.show(done, &line);
        }
    }
    Ok(())
}
