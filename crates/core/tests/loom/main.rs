//! Models of what core's threads do to one another: loom runs each in every interleaving, as far as a few preemptions and
//! the memory orders allow.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p selfpage-core --test loom --release`
#![cfg(loom)]

mod cut;
mod frames;
mod holding;
mod machine;
mod unpopulated;

use std::num::NonZeroU32;
use std::ptr::{self, NonNull};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::thread;
use machine::{Bed, Sleeping};
use selfpage_core::addr::{Frame, PageNo, PageRange};
use selfpage_core::frame::{FrameTable, Table, Use};
use selfpage_core::mmu::Trap;
use selfpage_core::page::{Found, PageWord, State, Word};
use selfpage_core::region::{Region, RegionMap, Rights};
use selfpage_core::ring::Ring;
use selfpage_core::shortage::{Demand, FrameWait, Shortage};
use selfpage_core::sync::{Event, Gate};

/// Runs `model` in every interleaving with at most `preemptions` switches away from a thread that could go on.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Memory for a table. It must outlive the table.
struct Memory<T>(Vec<T>);

impl<T: Default> Memory<T> {
    fn new(len: usize) -> Memory<T> {
        Memory((0..len).map(|_| T::default()).collect())
    }

    fn table(&mut self) -> Table<T> {
        // SAFETY: table-memory: a model keeps the memory beside the table, and uses it through the table alone.
        unsafe { Table::new(NonNull::new(self.0.as_mut_ptr()).unwrap(), self.0.len()) }
    }
}

const ONE: NonZeroU32 = NonZeroU32::MIN;

const GARBAGE: u32 = u32::MAX;
const SAVED: u32 = 7;

/// A page word with what its threads share.
struct Page {
    word: PageWord,
    bed: Bed,
    /// How often it has been filled; while it is unmapped, [`GARBAGE`]; on disk, [`SAVED`].
    contents: UnsafeCell<u32>,
    /// How often the frame that was being saved went back.
    given_back: AtomicU32,
}

impl Page {
    fn new(first: Word) -> Arc<Page> {
        let word = PageWord::new();
        assert!(word.claim(Word::ABSENT));
        assert!(!word.settle(first).awaited);
        Arc::new(Page { word, bed: Bed::new(), contents: UnsafeCell::new(0), given_back: AtomicU32::new(0) })
    }

    fn settle(&self, next: Word) -> bool {
        let settled = self.word.settle(next);
        if settled.awaited {
            self.bed.rouse();
        }
        settled.in_save
    }

    fn wait_until(&self, there: impl Fn(Word) -> bool) -> Word {
        loop {
            let seen = self.word.load();
            if there(seen) {
                return seen;
            }
            if let Some(marked) = self.word.await_change(seen) {
                self.bed.sleep_while(|| self.word.load().low() == marked.low());
            }
        }
    }

    /// As the program would, of a page that is mapped.
    fn read(&self) -> u32 {
        // SAFETY: model-cell: loom tracks each access and fails the model if two of them race.
        self.contents.with(|contents| unsafe { *contents })
    }

    /// As the owner of the page would.
    fn write(&self, what: u32) {
        // SAFETY: model-cell.
        self.contents.with_mut(|contents| unsafe { *contents = what });
    }

