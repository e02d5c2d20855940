//! The keeper: a thread that forgets old peaks, gives frames back when memory is short, and has some ready where they are used up
//! fast.

use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use selfpage_core::linux::{signal, thread};

use super::block::{self, PAGES};
use super::cgroup;
use super::frames::{self, TABLE_BYTES};
use super::limit;
use super::pressure::{Reports, Watch, Wishes};
use super::rounds::Rounds;
use super::stats::NOTED;
use super::workers::WORKERS;
use crate::fork::Once;
use crate::pthread::{self, Pthread};

/// How often it looks.
const PERIOD: Duration = Duration::from_secs(1);
/// From this many bytes on that had no frames, since the process began, the thread is worth its cost: a process that has touched
/// them has run for a tenth of a second or more.
const PAYS_FROM_BYTES: u64 = 256 << 20;
/// And from this part of what its control groups may have, where that is less.
const PAYS_FROM_PART: u64 = 8;
/// And so is having frames ready if this many bytes had none in a period.
const REFILL_FROM_BYTES: u64 = 32 << 20;
/// At most this much is made ready at a time.
const REFILL_BYTES: usize = 64 << 20;

const STACK_BYTES: usize = 128 << 10;

/// There is none.
const NONE: u8 = 0;
/// A thread is about to start it.
const BEGINS: u8 = 1;
const RUNS: u8 = 2;
/// The thread that `main` ran on has ended, and there will be none.
const OVER: u8 = 3;

static STATE: AtomicU8 = AtomicU8::new(NONE);
/// The process that started it last: in a child of a fork perhaps its parent.
static STARTED_BY: AtomicU32 = AtomicU32::new(0);
static ATTENDED: Once<()> = Once::new();
/// The C library's name of the thread, while it runs.
static THREAD: AtomicU64 = AtomicU64::new(0);
/// What the C library does when the first thread ends, by itself or cancelled, and the process does not: [`end`]. `None`: it has no key left.
static AT_END: Once<Option<libc::pthread_key_t>> = Once::new();
/// Once it could not be started: what the process will have taken when that is tried again.
static NOT_BEFORE_BYTES: AtomicU64 = AtomicU64::new(0);
static OTHERS: Once<fn()> = Once::new();
static WISHES: Once<Wishes> = Once::new();

/// Whether the process has taken so much memory that the keeper would pay.
pub fn pays() -> bool {
    if STATE.load(Ordering::Relaxed) != NONE {
        return false;
    }
    let from_bytes = PAYS_FROM_BYTES.min(NOTED.limit_bytes.load(Ordering::Relaxed) as u64 / PAYS_FROM_PART);
    NOTED.cold_bytes.load(Ordering::Relaxed) >= from_bytes.max(NOT_BEFORE_BYTES.load(Ordering::Relaxed))
}

/// Reads what the environment says of memory pressure, once and for all: for whoever may have to start the keeper in the middle of an
/// allocation, while another thread changes the environment. Called on the thread that `main` runs on, it also has the keeper end with that, as
/// the C library counts it: where `main` ends by `pthread_exit`, the process is to end with its last thread.
///
/// # Context
/// May allocate. No other thread changes the environment meanwhile, as before the program's first line.
pub fn read_environment() {
    WISHES.get_or_make(Wishes::of_environment);
    pthread::look_up();
    end_with_first_thread();
}

/// Has the keeper end with the first thread of the process, if that is the calling one.
fn end_with_first_thread() {
    if thread::id() == std::process::id() {
        let key = AT_END.get_or_make(|| {
            let mut key = 0;
            // SAFETY: out-pointer, c-library: the number outlives the call, and the function stays loaded as long as the allocator is used.
            (unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } == 0).then_some(key)
        });
        expect_end(*key);
    }
}

fn expect_end(key: Option<libc::pthread_key_t>) {
    if let Some(key) = key {
        // SAFETY: c-library: a key of ours, whose value is not looked at; it calls nobody where it is null.
        unsafe { libc::pthread_setspecific(key, (&raw const STATE).cast()) };
    }
}

