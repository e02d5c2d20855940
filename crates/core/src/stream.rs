//! The patterns in which a region is read, and how much to fetch because of them.
//!
//! A region has a few streams. One that is met where it was expected fetches twice as much next time; a fault that no
//! stream expected fetches one page. Large fetches are read ahead by pager threads in chunks, and the first page of each
//! chunk is left unmapped as a tripwire: whoever reaches it asks for the chunk after the next.
//!
//! # Source
//! Nemesis §8 names "stream paging" as future work. The marker page is Linux's `PG_readahead`; the doubling window too.

use core::array;

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};

const STREAMS: usize = 4;
/// Streams step at most this many pages at a time.
const LONGEST_STRIDE: i64 = 64;
/// Pages in the window of a stream that has been met often enough for its pattern to be no accident.
const ESTABLISHED: u32 = 4;
/// Faults that lie closer together than this, in no order, are of one sequence: loops that compilers have unrolled read a few pages
/// backwards and go on behind them.
const NEAR: i64 = 8;
/// Streams of this stride, or a shorter one, may be parts of one sequence. Wider ones are rather what they look like.
const WIDEST_APART: u64 = 4;
/// So many faults are a short time.
const LATELY: u32 = 16;
/// Chunks that are asked for before the first of them is reached, so that the device never waits for the program.
pub const DEPTH: u32 = 5;

/// A stream: where it is expected next, and how far it has been fetched.
struct Stream {
    /// The page whose fault continues it.
    next: AtomicU64,
    /// Pages from one to the next, as two's complement.
    stride: AtomicU64,
    /// How many pages to fetch.
    window: AtomicU32,
    /// When it was last met.
    met: AtomicU32,
    /// The page up to which chunks have been asked for; 0 while none were.
    asked: AtomicU64,
}

impl Stream {
    fn new() -> Stream {
        Stream {
            next: AtomicU64::new(u64::MAX),
            stride: AtomicU64::new(1),
            window: AtomicU32::new(0),
            met: AtomicU32::new(0),
            asked: AtomicU64::new(0),
        }
    }
}

/// The streams of one region.
pub struct Streams {
    turn: AtomicU32,
    clock: AtomicU32,
    /// The last fault, and the one before it.
    last: AtomicU64,
    before: AtomicU64,
    /// Whether the last fault came once more already.
    repeated: AtomicBool,
    /// Whether what was planned last has been fetched.
    fetched: AtomicBool,
    streams: [Stream; STREAMS],
}

/// What to fetch for a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Pages to fetch now, the faulting one first.
    pub count: u32,
    /// The distance from one to the next.
    pub stride: i64,
    /// Pages to read ahead, in chunks.
    pub ahead: Option<Chunk>,
}

/// Pages to read ahead of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The number of its first page in the region.
    pub first: u64,
    /// How many.
    pub count: u32,
    /// The distance from one to the next.
    pub stride: i64,
}

/// How much may be fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Pages at once by the faulting thread.
    pub now: u32,
    /// Pages in a chunk read ahead; 0: the pager does not read ahead.
    pub chunk: u32,
}

impl Plan {
    /// One page, and nothing ahead of it.
    pub const ALONE: Plan = Plan { count: 1, stride: 1, ahead: None };
}

impl Streams {
    /// No stream yet.
    pub fn new() -> Streams {
        Streams {
            turn: AtomicU32::new(0),
            clock: AtomicU32::new(0),
            last: AtomicU64::new(u64::MAX),
            before: AtomicU64::new(u64::MAX),
            repeated: AtomicBool::new(false),
            fetched: AtomicBool::new(false),
            streams: array::from_fn(|_| Stream::new()),
        }
    }

    /// What to fetch for a fault on page `index`. Two faults at once: the second fetches its page alone.
    ///
    /// # Context
    /// Trap.
    pub fn plan(&self, index: u64, limits: Limits) -> Plan {
        if self.turn.swap(1, Ordering::Acquire) != 0 {
            return Plan::ALONE;
        }
        let plan = self.plan_in_turn(index, limits);
        self.turn.store(0, Ordering::Release);
        plan
    }

