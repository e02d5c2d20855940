//! Each way in which a call can be wrong, once: it is told its own error, and nothing has changed.

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Handle, Kernel, Object, Progress, Rights, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::walk::Access;
use selfpage_core::tables::{AddressSpace, Entries, PageSize, Range};

use crate::machine::{Cpu, FIRST, memory};
use crate::world::MEMORY_BYTES;

const ROOT: Handle = Handle::at_root(1);
/// The block of 1 MiB, of which all is made here.
const RAM: Handle = Handle::at_root(10);
/// The one of 512 KiB.
const OTHER_RAM: Handle = Handle::at_root(9);
/// The one of 2 MiB.
const LARGE_RAM: Handle = Handle::at_root(11);
const NODE: Handle = Handle::at_root(20);
const PML4: Handle = Handle::at_root(21);
const PDPT: Handle = Handle::at_root(22);
const PD: Handle = Handle::at_root(23);
const PT: Handle = Handle::at_root(24);
/// 64 KiB.
const FRAME: Handle = Handle::at_root(25);
/// A place that is free.
const FREE: u8 = 40;

/// A holder with one object of each type.
struct Bench<'m> {
    kernel: Kernel<'m>,
    space: Space,
    memory: &'m PhysMemory,
    cpu: &'m Cpu,
}

fn entries(table: Handle, first: u16, count: u16) -> Entries {
    Entries { table, first, count }
}

fn object(kind: Type, size_bits: u8) -> Object {
    Object { kind, size_bits }
}

impl<'m> Bench<'m> {
    fn new(memory: &'m PhysMemory, cpu: &'m Cpu) -> Bench<'m> {
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
        let before = words(self.memory);
        assert_eq!(call(&mut self.kernel, &self.space).unwrap_err(), error);
        assert!(before == words(self.memory), "a call that was refused with {error:?} changed memory");
    }

    fn copy(&mut self, from: Handle, at: u8, rights: Rights) -> Handle {
        self.kernel.copy(&self.space, from, ROOT, at, rights).unwrap();
        Handle::at_root(at)
    }

    fn map(&mut self, table: Handle, first: u16, from: Handle) {
        self.kernel.map(&self.space, entries(table, first, 1), from, 0, Rights::READ).unwrap();
    }

    /// PML4, PDPT, PD and PT become one hierarchy, through their first entries.
    fn connect(&mut self) -> PhysAddr {
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
