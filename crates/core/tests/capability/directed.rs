//! Each way in which a call can be wrong, once: it is told its own error, and nothing has changed.

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Handle, Kernel, Object, Progress, Rights, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::walk::{Access, WalkFault, translate};
use selfpage_core::tables::{AddressSpace, Entries, PageSize, Range, Unfinished};

use crate::machine::{Cpu, FIRST, memory};
use crate::world::MEMORY_BYTES;

pub const ROOT: Handle = Handle::at_root(1);
/// The block of 1 MiB, of which all is made here.
pub const RAM: Handle = Handle::at_root(10);
/// The one of 512 KiB.
pub const OTHER_RAM: Handle = Handle::at_root(9);
/// The one of 2 MiB.
const LARGE_RAM: Handle = Handle::at_root(11);
/// Made from that, where a test does so.
const LARGE_RAM_FRAME: Handle = Handle::at_root(46);
pub const NODE: Handle = Handle::at_root(20);
pub const PML4: Handle = Handle::at_root(21);
const PDPT: Handle = Handle::at_root(22);
pub const PD: Handle = Handle::at_root(23);
pub const PT: Handle = Handle::at_root(24);
/// 64 KiB.
pub const FRAME: Handle = Handle::at_root(25);
/// A place that is free.
const FREE: u8 = 40;

/// A holder with one object of each type.
pub struct Bench<'m> {
    pub kernel: Kernel<'m>,
    pub space: Space,
    pub memory: &'m PhysMemory,
    pub cpu: &'m Cpu,
}

pub fn entries(table: Handle, first: u16, count: u16) -> Entries {
    Entries { table, first, count }
}

fn object(kind: Type, size_bits: u8) -> Object {
    Object { kind, size_bits }
}

impl<'m> Bench<'m> {
    pub fn new(memory: &'m PhysMemory, cpu: &'m Cpu) -> Bench<'m> {
        let (mut kernel, space) = Kernel::boot(memory, cpu, &[]).unwrap();
        let kinds = [Type::CNode, Type::Pml4, Type::Pdpt, Type::Pd, Type::Pt];
        for (kind, at) in kinds.into_iter().zip(20..) {
            kernel.retype(&space, RAM, Object::of(kind), 1, ROOT, at).unwrap();
        }
        kernel.retype(&space, RAM, object(Type::Frame, 16), 1, ROOT, 25).unwrap();
        Bench { kernel, space, memory, cpu }
    }

    /// The call is refused with this error, and memory is as it was.
    fn refuses<T: std::fmt::Debug>(
        &mut self,
        error: Error,
        call: impl FnOnce(&mut Kernel<'m>, &Space) -> Result<T, Error>,
    ) {
        let words = |memory: &PhysMemory| -> Vec<u64> {
            (0..memory.len_bytes()).step_by(8).map(|offset| memory.load(FIRST.plus(offset))).collect()
        };
        let (before, told) = (words(self.memory), self.cpu.told.borrow().clone());
        assert_eq!(call(&mut self.kernel, &self.space).unwrap_err(), error);
        assert!(told == *self.cpu.told.borrow(), "the CPU was told of a call that was refused with {error:?}");
        assert!(before == words(self.memory), "a call that was refused with {error:?} changed memory");
    }

    pub fn copy(&mut self, from: Handle, at: u8, rights: Rights) -> Handle {
        self.kernel.copy(&self.space, from, ROOT, at, rights).unwrap();
        Handle::at_root(at)
    }

    fn map(&mut self, table: Handle, first: u16, from: Handle) {
        self.kernel.map(&self.space, entries(table, first, 1), from, 0, Rights::READ).unwrap();
    }

    /// PML4, PDPT, PD and PT become one hierarchy, through their first entries.
    pub fn connect(&mut self) -> PhysAddr {
        for (above, below) in [(PML4, PDPT), (PDPT, PD), (PD, PT)] {
            self.kernel.map(&self.space, entries(above, 0, 1), below, 0, Rights::ALL).unwrap();
        }
        self.kernel.root_table(&self.space, PML4).unwrap()
    }
}