    fn give_back(&self) {
        self.given_back.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_claim_excludes_and_no_sleeper_is_lost() {
    explore(3, || {
        let page = Page::new(Word::ABSENT);
        let faulters = [0, 1].map(|_| {
            let page = page.clone();
            thread::spawn(move || fault(&page))
        });
        // One that claims the page and then finds no frame for it.
        let seen = page.word.load();
        if seen.state() == State::Absent && page.word.claim(seen) {
            page.write(page.read());
            page.settle(Word::ABSENT);
        }
        faulters.into_iter().for_each(|faulter| faulter.join().unwrap());
        assert_eq!(page.read(), 1);
    });
}

/// Fills the page, or waits for whoever does.
fn fault(page: &Page) {
    loop {
        let seen = page.wait_until(|seen| seen.state() != State::Busy);
        if seen.state() == State::Resident {
            return assert_eq!(page.read(), 1);
        }
        if page.word.claim(seen) {
            page.write(page.read() + 1);
            page.settle(Word::new(State::Resident, Frame(1)));
        }
    }
}

#[test]
fn whoever_ends_second_gives_the_old_frame_back() {
    explore(3, || {
        let saving = Word::new(State::Saving, Frame(1)).with_save();
        let page = Page::new(saving);
        let saver = {
            let page = page.clone();
            thread::spawn(move || {
                page.write(SAVED);
                let end = page.word.end_save(Word::new(State::Standby, Frame(1)));
                if end.awaited {
                    page.bed.rouse();
                }
                if end.found == Found::Copied {
                    page.give_back();
                }
            })
        };
        let flusher = {
            let page = page.clone();
            thread::spawn(move || {
                let seen = page.wait_until(|seen| seen.state() != State::Busy && !seen.in_save());
                assert!(matches!(seen.state(), State::Resident | State::Standby));
                assert_eq!(page.read(), SAVED);
            })
        };
        // The program wants the page.
        loop {
            let seen = page.word.load();
            if !page.word.claim(seen) {
                continue;
            }
            if seen.state() == State::Standby {
                page.settle(Word::new(State::Resident, Frame(1)));
            } else {
                assert_eq!(seen.state(), State::Saving);
                if !page.settle(Word::new(State::Resident, Frame(2))) {
                    page.give_back();
                }
            }
            break;
        }
        saver.join().unwrap();
        flusher.join().unwrap();
        let (last, given_back) = (page.word.load(), page.given_back.load(Ordering::Relaxed));
        assert_eq!(last.state(), State::Resident);
        assert!(!last.in_save());
        assert_eq!(given_back, u32::from(last.frame() == Frame(2)));
    });
}

#[test]
fn pins_are_counted_and_keep_a_page_from_being_claimed() {
    explore(3, || {
        let page = Page::new(Word::new(State::Resident, Frame(1)));
        let program = {
            let page = page.clone();
            thread::spawn(move || {
                while !page.word.pin(page.wait_until(|seen| seen.state() == State::Resident)) {}
                assert_eq!(page.read(), 0);
                while !page.word.unpin(page.word.load()) {}
            })
        };
        let seen = page.word.load();
        if seen.pins() == 0 && page.word.claim(seen) {
            // Unmapped for a look, and put back: meanwhile nobody with a pin may be there.
            page.write(GARBAGE);
            page.write(0);
            page.settle(Word::new(State::Resident, Frame(1)));
        }
        program.join().unwrap();
        assert_eq!(page.word.load().pins(), 0);
    });
}

/// A ring with its memory, and the events that its users sleep on.
struct Queue {
    ring: Ring,
    filled: Event,
    emptied: Event,
    mmu: Sleeping,
    _memory: Memory<selfpage_core::ring::Slot>,
}

impl Queue {
    fn new(slots: usize) -> Queue {
        let mut memory = Memory::new(slots);
        let ring = Ring::new(memory.table());
        let mmu = Sleeping(Bed::new());
        Queue { ring, filled: Event::default(), emptied: Event::default(), mmu, _memory: memory }
    }

    fn push(&self, what: u64) {
        loop {
            let seen = self.emptied.count();
            if self.ring.push(what, what * 10) {
                return self.filled.signal(&self.mmu);
            }
            self.emptied.wait(&self.mmu, seen, 0);
        }
    }

    fn pop(&self) -> u64 {
        loop {
            let seen = self.filled.count();
            if let Some((a, b)) = self.ring.pop() {
                assert_eq!(b, a * 10);
                self.emptied.signal(&self.mmu);
                return a;
            }
            self.filled.wait(&self.mmu, seen, 0);
        }
    }
}

#[test]
fn a_ring_loses_nothing_and_says_nothing_twice() {
    explore(2, || {
        let queue = Arc::new(Queue::new(2));
        let producers = [&[1, 2][..], &[3]].map(|entries| {
            let queue = queue.clone();
            thread::spawn(move || entries.iter().for_each(|entry| queue.push(*entry)))
        });
        let mut got: Vec<u64> = (0..3).map(|_| queue.pop()).collect();
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        assert_eq!(queue.ring.pop(), None);
        let at = |entry| got.iter().position(|other| *other == entry);
        assert!(at(1) < at(2), "{got:?}");
        got.sort_unstable();
        assert_eq!(got, [1, 2, 3]);
    });
}

#[test]
fn two_consumers_never_take_the_same_entry() {
    explore(3, || {
        let queue = Arc::new(Queue::new(2));
        queue.push(1);
        queue.push(2);
        assert!(!queue.ring.push(3, 30), "it is full");
        let other = {
            let queue = queue.clone();
            thread::spawn(move || queue.pop())
        };
        let mut got = [queue.pop(), other.join().unwrap()];
        got.sort_unstable();
        assert_eq!(got, [1, 2]);
        assert_eq!(queue.ring.pop(), None);
    });
}

/// A region map, three regions, and the memory of all.
struct Map {
    map: RegionMap,
    regions: [Region; 3],
    _memory: [Memory<selfpage_core::region::Line>; 2],
}

impl Map {
    /// Only the last region is in the map.
    fn new() -> Arc<Map> {
        let regions = [0, 10, 20].map(|first| {
            let range = PageRange { first: PageNo(first), count: 5 };
            Region::new(range, Trap::Worker, Rights::Read, Table::empty(), Table::empty())
        });
        let mut memory = [Memory::new(3), Memory::new(3)];
        let map = RegionMap::new(memory.each_mut().map(Memory::table));
        let all = Arc::new(Map { map, regions, _memory: memory });
        all.insert(2);
        all
    }

    fn insert(&self, region: usize) {
        // SAFETY: region-in-map: the regions live as long as the map.
        assert!(unsafe { self.map.insert(&self.regions[region]) });
    }

    fn find(&self, page: u64) -> Option<&Region> {
        let found = self.map.find(PageNo(page));
        assert!(found.is_none_or(|region| region.range.contains(PageNo(page))), "a torn line");
        found
    }
}

#[test]
fn a_region_is_found_whole_while_others_come_and_go() {
    explore(2, || {
        let map = Map::new();
        let removed = Arc::new(AtomicBool::new(false));
        let writer = {
            let (map, removed) = (map.clone(), removed.clone());
            thread::spawn(move || {
                // The second change writes where a reader may still be, and other lines than were there.
                map.insert(0);
                map.insert(1);
                assert!(map.map.remove(&map.regions[0]));
                removed.store(true, Ordering::Release);
            })
        };
        assert!(map.find(22).is_some_and(|region| ptr::eq(region, &map.regions[2])));
        let gone = removed.load(Ordering::Acquire);
        let low = map.find(2);
        assert!(!gone || low.is_none(), "found after its removal");
        writer.join().unwrap();
        assert!(map.find(2).is_none() && map.find(12).is_some() && map.find(22).is_some() && map.find(7).is_none());
    });
}

/// A frame table and its memory.
struct Records {
    table: FrameTable,
    _memory: Memory<selfpage_core::frame::FrameRecord>,
}

impl Records {
    fn tell(&self, told: &mut Vec<(u32, Option<PageNo>, Use)>) {
        self.table.drain_admitted(|frame, use_| told.push((frame.0, self.table.owner(frame), use_)));
    }

    fn admit(&self, frame: u32, page: u64, use_: Use) {
        self.table.set_owner(Frame(frame), Some(PageNo(page)));
        self.table.admit(Frame(frame), use_);
    }
}

#[test]
fn the_policy_learns_of_every_admission() {
    explore(3, || {
        let mut memory = Memory::new(2);
        let records = Arc::new(Records { table: FrameTable::new(memory.table()), _memory: memory });
        let admitters = [[(0, 10, Use::First), (0, 11, Use::Again)], [(1, 20, Use::First), (1, 20, Use::First)]].map(
            |admissions| {
                let records = records.clone();
                thread::spawn(move || {
                    for (frame, page, use_) in admissions {
                        records.admit(frame, page, use_);
                    }
                })
            },
        );
        let mut told = Vec::new();
        records.tell(&mut told);
        admitters.into_iter().for_each(|admitter| admitter.join().unwrap());
        records.tell(&mut told);
        let last = |frame| told.iter().rev().find(|entry| entry.0 == frame).map(|entry| entry.1);
        assert_eq!(last(0), Some(Some(PageNo(11))), "{told:?}");
        assert_eq!(last(1), Some(Some(PageNo(20))), "{told:?}");
        assert!(told.iter().any(|entry| entry.0 == 0 && entry.2 == Use::Again), "{told:?}");
        assert!(told.iter().all(|entry| entry.0 == 0 || entry.2 == Use::First), "{told:?}");
        records.tell(&mut Vec::new());
        assert!(told.len() <= 4, "{told:?}");
    });
}

#[test]
fn a_signal_reaches_every_sleeper() {
    explore(3, || {
        let shared = Arc::new((AtomicBool::new(false), Event::default(), Sleeping(Bed::new())));
        let sleepers: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (happened, event, mmu) = &*shared;
                    loop {
                        let seen = event.count();
                        if happened.load(Ordering::Relaxed) {
                            return;
                        }
                        event.wait(mmu, seen, 0);
                    }
                })
            })
            .collect();
        let (happened, event, mmu) = &*shared;
        happened.store(true, Ordering::Relaxed);
        event.signal(mmu);
        sleepers.into_iter().for_each(|sleeper| sleeper.join().unwrap());
    });
}

