//! Policies on traces, in a small model of a domain: frames, a standby list, and a program that touches pages.

extern crate std;

use super::*;
use crate::domain::{CHUNKS, MOST_AHEAD};
use crate::frame::{Use, table};
use crate::stream::DEPTH;
use std::collections::{HashMap, HashSet, VecDeque};
use std::vec::Vec;

pub(super) fn links(frames: u32) -> Table<Link> {
    table(frames as usize)
}

fn policy(name: &str, frames: u32) -> Named {
    by_name(name, links(frames)).unwrap()
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

/// What a domain does with a policy, without the machine.
struct Model {
    policy: Named,
    priority_of: fn(u64) -> u8,
    free: Vec<Frame>,
    mapped: HashMap<u64, Frame>,
    listed: HashMap<Frame, u64>,
    standby: VecDeque<(u64, Frame)>,
    on_standby: HashMap<u64, Frame>,
    keep_on_standby: usize,
    reserve: usize,
    seen: HashSet<u64>,
    reads: u64,
    rereads: u64,
}

impl Model {
    fn new(name: &str, frames: u32) -> Model {
        let policy = policy(name, frames);
        Model {
            keep_on_standby: frames as usize * usize::from(policy.standby_share()) / 256,
            policy,
            priority_of: |_| 0,
            free: (0..frames).map(Frame).collect(),
            mapped: HashMap::new(),
            listed: HashMap::new(),
            standby: VecDeque::new(),
            on_standby: HashMap::new(),
            reserve: (frames as usize / 64).max(1),
            seen: HashSet::new(),
            reads: 0,
            rereads: 0,
        }
    }

    fn touch(&mut self, page: u64) {
        if self.mapped.contains_key(&page) {
            return;
        }
        match self.on_standby.remove(&page) {
            Some(frame) => self.admit(page, frame, Use::Again),
            None => self.fetch(page),
        }
        self.balance();
    }

    /// Reads `page` unless it is in core.
    fn fetch(&mut self, page: u64) {
        if self.mapped.contains_key(&page) || self.on_standby.contains_key(&page) {
            return;
        }
        self.reads += 1;
        self.rereads += u64::from(!self.seen.insert(page));
        let frame = self.free.pop().or_else(|| self.reclaim()).unwrap();
        self.admit(page, frame, Use::First);
        self.balance();
    }

    fn admit(&mut self, page: u64, frame: Frame, used: Use) {
        self.mapped.insert(page, frame);
        self.listed.insert(frame, page);
        self.policy.admitted(frame, PageNo(page), (self.priority_of)(page), used);
    }

    fn reclaim(&mut self) -> Option<Frame> {
        loop {
            let (page, frame) = self.standby.pop_front()?;
            // It may have come back, and gone again, in another frame.
            if self.on_standby.get(&page) == Some(&frame) {
                self.on_standby.remove(&page);
                return Some(frame);
            }
        }
    }

    /// The evictor: keeps as many frames on standby as the policy wants, and a few free ones.
    fn balance(&mut self) {
        while self.on_standby.len() + self.free.len() < self.keep_on_standby + self.reserve {
            let frame = self.policy.victim().unwrap();
            let page = self.listed.remove(&frame).expect("a victim is listed");
            self.mapped.remove(&page);
            self.on_standby.insert(page, frame);
            self.standby.push_back((page, frame));
        }
        while self.on_standby.len() > self.keep_on_standby {
            let frame = self.reclaim().unwrap();
            self.free.push(frame);
        }
    }
}

/// How many pages that had been read before are read again: nine in ten accesses go to a quarter of the frames' worth of
/// pages, the tenth to a page never seen before.
fn hot_and_cold(name: &str) -> u64 {
    const FRAMES: u32 = 2048;
    let mut model = Model::new(name, FRAMES);
    let (mut dice, mut cold) = (Dice(7), 1 << 20);
    for _ in 0..200_000 {
        if dice.below(10) == 0 {
            cold += 1;
            model.touch(cold);
        } else {
            model.touch(dice.below(u64::from(FRAMES) / 4));
        }
    }
    model.rereads
}

#[test]
#[cfg_attr(miri, ignore = "a long trace through safe code")]
fn second_chances_keep_hot_pages_in_core() {
    let (fifo, lru, clock) = (hot_and_cold("fifo"), hot_and_cold("lru"), hot_and_cold("clock"));
    assert!(fifo > 2000, "{fifo}");
    assert!(lru * 2 <= fifo, "lru {lru}, fifo {fifo}");
    assert!(clock * 2 <= fifo, "clock {clock}, fifo {fifo}");
}

/// The part of its pages, in 1/1000, that one more pass of a cyclic scan over 4/3 of the frames reads again, read ahead as a
/// stream is.
fn cyclic(name: &str, frames: u32) -> u64 {
    const PASSES: u64 = 4;
    let mut model = Model::new(name, frames);
    let pages = u64::from(frames) * 4 / 3;
    let chunk = u64::from(MOST_AHEAD.min(frames / CHUNKS));
    for pass in 0..=PASSES {
        if pass == 1 {
            model.rereads = 0;
        }
        let mut asked = 0;
        for page in 0..pages {
            while asked < pages && asked <= page + chunk * u64::from(DEPTH) {
                for ahead in asked..(asked + chunk).min(pages) {
                    model.fetch(ahead);
                }
                asked += chunk;
            }
            model.touch(page);
        }
    }
    model.rereads * 1000 / (pages * PASSES)
}

#[test]
#[cfg_attr(miri, ignore = "a long trace through safe code")]
fn a_cyclic_scan_wants_the_most_recent_out() {
    let (large, small, lru) = (cyclic("mru", 65536), cyclic("mru", 4096), cyclic("lru", 4096));
    assert!(large <= 300, "{large} of 1000");
    assert!(small <= 400, "{small} of 1000");
    assert!(lru >= 950, "{lru} of 1000");
}

#[test]
#[cfg_attr(miri, ignore = "a long trace through safe code")]
fn important_pages_stay() {
    let mut model = Model::new("priority", 1024);
    model.priority_of = |page| if page < 512 { 200 } else { 3 };
    let mut dice = Dice(3);
    (0..512).for_each(|page| model.touch(page));
    for _ in 0..50_000 {
        model.touch(512 + dice.below(4096));
    }
    assert!(model.reads > 30_000, "{}", model.reads);
    assert!((0..512).all(|page| model.mapped.contains_key(&page)));
    // Where nothing else is left, they go too.
    model.priority_of = |_| 255;
    (10_000..11_000).for_each(|page| model.touch(page));
    assert!(!(0..512).any(|page| model.mapped.contains_key(&page)));
}

/// The contract of every policy: a victim was listed, a listed frame becomes a victim once, and in the end none is left.
#[test]
fn every_policy_gives_back_what_it_was_given() {
    const FRAMES: u32 = if cfg!(miri) { 30 } else { 300 };
    for name in NAMES {
        let mut policy = policy(name, FRAMES);
        let mut listed = HashSet::new();
        let mut dice = Dice(11);
        for _ in 0..if cfg!(miri) { 100 } else { 20_000 } {
            if dice.below(5) < 3 {
                let frame = Frame(dice.below(u64::from(FRAMES)) as u32);
                let used = if dice.below(3) == 0 { Use::Again } else { Use::First };
                policy.admitted(frame, PageNo(dice.below(1 << 20)), dice.below(256) as u8, used);
                listed.insert(frame);
            } else if let Some(frame) = policy.victim() {
                assert!(listed.remove(&frame), "{name} suggests {frame:?}, which it does not have");
            } else {
                assert!(listed.is_empty(), "{name} keeps {listed:?}");
            }
        }
        while let Some(frame) = policy.victim() {
            assert!(listed.remove(&frame), "{name} suggests {frame:?}, which it does not have");
        }
        assert!(listed.is_empty(), "{name} keeps {listed:?}");
        // A frame that cannot be does no harm.
        policy.admitted(Frame(FRAMES), PageNo(1), 0, Use::First);
        assert_eq!(policy.victim(), None, "{name}");
    }
    assert!(by_name("no such policy", Table::empty()).is_none());
}

fn order(name: &str, admissions: &[(u32, Use)]) -> Vec<u32> {
    let mut policy = policy(name, 16);
    for &(frame, used) in admissions {
        policy.admitted(Frame(frame), PageNo(0), 0, used);
    }
    core::iter::from_fn(|| policy.victim()).map(|frame| frame.0).collect()
}

#[test]
fn a_second_use_counts_as_each_policy_says() {
    let used_again = [(1, Use::First), (2, Use::First), (3, Use::First), (1, Use::Again)];
    assert_eq!(order("fifo", &used_again), [1, 2, 3]);
    assert_eq!(order("lru", &used_again), [2, 3, 1]);
    assert_eq!(order("clock", &used_again), [2, 3, 1]);
    assert_eq!(order("priority", &used_again), [2, 3, 1]);
    assert_eq!(order("mru", &used_again), [1, 3, 2]);
    // Another page in frame 1 is a new admission.
    let reused = [(1, Use::First), (2, Use::First), (1, Use::First)];
    assert_eq!(order("fifo", &reused), [2, 1]);
    assert_eq!(order("clock", &reused), [2, 1]);
}

#[test]
#[cfg_attr(miri, ignore = "a long trace through safe code")]
fn random_draws_from_all() {
    let mut policy = policy("random", 64);
    let mut counts = [0u32; 64];
    (0..64).for_each(|frame| policy.admitted(Frame(frame), PageNo(0), 0, Use::First));
    for _ in 0..64_000 {
        let frame = policy.victim().unwrap();
        counts[frame.0 as usize] += 1;
        policy.admitted(frame, PageNo(0), 0, Use::First);
    }
    assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
}
