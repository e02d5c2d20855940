//! A closure of this process in a virtual machine, on page tables that were built under the rules.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{self, Handle, Kernel, Object, Rights, Space, Type};
use selfpage_core::fault::Failure;
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::region::Access;
use selfpage_core::tables::{AddressSpace, PageSize, Range};

use crate::descriptors::Descriptors;
use crate::entry::{self, Call, HANDLER_ROOT, INTERRUPTED, UNDEFINED};
use crate::error::{Error, Kind, Result};
use crate::handler::{self, Changes, Counts, Handler, Shared, Station};
use crate::limit::Limit;
use crate::memory::Memory;
use crate::private::Private;
use crate::program;
use crate::statistics::Statistics;
use crate::steps::Steps;
use crate::vm::{Exit, Start, Vm, Writing};

/// Where RAM begins: not at 0, so that a number that is no address shows.
const RAM: PhysAddr = PhysAddr(0x4000_0000);
/// Where the pieces of the program are: a device to the rules, since nothing is ever made of them.
const PROGRAM: PhysAddr = PhysAddr(32 << 30);
const PROGRAM_LOG2_BYTES: u8 = 35;

const PAGE: u64 = 4096;
/// What the closure itself needs, in one Frame: descriptors, the stack of ring 0, the closure with its result, a gap, its stack.
const OWN_LOG2_BYTES: u8 = 21;
const RING0_STACK: u64 = PAGE;
const RING0_STACK_END: u64 = 2 * PAGE;
const CALL: u64 = 2 * PAGE;
const CALL_BYTES: u64 = 16 * PAGE;
const GAP: u64 = CALL + CALL_BYTES;
const STACK: u64 = GAP + PAGE;
const OWN_BYTES: u64 = 1 << OWN_LOG2_BYTES;

/// Where an exception leaves the address of the instruction, in bytes below the top of the stack.
const INSTRUCTION: u64 = 40;

/// Physical memory for a guest.
pub struct Machine {
    memory: Memory,
    private: Private,
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
    /// Where all of this must be kept that the handler is to use.
    pub private: &'m Private,
    /// What the guest has for itself, to be read.
    pub(crate) own: Handle,
}

/// A virtual machine with one closure to run.
///
/// **Experimental.** Guest address is host address: of the program's code and constants, which can only be read; of the stack that the
/// closure has for itself; and of regions, which its page tables lead to frames. Everything else is absent: the heap, other
/// stacks, thread-local data, and the kernel. So the closure must not call what the C library does for it beyond copying memory.
///
/// Its page faults are answered by a [`Handler`], in the same machine and at the same ring, but on page tables of its own: a load of
/// the root is all that parts the two, so the closure cannot write what the handler works on.
pub struct Guest<'m> {
    machine: &'m Machine,
    shared: &'m Shared,
    vm: Vm<'m>,
    root: PhysAddr,
    descriptors: Descriptors,
    own: PhysAddr,
    limit: Option<Duration>,
}

/// Who runs in a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The closure.
    Closure,
    /// What answers its faults.
    Handler,
}