#[test]
fn whoever_is_told_to_end_does() {
    explore(3, || {
        let shared = Arc::new((AtomicBool::new(false), Event::default(), Sleeping(Bed::new())));
        let sleeper = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (ended, event, mmu) = &*shared;
                while let Some(seen) = event.count_unless(|| ended.load(Ordering::Relaxed)) {
                    event.wait(mmu, seen, 0);
                }
            })
        };
        let (ended, event, mmu) = &*shared;
        ended.store(true, Ordering::Relaxed);
        event.signal(mmu);
        sleeper.join().unwrap();
    });
}

#[test]
fn nobody_is_told_of_a_shortage_from_before_they_asked() {
    explore(3, || {
        let state = (Demand::default(), AtomicBool::new(true), AtomicBool::new(false));
        let shared = Arc::new((state, Sleeping(Bed::new())));
        let evictor = {
            let shared = shared.clone();
            thread::spawn(move || {
                let ((demand, held, free), mmu) = &*shared;
                loop {
                    let asked = demand.wanted.count();
                    if !held.load(Ordering::SeqCst) {
                        free.store(true, Ordering::SeqCst);
                        return demand.available.signal(mmu);
                    }
                    demand.state_shortage(mmu, asked, Shortage::AllHeld);
                    demand.wanted.wait(mmu, asked, 0);
                }
            })
        };
        let ((demand, held, free), mmu) = &*shared;
        held.store(false, Ordering::SeqCst);
        let mut frame_wait = FrameWait::default();
        loop {
            let seen = demand.available.count();
            if free.load(Ordering::SeqCst) {
                break;
            }
            frame_wait.sleep(demand, mmu, seen).expect("nothing is held any more");
        }
        evictor.join().unwrap();
    });
}

#[test]
fn nobody_is_inside_a_closed_gate() {
    explore(3, || {
        let shared = Arc::new((Gate::default(), Sleeping(Bed::new()), UnsafeCell::new(0)));
        let insiders: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (gate, mmu, tables) = &*shared;
                    let _inside = gate.enter(mmu);
                    // SAFETY: model-cell.
                    tables.with(|tables| assert!(unsafe { *tables } <= 1));
                })
            })
            .collect();
        let (gate, mmu, tables) = &*shared;
        gate.close(mmu, 1).unwrap();
        // SAFETY: model-cell.
        tables.with_mut(|tables| unsafe { *tables += 1 });
        gate.open(mmu);
        insiders.into_iter().for_each(|insider| insider.join().unwrap());
    });
}
