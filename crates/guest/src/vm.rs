//! One virtual machine with one CPU, through KVM.

use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_MEM_READONLY, Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region, kvm_xcrs,
};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd, VmFd};
use selfpage_core::addr::VirtAddr;
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::PageSize;

use crate::descriptors::{Descriptors, RING0_CODE, RING3_CODE, RING3_DATA, TASK};
use crate::error::{Error, Kind, Result};
use crate::memory::Memory;
use crate::statistics::Statistics;

/// Protection, write protection also for ring 0, and paging; the old signal for floating point errors is off.
const CR0: u64 = 0x8005_0033;
/// Long mode's entries, and the SSE registers.
const CR4: u64 = 0x220;
/// Long mode, the no-execute bit, and SYSCALL.
const EFER: u64 = 0xd01;

/// The leaf of CPUID, and the bit in its edx, that say whether there are pages of 1 GiB.
const EXTENDED_FEATURES: u32 = 0x8000_0001;
const HUGE_PAGES: u32 = 1 << 26;

/// A virtual machine with one CPU, and the memory that it was given.
pub struct Vm<'m> {
    cpu: VcpuFd,
    vm: VmFd,
    largest_page: PageSize,
    lent: Vec<kvm_userspace_memory_region>,
    memory: PhantomData<&'m Memory>,
}

/// Where ring 3 begins.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The root of the page tables.
    pub root: PhysAddr,
    /// The first instruction.
    pub code: VirtAddr,
    /// The end of the stack.
    pub stack: VirtAddr,
    /// Where the thread's own data is, as the program has it.
    pub fs_base: u64,
}

/// Whether the machine may write to memory that it was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writing {
    /// It may.
    Allowed,
    /// A write ends the run with [`Exit::Store`].
    Reported,
}

/// Why the machine stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// It wrote to a port.
    Port(u16),
    /// It wrote where it has no memory, or none to write.
    Store(PhysAddr),
    /// It read where it has no memory.
    Load(PhysAddr),
    /// It waits for an interrupt.
    Halt,
    /// It met a fault while it handled one while it handled one.
    TripleFault,
    /// A signal came to the thread: run it again.
    Interrupted,
    /// KVM could not go on: what it calls that.
    Lost(&'static str),
}

