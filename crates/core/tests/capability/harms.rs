//! What each rule is for: what somebody can do once it is taken away. The same calls are tried with the rule, and do no harm.

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Handle, Object, Progress, Rights, Rule, Type};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::walk::Access;

use crate::directed::{Bench, FRAME, NODE, OTHER_RAM, PD, PML4, PT, R, RAM, ROOT, RW, entries};
use crate::machine::{Cpu, FIRST, memory};
use crate::world::MEMORY_BYTES;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Harm {
    /// The CPU writes into a table or a CNode.
    WritesKept,
    /// The CPU reads or writes memory for which its holder has no capability with that right.
    Reaches,
    /// It reads what was taken away.
    Keeps,
    /// What the mechanism knows of a capability or an entry becomes something else.
    Forges,
    /// A holder changes a CNode that it may only read.
    Meddles,
    /// A revocation in steps does not end.
    Endless,
    /// A call does something else than it was asked, to what is the caller's own.
    Differs,
}

impl Harm {
    /// Whether memory is no longer safe: with the others only calls do not what they should.
    fn is_unsafe(self) -> bool {
        matches!(self, Harm::WritesKept | Harm::Reaches | Harm::Keeps | Harm::Forges)
    }
}

/// Whether the harm was done. A call that is refused ends the attempt.
type Attempt = fn(&mut Bench<'_>) -> Result<bool, Error>;

const ATTEMPTS: [(Rule, Harm, Attempt); 31] = [
    (Rule::TypesDescend, Harm::WritesKept, |bench| {
        bench.give(PT, 0, FRAME, RW)?;
        let table = bench.make(FRAME, Type::Pt, 13, 41)?;
        Ok(bench.writes(0) == Some(bench.base(table)?))
    }),
    (Rule::RetypeTakesWrite, Harm::Reaches, |bench| {
        let lent = bench.copy(OTHER_RAM, 41, R);
        let frame = bench.make(lent, Type::Frame, 12, 42)?;
        bench.give(PT, 0, frame, R)?;
        Ok(bench.reads(0) == Some(bench.base(frame)?))
    }),
    (Rule::SizesFit, Harm::WritesKept, |bench| {
        let table = bench.make(OTHER_RAM, Type::Pt, 12, 41)?;
        let frame = bench.make(OTHER_RAM, Type::Frame, 12, 42)?;
        bench.give(PT, 0, frame, RW)?;
        // The page that says where its entries come from.
        Ok(bench.writes(0) == Some(bench.base(table)?.plus(4096)))
    }),
    (Rule::CarvedOnce, Harm::WritesKept, |bench| {
        let frame = bench.make(OTHER_RAM, Type::Frame, 13, 41)?;
        let table = bench.make(OTHER_RAM, Type::Pt, 13, 42)?;
        bench.give(PT, 0, frame, RW)?;
        Ok(bench.writes(0) == Some(bench.base(table)?))
    }),
    (Rule::CarvedWithin, Harm::WritesKept, |bench| {
        let small = bench.make(OTHER_RAM, Type::Ram, 13, 41)?;
        let table = bench.make(OTHER_RAM, Type::Pt, 13, 42)?;
        let frame = bench.make(small, Type::Frame, 14, 43)?;
        bench.kernel.map(&bench.space, entries(PT, 0, 1), frame, 8192, RW)?;
        Ok(bench.writes(0) == Some(bench.base(table)?))
    }),
    (Rule::BeginsEmpty, Harm::WritesKept, |bench| {
        let frame = bench.make(OTHER_RAM, Type::Frame, 13, 41)?;
        bench.memory.store(bench.base(frame)?, FIRST.0 | 7);
        bench.revoke(OTHER_RAM)?;
        let table = bench.make(OTHER_RAM, Type::Pt, 13, 41)?;
        bench.give(PD, 1, table, Rights::ALL)?;
        Ok(bench.writes(2 << 20) == Some(FIRST))
    }),
    (Rule::PlaceIsFree, Harm::Keeps, |bench| {
        let frame = bench.copy(FRAME, 41, RW);
        bench.give(PT, 0, frame, R)?;
        bench.kernel.copy(&bench.space, PD, ROOT, 41, R)?;
        bench.kernel.revoke(&bench.space, FRAME, 1)?;
        Ok(bench.reads(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::PlacingTakesWrite, Harm::Meddles, |bench| {
        let lent = bench.copy(NODE, 41, R);
        bench.kernel.copy(&bench.space, FRAME, lent, 1, R)?;
        Ok(bench.base(NODE.then(1)).is_ok())
    }),
    (Rule::RemovingTakesWrite, Harm::Meddles, |bench| {
        bench.kernel.copy(&bench.space, FRAME, NODE, 1, R)?;
        let lent = bench.copy(NODE, 41, R);
        bench.kernel.delete(&bench.space, lent.then(1))?;
        Ok(bench.base(NODE.then(1)).is_err())
    }),
    (Rule::LookupTakesRead, Harm::Reaches, |bench| {
        bench.kernel.copy(&bench.space, FRAME, NODE, 1, RW)?;
        let blind = bench.copy(NODE, 41, Rights::WRITE);
        bench.give(PT, 0, blind.then(1), RW)?;
        Ok(bench.writes(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::GuardMatches, Harm::Differs, |bench| {
        bench.kernel.copy(&bench.space, FRAME, NODE, 1, R)?;
        bench.kernel.mint(&bench.space, NODE, ROOT, 41, Handle { bits: 5, len: 3 })?;
        let other_guard = Handle::at_root(41).guarded(3, 4, 1);
        Ok(bench.base(other_guard)? == bench.base(FRAME)?)
    }),
    (Rule::RootIsTheSame, Harm::Reaches, |bench| {
        let home = bench.make(OTHER_RAM, Type::CNode, 12, 41)?;
        let holder = bench.kernel.space(&bench.space, home)?;
        bench.kernel.delete(&bench.space, home)?;
        // Another's CNode comes to where the holder's was.
        bench.kernel.copy(&bench.space, FRAME, NODE, 1, RW)?;
        bench.kernel.copy(&bench.space, PT, NODE, 2, RW)?;
        bench.copy(NODE, 41, RW);
        bench.kernel.map(&holder, entries(Handle::at_root(2), 0, 1), Handle::at_root(1), 0, RW)?;
        Ok(bench.writes(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::CopiesHaveLess, Harm::Reaches, |bench| {
        let lent = bench.copy(FRAME, 41, R);
        let more = bench.copy(lent, 42, RW);
        bench.give(PT, 0, more, RW)?;
        Ok(bench.writes(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::ChildlessWhenDeleted, Harm::WritesKept, |bench| {
        let frame = bench.make(OTHER_RAM, Type::Frame, 13, 41)?;
        let copy = bench.copy(frame, 42, RW);
        bench.give(PT, 0, copy, RW)?;
        bench.kernel.delete(&bench.space, frame)?;
        let table = bench.make(OTHER_RAM, Type::Pt, 13, 43)?;
        Ok(bench.writes(0) == Some(bench.base(table)?))
    }),
    (Rule::EmptyWhenDeleted, Harm::WritesKept, |bench| {
        let node = bench.make(OTHER_RAM, Type::CNode, 12, 41)?;
        bench.kernel.copy(&bench.space, FRAME, node, 1, R)?;
        bench.kernel.delete(&bench.space, node)?;
        bench.a_place_lies_in_a_frame()
    }),
    (Rule::ContentsGo, Harm::WritesKept, |bench| {
        let node = bench.make(OTHER_RAM, Type::CNode, 12, 41)?;
        bench.kernel.copy(&bench.space, FRAME, node, 1, R)?;
        bench.revoke(OTHER_RAM)?;
        bench.a_place_lies_in_a_frame()
    }),
    (Rule::EntriesGo, Harm::Keeps, |bench| {
        let copy = bench.copy(FRAME, 41, R);
        bench.give(PT, 0, copy, R)?;
        bench.kernel.delete(&bench.space, copy)?;
        Ok(bench.reads(0).is_some())
    }),
    (Rule::TableEntriesGo, Harm::Forges, |bench| {
        let table = bench.make(OTHER_RAM, Type::Pt, 13, 41)?;
        let copy = bench.copy(FRAME, 42, R);
        bench.give(table, 9, copy, R)?;
        bench.a_capability_changes_when_another_goes(copy)
    }),
    (Rule::NotCondemned, Harm::Endless, |bench| {
        bench.copy(FRAME, 41, R);
        bench.copy(FRAME, 42, R);
        for _ in 0..1000 {
            if bench.kernel.revoke(&bench.space, FRAME, 1)? == Progress::Done {
                return Ok(false);
            }
            bench.kernel.copy(&bench.space, FRAME, ROOT, 42, R)?;
        }
        Ok(true)
    }),
    (Rule::ChangingTakesWrite, Harm::Reaches, |bench| {
        bench.give(PT, 0, FRAME, R)?;
        let lent = bench.copy(PT, 41, R);
        bench.kernel.modify_flags(&bench.space, entries(lent, 0, 1), RW)?;
        Ok(bench.writes(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::EntriesFit, Harm::WritesKept, |bench| {
        let itself = bench.copy(PD, 41, RW);
        bench.give(PD, 1, itself, RW)?;
        // Its entry for the PT is one for a page there.
        Ok(bench.writes(2 << 20) == Some(bench.base(PT)?))
    }),
    (Rule::EntriesHaveLess, Harm::Reaches, |bench| {
        let lent = bench.copy(FRAME, 41, R);
        bench.give(PT, 0, lent, RW)?;
        Ok(bench.writes(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::EntriesAreReadable, Harm::Reaches, |bench| {
        let lent = bench.copy(FRAME, 41, Rights::WRITE);
        bench.give(PT, 0, lent, Rights::WRITE)?;
        Ok(bench.reads(0) == Some(bench.base(FRAME)?))
    }),
    // A page within its Frame still, as what is large enough for a large page is aligned to it; but not the page that was named.
    (Rule::PagesAreAligned, Harm::Differs, |bench| {
        bench.kernel.map(&bench.space, entries(PT, 0, 1), FRAME, 1, R)?;
        Ok(bench.reads(0) == Some(bench.base(FRAME)?))
    }),
    (Rule::MappedWithin, Harm::WritesKept, |bench| {
        let next = bench.make(RAM, Type::Pt, 13, 41)?;
        bench.kernel.map(&bench.space, entries(PT, 0, 1), FRAME, 1 << 16, RW)?;
        Ok(bench.writes(0) == Some(bench.base(next)?))
    }),
    (Rule::WithinTable, Harm::Forges, |bench| {
        bench.give(PT, 512, FRAME, R)?;
        // An entry, where it should say which capability the first entry comes of.
        Ok(bench.memory.load(bench.base(PT)?.plus(4096)) & 1 != 0)
    }),
    (Rule::EntryIsFree, Harm::Forges, |bench| {
        let table = bench.make(OTHER_RAM, Type::Pt, 13, 41)?;
        let (one, two) = (bench.copy(FRAME, 42, R), bench.copy(FRAME, 43, R));
        bench.give(table, 9, one, R)?;
        bench.give(table, 9, two, R)?;
        // The other's entry goes with it, and the table does not know of the other.
        bench.kernel.delete(&bench.space, one)?;
        bench.a_capability_changes_when_another_goes(two)
    }),
    (Rule::MappedOnce, Harm::Keeps, |bench| {
        let copy = bench.copy(FRAME, 41, R);
        bench.give(PT, 0, copy, R)?;
        bench.give(PT, 1, copy, R)?;
        bench.kernel.delete(&bench.space, copy)?;
        Ok(bench.reads(0).is_some())
    }),
    (Rule::WholeMappings, Harm::Differs, |bench| {
        bench.kernel.map(&bench.space, entries(PT, 0, 2), FRAME, 0, R)?;
        bench.kernel.unmap(&bench.space, entries(PT, 0, 1))?;
        Ok(bench.reads(4096).is_none())
    }),
    (Rule::StaleIsForgotten, Harm::Keeps, |bench| {
        bench.give(PT, 0, FRAME, R)?;
        bench.reads(0);
        bench.kernel.unmap(&bench.space, entries(PT, 0, 1))?;
        Ok(bench.reads(0).is_some())
    }),
    (Rule::LostRootIsLeft, Harm::WritesKept, |bench| {
        let root = bench.make(OTHER_RAM, Type::Pml4, 13, 41)?;
        let root = bench.kernel.root_table(&bench.space, root)?;
        bench.revoke(OTHER_RAM)?;
        let frame = bench.make(OTHER_RAM, Type::Frame, 12, 41)?;
        assert_eq!(bench.base(frame)?, root);
        // It is each table on the way, and its second page is the first CNode.
        bench.memory.store(root, root.0 | 7);
        bench.memory.store(root.plus(8), FIRST.0 | 7);
        let is_left = bench.cpu.left.borrow().contains(&root);
        let found = bench.cpu.access(bench.memory, root, VirtAddr(4096), Access::Write);
        Ok(!is_left && found == Ok(FIRST))
    }),
];

impl Bench<'_> {
    fn make(&mut self, from: Handle, kind: Type, size_bits: u8, at: u8) -> Result<Handle, Error> {
        self.kernel.retype(&self.space, from, Object { kind, size_bits }, 1, ROOT, at)?;
        Ok(Handle::at_root(at))
    }

    fn give(&mut self, table: Handle, entry: u16, from: Handle, rights: Rights) -> Result<(), Error> {
        self.kernel.map(&self.space, entries(table, entry, 1), from, 0, rights)
    }

    fn revoke(&mut self, of: Handle) -> Result<Progress, Error> {
        self.kernel.revoke(&self.space, of, u64::MAX)
    }

    fn base(&self, handle: Handle) -> Result<PhysAddr, Error> {
        self.kernel.identify(&self.space, handle).map(|found| found.base)
    }

    fn reads(&self, at: usize) -> Option<PhysAddr> {
        self.reaches(at, Access::Read)
    }

    fn writes(&self, at: usize) -> Option<PhysAddr> {
        self.reaches(at, Access::Write)
    }

    fn reaches(&self, at: usize, access: Access) -> Option<PhysAddr> {
        let root = self.kernel.root_table(&self.space, PML4).unwrap();
        self.cpu.access(self.memory, root, VirtAddr(at), access).ok()
    }

    /// The CNode that was made from the other RAM is gone, and what came of the Frame is still said to lie in it.
    fn a_place_lies_in_a_frame(&mut self) -> Result<bool, Error> {
        let frame = self.make(OTHER_RAM, Type::Frame, 12, 42)?;
        self.give(PT, 0, frame, RW)?;
        let is_there = self.kernel.derived(&self.space, FRAME)?.copies == 1;
        Ok(is_there && self.writes(64) == Some(self.base(frame)?.plus(64)))
    }

    /// The table that was made from the other RAM goes, and a CNode comes into its place. A capability in there, whose base is where
    /// the tenth entry was, is looked at before and after one goes that was mapped by that entry.
    fn a_capability_changes_when_another_goes(&mut self, mapped: Handle) -> Result<bool, Error> {
        self.revoke(OTHER_RAM)?;
        let node = self.make(OTHER_RAM, Type::CNode, 12, 41)?;
        self.kernel.copy(&self.space, FRAME, node, 1, R)?;
        let before = self.base(node.then(1))?;
        self.kernel.delete(&self.space, mapped)?;
        Ok(self.base(node.then(1))? != before)
    }
}

#[test]
fn each_rule_keeps_a_harm_away() {
    let memory = memory(MEMORY_BYTES);
    let all: Vec<Rule> = ATTEMPTS.iter().map(|(rule, ..)| *rule).collect();
    assert_eq!(all, Rule::ALL);
    for (rule, harm, attempt) in ATTEMPTS {
        let try_it = |waived: Option<Rule>| {
            let cpu = Cpu::default();
            let mut bench = Bench::new(&memory, &cpu);
            bench.connect();
            waived.into_iter().for_each(|rule| bench.kernel.waive(rule));
            attempt(&mut bench)
        };
        let kind = if harm.is_unsafe() { "memory is not safe" } else { "calls go wrong" };
        println!("{rule:?}: {harm:?}, so {kind}; with it: {:?}", try_it(None));
        assert_eq!(try_it(Some(rule)), Ok(true), "without {rule:?}: {harm:?}");
        assert_ne!(try_it(None), Ok(true), "with {rule:?}: {harm:?}");
    }
    let unsafe_ones = ATTEMPTS.iter().filter(|(_, harm, _)| harm.is_unsafe()).count();
    assert_eq!(unsafe_ones, 25);
}
