//! A program pages itself on page tables of its own: the same regions, pagers and policies as on Linux, under a CPU that walks
//! what the rules of capabilities let the domain build.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

#[path = "../tables/machine.rs"]
mod machine;
mod store;
mod taken;
mod world;

use std::ops::Range;

use selfpage_core::capability::{Progress, Rule};
use selfpage_core::fault::Failure;
use selfpage_core::mmu::Refusal;
use selfpage_core::page::State;
use selfpage_core::shortage::Shortage;
use selfpage_core::tables::walk::{Access, WalkFault};
use world::{FRAMES, PAGES, World};

const WORDS: u64 = PAGES * 512;

/// A program that knows what it wrote.
struct Program {
    world: &'static World,
    shadow: Vec<u64>,
    dice: u64,
    /// Where it was last: some accesses are in order.
    at: u64,
}

/// An access that found something else.
#[derive(Debug)]
struct Wrong {
    _word: u64,
    _found: u64,
}

impl Program {
    fn new(world: &'static World, seed: u64) -> Program {
        println!("seed {seed}");
        Program { world, shadow: vec![0; WORDS as usize], dice: seed, at: 0 }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice % bound
    }

    /// Any word, more often one of a few pages; now and then a walk through neighbouring pages.
    fn next_word(&mut self) -> u64 {
        self.at = match self.below(8) {
            0..3 => (self.at + 512) % WORDS,
            3..6 => self.below(WORDS / 12),
            _ => self.below(WORDS),
        };
        self.at
    }

    /// Reads and writes at random. What the domain has lost reads as zero.
    fn run(&mut self, accesses: u32) -> Result<(), Wrong> {
        for _ in 0..accesses {
            let word = self.next_word();
            if self.below(2) == 0 {
                let value = self.below(u64::MAX);
                self.world.write(word, value).unwrap();
                self.forget_what_is_lost();
                self.shadow[word as usize] = value;
            } else {
                self.read(word..word + 1)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, words: Range<u64>) -> Result<(), Wrong> {
        for word in words {
            let found = self.world.read(word).unwrap();
            self.forget_what_is_lost();
            if self.shadow[word as usize] != found {
                return Err(Wrong { _word: word, _found: found });
            }
        }
        Ok(())
    }

    /// An access that must fail.
    fn fail(&mut self) -> Failure {
        let word = self.next_word();
        let told = if self.below(2) == 0 { self.world.write(word, 1) } else { self.world.read(word).map(drop) };
        told.unwrap_err()
    }

    fn forget_what_is_lost(&mut self) {
        for page in self.world.store.forgotten() {
            self.shadow[page as usize * 512..][..512].fill(0);
        }
    }
}

#[test]
fn a_program_pages_itself_with_an_eighth_of_its_data_in_frames() {
    for (policy, seed) in [("lru", 0x5eed), ("fifo", 0xf00d), ("random", 0xcafe)] {
        let world = World::new(policy);
        let mut program = Program::new(world, seed);
        program.run(150_000).unwrap();
        program.read(0..WORDS).unwrap();
        let counts = world.domain.counters.read();
        println!("{policy}: {counts:?}");
        assert_eq!(world.mapped(), world.resident());
        assert!(counts.evictions_total > PAGES && counts.bytes_saved > 4096 * PAGES && counts.fills_ahead_total > 0);
        assert_eq!((counts.lost_total, counts.bad_victims_total), (0, 0));
        assert!((policy == "lru") == (counts.soft_faults_total > 100));
    }
}

#[test]
fn no_more_changed_pages_are_unmapped_than_may_wait_to_be_saved() {
    let world = World::new("fifo");
    (0..40).for_each(|page| world.write(page * 512, page + 1).unwrap());
    // A quarter of the frames may be on their way to the store.
    let mapped = world.mapped();
    let evicted = world.evict_only(32);
    assert_eq!((evicted.queued, evicted.kept, evicted.was_all), (16, 0, false));
    assert_eq!(world.mapped(), mapped - 16);
    // Now a few are tried, since some might be clean.
    let evicted = world.evict_only(4);
    assert_eq!((evicted.queued, evicted.kept), (0, 4));
    world.save_all();
    assert_eq!(world.evict_only(4).queued, 4);
}

#[test]
fn a_cpu_that_is_told_nothing_is_found_out() {
    let world = World::new("lru");
    world.mmu.with_kernel(|kernel| kernel.waive(Rule::StaleIsForgotten));
    Program::new(world, 0x5eed).run(150_000).unwrap_err();
}

#[test]
fn revoked_frames_are_gone_from_every_page_at_once() {
    let world = World::new("lru");
    let mut program = Program::new(world, 0xbead);
    program.run(50_000).unwrap();
    let before = world.mapped();
    assert!(before > 40);

    let revoked = world.mmu.with_kernel(|kernel| kernel.revoke(&world.space, FRAMES, u64::MAX));
    assert_eq!((revoked, world.mapped()), (Ok(Progress::Done), 0));
    for word in (0..WORDS).step_by(512) {
        let access = world.cpu.0.access(world.memory, world.root, world.address(word), Access::Read);
        assert_eq!(access, Err(WalkFault::Page(0b100)));
    }
    // The domain has its frames still: what was mapped is lost, the rest is with the pager or on standby.
    program.run(50_000).unwrap();
    program.read(0..WORDS).unwrap();
    assert_eq!(world.domain.counters.read().lost_total, before as u64);
}

#[test]
fn frames_that_are_others_now_are_neither_read_nor_written() {
    // Without an attempt, pages are on standby still when the domain gets other frames.
    [0, 5_000].into_iter().for_each(lend_to_another);
}

fn lend_to_another(attempts: u32) {
    let world = World::new("lru");
    let mut program = Program::new(world, 0xfeed);
    program.run(50_000).unwrap();
    // Some frames are free, and some on standby.
    world.make_room();
    let standby = world.pages(State::Standby);
    assert!(standby.len() > 1 && world.domain.stack.free.count() > 1);

    let theirs = world.lend_to_another();
    assert_eq!(world.mapped(), 0);
    for _ in 0..attempts {
        let why = program.fail();
        assert!(matches!(why, Failure::Machine(Refusal::Denied) | Failure::Shortage(Shortage::NoMemory)), "{why:?}");
    }
    assert!(theirs.is_untouched());
    assert_eq!(world.mapped(), 0);
    program.forget_what_is_lost();

    // The domain gets other memory.
    assert_ne!(world.lend_anew().base, theirs.base);
    world.mmu.replace_frames(FRAMES);
    for page in standby {
        program.read(page * 512..(page + 1) * 512).unwrap();
    }
    program.run(50_000).unwrap();
    program.read(0..WORDS).unwrap();
    assert!(theirs.is_untouched());
}