/// An exception that ended a run.
struct Exception {
    side: Side,
    vector: usize,
    by: VirtAddr,
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
    /// Its handler met an exception, or ended itself.
    Handler {
        /// Which one.
        vector: u8,
        /// Where it touched memory that it does not have, if that was it.
        at: Option<VirtAddr>,
        /// The instruction.
        by: VirtAddr,
    },
    /// Its time was over.
    TimedOut {
        /// Whether the closure or the handler ran then.
        side: Side,
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
    /// A machine with `ram_bytes` of RAM, a power of two and at least 8 MiB: half of it is for page tables. Beside that its handler
    /// has `private_bytes`, 1 MiB to 512 MiB.
    ///
    /// # Errors
    /// [`Kind::Invalid`], [`Kind::OutOfSpace`].
    pub fn new(ram_bytes: usize, private_bytes: usize) -> Result<Machine> {
        if !ram_bytes.is_power_of_two() || ram_bytes < 8 << 20 {
            let cause = format!("{ram_bytes} bytes of RAM: it takes a power of two from 8 MiB on");
            return Err(Error::new(Kind::Invalid, "make a machine", cause));
        }
        Ok(Machine { memory: Memory::new(RAM, ram_bytes)?, private: Private::new(private_bytes)? })
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
        let private = &machine.private;
        if entry::vectors().is_none() {
            return Err(Error::new(Kind::Unsupported, "make a guest", "it takes an x86-64 processor with XSAVE"));
        }
        let mut vm = Vm::new()?;
        vm.add(&machine.memory)?;
        private.lend(&mut vm)?;
        // SAFETY: guest-memory: the private memory goes when the RAM goes.
        let physical = unsafe { machine.memory.view() };
        let shared: &'m Shared = private.keep(Shared {
            physical,
            changes: Changes::default(),
            counts: Counts::default(),
            stepping: AtomicBool::new(false),
        })?;
        let physical = &shared.physical;
        let devices = [(PROGRAM, PROGRAM_LOG2_BYTES)];
        let (mut kernel, space) = Kernel::boot(physical, shared, &devices).map_err(ruled)?;
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
        // The closure may ask for other rights to its pages: no more than what they were mapped with.
        let (own_read, program_read) = (Handle::at_root(first_place + 3), Handle::at_root(first_place + 4));
        kernel.copy(&space, own, root, first_place + 3, Rights::READ).map_err(ruled)?;
        kernel.copy(&space, program, root, first_place + 4, Rights::READ | Rights::EXECUTE).map_err(ruled)?;
        let mut map = |at, len_bytes, from, offset_bytes, rights| {
            let mapped = tables.map(&mut kernel, small(at, len_bytes), from, offset_bytes, rights);
            mapped.map_err(|stopped| ruled(stopped.why))
        };
        let writable = Rights::READ | Rights::WRITE;
        let ram_at = machine.address(RAM);
        private.map(ram_at, RAM, physical.len_bytes(), writable)?;
        map(machine.address(own_base), PAGE, own_read, 0, Rights::READ)?;
        for (from, to) in [(RING0_STACK, GAP), (STACK, OWN_BYTES)] {
            map(machine.address(own_base.plus(from)), to - from, own, from, writable)?;
        }
        let mut offset = 0;
        for piece in program::pieces()? {
            let Some(host) = piece.host() else { continue };
            // SAFETY: guest-slot: the program's own code and data stay, and the machine only reads them.
            unsafe { vm.lend(PROGRAM.plus(offset), host, piece.len_bytes(), Writing::Reported)? };
            let at = VirtAddr(piece.begin);
            map(at, piece.len_bytes(), program_read, offset, piece.rights)?;
            private.map(at, PROGRAM.plus(offset), piece.len_bytes(), piece.rights)?;
            offset += piece.len_bytes();
        }
        let descriptors = Descriptors {
            at: machine.address(own_base),
            handlers: entry::exceptions(),
            stack: machine.address(own_base.plus(RING0_STACK_END)),
        };
        descriptors.write(physical, own_base);
        physical.store(own_base.plus(HANDLER_ROOT), private.root().0);
        private.map(descriptors.at, private.descriptors(), PAGE, writable)?;
        let root_table = kernel.root_table(&space, tables.pml4()).map_err(ruled)?;
        private.prepare(&descriptors, machine.address(own_base.plus(RING0_STACK_END - INTERRUPTED)), root_table);
        shared.changes.root.store(root_table.0, Ordering::Relaxed);
        let guest = Guest { machine, shared, vm, root: root_table, descriptors, own: own_base, limit: None };
        let first_place = first_place + 5;
        Ok((guest, Parts { kernel, space, root, tables, ram, first_place, private, own: own_read }))
    }

    /// How long a closure may run, the process's own time in between included. Without a limit it runs as long as it likes.
    pub const fn set_limit(&mut self, limit: Duration) {
        self.limit = Some(limit);
    }

    /// What tells the CPU where exceptions go. The closure can read it.
    pub const fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// How often what happened.
    pub const fn counts(&self) -> &'m Counts {
        &self.shared.counts
    }

    /// Counts instructions of ring 3, of the closure and of its handler.
    pub const fn steps(&self) -> Steps<'m> {
        let own = self.own.plus(RING0_STACK_END);
        Steps { shared: self.shared, closure_stack: own, private: &self.machine.private }
    }

    /// What KVM itself counts of this guest's CPU; `None`: it does not say.
    pub fn statistics(&self) -> Option<Statistics> {
        self.vm.statistics()
    }

    /// Runs a closure at ring 3. `handler` answers its page faults in there. `answer` is told of each
    /// [`host_call`], whose result it gives: the one way to the system.
    ///
    /// # Errors
    /// What stopped it.
    ///
    /// # Safety
    /// *guest-call*: until it has ended, nothing is made of the memory that the guest has for itself, and nothing is mapped
    /// where that is mapped; taking it away stops the closure. *guest-private*: the process works on nothing that the handler works
    /// on but in `answer`.
    pub unsafe fn run<R: 'static>(
        mut self,
        handler: impl Handler + 'static,
        mut answer: impl FnMut(Call) -> u64,
        closure: impl FnOnce() -> R + 'static,
    ) -> std::result::Result<R, Stopped> {
        let call = self.prepare(closure)?;
        let mut station = self.place(handler)?;
        let limit = self.limit.map(|limit| Limit::new(limit, &mut self.vm)).transpose()?;
        loop {
            self.take_news()?;
            let Exception { side, vector, by } = self.run_to_exception(limit.as_ref())?;
            match side {
                _ if vector == UNDEFINED && by == entry::host_call() => self.answer(side, &mut answer)?,
                Side::Closure if vector == UNDEFINED && by == entry::end() => {
                    // SAFETY: guest-call: the closure has run to its end, and left its result there.
                    let result = unsafe { call.result() };
                    return result
                        .ok_or_else(|| Error::new(Kind::Refused, "run a closure", "it left no result").into());
                }
                Side::Closure if vector == UNDEFINED && by == entry::system_call() => {
                    // The instruction leaves the address of the next one there.
                    return Err(Stopped::SystemCall {
                        by: VirtAddr(self.vm.registers()?.rcx.wrapping_sub(2) as usize),
                    });
                }
                Side::Closure => return Err(Stopped::Exception { vector: vector as u8, by }),
                Side::Handler if vector == UNDEFINED && by == entry::stopped() => {
                    // SAFETY: guest-private: the handler has ended.
                    let verdict = unsafe { station.as_mut() }.verdict.take();
                    return Err(verdict.unwrap_or(Stopped::Handler { vector: vector as u8, at: None, by }));
                }
                Side::Handler => {
                    let at = match vector {
                        entry::PAGE_FAULT => Some(VirtAddr(self.vm.special_registers()?.cr2 as usize)),
                        _ => None,
                    };
                    return Err(Stopped::Handler { vector: vector as u8, at, by });
                }
            }
        }
    }

    /// Answers what was asked, and lets whoever asked go on behind that.
    fn answer(&mut self, side: Side, answer: &mut impl FnMut(Call) -> u64) -> Result<()> {
        let mut registers = self.vm.registers()?;
        let call = Call { number: registers.rdi, arguments: [registers.rsi, registers.rdx, registers.rcx] };
        registers.rax = answer(call);
        let behind = entry::host_call().0 + entry::UD2_BYTES;
        if side == Side::Closure {
            self.steps().apply();
        }
        let (memory, end) = self.ring0_stack(side);
        memory.store(PhysAddr(end.0 - INSTRUCTION), behind as u64);
        registers.rip = entry::resume_without_code().0 as u64;
        self.vm.set_registers(&registers)
    }

    /// Tells the CPU what the process has changed while it stood still.
    fn take_news(&mut self) -> std::result::Result<(), Stopped> {
        let changes = &self.shared.changes;
        if changes.revoked.load(Ordering::Relaxed) {
            return Err(Stopped::Revoked);
        }
        if changes.stale.swap(false, Ordering::Relaxed) {
            self.vm.forget_translations()?;
        }
        Ok(())
    }

    /// Puts the handler where it can be called.
    fn place<H: Handler>(&mut self, handler: H) -> Result<NonNull<Station<'m, H>>> {
        let station = Station::new(handler, self.shared, self.own.plus(RING0_STACK_END - INTERRUPTED));
        let station = NonNull::from(self.machine.private.keep(station)?);
        let function = handler::attend::<H> as extern "C" fn(*mut Station<'_, H>, *const entry::Saved);
        let argument = station.as_ptr().expose_provenance();
        self.machine.private.set_handler(function as usize as u64, argument as u64);
        Ok(station)
    }

    /// Where ring 0 finds what was pushed: the memory, and the end of that stack.
    const fn ring0_stack(&self, side: Side) -> (&PhysMemory, PhysAddr) {
        match side {
            Side::Closure => (&self.shared.physical, self.own.plus(RING0_STACK_END)),
            Side::Handler => self.machine.private.ring0_stack(),
        }
    }

    /// Puts the closure where it can be called, and the CPU before it.
    fn prepare<F: FnOnce() -> R, R>(&mut self, closure: F) -> Result<Placed<F, R>> {
        if size_of::<Errand<F, R>>() as u64 > CALL_BYTES || align_of::<Errand<F, R>>() as u64 > PAGE {
            let cause = format!("it and its result take more than {CALL_BYTES} bytes");
            return Err(Error::new(Kind::Invalid, "place a closure", cause));
        }
        let at = self.machine.address(self.own.plus(CALL));
        let call = Placed(std::ptr::with_exposed_provenance_mut::<Errand<F, R>>(at.0));
        // SAFETY: guest-call: the place is large enough, aligned, and the guest's alone; the machine does not run.
        unsafe { call.0.write(Errand { closure: Some(closure), result: None }) };
        let stack = self.machine.address(self.own.plus(OWN_BYTES));
        let start = Start { root: self.root, code: entry::begin(), stack, fs_base: 0 };
        self.vm.begin(&self.descriptors, start)?;
        self.vm.share_vectors()?;
        self.vm.take_system_calls(entry::system_call())?;
        let mut registers = self.vm.registers()?;
        registers.rbx = (carry_out::<F, R> as extern "C" fn(*mut Errand<F, R>)) as usize as u64;
        registers.rdi = at.0 as u64;
        self.vm.set_registers(&registers)?;
        Ok(call)
    }

    /// Lets it run: the exception that ended that.
    fn run_to_exception(&mut self, limit: Option<&Limit>) -> std::result::Result<Exception, Stopped> {
        let port = loop {
            let exit = self.vm.run()?;
            self.shared.counts.exits.fetch_add(1, Ordering::Relaxed);
            match exit {
                Exit::Port(port) => break port,
                Exit::Interrupted => {
                    let Some(limit) = limit else { continue };
                    limit.hear();
                    if limit.is_over() {
                        return Err(self.timed_out()?);
                    }
                }
                // Memory that may only be read shows as a store to none.
                Exit::Store(at) => return Err(lost(format!("it wrote to physical address {:#x}", at.0)).into()),
                other => return Err(lost(format!("{other:?}")).into()),
            }
        };
        if limit.is_some_and(Limit::is_over) {
            return Err(self.timed_out()?);
        }
        let vector = usize::from(port.wrapping_sub(entry::FIRST_PORT));
        let (side, vector) = match vector {
            0..entry::VECTORS => (Side::Closure, vector),
            _ if vector < 2 * entry::VECTORS => (Side::Handler, vector - entry::VECTORS),
            _ => return Err(lost(format!("it wrote to port {port:#x}")).into()),
        };
        let (memory, end) = self.ring0_stack(side);
        Ok(Exception { side, vector, by: VirtAddr(memory.load(PhysAddr(end.0 - INSTRUCTION)) as usize) })
    }

    fn timed_out(&self) -> Result<Stopped> {
        let in_handler = self.vm.special_registers()?.cr3 == self.machine.private.root().0;
        let side = if in_handler { Side::Handler } else { Side::Closure };
        Ok(Stopped::TimedOut { side, by: VirtAddr(self.vm.registers()?.rip as usize) })
    }
}