    fn plan_in_turn(&self, index: u64, limits: Limits) -> Plan {
        let now = self.clock.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let last = self.last.swap(index, Ordering::Relaxed);
        let met_last = |stream: &&Stream| stream.met.load(Ordering::Relaxed) == now.wrapping_sub(1);
        // Not where the same fault is planned again, since it had to wait for a frame or was handed over.
        let comes_anew = self.fetched.swap(false, Ordering::Relaxed) && index == last;
        let repeated = self.repeated.swap(comes_anew, Ordering::Relaxed) && comes_anew;
        if index == last {
            if repeated {
                // The program drops the page, and touches it alone each time.
                return Plan::ALONE;
            }
            if let Some(stream) = self.streams.iter().find(met_last) {
                return again(stream, index, now, limits);
            }
        }
        let before = self.before.swap(last, Ordering::Relaxed);
        // Pages of a sequence are on every grid: the densest one goes on.
        let expecting = self.streams.iter().filter(|stream| expects(stream, index));
        let width = |stream: &&Stream| (stream.stride.load(Ordering::Relaxed) as i64).unsigned_abs();
        if let Some(stream) = expecting.min_by_key(width) {
            if (2..=WIDEST_APART).contains(&width(&stream))
                && self.streams.iter().any(|other| is_between_steps(stream, other, index, now))
            {
                make_dense(stream);
            }
            return advance(stream, index, now, limits);
        }
        if let Some(stream) = self.streams.iter().find(|stream| is_denser(stream, last, index, limits)) {
            make_dense(stream);
            return advance(stream, index, now, limits);
        }
        if let Some(stream) = self.streams.iter().find(|stream| within_asked(stream, index, limits)) {
            // The program is faster than the pager threads: help it on, but ask for nothing twice.
            let stride = stream.stride.load(Ordering::Relaxed) as i64;
            stream.met.store(now, Ordering::Relaxed);
            return Plan { count: limits.now, stride, ahead: None };
        }
        // Nobody expected it. It may be the second step of a new stream, from the last fault on.
        let step = index.wrapping_sub(last) as i64;
        let (stride, window) = match step {
            _ if last == u64::MAX || step == 0 || step.abs() > LONGEST_STRIDE => (1, 1),
            _ if step.abs() <= NEAR && is_between(before, last, index) => (step.signum(), ESTABLISHED),
            _ => (step, 1),
        };
        let age = |stream: &Stream| now.wrapping_sub(stream.met.load(Ordering::Relaxed));
        if let Some(oldest) = self.streams.iter().max_by_key(|stream| age(stream)) {
            oldest.next.store(index.wrapping_add(stride as u64), Ordering::Relaxed);
            oldest.stride.store(stride as u64, Ordering::Relaxed);
            oldest.window.store(window, Ordering::Relaxed);
            oldest.met.store(now, Ordering::Relaxed);
            oldest.asked.store(0, Ordering::Relaxed);
        }
        Plan::ALONE
    }

    /// The pages of the last plan have come.
    ///
    /// # Context
    /// Trap.
    pub fn note_fetched(&self) {
        self.fetched.store(true, Ordering::Relaxed);
    }

    /// Somebody reached the tripwire at page `index`: the chunk to ask for next, if the stream is still known.
    ///
    /// # Context
    /// Trap.
    pub fn tripped(&self, index: u64, limits: Limits) -> Option<Chunk> {
        if limits.chunk == 0 || self.turn.swap(1, Ordering::Acquire) != 0 {
            return None;
        }
        let now = self.clock.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let chunk = self.streams.iter().find(|stream| within_asked(stream, index, limits)).map(|stream| {
            stream.met.store(now, Ordering::Relaxed);
            ask(stream, limits.chunk)
        });
        self.turn.store(0, Ordering::Release);
        chunk
    }
}

impl Default for Streams {
    fn default() -> Self {
        Streams::new()
    }
}

/// Whether a fault at page `index` continues the stream. One that has held for some time may leave pages out: they are in core
/// already.
fn expects(stream: &Stream, index: u64) -> bool {
    let next = stream.next.load(Ordering::Relaxed);
    let window = stream.window.load(Ordering::Relaxed);
    let slack = if window >= ESTABLISHED { window } else { 0 };
    let steps = steps(stream, next, index);
    next != u64::MAX && steps.is_some_and(|steps| steps >= 0 && steps <= i64::from(slack))
}

