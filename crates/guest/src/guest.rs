//! A closure of this process in a virtual machine, on page tables that were built under the rules.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{self, Handle, Kernel, Object, Rights, Space, Type};
use selfpage_core::fault::{Failure, Fault, Outcome};
use selfpage_core::physical::PhysAddr;
use selfpage_core::region::Access;
use selfpage_core::tables::{AddressSpace, PageSize, Range, Tlb};

use crate::descriptors::Descriptors;
use crate::entry::{self, HostCall};
use crate::error::{Error, Kind, Result};
use crate::memory::Memory;
use crate::program;
use crate::vm::{Exit, Start, Vm, Writing};

/// Where RAM begins: not at 0, so that a number that is no address shows.
const RAM: PhysAddr = PhysAddr(0x4000_0000);
/// Where the pieces of the program are: a device to the rules, since nothing is ever made of them.
const PROGRAM: PhysAddr = PhysAddr(32 << 30);
const PROGRAM_LOG2_BYTES: u8 = 35;

const PAGE: u64 = 4096;
/// What the closure itself needs, in one Frame: descriptors, the stack of ring 0, the closure with its result, a gap, its stack.
const OWN_LOG2_BYTES: u8 = 21;
const RING0_STACK_END: u64 = 2 * PAGE;
const CALL: u64 = 2 * PAGE;
const CALL_BYTES: u64 = 16 * PAGE;
const GAP: u64 = CALL + CALL_BYTES;
const STACK: u64 = GAP + PAGE;
const OWN_BYTES: u64 = 1 << OWN_LOG2_BYTES;

/// Bits of the error code of a page fault.
const CODE_WRITE: u64 = 1 << 1;
const CODE_EXECUTE: u64 = 1 << 4;
/// How often an instruction may fault at one address, one time after the other.
const MOST_FAULTS: u32 = 100;

/// Where an exception leaves the address of the instruction, in bytes below the top of the stack.
const INSTRUCTION: u64 = 40;
/// And its error code, where it has one.
const ERROR_CODE: u64 = 48;

const UNDEFINED: usize = 6;
const PAGE_FAULT: usize = 14;

/// Physical memory for a guest, and the news of what changed in its page tables.
pub struct Machine {
    memory: Memory,
    changes: Changes,
}

/// What the CPU is to be told before it goes on.
#[derive(Default)]
struct Changes {
    /// Entries have changed.
    stale: AtomicBool,
    /// Roots whose memory is something else now.
    left: Mutex<Vec<PhysAddr>>,
}

impl Tlb for Changes {
    fn forget_all(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    fn forget(&self, _page: VirtAddr) {
        self.forget_all();
    }

    fn leave(&self, root: PhysAddr) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push(root);
    }
}

/// What a program builds on: the rules, and what the root of its capabilities holds.
pub struct Parts<'m> {
    /// The rules.
    pub kernel: Kernel<'m>,
    /// The capabilities.
    pub space: Space,
    /// The root CNode.
    pub root: Handle,
    /// The guest's address space.
    pub tables: AddressSpace,
    /// RAM for the program: a quarter of all.
    pub ram: Handle,
    /// From this place on the root CNode is empty.
    pub first_place: u8,
}

/// A virtual machine with one closure to run.
///
/// **Experimental.** Guest address is host address: of the program's code and constants, which can only be read; of the stack that the
/// closure has for itself; and of regions, which its page tables lead to frames. Everything else is absent: the heap, other
/// stacks, thread-local data, and the kernel. So the closure must not call what the C library does for it beyond copying memory.
///
/// Page faults are answered on the host's side: a few instructions of ring 0 hand each to the process. A closure that loops
/// without a fault is not stopped.
pub struct Guest<'m> {
    machine: &'m Machine,
    vm: Vm<'m>,
    root: PhysAddr,
    descriptors: Descriptors,
    own: PhysAddr,
}

