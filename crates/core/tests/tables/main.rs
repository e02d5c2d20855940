//! Page tables under capabilities, on a machine in memory.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod invalidation;
mod machine;
mod revocation;

use machine::{Cpu, FIRST, memory};
use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Derived, Error, Handle, Kernel, Object, Progress, Rights, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::walk::{Access, WalkFault, translate};
use selfpage_core::tables::{AddressSpace, Entries, PageSize, Range};

const ROOT: Handle = Handle::at_root(1);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const RW: Rights = Rights::READ.with(Rights::WRITE);

/// A machine whose two largest blocks of RAM are for data and for tables.
struct Machine {
    memory: &'static PhysMemory,
    cpu: &'static Cpu,
    kernel: Kernel<'static>,
    space: Space,
    frames: Handle,
    ram: Handle,
    /// A Frame, made from the first.
    data: Handle,
}

impl Machine {
    fn new(data_bits: u8, devices: &[(PhysAddr, u8)]) -> Machine {
        let memory: &'static PhysMemory = Box::leak(Box::new(memory(16 << 20)));
        let cpu: &'static Cpu = Box::leak(Box::new(Cpu::default()));
        let (mut kernel, space) = Kernel::boot(memory, cpu, devices).unwrap();
        let [frames, ram, ..] = blocks(&kernel, &space, Type::Ram)[..] else { panic!("too few blocks") };
        kernel.retype(&space, frames, frame(data_bits), 1, ROOT, 40).unwrap();
        Machine { memory, cpu, kernel, space, frames, ram, data: Handle::at_root(40) }
    }

    fn address_space(&mut self) -> (AddressSpace, PhysAddr) {
        let aspace = AddressSpace::new(&mut self.kernel, self.space, self.ram, ROOT, 50).unwrap();
        (aspace, self.kernel.root_table(&self.space, aspace.pml4()).unwrap())
    }
}

/// What the root holds of a type, the largest first.
fn blocks(kernel: &Kernel<'_>, space: &Space, kind: Type) -> Vec<Handle> {
    let held = |handle| kernel.identify(space, handle).ok().filter(|held| held.kind == kind);
    let mut found: Vec<_> =
        (2..64).map(Handle::at_root).filter_map(|handle| held(handle).map(|block| (block.size_bits, handle))).collect();
    found.sort_by_key(|(size_bits, _)| std::cmp::Reverse(*size_bits));
    found.into_iter().map(|(_, handle)| handle).collect()
}

fn frame(size_bits: u8) -> Object {
    Object { kind: Type::Frame, size_bits }
}

#[test]
fn a_range_is_mapped_read_written_protected_and_revoked() {
    let mut machine = Machine::new(22, &[]);
    let (aspace, root) = machine.address_space();
    let Machine { memory, cpu, mut kernel, space, ram, data, .. } = machine;
    let base = kernel.identify(&space, data).unwrap().base;

    let at = VirtAddr(0x7f12_3450_0000);
    let range = Range { at, len_bytes: 3 * MIB, pages: PageSize::Small4KiB };
    aspace.map(&mut kernel, range, data, 64 * KIB, RW).unwrap();
    for offset in (0..3 * MIB).step_by(4096) {
        let found = cpu.access(memory, root, VirtAddr(at.0 + offset as usize + 5), Access::Write).unwrap();
        assert_eq!(found, base.plus(64 * KIB + offset + 5));
    }
    assert_eq!(cpu.access(memory, root, at, Access::Execute), Err(WalkFault::Page(0b10101)));
    aspace.protect(&mut kernel, range, Rights::READ).unwrap();
    assert_eq!(cpu.access(memory, root, at, Access::Write), Err(WalkFault::Page(0b111)));
    assert!(cpu.access(memory, root, at, Access::Read).is_ok());

    assert_eq!(kernel.revoke(&space, data, u64::MAX), Ok(Progress::Done));
    assert_eq!(cpu.access(memory, root, at, Access::Read), Err(WalkFault::Page(0b100)));
    aspace.map(&mut kernel, range, data, 0, RW).unwrap();
    aspace.unmap(&mut kernel, range).unwrap();
    assert_eq!(translate(memory, root, at), None);
    aspace.map(&mut kernel, range, data, 0, RW).unwrap();
    assert_eq!(kernel.revoke(&space, ram, u64::MAX), Ok(Progress::Done));
    assert_eq!(cpu.access(memory, root, at, Access::Read), Err(WalkFault::Page(0b100)));
    assert_eq!(kernel.identify(&space, aspace.pml4()), Err(Error::NoCapability));
    // All of it can be had again.
    AddressSpace::new(&mut kernel, space, ram, ROOT, 50).unwrap();
}

