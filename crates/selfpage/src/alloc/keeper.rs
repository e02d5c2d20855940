//! The keeper: a thread that forgets old peaks, gives frames back when memory is short, and has some ready where they are used up
//! fast.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use selfpage_core::linux::signal;

use super::block::{self, PAGES, Severity};
use super::frames;
use super::pressure::Watch;

/// How often it looks.
const PERIOD: Duration = Duration::from_secs(1);
/// A second report of pressure within this time is severe.
const SEVERE_WITHIN: Duration = Duration::from_secs(5);
/// From this many bytes on that had no frames, since the process began, the thread is worth its cost: a process that has touched
/// them has run for a tenth of a second or more.
const PAYS_FROM_BYTES: u64 = 256 << 20;
/// And so is having frames ready if this many bytes had none in a period.
const REFILL_FROM_BYTES: u64 = 32 << 20;
/// At most this much is made ready at a time.
const REFILL_BYTES: usize = 64 << 20;

static STARTED: AtomicBool = AtomicBool::new(false);

/// Whether the process has taken so much memory that the keeper would pay.
pub fn pays() -> bool {
    !STARTED.load(Ordering::Relaxed) && PAGES.take().counts.cold_bytes >= PAYS_FROM_BYTES
}

/// Starts the keeper, unless it runs. A forked child has none until it starts its own.
///
/// # Context
/// May allocate, and starts a thread: not for use underneath an allocator's lock.
///
/// # Errors
/// There can be no more threads. All goes on without: then peaks are forgotten only by [`super::decay`], and pressure is not noticed.
pub fn start() -> io::Result<()> {
    if STARTED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let _quiet = signal::Quiet::begin();
    let started = std::thread::Builder::new().name("selfpage-keeper".into()).stack_size(128 << 10).spawn(keep);
    started.map(drop).inspect_err(|_| STARTED.store(false, Ordering::Relaxed))
}

/// The child of a fork has no keeper.
pub(super) fn forget() {
    STARTED.store(false, Ordering::Relaxed);
}

fn keep() {
    let watch = Watch::of_process();
    let (mut last_pressure, mut last_look) = (None::<Instant>, Instant::now());
    let mut cold_before = PAGES.take().counts.cold_bytes;
    loop {
        if watch.wait(PERIOD.saturating_sub(last_look.elapsed())) {
            let again = last_pressure.is_some_and(|last| last.elapsed() < SEVERE_WITHIN);
            block::relieve(if again { Severity::Full } else { Severity::Some });
            last_pressure = Some(Instant::now());
        }
        if last_look.elapsed() < PERIOD {
            continue;
        }
        last_look = Instant::now();
        block::decay();
        let cold = PAGES.take().counts.cold_bytes;
        if cold - cold_before >= REFILL_FROM_BYTES
            && last_pressure.is_none_or(|last| last.elapsed() > 10 * SEVERE_WITHIN)
        {
            refill();
        }
        cold_before = cold;
    }
}

/// Has the kernel fill a free slot with frames: whole huge pages, which blocks then take over by the table.
pub(super) fn refill() {
    let Some(reserve) = PAGES.take().begin_reserve(REFILL_BYTES) else { return };
    frames::populate(reserve.addr, reserve.len_bytes);
    PAGES.take().end_reserve(reserve);
}