/// A dead holder's root lies in memory that somebody writes now: what is written there is no capability.
#[test]
fn a_root_is_not_forged() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    let root = bench.connect();
    // A holder whose root lies in a CNode that is made from memory of its own.
    bench.kernel.retype(&bench.space, OTHER_RAM, Object::of(Type::CNode), 1, ROOT, FREE).unwrap();
    let home = Handle::at_root(FREE);
    bench.kernel.retype(&bench.space, RAM, Object::of(Type::CNode), 1, home, 5).unwrap();
    let victim = bench.kernel.space(&bench.space, home.then(5)).unwrap();
    let page = bench.kernel.identify(&bench.space, home).unwrap().base;
    let mut words: Vec<u64> = (0..512).map(|word| memory.load(page.plus(word * 8))).collect();
    words[5 * 8 + 1] = page.0;
    // That memory becomes a frame. What lay there is written again, but that it is the root's CNode itself.
    assert_eq!(bench.kernel.revoke(&bench.space, OTHER_RAM, u64::MAX), Ok(Progress::Done));
    bench.kernel.retype(&bench.space, OTHER_RAM, Object::of(Type::Frame), 1, ROOT, FREE).unwrap();
    bench.kernel.map(&bench.space, entries(PT, 0, 1), home, 0, Rights::READ | Rights::WRITE).unwrap();
    assert_eq!(bench.cpu.access(&memory, root, VirtAddr(0), Access::Write), Ok(page));
    words.iter().zip((0..).step_by(8)).for_each(|(word, offset)| memory.store(page.plus(offset), *word));
    bench.refuses(Error::NoCapability, |kernel, _| kernel.identify(&victim, Handle::at_root(5)));
}

pub const R: Rights = Rights::READ;
pub const RW: Rights = Rights::READ.with(Rights::WRITE);

#[test]
fn wrong_types() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    let wrong = Error::WrongType;
    for (source, kind) in
        [(FRAME, Type::Pt), (FRAME, Type::Ram), (FRAME, Type::CNode), (PT, Type::Frame), (NODE, Type::Frame)]
    {
        bench.refuses(wrong, |kernel, space| kernel.retype(space, source, Object::of(kind), 1, ROOT, FREE));
    }
    bench.refuses(wrong, |kernel, space| kernel.retype(space, RAM, Object::of(Type::DevFrame), 1, ROOT, FREE));
    bench.refuses(wrong, |kernel, space| kernel.copy(space, FRAME, PT, 1, R));
    bench.refuses(wrong, |kernel, space| kernel.mint(space, FRAME, ROOT, FREE, Handle { bits: 0, len: 3 }));
    bench.refuses(wrong, |kernel, space| kernel.space(space, FRAME));
    bench.refuses(wrong, |kernel, space| kernel.root_table(space, PT));
    for (table, from) in
        [(PML4, FRAME), (PML4, PD), (PDPT, PT), (PD, PML4), (PT, OTHER_RAM), (PT, NODE), (FRAME, PT), (NODE, PT)]
    {
        bench.refuses(wrong, |kernel, space| kernel.map(space, entries(table, 0, 1), from, 0, R));
    }
    bench.refuses(wrong, |kernel, space| kernel.unmap(space, entries(FRAME, 0, 1)));
    bench.refuses(wrong, |kernel, space| kernel.modify_flags(space, entries(NODE, 0, 1), R));
    bench.refuses(wrong, |kernel, space| kernel.clear_dirty_bits(space, entries(OTHER_RAM, 0, 1)));
}

