//! The CPU as oracle: what core's walk says of page tables, a CPU that is given the same tables does.
//!
//! Random tables are made by random operations on capabilities. Then a virtual machine whose physical memory they lie in makes
//! random accesses at ring 3, and the walk makes the same accesses in a copy of that memory. Each access must end in the same
//! way, with the same value or the same error code, and afterwards both memories must be the same: what was written, and each
//! accessed and dirty bit of each entry. What an access reaches, the holder must have a capability for. Last, KVM's own walk
//! must lead to the same addresses.
//!
//! KVM may keep using an entry that was changed behind its back, so each time there is a new machine.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]
#![cfg(target_arch = "x86_64")]

mod dice;
mod holder;
mod physical;
mod recorder;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::time::Instant;

use dice::Dice;
use holder::{Holder, INDICES};
use physical::{FIRST, HUGE, HUGE_BITS, Physical, RAM_BYTES};
use recorder::{Outcome, Planned, ROOT_ENTRY, Recorder};
use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Capability, Rights};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::walk::{self, Access, WalkFault};
use selfpage_core::tables::{ENTRIES, Entry, PageSize, index, span_bits};
use selfpage_guest::Vm;

#[path = "../possible/mod.rs"]
mod possible;

const SAMPLES: u64 = 150;
/// How often tables are changed and accessed in each.
const ROUNDS: u32 = 2;
const OPERATIONS: u32 = 150;
const ACCESSES: usize = 500;
const TRANSLATIONS: usize = 300;
/// `ret`: the first byte of each word of each frame.
const RETURN: u64 = 0xc3;

/// The bit of an entry that says that the CPU has used it.
const ACCESSED: u64 = 1 << 5;

/// What was seen.
#[derive(Default)]
struct Tally {
    operations: u64,
    refused: u64,
    runs: u64,
    accesses: u64,
    done: BTreeMap<&'static str, u64>,
    /// By log2 of the size of the page.
    pages: BTreeMap<u8, u64>,
    /// By vector and error code.
    faults: BTreeMap<(u64, u64), u64>,
    translated: u64,
    untranslated: u64,
    /// Entries that the CPU marked as accessed although every access through them faulted.
    eager: u64,
}

#[test]
fn the_cpu_does_what_the_walk_says() {
    let Some(vm) = possible::here(Vm::new()) else { return };
    let largest_page = vm.largest_page();
    drop(vm);
    let began = Instant::now();
    let mut tally = Tally::default();
    let recorder = Recorder::new();
    let (memory, copy) = (Physical::new(largest_page), Physical::new(largest_page));
    let ram = memory.ram();
    let usable = usable_entries(&recorder, &memory);
    let missing: Vec<u16> = (0..ENTRIES).filter(|entry| !usable.contains(entry)).collect();
    println!("entries of the root that ring 3 cannot use on this machine: {missing:?}");
    assert!(missing.len() < 64);
    for seed in 0..SAMPLES {
        let mut dice = Dice(seed);
        for at in words() {
            ram.store(at, at.0 << 8 | RETURN);
        }
        let mut holder = Holder::new(ram, Dice(dice.next()), largest_page);
        for _ in 0..ROUNDS {
            holder.act(OPERATIONS);
            // All hierarchies may be gone.
            let Some(root) = holder.enter() else { continue };
            let mut run =
                Run { seed, root, usable: &usable, dice: &mut dice, memory: &memory, copy: &copy, tally: &mut tally };
            run.compare(&recorder, &holder);
            holder.leave();
        }
        tally.operations += holder.done;
        tally.refused += holder.refused;
    }
    println!("seeds 0..{SAMPLES}: {tally}; {:.1} s", began.elapsed().as_secs_f64());
    let faults: u64 = tally.faults.values().sum();
    let done: u64 = tally.done.values().sum();
    assert!(done > 20_000 && faults > 20_000 && tally.faults.len() == 6, "too little to mean something: {tally}");
    let huge = tally.pages.get(&HUGE_BITS).copied().unwrap_or(0);
    assert!(largest_page != PageSize::Huge1GiB || huge > 1000, "too few pages of 1 GiB: {tally}");
}

impl Tally {
    fn note(&mut self, access: Access, outcome: Outcome) {
        match outcome {
            Outcome::Done(_) => {
                let name = match access {
                    Access::Read => "read",
                    Access::Write => "write",
                    Access::Execute => "execute",
                };
                *self.done.entry(name).or_default() += 1;
            }
            Outcome::PageFault { code, .. } => *self.faults.entry((14, code)).or_default() += 1,
            Outcome::ProtectionFault { code } => *self.faults.entry((13, code)).or_default() += 1,
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations on capabilities, {} refused; {} machines; ",
            self.operations, self.refused, self.runs
        )?;
        write!(f, "{} accesses:", self.accesses)?;
        for (kind, times) in &self.done {
            write!(f, " {kind} {times},")?;
        }
        for (size_bits, times) in &self.pages {
            write!(f, " in pages of 2^{size_bits} {times},")?;
        }
        for ((vector, code), times) in &self.faults {
            write!(f, " fault {vector} with code {code:#x} {times},")?;
        }
        write!(f, " translated {}, without a translation {};", self.translated, self.untranslated)?;
        write!(f, " {} entries marked on the way to a fault alone", self.eager)
    }
}

