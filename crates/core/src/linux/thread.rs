//! The calling thread: its number, its CPUs, its descriptor table.

use super::errno::Errno;
use super::syscall::call;
use linux_raw_sys::general as raw;

/// The kernel's number of the calling thread.
pub fn id() -> u32 {
    // SAFETY: syscall-contract: the call takes no pointer and cannot fail.
    unsafe { call(raw::__NR_gettid, [0; 6]) }.unwrap_or(0) as u32
}

/// Whether there is a thread with this number, of whatever process.
pub fn exists(thread: u32) -> bool {
    // SAFETY: syscall-contract: the call takes no pointer; signal 0 is none.
    let asked = unsafe { call(raw::__NR_tkill, [thread as usize, 0, 0, 0, 0, 0]) };
    asked != Err(Errno::SRCH)
}

/// Where the calling thread's own block of memory is: other threads that live have other ones, and it is known without a call of the
/// kernel. After fork(2) it is the same.
pub fn block() -> usize {
    let block;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: thread-block: reads the word that the block begins with.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: thread-block: reads the register that has its address.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) block, options(nomem, nostack, preserves_flags));
    }
    block
}

/// The CPU that the calling thread runs on at this moment.
pub fn cpu() -> u32 {
    let mut cpu = 0u32;
    // SAFETY: syscall-contract: the number is borrowed until the call returns; the other pointers may be null.
    let _ = unsafe { call(raw::__NR_getcpu, [&raw mut cpu as usize, 0, 0, 0, 0, 0]) };
    cpu
}

/// Lets another thread run.
pub fn give_way() {
    // SAFETY: syscall-contract: the call takes no pointer and cannot fail.
    let _ = unsafe { call(raw::__NR_sched_yield, [0; 6]) };
}

/// A set of CPUs, up to number 1023.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuSet([u64; 16]);

impl CpuSet {
    /// No CPU.
    pub const NONE: CpuSet = CpuSet([0; 16]);

    /// This one CPU.
    pub fn only(cpu: u32) -> CpuSet {
        let mut set = CpuSet::NONE;
        if let Some(word) = set.0.get_mut(cpu as usize / 64) {
            *word = 1 << (cpu % 64);
        }
        set
    }

    /// The set without this CPU.
    pub fn without(mut self, cpu: u32) -> CpuSet {
        if let Some(word) = self.0.get_mut(cpu as usize / 64) {
            *word &= !(1 << (cpu % 64));
        }
        self
    }

    /// Whether the CPU is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.get(cpu as usize / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1)
    }

    /// Whether no CPU is in the set.
    pub fn is_empty(&self) -> bool {
        *self == CpuSet::NONE
    }

    /// Where the thread `thread` may run (0: the calling thread).
    ///
    /// # Errors
    /// `ESRCH`: no such thread. `EINVAL`: the machine has more than 1024 CPUs.
    pub fn of(thread: u32) -> Result<CpuSet, Errno> {
        let mut set = CpuSet::NONE;
        let pointer = set.0.as_mut_ptr() as usize;
        // SAFETY: syscall-contract: the set is borrowed until the call returns, and its size is stated.
        unsafe { call(raw::__NR_sched_getaffinity, [thread as usize, size_of::<CpuSet>(), pointer, 0, 0, 0]) }?;
        Ok(set)
    }

    /// Lets the thread `thread` (0: the calling thread) run on these CPUs only.
    ///
    /// # Errors
    /// `EINVAL`: none of them may be used. `ESRCH`: no such thread.
    pub fn bind(&self, thread: u32) -> Result<(), Errno> {
        let pointer = self.0.as_ptr() as usize;
        // SAFETY: syscall-contract: the set is borrowed until the call returns, and its size is stated.
        unsafe { call(raw::__NR_sched_setaffinity, [thread as usize, size_of::<CpuSet>(), pointer, 0, 0, 0]) }.map(drop)
    }
}

/// Gives the calling thread a descriptor table of its own, a copy of the one that it shared.
///
/// # Errors
/// `ENOMEM`.
pub fn unshare_descriptors() -> Result<(), Errno> {
    // SAFETY: syscall-contract: the call takes no pointer.
    unsafe { call(raw::__NR_unshare, [raw::CLONE_FILES as usize, 0, 0, 0, 0, 0]) }.map(drop)
}

/// Gives the calling thread a descriptor table of its own with nothing in it. None that it shared is closed, nor anything flushed.
///
/// # Errors
/// `ENOMEM`; what a filter of system calls says.
pub fn leave_descriptors() -> Result<(), Errno> {
    /// As in `linux/close_range.h`.
    const CLOSE_RANGE_UNSHARE: usize = 1 << 1;
    // SAFETY: syscall-contract: the call takes no pointer.
    unsafe { call(raw::__NR_close_range, [0, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0]) }.map(drop)
}

/// Closes the descriptors `first..=last` in the calling thread's table.
///
/// # Errors
/// `EINVAL`: `first` is greater than `last`.
pub fn close_descriptors(first: u32, last: u32) -> Result<(), Errno> {
    // SAFETY: syscall-contract: the call takes no pointer.
    unsafe { call(raw::__NR_close_range, [first as usize, last as usize, 0, 0, 0, 0]) }.map(drop)
}