#[test]
fn missing_rights() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    let none = Error::NoRight;
    let ram = bench.copy(OTHER_RAM, 41, R);
    bench.refuses(none, |kernel, space| kernel.retype(space, ram, Object::of(Type::Frame), 1, ROOT, FREE));
    bench.kernel.copy(&bench.space, FRAME, NODE, 1, R).unwrap();
    let (read_only, blind) = (bench.copy(NODE, 42, R), bench.copy(NODE, 43, Rights::WRITE));
    bench.refuses(none, |kernel, space| kernel.copy(space, FRAME, read_only, 2, R));
    bench.refuses(none, |kernel, space| kernel.retype(space, RAM, Object::of(Type::Pt), 1, read_only, 2));
    bench.refuses(none, |kernel, space| kernel.delete(space, read_only.then(1)));
    bench.refuses(none, |kernel, space| kernel.revoke(space, read_only.then(1), 1));
    bench.refuses(none, |kernel, space| kernel.identify(space, blind.then(1)));
    let frame = NODE.then(1);
    bench.refuses(none, |kernel, space| kernel.map(space, entries(PT, 0, 1), frame, 0, RW));
    bench.map(PT, 0, frame);
    bench.refuses(none, |kernel, space| kernel.modify_flags(space, entries(PT, 0, 1), RW));
    bench.refuses(none, |kernel, space| kernel.map(space, entries(PT, 1, 1), PD, 0, RW));
    let table = bench.copy(PT, 44, R);
    bench.refuses(none, |kernel, space| kernel.map(space, entries(table, 1, 1), FRAME, 0, R));
    bench.refuses(none, |kernel, space| kernel.unmap(space, entries(table, 0, 1)));
    bench.refuses(none, |kernel, space| kernel.modify_flags(space, entries(table, 0, 1), R));
    bench.refuses(none, |kernel, space| kernel.clear_dirty_bits(space, entries(table, 0, 1)));
    bench.refuses(none, |kernel, space| kernel.map(space, entries(PD, 0, 1), table, 0, RW));
    let unreadable = Error::NoSuchEntry;
    bench.refuses(unreadable, |kernel, space| kernel.map(space, entries(PT, 1, 1), FRAME, 0, Rights::WRITE));
    bench.refuses(unreadable, |kernel, space| kernel.modify_flags(space, entries(PT, 0, 1), Rights::NONE));
}

#[test]
fn wrong_sizes_and_places() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    for (kind, size_bits) in [(Type::Pt, 12), (Type::CNode, 13), (Type::Frame, 11), (Type::Ram, 36), (Type::Ram, 255)] {
        let to = object(kind, size_bits);
        bench.refuses(Error::BadSize, |kernel, space| kernel.retype(space, RAM, to, 1, ROOT, FREE));
    }
    bench
        .refuses(Error::OutOfMemory, |kernel, space| kernel.retype(space, RAM, object(Type::Frame, 20), 1, ROOT, FREE));
    bench.refuses(Error::OutOfMemory, |kernel, space| {
        kernel.retype(space, OTHER_RAM, object(Type::Frame, 18), 3, ROOT, FREE)
    });
    let far = Error::OutOfRange;
    for (first, count) in [(0, 1), (64, 1), (62, 3), (255, 255)] {
        bench.refuses(far, |kernel, space| kernel.retype(space, OTHER_RAM, Object::of(Type::Pt), count, NODE, first));
    }
    bench.refuses(far, |kernel, space| kernel.copy(space, FRAME, NODE, 0, R));
    bench.refuses(far, |kernel, space| kernel.mint(space, NODE, ROOT, FREE, Handle { bits: 0, len: 53 }));
    bench.refuses(far, |kernel, space| kernel.mint(space, NODE, ROOT, FREE, Handle { bits: 8, len: 3 }));
    bench.refuses(Error::SlotTaken, |kernel, space| kernel.copy(space, FRAME, ROOT, 25, R));
    bench.refuses(Error::SlotTaken, |kernel, space| kernel.mint(space, NODE, ROOT, 1, Handle { bits: 0, len: 0 }));
    bench.refuses(Error::SlotTaken, |kernel, space| kernel.retype(space, RAM, Object::of(Type::Frame), 7, ROOT, 19));
}