/// Whether a page lies between two others, of which the second is not the same as the first.
fn is_between(page: u64, first: u64, second: u64) -> bool {
    let (there, whole) = (page.wrapping_sub(first) as i64, second.wrapping_sub(first) as i64);
    there.signum() == whole.signum() && there.unsigned_abs() < whole.unsigned_abs()
}

/// Whether page `index` is among the last that were asked for ahead of the stream.
fn within_asked(stream: &Stream, index: u64, limits: Limits) -> bool {
    let asked = stream.asked.load(Ordering::Relaxed);
    let longest = i64::from(limits.chunk) * i64::from(DEPTH + 1);
    asked != 0 && steps(stream, index, asked).is_some_and(|before_end| (1..=longest).contains(&before_end))
}

/// Whether the program reads every page where the stream takes every other one: it faults on the pages between. Some of a
/// sequence were in core when it began, and what was left looked like a stride.
fn is_denser(stream: &Stream, last: u64, index: u64, limits: Limits) -> bool {
    let stride = stream.stride.load(Ordering::Relaxed) as i64;
    let next_on_grid = index.wrapping_add(stride.signum() as u64);
    stride.abs() == 2 && index.wrapping_sub(last) as i64 == stride && within_asked(stream, next_on_grid, limits)
}

/// Whether another stream goes on lately beside this one, which is met at page `index`, on pages between its own: the two are one sequence.
fn is_between_steps(stream: &Stream, other: &Stream, index: u64, now: u32) -> bool {
    let stride = stream.stride.load(Ordering::Relaxed) as i64;
    let window = stream.window.load(Ordering::Relaxed).max(other.window.load(Ordering::Relaxed));
    let apart = other.next.load(Ordering::Relaxed).wrapping_sub(index) as i64;
    let age = now.wrapping_sub(other.met.load(Ordering::Relaxed));
    age <= LATELY
        && apart.unsigned_abs() <= u64::from(window) * stride.unsigned_abs()
        && apart.checked_rem(stride).is_some_and(|rest| rest != 0)
}

fn make_dense(stream: &Stream) {
    let stride = stream.stride.load(Ordering::Relaxed) as i64;
    stream.stride.store(stride.signum() as u64, Ordering::Relaxed);
}

/// How many steps of the stream lead from one page to another, if a number of them does.
fn steps(stream: &Stream, from: u64, to: u64) -> Option<i64> {
    let stride = stream.stride.load(Ordering::Relaxed) as i64;
    let distance = to.wrapping_sub(from) as i64;
    (distance.checked_rem(stride) == Some(0)).then(|| distance / stride)
}

fn advance(stream: &Stream, index: u64, now: u32, limits: Limits) -> Plan {
    let stride = stream.stride.load(Ordering::Relaxed);
    let grown = stream.window.load(Ordering::Relaxed).saturating_mul(2);
    let count = grown.clamp(1, limits.now.max(1));
    let next = index.wrapping_add(stride.wrapping_mul(u64::from(count)));
    stream.window.store(grown.min(limits.now.max(limits.chunk).max(1)), Ordering::Relaxed);
    stream.met.store(now, Ordering::Relaxed);
    stream.next.store(next, Ordering::Relaxed);
    // The pattern has held for some time: let pager threads go ahead of it.
    let ahead = (limits.chunk != 0 && grown > limits.now).then(|| {
        stream.asked.store(next, Ordering::Relaxed);
        ask(stream, limits.chunk * DEPTH)
    });
    Plan { count, stride: stride as i64, ahead }
}

/// The same fault once more, in another context: what was planned for it, of which nothing is asked for twice.
fn again(stream: &Stream, index: u64, now: u32, limits: Limits) -> Plan {
    stream.met.store(now, Ordering::Relaxed);
    let planned = steps(stream, index, stream.next.load(Ordering::Relaxed)).unwrap_or(1);
    let count = planned.clamp(1, i64::from(limits.now.max(1))) as u32;
    Plan { count, stride: stream.stride.load(Ordering::Relaxed) as i64, ahead: None }
}