/// Why a closure was stopped. The process goes on; what the closure held is never freed.
#[derive(Debug)]
pub enum Stopped {
    /// It touched memory that the guest does not have, or wrote to what it may only read.
    Unregistered {
        /// Where.
        at: VirtAddr,
        /// How; code counts as read.
        access: Access,
        /// The instruction.
        by: VirtAddr,
    },
    /// It made a system call.
    SystemCall {
        /// The instruction.
        by: VirtAddr,
    },
    /// A page of a region cannot be had.
    Failed(Failure),
    /// It faults again and again, though each fault is answered.
    NoProgress {
        /// Where.
        at: VirtAddr,
    },
    /// The CPU raised another exception.
    Exception {
        /// Which one.
        vector: u8,
        /// The instruction.
        by: VirtAddr,
    },
    /// The root of its page tables was taken away.
    Revoked,
    /// The machine cannot go on.
    Machine(Error),
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Stopped {
        Stopped::Machine(error)
    }
}

impl Machine {
    /// A machine with `ram_bytes` of RAM, a power of two and at least 8 MiB: half of it is for page tables.
    ///
    /// # Errors
    /// [`Kind::Invalid`], [`Kind::OutOfSpace`].
    pub fn new(ram_bytes: usize) -> Result<Machine> {
        if !ram_bytes.is_power_of_two() || ram_bytes < 8 << 20 {
            let cause = format!("{ram_bytes} bytes of RAM: it takes a power of two from 8 MiB on");
            return Err(Error::new(Kind::Invalid, "make a machine", cause));
        }
        Ok(Machine { memory: Memory::new(RAM, ram_bytes)?, changes: Changes::default() })
    }

    /// The host's address of something in RAM, which is the guest's too.
    fn address(&self, at: PhysAddr) -> VirtAddr {
        VirtAddr(self.memory.host().as_ptr().expose_provenance() + (at.0 - RAM.0) as usize)
    }
}

fn ruled(error: capability::Error) -> Error {
    Error::new(Kind::Refused, "build a guest's page tables", format!("{error:?}"))
}

impl<'m> Guest<'m> {
    /// A guest with the program in it, and what regions are built from.
    ///
    /// # Errors
    /// [`Kind::Unsupported`]: there is no KVM. [`Kind::OutOfSpace`].
    pub fn new(machine: &'m mut Machine) -> Result<(Guest<'m>, Parts<'m>)> {
        let machine: &'m Machine = machine;
        let mut vm = Vm::new()?;
        vm.add(&machine.memory)?;
        let physical = machine.memory.physical();
        let devices = [(PROGRAM, PROGRAM_LOG2_BYTES)];
        let (mut kernel, space) = Kernel::boot(physical, &machine.changes, &devices).map_err(ruled)?;
        let root = Handle::at_root(1);
        let mut blocks: Vec<_> = (2..64)
            .map(Handle::at_root)
            .filter_map(|handle| {
                kernel.identify(&space, handle).ok().map(|found| (found.kind, found.size_bits, handle))
            })
            .collect();
        blocks.sort_by_key(|block| std::cmp::Reverse(block.1));
        let [(Type::DevFrame, _, program), (_, _, tables_ram), (_, _, ram), (_, _, own_ram), ..] = blocks[..] else {
            return Err(Error::new(Kind::Invalid, "make a guest", "too little RAM"));
        };
        let first_place = blocks.len() as u8 + 2;
        let tables = AddressSpace::new(&mut kernel, space, tables_ram, root, first_place).map_err(ruled)?;
        let own = Object { kind: Type::Frame, size_bits: OWN_LOG2_BYTES };
        kernel.retype(&space, own_ram, own, 1, root, first_place + 2).map_err(ruled)?;
        let own = Handle::at_root(first_place + 2);
        let own_base = kernel.identify(&space, own).map_err(ruled)?.base;
        for (from, to) in [(0, GAP), (STACK, OWN_BYTES)] {
            let range = small(machine.address(own_base.plus(from)), to - from);
            let rights = Rights::READ | Rights::WRITE;
            tables.map(&mut kernel, range, own, from, rights).map_err(|stopped| ruled(stopped.why))?;
        }
        let mut offset = 0;
        for piece in program::pieces()? {
            let Some(host) = piece.host() else { continue };
            // SAFETY: guest-slot: the program's own code and data stay, and the machine only reads them.
            unsafe { vm.lend(PROGRAM.plus(offset), host, piece.len_bytes(), Writing::Reported)? };
            let range = small(VirtAddr(piece.begin), piece.len_bytes());
            tables.map(&mut kernel, range, program, offset, piece.rights).map_err(|stopped| ruled(stopped.why))?;
            offset += piece.len_bytes();
        }
        let descriptors = Descriptors {
            at: machine.address(own_base),
            handlers: entry::exceptions(),
            stack: machine.address(own_base.plus(RING0_STACK_END)),
        };
        descriptors.write(physical, own_base);
        let root_table = kernel.root_table(&space, tables.pml4()).map_err(ruled)?;
        let guest = Guest { machine, vm, root: root_table, descriptors, own: own_base };
        Ok((guest, Parts { kernel, space, root, tables, ram, first_place: first_place + 3 }))
    }