#[test]
fn wrong_entries() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    bench.kernel.retype(&bench.space, LARGE_RAM, object(Type::Frame, 21), 1, ROOT, 45).unwrap();
    let large = Handle::at_root(45);
    let (one, two) = (bench.copy(FRAME, 41, RW), bench.copy(FRAME, 42, RW));
    for (table, from, offset_bytes) in [(PT, FRAME, 1), (PD, large, 4096), (PDPT, large, 0), (PT, FRAME, u64::MAX)] {
        bench
            .refuses(Error::Misaligned, |kernel, space| kernel.map(space, entries(table, 0, 1), from, offset_bytes, R));
    }
    let far = [
        (PT, 0, 17, 0),
        (PT, 0, 1, 1 << 16),
        (PT, 0, 1, u64::MAX << 12),
        (PT, 512, 1, 0),
        (PT, 511, 2, 0),
        (PT, u16::MAX, u16::MAX, 0),
    ];
    for (table, first, count, offset_bytes) in far {
        let entries = entries(table, first, count);
        bench.refuses(Error::OutOfRange, |kernel, space| kernel.map(space, entries, FRAME, offset_bytes, R));
    }
    bench.refuses(Error::OutOfRange, |kernel, space| kernel.map(space, entries(PD, 0, 2), PT, 0, R));
    bench.refuses(Error::OutOfRange, |kernel, space| kernel.map(space, entries(PD, 0, 1), PT, 4096, R));
    bench.kernel.map(&bench.space, entries(PT, 4, 4), one, 0, RW).unwrap();
    bench.refuses(Error::AlreadyMapped, |kernel, space| kernel.map(space, entries(PT, 20, 1), one, 0, RW));
    bench.refuses(Error::AlreadyMapped, |kernel, space| kernel.map(space, entries(PT, 4, 4), one, 0, RW));
    // Neither the original of a copy that is mapped nor a copy of one that is counts as mapped; a table does, wherever.
    bench.connect();
    bench.refuses(Error::AlreadyMapped, |kernel, space| kernel.map(space, entries(PT, 21, 1), PT, 0, R));
    bench.refuses(Error::AlreadyMapped, |kernel, space| kernel.map(space, entries(PD, 1, 1), PT, 0, R));
    bench.refuses(Error::EntryTaken, |kernel, space| kernel.map(space, entries(PD, 0, 1), large, 0, R));
    bench.refuses(Error::EntryTaken, |kernel, space| kernel.map(space, entries(PT, 3, 2), two, 0, RW));
    bench.refuses(Error::EntryTaken, |kernel, space| kernel.map(space, entries(PT, 7, 1), two, 0, RW));
    for (first, count) in [(4, 3), (5, 3), (3, 5)] {
        let error = if first == 3 { Error::NotMapped } else { Error::PartOfMapping };
        bench.refuses(error, |kernel, space| kernel.unmap(space, entries(PT, first, count)));
    }
    bench.refuses(Error::NotMapped, |kernel, space| kernel.modify_flags(space, entries(PT, 7, 2), R));
    for (first, count) in [(512, 1), (0, 513), (u16::MAX, 2)] {
        let all = entries(PT, first, count);
        bench.refuses(Error::OutOfRange, |kernel, space| kernel.unmap(space, all));
        bench.refuses(Error::OutOfRange, |kernel, space| kernel.modify_flags(space, all, R));
        bench.refuses(Error::OutOfRange, |kernel, space| kernel.clear_dirty_bits(space, all));
    }
}

