//! A lender and a holder on a small machine, and every step that the holder can take.

use std::sync::atomic::Ordering;

use selfpage_core::capability::{Error, Handle, Kernel, Object, Rights, Rule, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::sync::AtomicU64;
use selfpage_core::tables::{Entries, Tlb};

use crate::machine;
use crate::seen::{ENTRIES, Seen};

const RW: Rights = Rights::READ.with(Rights::WRITE);

/// The holder's places: 1 its own CNode, which steps leave alone, then what it begins with, then two free ones.
pub const FIRST: u8 = 2;
const PAGE: u8 = 5;
const LARGE: u8 = 6;
const LENT: u8 = 7;
const RAM: u8 = 8;
const FREE: std::ops::RangeInclusive<u8> = 9..=10;
/// Where the lender keeps what it lends.
const LENDERS: u8 = 40;
const HOLDERS_NODE: u8 = 50;

/// Runs of entries that steps name.
const RUNS: [(u16, u16); 3] = [(0, 1), (1, 1), (0, 2)];

/// One call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The lender takes back what it lent.
    TakeBack,
    Copy {
        from: u8,
        rights: Rights,
    },
    Delete(u8),
    Revoke {
        of: u8,
        most: u64,
    },
    Map {
        table: u8,
        run: (u16, u16),
        from: u8,
        rights: Rights,
    },
    Unmap {
        table: u8,
        run: (u16, u16),
    },
    Modify {
        table: u8,
        run: (u16, u16),
        rights: Rights,
    },
    Retype {
        from: u8,
        to: Object,
    },
}

/// Nobody translates: the entries themselves are looked at.
struct NoCpu;

impl Tlb for NoCpu {
    fn forget_all(&self) {}
    fn forget(&self, _: selfpage_core::addr::VirtAddr) {}
    fn leave(&self, _: PhysAddr) {}
}

pub struct World {
    memory: &'static PhysMemory,
    kernel: Kernel<'static>,
    lender: Space,
    holder: Space,
    /// Every word that a step may change.
    words: Vec<&'static AtomicU64>,
    pub seen: Seen,
}

impl World {
    /// The start: the holder has three tables, a Frame of 4 KiB, one of 2 MiB, one that was lent to it to be read, and 8 KiB of RAM.
    pub fn new(tables: [Type; 3], waived: Option<Rule>) -> World {
        let memory: &'static PhysMemory = Box::leak(Box::new(machine::memory(4 << 20)));
        let (mut kernel, lender) = Kernel::boot(memory, &NoCpu, &[]).unwrap();
        let at = Handle::at_root;
        let node = at(HOLDERS_NODE);
        // 1 MiB and 2 MiB of RAM; the rest is not needed.
        let [small, large] = [10, 11].map(at);
        (2..10).for_each(|place| kernel.delete(&lender, at(place)).unwrap());
        let mut make = |ram, kind, size_bits, into, first| {
            kernel.retype(&lender, ram, Object { kind, size_bits }, 1, into, first).unwrap();
        };
        make(small, Type::CNode, 12, at(1), HOLDERS_NODE);
        for (place, kind) in (FIRST..).zip(tables) {
            make(small, kind, 13, node, place);
        }
        make(small, Type::Frame, 12, node, PAGE);
        make(large, Type::Frame, 21, node, LARGE);
        make(small, Type::Frame, 12, at(1), LENDERS);
        make(small, Type::Ram, 13, node, RAM);
        kernel.copy(&lender, at(LENDERS), node, LENT, Rights::READ).unwrap();
        kernel.copy(&lender, node, node, 1, Rights::ALL).unwrap();
        let holder = kernel.space(&lender, node).unwrap();

        let base = |space, place| kernel.identify(space, at(place)).unwrap().base;
        let nodes = [base(&lender, 1), base(&lender, HOLDERS_NODE)];
        let ram = base(&holder, RAM);
        let tables: Vec<PhysAddr> = (FIRST..FIRST + 3).map(|place| base(&holder, place)).chain([ram]).collect();
        let mine = (1..=*FREE.end()).map(|place| nodes[1].plus(u64::from(place) * 64));
        let lenders = (1..64).filter(|place| kernel.identify(&lender, at(*place)).is_ok());
        let places: Vec<_> = lenders.map(|place| nodes[0].plus(u64::from(place) * 64)).chain(mine).collect();
        let of_places = places.iter().flat_map(|place| (0..8).map(|word| place.plus(word * 8)));
        let first = || (0..ENTRIES as u64).flat_map(|entry| [entry, 512 + entry]);
        let of_tables = tables.iter().flat_map(|table| first().map(|word| table.plus(word * 8)));
        // How many places a CNode has taken, and of the first how many revocations are not done.
        let of_nodes = nodes.into_iter().chain([nodes[0].plus(24)]);
        let words = of_places.chain(of_tables).chain(of_nodes).map(|at| memory.word(at).unwrap()).collect();
        if let Some(rule) = waived {
            kernel.waive(rule);
        }
        // Whose Frame the RAM was before wrote into it what looks most like entries.
        for entry in 0..ENTRIES as u64 {
            memory.store(ram.plus(entry * 8), nodes[1].0 | 7);
            memory.store(ram.plus(4096 + entry * 8), nodes[1].0 + 64);
        }
        let seen = Seen::new(nodes, &places, &tables);
        World { memory, kernel, lender, holder, words, seen }
    }

