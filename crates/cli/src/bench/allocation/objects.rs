//! `objects`: `malloc` and `free` by the usual patterns of small objects, and of sizes mixed, with one thread and with more.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::Instant;

use super::super::error::Error;
use super::super::host;
use super::super::job::{Bench, Job};
use super::super::raw::blocks::Source;
use super::super::raw::objects::{Object, Used};
use super::super::result::{Better, Sample, Unit, median};
use super::super::system::{Entry, Systems};
use super::{GLIBC, JEMALLOC, KEPT, MIMALLOC, TCMALLOC};

/// The bench.
pub struct Objects;

/// All by `malloc` of the process: here it is ours in the same way as the others'.
static SYSTEMS: Systems<Source> = Systems(&[super::our_malloc("selfpage"), KEPT, GLIBC, JEMALLOC, MIMALLOC, TCMALLOC]);

const PASSES: usize = 9;

struct Pattern {
    name: &'static str,
    /// Does `pairs` of malloc and free on each of so many threads.
    run: fn(threads: usize, pairs: usize),
    /// So many times fewer pairs than of small objects, since each costs more.
    weight: usize,
    /// What a thread may have at once.
    thread_bytes: usize,
}

impl Pattern {
    fn memory_bytes(&self, threads: usize) -> usize {
        self.thread_bytes * threads.max(2)
    }
}

const fn small(name: &'static str, run: fn(usize, usize)) -> Pattern {
    Pattern { name, run, weight: 1, thread_bytes: 128 << 20 }
}

static PATTERNS: [Pattern; 6] = [
    small("producer-consumer", producer_consumer),
    small("larson", larson),
    small("sh6", sh6),
    small("alloc-test", alloc_test),
    Pattern { name: "mixed", run: mixed, weight: 50, thread_bytes: 128 << 20 },
    Pattern { name: "mixed-large", run: mixed_large, weight: 200, thread_bytes: 256 << 20 },
];

fn case(name: &str) -> Option<(&'static Pattern, usize)> {
    let (pattern, suffix) = name.rsplit_once('-')?;
    let threads = suffix.strip_suffix('t')?.parse().ok()?;
    Some((PATTERNS.iter().find(|known| known.name == pattern)?, threads))
}

impl Bench for Objects {
    fn name(&self) -> &'static str {
        "objects"
    }

    fn about(&self) -> &'static str {
        "malloc and free of small objects: handed to a thread that frees, larson-, sh6- and alloc-test-like; of all sizes mixed"
    }

    fn cases(&self) -> Vec<String> {
        let of =
            |pattern: &'static Pattern| host::thread_counts().map(|threads| format!("{}-{threads}t", pattern.name));
        PATTERNS.iter().flat_map(of).collect()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn unit(&self, _: &str) -> Unit {
        Unit { name: "ns/pair", better: Better::Lower }
    }

    fn memory_bytes(&self, name: &str) -> usize {
        case(name).map_or(0, |(pattern, threads)| pattern.memory_bytes(threads))
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let (pattern, threads) = job.known(case(job.case))?;
        super::need(pattern.memory_bytes(threads))?;
        let pairs = job.sizes.accesses * 5 / pattern.weight;
        let mut took = Vec::new();
        for _ in 0..PASSES {
            let begin = Instant::now();
            (pattern.run)(threads, pairs);
            took.push(begin.elapsed().as_nanos() as f64);
        }
        // What a busy machine adds is never negative.
        let least = took.iter().copied().fold(f64::INFINITY, f64::min);
        Ok(Sample::of(least / pairs as f64, &[("median", median(took) / pairs as f64)]))
    }
}

/// Numbers that look random, the same in each run.
pub struct Random(u64);

impl Random {
    /// A sequence for each thread.
    pub fn of(thread: usize) -> Random {
        Random(88_172_645_463_325_252 + thread as u64)
    }

    /// Below `limit`.
    #[inline]
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }
}

fn on_each(threads: usize, work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
}

/// So many objects are handed over at once: otherwise the handing over is measured. With a thousand, the threads wait for each other
/// every few microseconds, and who frees sooner only waits more.
const HANDED: usize = 10_000;