#[test]
fn what_is_in_use_is_not_deleted_nor_what_is_being_revoked_used() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    bench.copy(FRAME, 41, R);
    bench.kernel.retype(&bench.space, LARGE_RAM, object(Type::Frame, 21), 1, ROOT, 46).unwrap();
    bench.kernel.copy(&bench.space, PD, NODE, 1, R).unwrap();
    bench.map(PT, 0, Handle::at_root(41));
    for in_use in [RAM, FRAME, NODE, PT, PD, ROOT] {
        bench.refuses(Error::InUse, |kernel, space| kernel.delete(space, in_use));
    }
    assert_eq!(bench.kernel.revoke(&bench.space, RAM, 1), Ok(Progress::More));
    let later = Error::RevokeInProgress;
    bench.refuses(later, |kernel, space| kernel.retype(space, RAM, Object::of(Type::Pt), 1, ROOT, FREE));
    bench.refuses(later, |kernel, space| kernel.copy(space, RAM, ROOT, FREE, R));
    bench.refuses(later, |kernel, space| kernel.copy(space, PT, ROOT, FREE, R));
    bench.refuses(later, |kernel, space| kernel.mint(space, NODE, ROOT, FREE, Handle { bits: 0, len: 1 }));
    bench.refuses(later, |kernel, space| kernel.map(space, entries(PD, 0, 1), PT, 0, R));
    bench.refuses(later, |kernel, space| kernel.map(space, entries(PT, 1, 1), LARGE_RAM_FRAME, 0, R));
    // Nor is anything put into a CNode that goes, from wherever.
    bench.refuses(later, |kernel, space| kernel.copy(space, LARGE_RAM_FRAME, NODE, 2, R));
    bench.refuses(later, |kernel, space| kernel.mint(space, ROOT, NODE, 2, Handle { bits: 0, len: 1 }));
    bench.refuses(later, |kernel, space| kernel.retype(space, OTHER_RAM, Object::of(Type::Pt), 1, NODE, 2));
    assert_eq!(bench.kernel.revoke(&bench.space, RAM, u64::MAX), Ok(Progress::Done));
    bench.kernel.retype(&bench.space, RAM, Object::of(Type::Pt), 1, ROOT, FREE).unwrap();
}

#[test]
fn handles_that_lead_nowhere() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    bench.kernel.copy(&bench.space, FRAME, NODE, 1, R).unwrap();
    bench.kernel.mint(&bench.space, NODE, ROOT, 41, Handle { bits: 5, len: 3 }).unwrap();
    let guarded = Handle::at_root(41);
    assert!(bench.kernel.identify(&bench.space, guarded.guarded(3, 5, 1)).is_ok());
    let long = (0..10).fold(Handle::at_root(1), |handle, _| handle.then(1));
    for handle in [
        Handle { bits: 0, len: 0 },
        Handle { bits: 1, len: 5 },
        // One bit too many.
        Handle { bits: 20 << 1, len: 7 },
        FRAME.then(1),
        guarded.then(1),
        long,
        Handle { bits: 1, len: 255 },
    ] {
        bench.refuses(Error::DepthOverflow, |kernel, space| kernel.identify(space, handle));
    }
    for handle in [Handle::at_root(FREE), Handle::at_root(0), NODE.then(2), NODE.then(0), guarded.guarded(3, 4, 1)] {
        bench.refuses(Error::NoCapability, |kernel, space| kernel.identify(space, handle));
        bench.refuses(Error::NoCapability, |kernel, space| kernel.delete(space, handle));
    }
    // A holder whose root went, and another CNode came into its place.
    let holder = bench.kernel.space(&bench.space, guarded).unwrap();
    assert!(bench.kernel.identify(&holder, Handle { bits: 0, len: 0 }.guarded(3, 5, 1)).is_ok());
    bench.kernel.delete(&bench.space, guarded).unwrap();
    bench.kernel.mint(&bench.space, NODE, ROOT, 41, Handle { bits: 5, len: 3 }).unwrap();
    bench.refuses(Error::NoCapability, |kernel, _| {
        kernel.identify(&holder, Handle { bits: 0, len: 0 }.guarded(3, 5, 1))
    });
    // One whose way is too long.
    let deep = (0..7).fold(Handle::at_root(1), |handle, _| handle.then(1));
    let holder = bench.kernel.space(&bench.space, deep).unwrap();
    bench.refuses(Error::DepthOverflow, |kernel, _| kernel.space(&holder, Handle::at_root(1).then(1).then(1)));
}

