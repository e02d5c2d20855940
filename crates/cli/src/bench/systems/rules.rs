//! The rules of capabilities and page tables, on a machine in memory: physical memory is an array, and the CPU remembers no
//! translation, so being told to forget one costs a call and no more.

use std::time::Duration;

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Derived, Handle, Kernel, Object, Rights, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::walk::translate;
use selfpage_core::tables::{AddressSpace, ENTRIES, Entries, PageSize, Range, Tlb, Unfinished};

use super::super::error::Error;
use super::super::raw;
use super::super::sizes::Sizes;
use super::super::tables::{Change, PASSES, Shape, Took, Way, Work, cpu_time, one_pass};

const MEMORY: PhysAddr = PhysAddr(1 << 30);
const MEMORY_BYTES: usize = 64 << 20;
/// What is mapped: addresses without memory, as nobody looks at what is there.
const DEVICE: PhysAddr = PhysAddr(1 << 40);
const DEVICE_BITS: u8 = 35;
const PAGES_OF_EACH: u16 = 4 * ENTRIES;
const DESCENDANTS: usize = 10_000;
/// Places of a CNode, and objects of a call.
const PLACES: u8 = 63;
const READ_WRITE: Rights = Rights::READ.with(Rights::WRITE);

/// The root CNode, which holds itself; where in it our CNodes begin; and the place of the address space.
const ROOT: Handle = Handle::at_root(1);
const FIRST_NODE: u8 = 40;
const HOME: u8 = 50;

/// Measures a case.
pub fn measure(work: Work, sizes: Sizes) -> Result<Took, Error> {
    let mut machine = Machine::boot()?;
    match work {
        Work::Mapping(wanted, Way::Range) => machine.range(wanted, sizes.frames_bytes),
        Work::Mapping(wanted, Way::Each) => {
            let batches = machine.batches(PageSize::Small4KiB, PAGES_OF_EACH / ENTRIES, 1)?;
            machine.change(wanted, &batches)
        }
        Work::Mapping(wanted, Way::Batches(pages)) => {
            let tables = (sizes.frames_bytes >> 21) as u16;
            let batches = machine.batches(pages, tables, ENTRIES)?;
            machine.change(wanted, &batches)
        }
        Work::Retype(kind) => machine.retype(kind),
        Work::Copy => machine.derive(DESCENDANTS, Shape::Flat).map(|derived| derived.copying),
        Work::Revoke { descendants, shape } => machine.derive(descendants, shape).map(|derived| derived.revoking),
    }
}

fn failed(error: selfpage_core::capability::Error) -> Error {
    Error::Failed(format!("the rules refuse it: {error:?}"))
}

fn unfinished(stopped: Unfinished) -> Error {
    failed(stopped.why)
}

struct Cpu;

impl Tlb for Cpu {
    fn forget_all(&self) {}
    fn forget(&self, _: VirtAddr) {}
    fn leave(&self, _: PhysAddr) {}
}

struct Machine {
    memory: &'static PhysMemory,
    kernel: Kernel<'static>,
    space: Space,
    device: Handle,
    /// For address spaces and objects; 32 MiB.
    ram: Handle,
    /// For CNodes; 16 MiB.
    ram_of_nodes: Handle,
}

/// A call that maps, and the calls that protect and unmap the same.
struct Batch {
    entries: Entries,
    from: Handle,
    offset_bytes: u64,
    /// The last page.
    last: VirtAddr,
    last_offset_bytes: u64,
}

struct DeriveTook {
    copying: Took,
    revoking: Took,
}

impl Machine {
    /// The process ends with the case: nothing is given back.
    fn boot() -> Result<Machine, Error> {
        let memory = raw::physical(MEMORY, MEMORY_BYTES)
            .map_err(|error| Error::Failed(format!("map {MEMORY_BYTES} bytes: {error}")))?;
        let memory: &PhysMemory = Box::leak(Box::new(memory));
        let (kernel, space) = Kernel::boot(memory, &Cpu, &[(DEVICE, DEVICE_BITS)]).map_err(failed)?;
        let held = |kind, size_bits| {
            let is_it = |place: &Handle| {
                let found = kernel.identify(&space, *place);
                found.is_ok_and(|found| found.kind == kind && found.size_bits == size_bits)
            };
            let found = (2..FIRST_NODE).map(Handle::at_root).find(is_it);
            found.ok_or_else(|| Error::Failed(format!("the machine has no {kind:?} of 2^{size_bits} bytes")))
        };
        let device = held(Type::DevFrame, DEVICE_BITS)?;
        let ram = held(Type::Ram, 25)?;
        let ram_of_nodes = held(Type::Ram, 24)?;
        Ok(Machine { memory, kernel, space, device, ram, ram_of_nodes })
    }