    /// Runs a closure at ring 3. `resolve` is told of each page fault, and `answer` of each [`host_call`](crate::host_call), whose
    /// result it gives: the one way from the closure to the system.
    ///
    /// # Errors
    /// What stopped it.
    ///
    /// # Safety
    /// *guest-call*: until it has ended, nothing is made of the memory that the guest has for itself, and nothing is mapped
    /// where that is mapped; taking it away stops the closure.
    pub unsafe fn run<R: 'static>(
        mut self,
        mut resolve: impl FnMut(Fault) -> Outcome,
        mut answer: impl FnMut(HostCall) -> u64,
        closure: impl FnOnce() -> R + 'static,
    ) -> std::result::Result<R, Stopped> {
        let call = self.prepare(closure)?;
        let mut last = (VirtAddr(0), VirtAddr(0));
        let mut repeated = 0;
        loop {
            self.take_news()?;
            let (vector, code, by) = self.run_to_exception()?;
            if vector == UNDEFINED && by == entry::end() {
                // SAFETY: guest-call: the closure has run to its end, and left its result there.
                let result = unsafe { call.result() };
                return result.ok_or_else(|| Error::new(Kind::Refused, "run a closure", "it left no result").into());
            }
            if vector == UNDEFINED && by == entry::host_call() {
                self.answer(&mut answer)?;
                continue;
            }
            if vector == UNDEFINED && by == entry::system_call() {
                // The instruction leaves the address of the next one there.
                return Err(Stopped::SystemCall { by: VirtAddr(self.vm.registers()?.rcx.wrapping_sub(2) as usize) });
            }
            if vector != PAGE_FAULT {
                return Err(Stopped::Exception { vector: vector as u8, by });
            }
            let at = VirtAddr(self.vm.special_registers()?.cr2 as usize);
            let access = if code & CODE_WRITE != 0 { Access::Write } else { Access::Read };
            repeated = if last == (at, by) { repeated + 1 } else { 0 };
            last = (at, by);
            if repeated > MOST_FAULTS {
                return Err(Stopped::NoProgress { at });
            }
            match resolve(Fault { addr: at, access, thread: 0 }) {
                Outcome::Resolved | Outcome::Retry if code & CODE_EXECUTE == 0 => {}
                Outcome::Failed(failure) => return Err(Stopped::Failed(failure)),
                _ => return Err(Stopped::Unregistered { at, access, by }),
            }
            let mut registers = self.vm.registers()?;
            registers.rip = entry::resume().0 as u64;
            self.vm.set_registers(&registers)?;
        }
    }

    /// Answers what the closure asked, and lets it go on behind that.
    fn answer(&mut self, answer: &mut impl FnMut(HostCall) -> u64) -> Result<()> {
        let mut registers = self.vm.registers()?;
        let call = HostCall { number: registers.rdi, arguments: [registers.rsi, registers.rdx, registers.rcx] };
        registers.rax = answer(call);
        let behind = entry::host_call().0 + entry::UD2_BYTES;
        self.machine.memory.physical().store(self.own.plus(RING0_STACK_END - INSTRUCTION), behind as u64);
        registers.rip = entry::resume_without_code().0 as u64;
        self.vm.set_registers(&registers)
    }

    /// Tells the CPU what has changed while it stood still.
    fn take_news(&mut self) -> std::result::Result<(), Stopped> {
        let changes = &self.machine.changes;
        if changes.left.lock().unwrap_or_else(PoisonError::into_inner).contains(&self.root) {
            return Err(Stopped::Revoked);
        }
        if changes.stale.swap(false, Ordering::Relaxed) {
            self.vm.forget_translations()?;
        }
        Ok(())
    }

    /// Puts the closure where it can be called, and the CPU before it.
    fn prepare<F: FnOnce() -> R, R>(&mut self, closure: F) -> Result<Placed<F, R>> {
        if size_of::<Call<F, R>>() as u64 > CALL_BYTES || align_of::<Call<F, R>>() as u64 > PAGE {
            let cause = format!("it and its result take more than {CALL_BYTES} bytes");
            return Err(Error::new(Kind::Invalid, "place a closure", cause));
        }
        let at = self.machine.address(self.own.plus(CALL));
        let call = Placed(std::ptr::with_exposed_provenance_mut::<Call<F, R>>(at.0));
        // SAFETY: guest-call: the place is large enough, aligned, and the guest's alone; the machine does not run.
        unsafe { call.0.write(Call { closure: Some(closure), result: None }) };
        let stack = self.machine.address(self.own.plus(OWN_BYTES));
        let start = Start { root: self.root, code: entry::begin(), stack, fs_base: 0 };
        self.vm.begin(&self.descriptors, start)?;
        self.vm.share_vectors()?;
        self.vm.take_system_calls(entry::system_call())?;
        let mut registers = self.vm.registers()?;
        registers.rbx = (carry_out::<F, R> as extern "C" fn(*mut Call<F, R>)) as usize as u64;
        registers.rdi = at.0 as u64;
        self.vm.set_registers(&registers)?;
        Ok(call)
    }

    /// Lets it run: the exception that ended that, its error code, and the instruction.
    fn run_to_exception(&mut self) -> std::result::Result<(usize, u64, VirtAddr), Stopped> {
        let port = loop {
            match self.vm.run()? {
                Exit::Port(port) => break port,
                Exit::Interrupted => {}
                // Memory that may only be read shows as a store to none.
                Exit::Store(at) => return Err(lost(format!("it wrote to physical address {:#x}", at.0)).into()),
                other => return Err(lost(format!("{other:?}")).into()),
            }
        };
        let vector = usize::from(port.wrapping_sub(entry::FIRST_PORT));
        if vector >= entry::VECTORS {
            return Err(lost(format!("it wrote to port {port:#x}")).into());
        }
        let frame = |below: u64| self.machine.memory.physical().load(self.own.plus(RING0_STACK_END - below));
        Ok((vector, frame(ERROR_CODE), VirtAddr(frame(INSTRUCTION) as usize)))
    }
}