/// The entries of the root through which ring 3 can reach anything, on this machine. A KVM that runs the guest's ring 3 within the
/// host's own tables (PVM) keeps a few of the upper half for itself.
fn usable_entries(recorder: &Recorder, memory: &Physical) -> Vec<u16> {
    let ram = memory.ram();
    let mut holder = Holder::new(ram, Dice(0), PageSize::Large2MiB);
    let root = holder.enter().unwrap();
    let entry = |index: u16| root.plus(u64::from(index) * 8);
    let all = || 0..ENTRIES;
    for index in all() {
        ram.store(entry(index), ram.load(entry(ROOT_ENTRY)));
    }
    let mut vm = Vm::new().unwrap();
    memory.lend(&mut vm);
    let at = |index| VirtAddr(((usize::from(index) << span_bits(4) << 16) as isize >> 16) as usize);
    let planned: Vec<_> = all().map(|index| Planned { at: at(index), access: Access::Read, value: 0 }).collect();
    let outcomes = recorder.run(&mut vm, root, &planned);
    all().zip(outcomes).filter(|(_, outcome)| matches!(outcome, Outcome::Done(_))).map(|(index, _)| index).collect()
}

fn words() -> impl Iterator<Item = PhysAddr> {
    (0..RAM_BYTES as u64).step_by(8).map(|offset| FIRST.plus(offset))
}

/// Tables that do not change, and a machine that uses them.
struct Run<'a> {
    seed: u64,
    root: PhysAddr,
    usable: &'a [u16],
    dice: &'a mut Dice,
    memory: &'a Physical,
    copy: &'a Physical,
    tally: &'a mut Tally,
}