    /// CNodes with this many places in all, two below the root.
    fn nodes(&mut self, places: usize) -> Result<Vec<Handle>, Error> {
        let mut nodes = Vec::new();
        let wanted = places.div_ceil(usize::from(PLACES));
        while nodes.len() < wanted {
            let at = FIRST_NODE + (nodes.len() / usize::from(PLACES)) as u8;
            let above = Handle::at_root(at);
            let node = Object::of(Type::CNode);
            self.kernel.retype(&self.space, self.ram_of_nodes, node, 1, ROOT, at).map_err(failed)?;
            self.kernel.retype(&self.space, self.ram_of_nodes, node, PLACES, above, 1).map_err(failed)?;
            nodes.extend((1..=PLACES).map(|index| above.then(index)));
        }
        nodes.truncate(wanted);
        Ok(nodes)
    }

    /// An address space without tables; the one before is gone.
    fn fresh_space(&mut self) -> Result<AddressSpace, Error> {
        self.kernel.revoke(&self.space, self.ram, u64::MAX).map_err(failed)?;
        AddressSpace::new(&mut self.kernel, self.space, self.ram, ROOT, HOME).map_err(failed)
    }

    fn root(&self) -> Result<PhysAddr, Error> {
        self.kernel.root_table(&self.space, Handle::at_root(HOME)).map_err(failed)
    }

    /// Tables, and calls that fill `count` entries of them each. Every call has a capability of its own.
    fn batches(&mut self, pages: PageSize, tables: u16, count: u16) -> Result<Vec<Batch>, Error> {
        let aspace = self.fresh_space()?;
        let page_bytes = pages.len_bytes();
        let device_bytes = 1 << DEVICE_BITS;
        let entries = u64::from(ENTRIES).min(device_bytes / page_bytes) as u16;
        let count = count.min(entries);
        let mut places = Places::of(self.nodes(usize::from(tables) * usize::from(entries / count))?);
        let mut batches = Vec::new();
        for table in 0..u64::from(tables) {
            let begin = table * page_bytes * u64::from(ENTRIES);
            let one = Range { at: VirtAddr(begin as usize), len_bytes: page_bytes, pages };
            aspace.map(&mut self.kernel, one, self.device, 0, READ_WRITE).map_err(unfinished)?;
            aspace.unmap(&mut self.kernel, one).map_err(unfinished)?;
            let table = aspace.table(&self.kernel, one.at, pages.level()).map_err(failed)?;
            for first in (0..entries).step_by(usize::from(count)) {
                let (node, at) = places.take()?;
                self.kernel.copy(&self.space, self.device, node, at, Rights::ALL).map_err(failed)?;
                let offset = |entry: u16| begin + u64::from(entry) * page_bytes;
                let last = first + count - 1;
                batches.push(Batch {
                    entries: Entries { table, first, count },
                    from: node.then(at),
                    offset_bytes: offset(first) % device_bytes,
                    last: VirtAddr(offset(last) as usize),
                    last_offset_bytes: offset(last) % device_bytes,
                });
            }
        }
        Ok(batches)
    }

    fn change(&mut self, wanted: Change, batches: &[Batch]) -> Result<Took, Error> {
        for change in [Change::Map, Change::Protect, Change::Unmap] {
            self.make(change, batches)?;
            for batch in batches {
                self.check(change, batch.last, batch.last_offset_bytes)?;
            }
        }
        let passes = (0..PASSES).map(|_| one_pass(wanted, |change| self.make(change, batches)));
        let things = batches.iter().map(|batch| usize::from(batch.entries.count)).sum();
        Ok(Took { passes: passes.collect::<Result<_, _>>()?, calls: batches.len(), things })
    }

    fn make(&mut self, change: Change, batches: &[Batch]) -> Result<(), Error> {
        for Batch { entries, from, offset_bytes, .. } in batches {
            match change {
                Change::Map => self.kernel.map(&self.space, *entries, *from, *offset_bytes, READ_WRITE),
                Change::Protect => self.kernel.modify_flags(&self.space, *entries, Rights::READ),
                Change::Unmap => self.kernel.unmap(&self.space, *entries),
            }
            .map_err(failed)?;
        }
        Ok(())
    }

    /// A CPU would find what the change left.
    fn check(&self, change: Change, at: VirtAddr, offset_bytes: u64) -> Result<(), Error> {
        let found = translate(self.memory, self.root()?, at).map(|found| (found.at, found.rights));
        let expected = match change {
            Change::Map => Some((DEVICE.plus(offset_bytes), READ_WRITE)),
            Change::Protect => Some((DEVICE.plus(offset_bytes), Rights::READ)),
            Change::Unmap => None,
        };
        if found != expected {
            return Err(Error::Failed(format!("{change:?} at {at:?} left {found:?}, not {expected:?}")));
        }
        Ok(())
    }