fn lost(cause: String) -> Error {
    Error::new(Kind::Refused, "run a closure", cause)
}

const fn small(at: VirtAddr, len_bytes: u64) -> Range {
    Range { at, len_bytes, pages: PageSize::Small4KiB }
}

/// A closure, and where its result goes.
struct Errand<F, R> {
    closure: Option<F>,
    result: Option<R>,
}

struct Placed<F, R>(*mut Errand<F, R>);

impl<F, R> Placed<F, R> {
    /// # Safety
    /// *guest-call*: the machine has stopped, and the result was not taken before.
    unsafe fn result(self) -> Option<R> {
        // SAFETY: guest-call: as the caller promises.
        unsafe { (*self.0).result.take() }
    }
}

/// Asks the process, from within a closure in a guest or its handler: what [`Guest::run`] was given to answer with is called there,
/// between two instructions. Memory that the guest has for itself is at the same addresses on both sides; regions are the guest's
/// alone.
///
/// # Safety
/// *guest-host-call*: a guest runs this. Elsewhere it ends the process with `SIGILL`.
pub unsafe fn host_call(number: u64, arguments: [u64; 3]) -> u64 {
    // SAFETY: guest-host-call: as the caller promises.
    unsafe { entry::ask_host(Call { number, arguments }) }
}

/// Asks the handler, from within a closure in a guest: [`Handler::answer`] is called in there, without the process. What it reads and
/// writes of the closure's is at the same address for it only where the guest has it for itself.
///
/// # Safety
/// *guest-host-call*: a closure in a guest runs this. Elsewhere it ends the process with `SIGSEGV`.
pub unsafe fn handler_call(number: u64, arguments: [u64; 3]) -> u64 {
    // SAFETY: guest-host-call: as the caller promises.
    unsafe { entry::ask_handler(Call { number, arguments }) }
}

/// What the guest calls.
extern "C" fn carry_out<F: FnOnce() -> R, R>(call: *mut Errand<F, R>) {
    // SAFETY: guest-call: it lies in the guest's own memory, and the process does not touch it while the guest runs.
    let call = unsafe { &mut *call };
    if let Some(closure) = call.closure.take() {
        call.result = Some(closure());
    }
}