/// The chunk after the last one asked for.
fn ask(stream: &Stream, count: u32) -> Chunk {
    let first = stream.asked.load(Ordering::Relaxed);
    let stride = stream.stride.load(Ordering::Relaxed);
    let end = first.wrapping_add(stride.wrapping_mul(u64::from(count)));
    stream.asked.store(end, Ordering::Relaxed);
    // The program runs through the chunk without a fault; if one page of it was dropped meanwhile, the fault there is no
    // part of the stream. The stream is met next where the chunk ends, or at a tripwire.
    stream.next.store(end, Ordering::Relaxed);
    Chunk { first, count, stride: stride as i64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { now: 16, chunk: 256 };

    #[test]
    fn a_sequence_doubles_up_to_chunks_ahead() {
        let streams = Streams::new();
        let mut at = 100;
        let mut counts = std::vec::Vec::new();
        let ahead = loop {
            let plan = streams.plan(at, LIMITS);
            counts.push(plan.count);
            at += u64::from(plan.count);
            if let Some(chunk) = plan.ahead {
                break chunk;
            }
        };
        assert_eq!(counts, [1, 2, 4, 8, 16, 16]);
        assert_eq!(ahead, Chunk { first: at, count: DEPTH * 256, stride: 1 });
        let next = Chunk { first: at + u64::from(DEPTH) * 256, count: 256, stride: 1 };
        assert_eq!(streams.tripped(at, LIMITS), Some(next));
        assert_eq!(streams.tripped(at + 4000, LIMITS), None);
        // A fault within the chunk gets help, and asks for nothing.
        assert_eq!(streams.plan(at + 300, LIMITS), Plan { count: 16, stride: 1, ahead: None });
    }

    #[test]
    fn random_faults_fetch_one_page_each() {
        let streams = Streams::new();
        let mut dice = 1u64;
        let mut fetched = 0;
        for _ in 0..1000 {
            dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            fetched += streams.plan(dice >> 44, LIMITS).count;
        }
        assert!(fetched < 1020, "{fetched}");
    }

    #[test]
    fn a_stride_is_followed_in_both_directions() {
        for stride in [3i64, -2] {
            let streams = Streams::new();
            let mut at = 10_000i64;
            let mut last = Plan::ALONE;
            for _ in 0..5 {
                last = streams.plan(at as u64, LIMITS);
                at += last.stride * i64::from(last.count).max(1);
                if last.count == 1 {
                    at += stride - last.stride;
                }
            }
            assert_eq!(last.stride, stride);
            assert!(last.count >= 4);
        }
    }

    /// Runs through `pages` in order; those that `in_core` holds make no fault, nor those that were fetched. How many faults it
    /// took, and the last chunk that was read ahead.
    fn pass(pages: impl Iterator<Item = u64>, in_core: impl Fn(u64) -> bool) -> (u32, Option<Chunk>) {
        let after = |first: u64, steps: u64, stride: i64| first.wrapping_add(steps.wrapping_mul(stride as u64));
        let streams = Streams::new();
        let mut last = None;
        let mut fetched = std::collections::HashSet::new();
        let mut tripwires = std::collections::HashSet::new();
        let mut faults = 0;
        for page in pages {
            let mut ahead = None;
            if tripwires.remove(&page) {
                ahead = streams.tripped(page, LIMITS);
            } else if !in_core(page) && !fetched.contains(&page) {
                faults += 1;
                let plan = streams.plan(page, LIMITS);
                fetched.extend((0..u64::from(plan.count)).map(|step| after(page, step, plan.stride)));
                ahead = plan.ahead;
            }
            for step in 0..ahead.map_or(0, |chunk| u64::from(chunk.count)) {
                let page = ahead.map_or(0, |chunk| after(chunk.first, step, chunk.stride));
                if step % u64::from(LIMITS.chunk) == 0 && !in_core(page) {
                    tripwires.insert(page);
                }
                fetched.insert(page);
            }
            last = ahead.or(last);
        }
        (faults, last)
    }

    #[test]
    #[cfg_attr(miri, ignore = "a long trace through safe code")]
    fn a_sequence_is_seen_where_a_few_pages_are_read_backwards() {
        for together in [2, 3, 4] {
            let backwards = |first: u64| (first..first + together).rev();
            let upwards = (0..100_000 / together).flat_map(|at| backwards(at * together));
            let downwards = (0..100_000 / together).rev().flat_map(|at| backwards(at * together).rev());
            for (pages, stride) in
                [(&mut upwards.into_iter() as &mut dyn Iterator<Item = u64>, 1), (&mut downwards.into_iter(), -1)]
            {
                let (faults, last) = pass(pages, |_| false);
                assert!(faults < 100, "{together} backwards: {faults} faults");
                assert_eq!(last.map(|chunk| chunk.stride), Some(stride), "{together} backwards");
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a long trace through safe code")]
    fn a_sequence_is_seen_through_both() {
        for seed in 0..400u64 {
            for share in [2, 3, 4, 6] {
                let in_core = |page: u64| (page ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - share) == 0;
                let pages = (0..20_000).map(|at| at ^ 1);
                let (faults, last) = pass(pages, in_core);
                assert!(faults < 300, "seed {seed}, {share}: {faults} faults");
                assert_eq!(last.map(|chunk| chunk.stride), Some(1), "seed {seed}, {share}");
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a long trace through safe code")]
    fn a_sequence_is_seen_through_pages_that_are_in_core() {
        for seed in 0..200u64 {
            let in_core = |page: u64| (page ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 == 0;
            let (faults, _) = pass(1..100_000, in_core);
            assert!(faults < 200, "seed {seed}: {faults} faults");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a long trace through safe code")]
    fn a_sequence_that_began_like_a_stride_is_seen() {
        // Every other page of the first few is in core.
        let (faults, last) = pass(1..100_000, |page| page < 64 && page % 2 == 0);
        assert!(faults < 100, "{faults} faults");
        assert_eq!(last.map(|chunk| chunk.stride), Some(1));
    }

    /// By a pager thread, where the trap could not, and after each wait for a frame.
    #[test]
    fn a_fault_that_is_planned_again_is_no_fault_of_its_own() {
        let (once, often) = (Streams::new(), Streams::new());
        let mut at = [0u64, 1_000_000];
        for _ in 0..12 {
            for at in &mut at {
                let plan = once.plan(*at, LIMITS);
                once.note_fetched();
                assert_eq!(often.plan(*at, LIMITS), plan);
                for _ in 0..3 {
                    assert_eq!(often.plan(*at, LIMITS), Plan { ahead: None, ..plan });
                }
                often.note_fetched();
                *at += u64::from(plan.count);
            }
        }
    }

    /// As a program's that drops a stretch of pages and touches the first of them, time and again.
    #[test]
    fn a_fault_that_comes_a_third_time_fetches_its_page_alone() {
        // In a sequence that is followed so far, one that is read ahead of last.
        for faults in 1..8 {
            let streams = Streams::new();
            let fault = |at| {
                let plan = streams.plan(at, LIMITS);
                streams.note_fetched();
                plan
            };
            let mut at = 100;
            for _ in 1..faults {
                at += u64::from(fault(at).count);
            }
            let plan = fault(at);
            assert_eq!(fault(at), Plan { ahead: None, ..plan });
            for _ in 0..10 {
                assert_eq!(fault(at), Plan::ALONE, "{faults}");
            }
            // And the sequence goes on where it was left.
            let next = fault(at + u64::from(plan.count));
            assert!(next.count >= plan.count, "{faults}: {plan:?}, {next:?}");
        }
    }

    #[test]
    fn two_sequences_at_once_are_two_streams() {
        let streams = Streams::new();
        let (mut a, mut b) = (0u64, 1_000_000u64);
        for _ in 0..8 {
            a += u64::from(streams.plan(a, LIMITS).count);
            b += u64::from(streams.plan(b, LIMITS).count);
        }
        assert!(a > 45 && b > 1_000_045, "{a} {b}");
    }

    extern crate std;
}