    fn range(&mut self, wanted: Change, len_bytes: u64) -> Result<Took, Error> {
        let pages = PageSize::Small4KiB;
        let range = Range { at: VirtAddr(0), len_bytes, pages };
        let last = len_bytes - pages.len_bytes();
        let mut passes = Vec::new();
        for _ in 0..PASSES {
            let aspace = self.fresh_space()?;
            passes.push(one_pass(wanted, |change| {
                match change {
                    Change::Map => aspace.map(&mut self.kernel, range, self.device, 0, READ_WRITE),
                    Change::Protect => aspace.protect(&mut self.kernel, range, Rights::READ),
                    Change::Unmap => aspace.unmap(&mut self.kernel, range),
                }
                .map_err(unfinished)?;
                // One walk among as many pages as these costs nothing.
                self.check(change, VirtAddr(last as usize), last)
            })?);
        }
        Ok(Took { passes, calls: 1, things: (len_bytes / pages.len_bytes()) as usize })
    }

    fn retype(&mut self, kind: Type) -> Result<Took, Error> {
        let nodes = self.nodes(usize::from(PLACES) * usize::from(PLACES))?;
        let mut passes = Vec::new();
        for _ in 0..PASSES {
            let before = cpu_time();
            for node in &nodes {
                let object = Object::of(kind);
                self.kernel.retype(&self.space, self.ram, object, PLACES, *node, 1).map_err(failed)?;
            }
            passes.push(cpu_time() - before);
            self.kernel.revoke(&self.space, self.ram, u64::MAX).map_err(failed)?;
        }
        Ok(Took { passes, calls: nodes.len(), things: nodes.len() * usize::from(PLACES) })
    }

    /// Copies of capabilities, and their revocation: as many sets of `descendants` as make [`DESCENDANTS`].
    fn derive(&mut self, descendants: usize, shape: Shape) -> Result<DeriveTook, Error> {
        let sets = DESCENDANTS / descendants;
        let mut places = Places::of(self.nodes(DESCENDANTS + sets)?);
        let mut heads = Vec::new();
        for _ in 0..sets {
            let (node, at) = places.take()?;
            self.kernel.copy(&self.space, self.device, node, at, Rights::ALL).map_err(failed)?;
            let descendants = (0..descendants).map(|_| places.take()).collect::<Result<Vec<_>, _>>()?;
            heads.push((node.then(at), descendants));
        }
        let (mut copying, mut revoking): (Vec<Duration>, Vec<Duration>) = (Vec::new(), Vec::new());
        for _ in 0..PASSES {
            let before = cpu_time();
            for (head, descendants) in &heads {
                let mut source = *head;
                for (node, at) in descendants {
                    self.kernel.copy(&self.space, source, *node, *at, Rights::ALL).map_err(failed)?;
                    if shape == Shape::Chain {
                        source = node.then(*at);
                    }
                }
            }
            copying.push(cpu_time() - before);
            self.check_derived(heads.last(), descendants as u64)?;
            let before = cpu_time();
            for (head, _) in &heads {
                self.kernel.revoke(&self.space, *head, u64::MAX).map_err(failed)?;
            }
            revoking.push(cpu_time() - before);
            self.check_derived(heads.last(), 0)?;
        }
        let things = sets * descendants;
        Ok(DeriveTook {
            copying: Took { passes: copying, calls: things, things },
            revoking: Took { passes: revoking, calls: sets, things },
        })
    }

    fn check_derived(&self, head: Option<&(Handle, Vec<(Handle, u8)>)>, copies: u64) -> Result<(), Error> {
        let Some((head, _)) = head else { return Ok(()) };
        let derived = self.kernel.derived(&self.space, *head).map_err(failed)?;
        if derived != (Derived { copies, objects: 0 }) {
            return Err(Error::Failed(format!("{derived:?} came of a capability, not {copies} copies")));
        }
        Ok(())
    }
}

/// Empty places, one after the other.
struct Places(Box<dyn Iterator<Item = (Handle, u8)>>);

impl Places {
    fn of(nodes: Vec<Handle>) -> Places {
        Places(Box::new(nodes.into_iter().flat_map(|node| (1..=PLACES).map(move |at| (node, at)))))
    }

    fn take(&mut self) -> Result<(Handle, u8), Error> {
        self.0.next().ok_or_else(|| Error::Failed("too few places".into()))
    }
}