#[test]
fn addresses_that_are_not_canonical() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    let aspace = AddressSpace::new(&mut bench.kernel, bench.space, LARGE_RAM, ROOT, 45).unwrap();
    let pages = PageSize::Small4KiB;
    let crossing = [
        (0x7fff_ffff_f000, 8192),
        (0x8000_0000_0000, 4096),
        (0xffff_7fff_ffff_f000, 8192),
        (0xffff_ffff_ffff_f000, 8192),
    ];
    for (at, len_bytes) in crossing {
        let range = Range { at: VirtAddr(at), len_bytes, pages };
        bench.refuses(Error::NotCanonical, |kernel, _| {
            aspace.map(kernel, range, FRAME, 0, R).map_err(|stopped| stopped.why)
        });
        bench.refuses(Error::NotCanonical, |kernel, _| aspace.unmap(kernel, range).map_err(|stopped| stopped.why));
        bench.refuses(Error::NotCanonical, |kernel, _| aspace.protect(kernel, range, R).map_err(|stopped| stopped.why));
    }
    for (at, len_bytes) in [(1, 4096), (4096, 1)] {
        let range = Range { at: VirtAddr(at), len_bytes, pages };
        bench.refuses(Error::Misaligned, |kernel, _| {
            aspace.map(kernel, range, FRAME, 0, R).map_err(|stopped| stopped.why)
        });
    }
    let root = bench.connect();
    assert_eq!(cpu.access(&memory, root, VirtAddr(1 << 47), Access::Read), Err(WalkFault::NotCanonical));
}

/// Every call takes handles, and each handle may be too long, too short, or go on where there is no CNode.
#[test]
fn handles_of_the_wrong_length_in_every_call() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    let wrong = Error::DepthOverflow;
    for handle in [Handle { bits: 1, len: 5 }, FRAME.then(1), Handle { bits: 1, len: 65 }, Handle { bits: 1, len: 255 }]
    {
        let all = entries(handle, 0, 1);
        bench.refuses(wrong, |kernel, space| kernel.retype(space, handle, Object::of(Type::Pt), 1, ROOT, FREE));
        bench.refuses(wrong, |kernel, space| kernel.retype(space, RAM, Object::of(Type::Pt), 1, handle, FREE));
        bench.refuses(wrong, |kernel, space| kernel.copy(space, handle, ROOT, FREE, R));
        bench.refuses(wrong, |kernel, space| kernel.copy(space, FRAME, handle, FREE, R));
        bench.refuses(wrong, |kernel, space| kernel.mint(space, handle, ROOT, FREE, Handle { bits: 0, len: 1 }));
        bench.refuses(wrong, |kernel, space| kernel.mint(space, NODE, handle, FREE, Handle { bits: 0, len: 1 }));
        bench.refuses(wrong, |kernel, space| kernel.delete(space, handle));
        bench.refuses(wrong, |kernel, space| kernel.revoke(space, handle, 1));
        bench.refuses(wrong, |kernel, space| kernel.derived(space, handle));
        bench.refuses(wrong, |kernel, space| kernel.space(space, handle));
        bench.refuses(wrong, |kernel, space| kernel.root_table(space, handle));
        bench.refuses(wrong, |kernel, space| kernel.map(space, all, FRAME, 0, R));
        bench.refuses(wrong, |kernel, space| kernel.map(space, entries(PT, 0, 1), handle, 0, R));
        bench.refuses(wrong, |kernel, space| kernel.unmap(space, all));
        bench.refuses(wrong, |kernel, space| kernel.modify_flags(space, all, R));
        bench.refuses(wrong, |kernel, space| kernel.clear_dirty_bits(space, all));
    }
}