#[test]
fn large_pages_lie_beside_small_ones() {
    let mut machine = Machine::new(21, &[(PhysAddr(1 << 40), 30)]);
    let (aspace, root) = machine.address_space();
    let Machine { memory, mut kernel, space, data, .. } = machine;
    let [device] = blocks(&kernel, &space, Type::DevFrame)[..] else { panic!("one device") };
    let base = kernel.identify(&space, data).unwrap().base;

    let range = |at, len_bytes, pages| Range { at: VirtAddr(at), len_bytes, pages };
    aspace.map(&mut kernel, range(2 << 20, 2 * MIB, PageSize::Large2MiB), data, 0, RW).unwrap();
    aspace.map(&mut kernel, range(4 << 20, 64 * KIB, PageSize::Small4KiB), data, 0, Rights::READ).unwrap();
    aspace.map(&mut kernel, range(1 << 30, 1024 * MIB, PageSize::Huge1GiB), device, 0, RW).unwrap();
    let found = translate(memory, root, VirtAddr((2 << 20) + 0x12345)).unwrap();
    assert_eq!((found.at, found.size_bits), (base.plus(0x12345), 21));
    let found = translate(memory, root, VirtAddr((4 << 20) + 0x5678)).unwrap();
    assert_eq!((found.at, found.size_bits, found.rights), (base.plus(0x5678), 12, Rights::READ));
    let found = translate(memory, root, VirtAddr((1 << 30) + 0x765_4321)).unwrap();
    assert_eq!((found.at, found.size_bits), (PhysAddr((1 << 40) + 0x765_4321), 30));
    // A table where the large page is would hide it.
    let in_between = range((2 << 20) + 4096, 4096, PageSize::Small4KiB);
    let stopped = aspace.map(&mut kernel, in_between, data, 0, RW).unwrap_err();
    assert_eq!(stopped.why, Error::EntryTaken);
    let unaligned = range(3 << 20, 2 * MIB, PageSize::Large2MiB);
    assert_eq!(aspace.map(&mut kernel, unaligned, data, 0, RW).unwrap_err().why, Error::Misaligned);
    let hole = range(0x7fff_ffff_f000, 8 * KIB, PageSize::Small4KiB);
    assert_eq!(aspace.map(&mut kernel, hole, data, 0, RW).unwrap_err().why, Error::NotCanonical);
}

#[test]
fn tables_are_shared_and_read_and_tell_what_was_written() {
    let mut machine = Machine::new(14, &[]);
    let (aspace, root) = machine.address_space();
    let Machine { memory, cpu, mut kernel, space, data, .. } = machine;
    let four = Range { at: VirtAddr(0x20_0000), len_bytes: 16 * KIB, pages: PageSize::Small4KiB };
    aspace.map(&mut kernel, four, data, 0, RW).unwrap();
    let pt = aspace.table(&kernel, four.at, 1).unwrap();
    let pd = aspace.table(&kernel, four.at, 2).unwrap();
    let pt_base = kernel.identify(&space, pt).unwrap().base;

    // The table again, 2 MiB further on, and for reading only.
    kernel.copy(&space, pt, ROOT, 41, Rights::ALL).unwrap();
    let beside = Entries { table: pd, first: 2, count: 1 };
    kernel.map(&space, beside, Handle::at_root(41), 0, Rights::READ).unwrap();
    let there = VirtAddr(0x40_1000);
    assert!(cpu.access(memory, root, there, Access::Read).is_ok());
    assert_eq!(cpu.access(memory, root, there, Access::Write), Err(WalkFault::Page(0b111)));

    // The table as a page of its own.
    kernel.copy(&space, pt, ROOT, 42, Rights::ALL).unwrap();
    assert_eq!(kernel.derived(&space, pt), Ok(Derived { copies: 2, objects: 0 }));
    let own = Entries { table: pt, first: 9, count: 1 };
    assert_eq!(kernel.map(&space, own, Handle::at_root(42), 0, RW), Err(Error::NoRight));
    kernel.map(&space, own, Handle::at_root(42), 0, Rights::READ).unwrap();
    let window = VirtAddr(0x20_9000);
    assert_eq!(cpu.access(memory, root, window, Access::Read), Ok(pt_base));

    let dirty = || (0..4).filter(|page| memory.load(pt_base.plus(page * 8)) & 1 << 6 != 0).count();
    assert_eq!(dirty(), 0);
    cpu.access(memory, root, VirtAddr(0x20_1000), Access::Write).unwrap();
    cpu.access(memory, root, VirtAddr(0x20_3000), Access::Write).unwrap();
    assert_eq!(dirty(), 2);
    let all = Entries { table: pt, first: 0, count: 4 };
    assert_eq!(kernel.clear_dirty_bits(&space, all), Ok(2));
    assert_eq!(dirty(), 0);

    // Taken back, it is gone from both places.
    kernel.revoke(&space, pt, u64::MAX).unwrap();
    assert_eq!(translate(memory, root, there), None);
    assert_eq!(translate(memory, root, window), None);
    assert!(translate(memory, root, four.at).is_some());
    assert!(FIRST < pt_base);
}
