//! One system call, without errno.

use super::errno::Errno;

/// The highest error number that the kernel returns.
const ERRNO_MAX: usize = 4095;

/// Calls the kernel.
///
/// # Safety
/// syscall-contract: the arguments are what `number` asks for, and every pointer among them is valid for what the kernel
/// does with it.
#[inline]
pub unsafe fn call(number: u32, arguments: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: syscall-contract: passed on from our caller.
    let returned = unsafe { trap_into_kernel(number as usize, arguments) };
    match returned.wrapping_neg() {
        error @ 1..=ERRNO_MAX => Err(Errno::from_raw_os_error(error as i32)),
        _ => Ok(returned),
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn trap_into_kernel(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> usize {
    let returned;
    // SAFETY: syscall-contract: the instruction changes rax, rcx, r11 and the memory that the call names, no stack.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") number => returned, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    returned
}

#[cfg(target_arch = "aarch64")]
#[inline]
unsafe fn trap_into_kernel(number: usize, [a, b, c, d, e, f]: [usize; 6]) -> usize {
    let returned;
    // SAFETY: syscall-contract: the instruction changes x0 and the memory that the call names, no stack.
    unsafe {
        core::arch::asm!("svc 0", in("x8") number, inlateout("x0") a => returned, in("x1") b, in("x2") c, in("x3") d,
            in("x4") e, in("x5") f, options(nostack));
    }
    returned
}