fn lost(cause: String) -> Error {
    Error::new(Kind::Refused, "run a closure", cause)
}

const fn small(at: VirtAddr, len_bytes: u64) -> Range {
    Range { at, len_bytes, pages: PageSize::Small4KiB }
}

/// A closure, and where its result goes.
struct Call<F, R> {
    closure: Option<F>,
    result: Option<R>,
}

struct Placed<F, R>(*mut Call<F, R>);

impl<F, R> Placed<F, R> {
    /// # Safety
    /// *guest-call*: the machine has stopped, and the result was not taken before.
    unsafe fn result(self) -> Option<R> {
        // SAFETY: guest-call: as the caller promises.
        unsafe { (*self.0).result.take() }
    }
}

/// Asks the process, from within a closure in a guest: what [`Guest::run`] was given to answer with is called there, between two
/// instructions of the closure. Memory that the guest has for itself is at the same addresses on both sides; regions are the guest's
/// alone.
///
/// # Safety
/// *guest-host-call*: a guest runs this. Elsewhere it ends the process with `SIGILL`.
pub unsafe fn host_call(number: u64, arguments: [u64; 3]) -> u64 {
    // SAFETY: guest-host-call: as the caller promises.
    unsafe { entry::ask(HostCall { number, arguments }) }
}

/// What the guest calls.
extern "C" fn carry_out<F: FnOnce() -> R, R>(call: *mut Call<F, R>) {
    // SAFETY: guest-call: it lies in the guest's own memory, and the process does not touch it while the guest runs.
    let call = unsafe { &mut *call };
    if let Some(closure) = call.closure.take() {
        call.result = Some(closure());
    }
}