impl<'m> Vm<'m> {
    /// A machine without memory. Its CPU is what KVM can show of this one.
    ///
    /// # Errors
    /// [`Kind::Unsupported`]: KVM is absent, forbidden, or lacks something. [`Kind::OutOfSpace`].
    pub fn new() -> Result<Vm<'m>> {
        let kvm = Kvm::new().map_err(|errno| Error::no_kvm("open /dev/kvm", system(errno)))?;
        if kvm.get_api_version() != 12 || !kvm.check_extension(Cap::UserMemory) {
            let cause = "this KVM is older than Linux 2.6.26; a newer kernel has what is needed";
            return Err(Error::new(Kind::Unsupported, "open /dev/kvm", cause));
        }
        let vm = kvm.create_vm().map_err(|errno| Error::no_kvm("make a virtual machine", system(errno)))?;
        let cpu = vm.create_vcpu(0).map_err(refused("make a virtual CPU"))?;
        let features = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(refused("ask for a CPU's features"))?;
        cpu.set_cpuid2(&features).map_err(refused("set a virtual CPU's features"))?;
        let extended = features.as_slice().iter().find(|leaf| leaf.function == EXTENDED_FEATURES);
        let largest_page = match extended {
            Some(leaf) if leaf.edx & HUGE_PAGES != 0 => PageSize::Huge1GiB,
            _ => PageSize::Large2MiB,
        };
        Ok(Vm { cpu, vm, largest_page, lent: Vec::new(), memory: PhantomData })
    }

    /// The largest pages that its CPU has. An entry for larger ones has a reserved bit set: what goes through it faults.
    pub const fn largest_page(&self) -> PageSize {
        self.largest_page
    }

    /// Gives the machine physical memory.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: there is some at one of its addresses already.
    pub fn add(&mut self, memory: &'m Memory) -> Result<()> {
        let physical = memory.physical();
        // SAFETY: guest-slot: the mapping lives for 'm, and is read and written as atomics only.
        unsafe { self.lend(physical.first(), memory.host(), physical.len_bytes(), Writing::Allowed) }
    }

    /// Gives the machine a mapping of the process as its physical memory from `first` on.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: address or length are no multiples of pages, or there is memory already.
    ///
    /// # Safety
    /// *guest-slot*: the mapping stays as long as the machine runs, and no reference lives that the machine's accesses make
    /// wrong.
    pub unsafe fn lend(&mut self, first: PhysAddr, host: NonNull<u8>, len_bytes: u64, writing: Writing) -> Result<()> {
        let region = kvm_userspace_memory_region {
            slot: self.lent.len() as u32,
            flags: if writing == Writing::Allowed { 0 } else { KVM_MEM_READONLY },
            guest_phys_addr: first.0,
            memory_size: len_bytes,
            userspace_addr: host.as_ptr() as u64,
        };
        // SAFETY: guest-slot: as the caller promises.
        let given = unsafe { self.vm.set_user_memory_region(region) };
        given.map_err(refused("give memory to a virtual machine"))?;
        self.lent.push(region);
        Ok(())
    }

    /// Makes the machine see what the process has changed in page tables in it. A KVM that shadows them looks at an entry again
    /// only when the guest itself writes to it; so the memory is taken away and given again, and all shadows with it.
    ///
    /// # Errors
    /// KVM refused.
    pub fn forget_translations(&mut self) -> Result<()> {
        for region in self.lent.iter().filter(|region| region.flags & KVM_MEM_READONLY == 0) {
            for region in [kvm_userspace_memory_region { memory_size: 0, ..*region }, *region] {
                // SAFETY: guest-slot: as it was when it was lent.
                let given = unsafe { self.vm.set_user_memory_region(region) };
                given.map_err(refused("give memory to a virtual machine again"))?;
            }
        }
        Ok(())
    }

    /// Has system calls of ring 3 go to `entry`, at ring 0, on the stack that they came with. Call it after [`Vm::begin`].
    ///
    /// # Errors
    /// KVM refused.
    pub fn take_system_calls(&mut self, entry: VirtAddr) -> Result<()> {
        const STAR: u32 = 0xc000_0081;
        const LSTAR: u32 = 0xc000_0082;
        const FMASK: u32 = 0xc000_0084;
        /// Interrupts, steps, directions, ...: none is wanted in there.
        const ALL_FLAGS: u64 = 0x47700;
        let register = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let all = [
            // The way back is not used.
            register(STAR, 0x23 << 48 | u64::from(RING0_CODE) << 32),
            register(LSTAR, entry.0 as u64),
            register(FMASK, ALL_FLAGS),
        ];
        let all = Msrs::from_entries(&all)
            .map_err(|error| Error::new(Kind::Refused, "take system calls", format!("{error:?}")))?;
        let set = self.cpu.set_msrs(&all).map_err(refused("set a virtual CPU's model-specific registers"))?;
        if set < 3 {
            return Err(Error::new(Kind::Refused, "take system calls", "KVM has no such registers"));
        }
        Ok(())
    }

    /// Lets ring 3 use the vector registers that this process uses: the C library copies memory with the widest that there are.
    /// Call it after [`Vm::begin`].
    ///
    /// # Errors
    /// KVM refused.
    pub fn share_vectors(&mut self) -> Result<()> {
        const XSAVE: u64 = 1 << 18;
        let Some(value) = crate::entry::vectors() else { return Ok(()) };
        let mut special = self.special_registers()?;
        special.cr4 |= XSAVE;
        self.set_special_registers(&special)?;
        let mut all = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
        all.xcrs[0].value = value;
        self.cpu.set_xcrs(&all).map_err(refused("set a virtual CPU's extended registers"))
    }

    /// Makes the CPU begin at ring 3, with page tables on. The descriptors must have been written to the page that is mapped where
    /// they say.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: KVM takes no such registers.
    pub fn begin(&mut self, descriptors: &Descriptors, start: Start) -> Result<()> {
        let mut special = self.special_registers()?;
        (special.cr0, special.cr3, special.cr4, special.efer) = (CR0, start.root.0, CR4, EFER);
        (special.gdt.base, special.gdt.limit) = descriptors.segments_at();
        (special.idt.base, special.idt.limit) = descriptors.handlers_at();
        let (base, limit) = descriptors.task_at();
        // 11: in use, of 64 bits.
        special.tr =
            kvm_segment { base, limit: limit.into(), selector: TASK, type_: 11, present: 1, ..Default::default() };
        let data = kvm_segment {
            limit: u32::MAX,
            selector: RING3_DATA,
            // Writable, and used before.
            type_: 3,
            present: 1,
            dpl: 3,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        special.ss = data;
        // Executable, readable, and used before.
        special.cs = kvm_segment { selector: RING3_CODE, type_: 11, db: 0, l: 1, ..data };
        let none = kvm_segment { selector: 0, ..data };
        (special.ds, special.es, special.gs) = (none, none, none);
        special.fs = kvm_segment { base: start.fs_base, ..none };
        self.set_special_registers(&special)?;
        self.set_registers(&kvm_regs {
            rip: start.code.0 as u64,
            rsp: start.stack.0 as u64,
            // Always set; and interrupts, of which there are none.
            rflags: 0x202,
            ..Default::default()
        })
    }

    /// What KVM itself counts of the CPU; `None`: it does not say.
    pub fn statistics(&self) -> Option<Statistics> {
        Statistics::of(&self.cpu)
    }

    /// The registers.
    ///
    /// # Errors
    /// KVM refused.
    pub fn registers(&self) -> Result<kvm_regs> {
        self.cpu.get_regs().map_err(refused("read a virtual CPU's registers"))
    }

    /// Sets them.
    ///
    /// # Errors
    /// KVM refused.
    pub fn set_registers(&mut self, registers: &kvm_regs) -> Result<()> {
        self.cpu.set_regs(registers).map_err(refused("set a virtual CPU's registers"))
    }

    /// Segments, control registers and tables.
    ///
    /// # Errors
    /// KVM refused.
    pub fn special_registers(&self) -> Result<kvm_sregs> {
        self.cpu.get_sregs().map_err(refused("read a virtual CPU's special registers"))
    }

    /// Sets them.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: the CPU cannot be in such a state.
    pub fn set_special_registers(&mut self, registers: &kvm_sregs) -> Result<()> {
        self.cpu.set_sregs(registers).map_err(refused("set a virtual CPU's special registers"))
    }

    /// Runs the machine until it stops.
    ///
    /// # Errors
    /// KVM refused.
    pub fn run(&mut self) -> Result<Exit> {
        match self.cpu.run() {
            Ok(exit) => Ok(match exit {
                VcpuExit::IoOut(port, _) => Exit::Port(port),
                VcpuExit::MmioWrite(at, _) => Exit::Store(PhysAddr(at)),
                VcpuExit::MmioRead(at, _) => Exit::Load(PhysAddr(at)),
                VcpuExit::Hlt => Exit::Halt,
                VcpuExit::Shutdown => Exit::TripleFault,
                VcpuExit::Intr => Exit::Interrupted,
                VcpuExit::InternalError => Exit::Lost("KVM_EXIT_INTERNAL_ERROR"),
                VcpuExit::FailEntry(..) => Exit::Lost("KVM_EXIT_FAIL_ENTRY"),
                _ => Exit::Lost("an exit without a name here"),
            }),
            Err(errno) if system(errno).kind() == io::ErrorKind::Interrupted => Ok(Exit::Interrupted),
            Err(errno) => Err(refused("run a virtual machine")(errno)),
        }
    }

    /// Which signals the thread has blocked while the machine runs, in place of those that it has blocked otherwise. One that comes
    /// ends the run with [`Exit::Interrupted`].
    ///
    /// # Errors
    /// KVM refused.
    pub fn set_signal_mask(&mut self, mask: &libc::sigset_t) -> Result<()> {
        /// `_IOW(KVMIO, 0x8b, struct kvm_signal_mask)`.
        const KVM_SET_SIGNAL_MASK: libc::Ioctl = 0x4004_ae8b;
        /// As long as the kernel's own set.
        const LEN: usize = 8;
        let mut request = [0; 4 + LEN];
        request[..4].copy_from_slice(&(LEN as u32).to_ne_bytes());
        for signal in 1..=64u8 {
            // SAFETY: guest-limit: a set that was filled in.
            let blocked = unsafe { libc::sigismember(mask, signal.into()) } == 1;
            request[4 + usize::from(signal - 1) / 8] |= u8::from(blocked) << ((signal - 1) % 8);
        }
        // SAFETY: guest-limit: KVM reads as many bytes as the first word says.
        if unsafe { libc::ioctl(self.cpu.as_raw_fd(), KVM_SET_SIGNAL_MASK, request.as_ptr()) } != 0 {
            return Err(Error::system("set the signals of a virtual CPU", io::Error::last_os_error()));
        }
        Ok(())
    }

    /// Where the CPU's page tables lead, by KVM's own walk: it asks for no right, and marks entries as accessed.
    ///
    /// # Errors
    /// KVM refused.
    pub fn translate(&self, at: VirtAddr) -> Result<Option<PhysAddr>> {
        let found = self.cpu.translate_gva(at.0 as u64).map_err(refused("translate an address"))?;
        Ok((found.valid != 0).then_some(PhysAddr(found.physical_address)))
    }
}

fn system(errno: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(errno.errno())
}

fn refused(operation: &'static str) -> impl Fn(kvm_ioctls::Error) -> Error {
    move |errno| Error::system(operation, system(errno))
}