#[test]
fn devices_that_no_capability_can_be_of() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let boot = |devices: &[_]| Kernel::boot(&memory, &cpu, devices).map(drop);
    let device = PhysAddr(1 << 40);
    assert_eq!(boot(&[(device, 12), (device, 35)]), Ok(()));
    for size_bits in [0, 11, 36, 64, 255] {
        assert_eq!(boot(&[(device, size_bits)]), Err(Error::BadSize));
    }
    assert_eq!(boot(&[(PhysAddr((1 << 40) + 4096), 13)]), Err(Error::Misaligned));
    // Ten blocks of RAM and the root itself have places already.
    assert_eq!(boot(&[(device, 12); 52]), Ok(()));
    assert_eq!(boot(&[(device, 12); 53]), Err(Error::OutOfRange));
}

/// What an address space refuses leaves all addresses, all tables and all capabilities as they were. A place in which a copy lay for
/// the time of the call may look otherwise.
#[test]
fn ranges_that_meet_something_else() {
    let (memory, cpu) = (memory(MEMORY_BYTES), Cpu::default());
    let mut bench = Bench::new(&memory, &cpu);
    let aspace = AddressSpace::new(&mut bench.kernel, bench.space, OTHER_RAM, ROOT, 47).unwrap();
    let range = |page: usize, pages: u64| Range {
        at: VirtAddr((1 << 30) + page * 4096),
        len_bytes: pages * 4096,
        pages: PageSize::Small4KiB,
    };
    aspace.map(&mut bench.kernel, range(4, 4), FRAME, 0, R).unwrap();
    let read_only = bench.copy(FRAME, 49, R);
    let root = bench.kernel.root_table(&bench.space, aspace.pml4()).unwrap();
    let mut refuses = |error, call: &dyn Fn(&mut Kernel<'_>) -> Result<(), Unfinished>| {
        let space = bench.space;
        let state = |kernel: &Kernel<'_>| {
            let pages = (0..32).map(|page| translate(&memory, root, range(page, 1).at)).collect::<Vec<_>>();
            (pages, [FRAME, read_only, OTHER_RAM].map(|handle| kernel.derived(&space, handle).unwrap()))
        };
        let before = state(&bench.kernel);
        assert_eq!(call(&mut bench.kernel).unwrap_err(), Unfinished { done_bytes: 0, why: error });
        assert_eq!(state(&bench.kernel), before);
    };
    for (page, pages) in [(4, 1), (2, 4), (7, 1)] {
        let all = range(page, pages);
        refuses(Error::EntryTaken, &|kernel| aspace.map(kernel, all, FRAME, 0, R));
    }
    let beside = range(8, 1);
    refuses(Error::NoRight, &|kernel| aspace.map(kernel, beside, read_only, 0, RW));
    refuses(Error::OutOfRange, &|kernel| aspace.map(kernel, range(8, 17), FRAME, 0, R));
    refuses(Error::Misaligned, &|kernel| aspace.map(kernel, range(8, 1), FRAME, 1, R));
    for (page, pages, error) in [(3, 5, Error::NotMapped), (16, 1, Error::NotMapped), (4, 3, Error::PartOfMapping)] {
        refuses(error, &|kernel| aspace.unmap(kernel, range(page, pages)));
    }
    refuses(Error::NotMapped, &|kernel| aspace.protect(kernel, range(6, 4), R));
    refuses(Error::NoSuchEntry, &|kernel| aspace.protect(kernel, range(4, 4), Rights::WRITE));
    aspace.unmap(&mut bench.kernel, range(4, 4)).unwrap();
}