    pub fn save(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }

    pub fn restore(&self, saved: &[u64]) {
        for (word, saved) in self.words.iter().zip(saved) {
            word.store(*saved, Ordering::Relaxed);
        }
    }

    pub fn is_as(&self, saved: &[u64]) -> bool {
        self.words.iter().zip(saved).all(|(word, saved)| word.load(Ordering::Relaxed) == *saved)
    }

    pub fn look(&mut self) {
        self.seen.look(self.memory);
    }

    /// Addresses of the places whose trees hold all that the holder has: each as it began, or empty.
    pub fn roots(&self) -> [u64; 7] {
        let [lender, holder] = self.seen.nodes;
        let mine = |place: u8| holder + u64::from(place) * 64;
        [mine(2), mine(3), mine(4), mine(PAGE), mine(LARGE), lender + u64::from(LENDERS) * 64, mine(RAM)]
    }

    /// The steps that name capabilities which are there. Call it after `look`.
    pub fn steps(&self) -> Vec<Step> {
        let kind = |place: u8| self.seen.at(self.seen.nodes[1] + u64::from(place) * 64).map(|place| place.kind);
        let has: Vec<(u8, Type)> =
            (FIRST..=*FREE.end()).filter_map(|place| kind(place).map(|kind| (place, kind))).collect();
        let mut steps = vec![Step::TakeBack];
        let has_room = FREE.into_iter().any(|place| kind(place).is_none());
        for &(place, kind) in &has {
            if has_room {
                steps.push(Step::Copy { from: place, rights: Rights::ALL });
                if place == PAGE || kind == Type::Pt {
                    steps.push(Step::Copy { from: place, rights: Rights::READ });
                }
            }
            steps.push(Step::Delete(place));
            steps.extend([u64::MAX, 1].map(|most| Step::Revoke { of: place, most }));
            if kind == Type::Ram && has_room {
                let to = [Type::Pt, Type::Frame].map(|kind| Object { kind, size_bits: 13 });
                steps.extend(to.map(|to| Step::Retype { from: place, to }));
            }
            if kind.level().is_none() {
                continue;
            }
            for run in RUNS {
                steps.push(Step::Unmap { table: place, run });
                for rights in [Rights::READ, RW] {
                    steps.push(Step::Modify { table: place, run, rights });
                    let from = has.iter().map(|(from, _)| *from);
                    steps.extend(from.map(|from| Step::Map { table: place, run, from, rights }));
                }
            }
        }
        steps
    }

    pub fn take(&mut self, step: Step) -> Result<(), Error> {
        let at = Handle::at_root;
        let (kernel, holder) = (&mut self.kernel, &self.holder);
        let node = self.seen.nodes[1];
        let free = || {
            let is_free = |place: &u8| self.memory.load(PhysAddr(node + u64::from(*place) * 64)) == 0;
            FREE.into_iter().find(is_free).unwrap_or(63)
        };
        let entries = |table, (first, count)| Entries { table: at(table), first, count };
        match step {
            Step::TakeBack => kernel.revoke(&self.lender, at(LENDERS), u64::MAX).map(drop),
            Step::Copy { from, rights } => kernel.copy(holder, at(from), at(1), free(), rights),
            Step::Delete(place) => kernel.delete(holder, at(place)),
            Step::Revoke { of, most } => kernel.revoke(holder, at(of), most).map(drop),
            Step::Map { table, run, from, rights } => kernel.map(holder, entries(table, run), at(from), 0, rights),
            Step::Unmap { table, run } => kernel.unmap(holder, entries(table, run)),
            Step::Modify { table, run, rights } => kernel.modify_flags(holder, entries(table, run), rights),
            Step::Retype { from, to } => kernel.retype(holder, at(from), to, 1, at(1), free()),
        }
    }
}