impl Run<'_> {
    fn compare(&mut self, recorder: &Recorder, holder: &Holder<'_>) {
        let (holdings, recorder_tables) = (holder.holdings(), holder.recorder_tables());
        let (ram, copy) = (self.memory.ram(), self.copy.ram());
        for at in words() {
            copy.store(at, ram.load(at));
        }
        let mut vm = Vm::new().unwrap();
        self.memory.lend(&mut vm);
        let planned: Vec<Planned> = (0..ACCESSES).map(|number| self.plan(number as u64)).collect();
        let outcomes = recorder.run(&mut vm, self.root, &planned);
        self.tally.runs += 1;
        self.tally.accesses += outcomes.len() as u64;
        let root_entry = self.root.plus(u64::from(ROOT_ENTRY) * 8);
        // The recorder's own way goes through this entry, and was there first.
        copy.store(root_entry, ram.load(root_entry));
        let eager = self.faulted_through(&planned, &outcomes);
        // Whether a word is what the walk says, but for what the CPU may do.
        let is_same = |at, cpu, walk| cpu == walk || (cpu == walk | ACCESSED && eager.contains(&at));
        // Of the memory of huge pages, only these words are looked at again.
        let mut reached = Vec::new();
        for (planned, outcome) in planned.into_iter().zip(outcomes) {
            let expected = expect(self.copy, self.root, planned);
            let mut agree = outcome == expected;
            if let (Outcome::Done(cpu), Some(found)) = (outcome, walk::translate(copy, self.root, planned.at)) {
                let held = holdings.iter().any(|held| permits(held, found.at, planned.access));
                assert!(held, "without a capability: seed {}, {planned:x?} at {:#x}", self.seed, found.at.0);
                agree |= matches!(expected, Outcome::Done(walk) if is_same(found.at, cpu, walk));
                *self.tally.pages.entry(found.size_bits).or_default() += 1;
                if found.at >= HUGE {
                    reached.push(found.at);
                }
            }
            self.tally.note(planned.access, outcome);
            assert!(agree, "seed {}, {planned:x?}: CPU {outcome:x?}, walk {expected:x?}", self.seed);
        }
        for at in words() {
            let (cpu, walk) = (ram.load(at), copy.load(at));
            let is_same = is_same(at, cpu, walk) || recorder_tables.contains(&PhysAddr(at.0 & !4095));
            assert!(is_same, "seed {}, the word at {:#x}: CPU {cpu:#x}, walk {walk:#x}", self.seed, at.0);
        }
        for at in reached {
            let (cpu, walk) = (self.memory.around(at).load(at), self.copy.around(at).load(at));
            assert_eq!(cpu, walk, "CPU, walk: seed {}, the word at {:#x}", self.seed, at.0);
        }
        self.tally.eager += eager.iter().filter(|at| ram.load(**at) != copy.load(**at)).count() as u64;
        for _ in 0..TRANSLATIONS {
            let at = VirtAddr(self.aim(ram).0 | self.dice.below(8) as usize);
            let walk = walk::translate(ram, self.root, at).map(|found| found.at);
            let cpu = vm.translate(at).unwrap();
            assert_eq!(cpu, walk, "CPU, walk: seed {}, {at:x?}", self.seed);
            match walk {
                Some(_) => self.tally.translated += 1,
                None => self.tally.untranslated += 1,
            }
        }
    }

    /// The entries on the ways of accesses that faulted. A CPU may mark these too, and a program cannot tell when: it may walk to a
    /// page for an access that it only expects. So what reads such an entry may find it marked before an access that marks it.
    fn faulted_through(&self, planned: &[Planned], outcomes: &[Outcome]) -> HashSet<PhysAddr> {
        let faulted = planned.iter().zip(outcomes).filter(|(_, end)| !matches!(end, Outcome::Done(_)));
        faulted.flat_map(|(planned, _)| way(self.memory.ram(), self.root, planned.at)).collect()
    }

    fn plan(&mut self, number: u64) -> Planned {
        let (copy, memory) = (self.copy, self.copy.ram());
        let word = |at| copy.around(at).load(at);
        let mut at = self.aim(memory);
        while !self.usable.contains(&index(at, 4)) {
            at = self.aim(memory);
        }
        if self.dice.below(100) == 0 {
            // Not canonical.
            at = VirtAddr(at.0 ^ 1 << (48 + self.dice.below(16)));
        }
        let access = match self.dice.below(3) {
            0 => Access::Read,
            1 => Access::Write,
            // Where nothing else stands than `ret`.
            _ if walk::translate(memory, self.root, at).is_none_or(|found| word(found.at) & 0xff == RETURN) => {
                Access::Execute
            }
            _ => Access::Read,
        };
        Planned { at, access, value: 1 << 63 | self.seed << 32 | number << 8 | RETURN }
    }

    /// An address whose way goes mostly through entries that are there, or beside them; never the recorder's. A multiple of 8.
    fn aim(&mut self, memory: &PhysMemory) -> VirtAddr {
        let mut table = Some(self.root);
        let mut at = 0;
        for level in (1..=4).rev() {
            let entry_of = |table: PhysAddr, index: u16| Entry(memory.load(table.plus(u64::from(index) * 8)));
            let present: Vec<u16> = match table {
                Some(table) => (0..ENTRIES).filter(|index| entry_of(table, *index).is_present()).collect(),
                None => Vec::new(),
            };
            let index = match self.dice.below(40) {
                0 if table.is_some() => self.dice.below(512) as u16,
                1 => self.dice.of(&INDICES).unwrap_or(0),
                2 => self.dice.of(&present).unwrap_or(0).wrapping_add(511) % 512,
                3 => self.dice.of(&present).unwrap_or(0).wrapping_add(1) % 512,
                _ if !present.is_empty() => self.dice.of(&present).unwrap_or(0),
                _ if level == 1 => self.dice.below(512) as u16,
                // In a huge page: few places, so that little memory is used.
                _ => self.dice.of(&INDICES).unwrap_or(0),
            };
            let index = if level == 4 && index == ROOT_ENTRY { 0 } else { index };
            at |= usize::from(index) << span_bits(level);
            let entry = table.map(|table| entry_of(table, index));
            table = entry.filter(|entry| entry.is_present() && !entry.is_page(level)).map(|entry| entry.base());
        }
        let offset = match self.dice.below(4) {
            0 => 0,
            1 => 4088,
            _ => self.dice.below(512) as usize * 8,
        };
        VirtAddr(((at << 16) as isize >> 16) as usize | offset)
    }
}

/// The entries on the way to an address.
fn way(memory: &PhysMemory, root: PhysAddr, at: VirtAddr) -> Vec<PhysAddr> {
    let mut way = Vec::new();
    let mut table = root;
    for level in (1..=4).rev() {
        let place = table.plus(u64::from(index(at, level)) * 8);
        way.push(place);
        let entry = Entry(memory.load(place));
        if !entry.is_present() || entry.is_page(level) {
            break;
        }
        table = entry.base();
    }
    way
}

/// Whether a capability is one for an access.
fn permits(held: &Capability, at: PhysAddr, access: Access) -> bool {
    let needed = match access {
        Access::Read => Rights::READ,
        Access::Write => Rights::WRITE,
        Access::Execute => Rights::EXECUTE,
    };
    at >= held.base && at < held.base.plus(held.len_bytes()) && held.rights.contain(needed)
}

/// What the walk says, with its effects on the copy.
fn expect(copy: &Physical, root: PhysAddr, planned: Planned) -> Outcome {
    match walk::access(copy.ram(), root, planned.at, planned.access) {
        Ok(at) => match planned.access {
            Access::Read => Outcome::Done(copy.around(at).load(at)),
            Access::Write => {
                copy.around(at).store(at, planned.value);
                Outcome::Done(planned.value)
            }
            Access::Execute => Outcome::Done(planned.value),
        },
        Err(WalkFault::Page(code)) => Outcome::PageFault { code: code.into(), at: planned.at.0 as u64 },
        Err(WalkFault::NotCanonical) => Outcome::ProtectionFault { code: 0 },
    }
}
