//! Protection keys: each mapping has one of 16 numbers, and a register of each thread (PKRU) says what the thread may do with
//! each number. Writing the register takes some nanoseconds, and no system call.

use super::errno::Errno;
use super::syscall::call;
use linux_raw_sys::general as raw;

/// How many keys a machine has at most, key 0 included.
pub const KEYS: usize = 16;

/// The register denies nothing.
pub const EVERYTHING: u32 = 0;

/// A key. Key 0 is every mapping's that was given none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key(u8);

impl Key {
    /// The key of all other memory.
    pub const NONE: Key = Key(0);

    /// Takes a key that nobody in this process uses. The calling thread gets no right to it.
    ///
    /// # Errors
    /// `ENOSPC`: none is left, or the machine has none. `ENOSYS`: the kernel knows of none.
    pub fn allocate() -> Result<Key, Errno> {
        let denied = raw::PKEY_DISABLE_ACCESS as usize;
        // SAFETY: syscall-contract: the call takes no pointer.
        unsafe { call(raw::__NR_pkey_alloc, [0, denied, 0, 0, 0, 0]) }.map(|number| Key(number as u8))
    }

    /// Gives the key back.
    pub fn release(self) {
        // SAFETY: syscall-contract: the call takes no pointer, and changes no mapping.
        let _ = unsafe { call(raw::__NR_pkey_free, [self.0.into(), 0, 0, 0, 0, 0]) };
    }

    /// Its number.
    pub const fn number(self) -> usize {
        self.0 as usize
    }

    /// The register's bits that forbid every access.
    pub const fn deny_access(self) -> u32 {
        (raw::PKEY_DISABLE_ACCESS | raw::PKEY_DISABLE_WRITE) << (2 * self.0)
    }

    /// The register's bits that forbid writing.
    pub const fn deny_writing(self) -> u32 {
        raw::PKEY_DISABLE_WRITE << (2 * self.0)
    }
}

/// Gives a range the protection `prot` (the bits of mprotect(2)), and `key` if there is one: else it keeps what it has.
///
/// # Errors
/// What pkey_mprotect(2) says.
///
/// # Safety
/// owned-range: the range is the caller's, and no reference lives that the new access would break.
pub unsafe fn protect(addr: usize, len_bytes: usize, prot: u32, key: Option<Key>) -> Result<(), Errno> {
    let (number, key) = key.map_or((raw::__NR_mprotect, 0), |key| (raw::__NR_pkey_mprotect, key.number()));
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(number, [addr, len_bytes, prot as usize, key, 0, 0]) }.map(drop)
}

/// The calling thread's register. To be had only where the CPU has it and the kernel uses it.
#[derive(Clone, Copy, Debug)]
pub struct Register(());

impl Register {
    /// `None`: this machine has no protection keys.
    pub fn of_this_machine() -> Option<Register> {
        enabled().then_some(Register(()))
    }

    /// What it holds now.
    #[inline]
    pub fn read(self) -> u32 {
        read()
    }

    /// Makes it `denied`. Memory accesses before and after keep their order.
    #[inline]
    pub fn write(self, denied: u32) {
        write(denied);
    }
}

#[cfg(target_arch = "x86_64")]
fn enabled() -> bool {
    // Bit 4 of ECX says that the kernel has switched them on.
    let most = core::arch::x86_64::__cpuid(0).eax;
    most >= 7 && core::arch::x86_64::__cpuid_count(7, 0).ecx >> 4 & 1 == 1
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn read() -> u32 {
    let denied;
    // SAFETY: key-register: the kernel has switched keys on; the instruction wants 0 in ecx and changes eax and edx.
    unsafe { core::arch::asm!("rdpkru", out("eax") denied, out("edx") _, in("ecx") 0, options(nostack, nomem)) };
    denied
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn write(denied: u32) {
    // SAFETY: key-register: as above, with 0 in edx; no access is moved over it by the compiler.
    unsafe { core::arch::asm!("wrpkru", in("eax") denied, in("edx") 0, in("ecx") 0, options(nostack)) };
}

/// Where PKRU lies in what XSAVE writes for a signal handler, from its beginning.
#[cfg(target_arch = "x86_64")]
pub fn offset_in_xsave() -> usize {
    core::arch::x86_64::__cpuid_count(0xd, 9).ebx as usize
}

#[cfg(not(target_arch = "x86_64"))]
fn enabled() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn read() -> u32 {
    EVERYTHING
}

#[cfg(not(target_arch = "x86_64"))]
fn write(_: u32) {}

/// Where PKRU lies in what is saved for a signal handler.
#[cfg(not(target_arch = "x86_64"))]
pub fn offset_in_xsave() -> usize {
    0
}