/// Ends the keeper, and waits for that: were it the process's last thread, handlers of the program's exit would run on it, who has other
/// descriptors. There is none from then on.
unsafe extern "C" fn end(_: *mut c_void) {
    let _quiet = signal::Quiet::begin();
    let mut rounds = Rounds::new();
    loop {
        let seen = STATE.compare_exchange(NONE, OVER, Ordering::Relaxed, Ordering::Relaxed);
        match seen {
            Ok(_) | Err(OVER) => return,
            Err(RUNS) if STATE.compare_exchange(RUNS, OVER, Ordering::Acquire, Ordering::Relaxed).is_ok() => break,
            Err(_) => rounds.pass(),
        }
    }
    // SAFETY: c-library: a thread that was started to be joined, which whoever has set the state joins alone.
    unsafe { libc::pthread_join(THREAD.load(Ordering::Relaxed), std::ptr::null_mut()) };
}

/// Starts the keeper, unless it runs, or has ended for good. Reads the environment, unless [`read_environment`] did. A forked child has none until it starts its own.
///
/// # Context
/// May allocate, and starts a thread: not for use underneath an allocator's lock.
///
/// # Errors
/// There can be no more threads. All goes on without: then peaks are forgotten only by [`super::decay`], and pressure is not noticed.
pub fn start() -> io::Result<()> {
    // First: no handler of a signal ends the thread in the middle of this.
    let _quiet = signal::Quiet::begin();
    if STATE.compare_exchange(NONE, BEGINS, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return Ok(());
    }
    STARTED_BY.store(std::process::id(), Ordering::Relaxed);
    end_with_first_thread();
    // Nothing before a fork: what comes as late as this would be called first then, and had the allocator's lock before the program's own
    // handlers have theirs.
    // SAFETY: fork-handlers: a function without arguments, which stays loaded as long as the allocator is used.
    ATTENDED.get_or_make(|| unsafe {
        libc::pthread_atfork(None, None, Some(forget_parents));
    });
    // Here at the latest: another thread may change the environment while the keeper runs.
    match create(WISHES.get_or_make(Wishes::of_environment)) {
        Ok(thread) => {
            THREAD.store(thread.into_raw(), Ordering::Relaxed);
            STATE.store(RUNS, Ordering::Release);
            Ok(())
        }
        Err(error) => {
            let taken = PAGES.take().counts.cold_bytes;
            NOT_BEFORE_BYTES.store(taken.saturating_add(PAYS_FROM_BYTES), Ordering::Relaxed);
            STATE.store(NONE, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// Starts the thread. Not by std, which ends the process where there is no memory for what it knows of a thread.
fn create(wishes: &'static Wishes) -> io::Result<Pthread> {
    let given = (&raw const *wishes).cast_mut().cast();
    // SAFETY: thread-owns-share: what is given is shared, and lives for good.
    unsafe { pthread::create(STACK_BYTES, run, given) }
}

extern "C" fn run(wishes: *mut c_void) -> *mut c_void {
    let _ = rustix::thread::set_name(c"selfpage-keeper");
    // SAFETY: made-once: what `start` found made, which is never changed again.
    keep(unsafe { &*wishes.cast::<Wishes>() });
    std::ptr::null_mut()
}

/// The child of a fork has no keeper, and the thread that forked is its first.
pub(super) fn forget() {
    STATE.store(NONE, Ordering::Relaxed);
    if let Some(key) = AT_END.get() {
        expect_end(*key);
    }
}

/// In a child of a fork, also where nobody attends to that for the allocator. Handlers that came before this may have started the child's own.
extern "C" fn forget_parents() {
    if STATE.load(Ordering::Relaxed) != NONE && STARTED_BY.load(Ordering::Relaxed) != std::process::id() {
        forget();
    }
}

/// Has the keeper call `relieve` too when memory is short: who has an object heap over this allocator gives its free pages back there.
/// Only the first of them is called.
pub fn on_pressure(relieve: fn()) {
    OTHERS.get_or_make(|| relieve);
}

fn keep(wishes: &Wishes) {
    // As the thread that started it has for a moment, and the C library's own let in.
    signal::block_others_for_good();
    // First: who is moved after this, and before there is a watch, gets another.
    let mut groups = cgroup::groups().ok();
    // The program may close all descriptors that it finds, and have its own by those numbers then. Where a filter of system calls leaves
    // us no table of our own, nothing is kept open.
    let mut watch = if thread::leave_descriptors().is_ok() { Watch::of(wishes) } else { Watch::Bare };
    let (mut reports, mut last_look) = (Reports::default(), Instant::now());
    let mut cold_before = PAGES.take().counts.cold_bytes;
    stay_below_limit();
    // Whoever ends it waits for a period at most.
    while STATE.load(Ordering::Relaxed) != OVER {
        if watch.wait(PERIOD.saturating_sub(last_look.elapsed())) {
            block::relieve(reports.add(Instant::now()));
            relieve_others();
        }
        if last_look.elapsed() < PERIOD {
            continue;
        }
        last_look = Instant::now();
        watch.renew(wishes, &mut groups);
        block::decay();
        stay_below_limit();
        let cold = PAGES.take().counts.cold_bytes;
        if cold - cold_before >= REFILL_FROM_BYTES && reports.are_over(last_look) {
            refill();
        }
        cold_before = cold;
    }
    // Nobody finds any more that there is room again. The limit stays known.
    PAGES.take().retention.most_bytes = usize::MAX;
}

fn relieve_others() {
    if let Some(relieve) = OTHERS.get() {
        relieve();
    }
}

/// Sees to it that what is kept leaves some of what the process's control groups may have. Until the next look the bound holds whatever
/// blocks are allocated.
fn stay_below_limit() {
    // First: what blocks take meanwhile is then in use, and no room.
    let framed_bytes = PAGES.take().retention.framed_bytes;
    let (mut least, mut limit_bytes) = (None, None);
    let seen = cgroup::each_room(|room| {
        let more_bytes = room.free_bytes as isize - limit::left_bytes(room.limit_bytes) as isize;
        least = least.into_iter().chain([more_bytes]).min();
        limit_bytes = limit_bytes.into_iter().chain([room.limit_bytes]).min();
    });
    if seen.is_err() {
        // Nothing could be seen: the bounds of the last look hold.
        return;
    }
    block::stay_below(limit_bytes, least.map_or(usize::MAX, |more| framed_bytes.saturating_add_signed(more)));
    if least.is_some_and(|more| more < 0) {
        relieve_others();
    }
}

/// Has the kernel fill a free slot with frames: whole huge pages, which blocks then take over by the table.
fn refill() {
    let Some(reserve) = PAGES.take().begin_reserve(REFILL_BYTES) else { return };
    let filled_bytes = fill(reserve.addr, reserve.len_bytes, frames::populate);
    PAGES.take().end_reserve(reserve, filled_bytes);
}

/// Table by table: the kernel changes no mapping of the process meanwhile, which others wait for who allocate, and a machine that has to find
/// the memory first takes hundreds of milliseconds for all of it. Returns how much it came to: not to the end if a fork waits for this, or the
/// thread that ends the keeper.
fn fill(addr: usize, len_bytes: usize, populate: impl Fn(usize, usize)) -> usize {
    let is_awaited = || WORKERS.is_awaited() || STATE.load(Ordering::Relaxed) == OVER;
    let mut filled_bytes = 0;
    while filled_bytes < len_bytes && !is_awaited() {
        populate(addr + filled_bytes, TABLE_BYTES);
        filled_bytes += TABLE_BYTES;
        thread::give_way();
    }
    filled_bytes
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::alloc::fork;
    use crate::child;

    #[test]
    fn who_can_open_nothing_leaves_the_bounds_that_were_found_last() {
        fork::register();
        child::forked(|| {
            let bounds = (1 << 40, 1 << 39);
            {
                let retention = &mut PAGES.take().retention;
                (retention.limit_bytes, retention.most_bytes) = bounds;
            }
            child::opens_nothing();
            stay_below_limit();
            let retention = &PAGES.take().retention;
            assert_eq!((retention.limit_bytes, retention.most_bytes), bounds);
        });
    }

    #[test]
    fn frames_are_made_ready_table_by_table_until_somebody_waits() {
        // Alone: it is all of the process's threads that wait.
        child::forked(|| {
            let filled = RefCell::new(Vec::new());
            let populate = |addr: usize, len_bytes: usize| {
                filled.borrow_mut().push((addr, len_bytes));
                if filled.borrow().len() == 11 {
                    WORKERS.begin_fork();
                }
            };
            let tables =
                |from: usize, to: usize| (from..to).map(|at| (at * TABLE_BYTES, TABLE_BYTES)).collect::<Vec<_>>();
            assert_eq!(fill(0, 8 * TABLE_BYTES, populate), 8 * TABLE_BYTES);
            assert_eq!(filled.borrow()[..], tables(0, 8));
            assert_eq!(fill(8 * TABLE_BYTES, 8 * TABLE_BYTES, populate), 3 * TABLE_BYTES);
            assert_eq!(filled.borrow()[..], tables(0, 11));
            assert_eq!(fill(0, 8 * TABLE_BYTES, populate), 0);
            WORKERS.end_fork();
        });
    }
}