/// Each thread that allocates has another that frees.
fn producer_consumer(threads: usize, pairs: usize) {
    let round_trip = |full: &SyncSender<Vec<Object>>, empty: &Receiver<Vec<Object>>| {
        for round in 0..pairs.div_ceil(HANDED) {
            let mut objects = if round < 4 { Vec::with_capacity(HANDED) } else { empty.recv().unwrap_or_default() };
            objects.extend((0..HANDED).map(|at| Object::new(16 + at % 8 * 16)));
            if full.send(objects).is_err() {
                return;
            }
        }
    };
    on_each(threads, |_| {
        let (full, take) = mpsc::sync_channel::<Vec<Object>>(4);
        let (give_back, empty) = mpsc::sync_channel(4);
        thread::scope(|scope| {
            scope.spawn(move || {
                for mut objects in take {
                    objects.clear();
                    // The last ones are not waited for.
                    let _ = give_back.send(objects);
                }
            });
            round_trip(&full, &empty);
            drop(full);
        });
    });
}

/// What a server does: objects of 8 to 507 bytes, replaced at random. Threads end, and others go on with their objects.
fn larson(threads: usize, pairs: usize) {
    const OBJECTS: usize = 1000;
    const LIVES: usize = 10;
    let mut all: Vec<Vec<Option<Object>>> = Vec::new();
    all.resize_with(threads, || std::iter::repeat_with(|| None).take(OBJECTS).collect());
    for life in 0..LIVES {
        thread::scope(|scope| {
            for (thread, objects) in all.iter_mut().enumerate() {
                scope.spawn(move || {
                    let mut random = Random::of(life * threads + thread);
                    for _ in 0..pairs / LIVES {
                        let place = &mut objects[random.below(OBJECTS)];
                        *place = None;
                        *place = Some(Object::new(8 + random.below(500)));
                    }
                });
            }
        });
        all.rotate_left(1);
    }
}

/// Batches of objects of 1 to 1000 bytes, most of them small; freed partly in the order of allocation, partly in the other one.
fn sh6(threads: usize, pairs: usize) {
    const BATCH: usize = 4000;
    on_each(threads, |thread| {
        let mut random = Random::of(thread);
        let mut objects = Vec::with_capacity(BATCH);
        for _ in 0..pairs / BATCH {
            for _ in 0..BATCH {
                let largest = if random.below(10) == 0 { 1000 } else { 100 };
                objects.push(Some(Object::new(1 + random.below(largest))));
            }
            objects.iter_mut().step_by(2).for_each(|object| *object = None);
            objects.iter_mut().rev().for_each(|object| *object = None);
            objects.clear();
        }
    });
}

/// Many live objects of 16 bytes to 4 KiB, small ones more often; all of an object is written, and read before it is freed.
fn alloc_test(threads: usize, pairs: usize) {
    let live = (pairs / 4).max(1);
    on_each(threads, |thread| {
        let mut random = Random::of(thread);
        let mut objects: Vec<Option<Used>> = Vec::new();
        objects.resize_with(live, || None);
        for _ in 0..pairs {
            let place = &mut objects[random.below(live)];
            *place = None;
            let bits = random.below(9);
            *place = Some(Used::new(16 << (bits * random.below(9) / 8)));
        }
    });
}

/// Blocks of 16 bytes to 1 MiB, each doubling as often as any other, replaced at random; a byte of each page is written.
fn mixed(threads: usize, pairs: usize) {
    on_each(threads, |thread| replace(&mut Random::of(thread), 16, 64 << 20, pairs));
}

/// The same to 16 MiB.
fn mixed_large(threads: usize, pairs: usize) {
    on_each(threads, |thread| replace(&mut Random::of(thread), 20, 128 << 20, pairs));
}

/// Blocks that are so many doublings of 16 bytes long, and less; `live_bytes` live at once, at most.
fn replace(random: &mut Random, doublings: usize, live_bytes: usize, pairs: usize) {
    const BLOCKS: usize = 512;
    let mut blocks: Vec<Option<(Object, usize)>> = Vec::new();
    blocks.resize_with(BLOCKS, || None);
    let mut live = 0;
    for _ in 0..pairs {
        let least = 16 << random.below(doublings);
        let len_bytes = least + random.below(least);
        let place = random.below(BLOCKS);
        // What is in its place goes, and what comes next as long as there is no room.
        let mut goes = place;
        loop {
            if let Some((_, freed_bytes)) = blocks[goes].take() {
                live -= freed_bytes;
            }
            if live + len_bytes <= live_bytes {
                break;
            }
            goes = (goes + 1) % BLOCKS;
        }
        blocks[place] = Some((Object::touched(len_bytes), len_bytes));
        live += len_bytes;
    }
}
