//! An array several times larger than its frames.

use std::sync::atomic::Ordering;
use std::time::Instant;

use selfpage::{Domain, Region, Trap};

use super::screen::Screen;
use super::{PAGE_BYTES, Row, Sizes, Stop, mib, scratch};
use crate::process::{self, InCore};

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
    // Some kernels keep no maximum that can begin anew.
    let in_core = InCore::since_now();
    let domain = Domain::with_frames(sizes.frames_bytes).policy("lru").build()?;
    let store = scratch::store(2 * sizes.array_bytes)?;
    let mut region = domain.region(sizes.array_bytes).name("the tour's array").trap(Trap::Upcall).stored(store)?;
    let began = Instant::now();
    pass(screen, &domain, &mut region, "writing", |words, first| {
        words.iter_mut().enumerate().for_each(|(at, word)| *word = value(first + at));
        true
    })?;
    let wrote = began.elapsed();
    let began = Instant::now();
    pass(screen, &domain, &mut region, "reading", |words, first| {
        words.iter().enumerate().all(|(at, word)| *word == value(first + at))
    })?;
    let stats = domain.stats();
    let most = mib(stats.resident_bytes_max);
    let grown = in_core.and_then(|in_core| in_core.most_bytes()).map_or("an unknown amount".into(), mib);
    screen.say(&format!(
        "   Every word came back right. At most {most} were in core at once, and the whole process never grew by more than {grown}:\n   \
         a program that must stay within a limit does, by itself, and what it needs next it can choose to keep.\n"
    ));
    let figures = format!("{most} in core at most; the process grew by {grown}");
    let size = mib(sizes.array_bytes as u64);
    let written = Row { step: format!("write {size} of array"), figures, took: wrote };
    let figures = format!("{} faults, {} evictions in both", stats.counts.faults_total, stats.counts.evictions_total);
    Ok(vec![written, Row { step: format!("read it back, {size}"), figures, took: began.elapsed() }])
}

/// One pass over the array: `visit` gets a few pages of words and the number of the first, and says whether they are right.
fn pass(
    screen: &mut Screen,
    domain: &Domain,
    region: &mut Region,
    verb: &str,
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
            let stats = domain.stats();
            let rate = done as f64 / began.elapsed().as_secs_f64() / 1000.0;
            let line = format!(
                "{verb}: in core {} of {}, process {} | {rate:.0} k pages/s, {} faults, {} evictions",
                mib(in_core_bytes(region)),
                mib(stats.frames_bytes),
                mib(resident_bytes()),
                stats.counts.faults_total,
                stats.counts.evictions_total,
            );
            screen.show(done, &line);
        }
    }
    Ok(())
}
