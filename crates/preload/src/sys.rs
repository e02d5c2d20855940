//! System calls as the kernel has them: no errno, no hook of ours in between.

use std::arch::asm;
use std::ffi::{CStr, c_void};
use std::time::Duration;

use selfpage_core::linux::die;
use selfpage_core::linux::signal::{self, SignalSet};

use crate::heap;

/// Makes system call `number`. Errors are negative, as the kernel returns them.
///
/// # Safety
/// *raw-call*: the arguments are what the kernel expects of the call, or what the program itself asked of it.
pub unsafe fn call(number: i64, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: raw-call: the kernel's calling convention; it changes rcx and r11 besides the result.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// The C library's way of reporting: -1, and the number in errno.
pub fn in_c(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        set_errno(-result as i32);
        return -1;
    }
    result
}

/// The calling thread's errno.
pub fn errno() -> i32 {
    // SAFETY: thread-local-c: the C library's own location, valid on every thread that it started.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
pub fn set_errno(errno: i32) {
    // SAFETY: thread-local-c: the C library's own location, valid on every thread that it started.
    unsafe { *libc::__errno_location() = errno };
}

/// The process's number, from the kernel: after `vfork` it is not ours.
pub fn pid() -> u32 {
    // SAFETY: raw-call: no arguments.
    unsafe { call(libc::SYS_getpid, [0; 6]) as u32 }
}

/// Writes a number where the program wants it, as the kernel does: a place that cannot be written is an error, `EFAULT`.
///
/// # Safety
/// *raw-call*: the program asked for it.
pub unsafe fn store(address: usize, number: i32) -> isize {
    let len = size_of_val(&number);
    // SAFETY: raw-call: the kernel reads our own number, and writes what the program gave.
    unsafe { copy(libc::SYS_process_vm_writev, (&raw const number) as usize, address, len) }
}

/// Fills `into` from where the program says, as the kernel does: what cannot be read is an error, `EFAULT`.
pub fn load(into: &mut [u8], address: usize) -> isize {
    // SAFETY: raw-call: the kernel reads what the program gave, and fills what is borrowed for that.
    unsafe { copy(libc::SYS_process_vm_readv, into.as_mut_ptr() as usize, address, into.len()) }
}

/// # Safety
/// *raw-call*: `len` bytes at `ours`, and what the program asked for at `theirs`.
unsafe fn copy(call_number: i64, ours: usize, theirs: usize, len: usize) -> isize {
    let ranges = [ours, theirs].map(|at| libc::iovec { iov_base: at as *mut c_void, iov_len: len });
    let [ours, theirs] = [0, 1].map(|at| &raw const ranges[at] as usize);
    // SAFETY: raw-call: passed on from our caller.
    let copied = unsafe { call(call_number, [pid() as usize, ours, 1, theirs, 1, 0]) };
    if (0..len as isize).contains(&copied) { -libc::EFAULT as isize } else { copied }
}

/// Copies bytes between places that do not meet. To a program address 0 may be one, to Rust it is none: the machine does it.
///
/// # Safety
/// *owned-range*: the one is the program's, and open to reading, the other to writing.
pub unsafe fn copy_bytes(from: usize, to: usize, len: usize) {
    // SAFETY: owned-range: passed on from our caller.
    unsafe {
        asm!(
            "rep movsb",
            inout("rsi") from => _,
            inout("rdi") to => _,
            inout("rcx") len => _,
            options(nostack, preserves_flags),
        );
    }
}

/// What a small file of the kernel's begins with; empty where it cannot be read.
pub fn read_small<'a>(path: &CStr, text: &'a mut [u8]) -> &'a [u8] {
    // SAFETY: raw-call: the name ends with NUL, and the buffer is as long as said.
    let len = unsafe {
        let file = call(libc::SYS_open, [path.as_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0, 0]);
        if file < 0 {
            return &[];
        }
        let len = call(libc::SYS_read, [file as usize, text.as_mut_ptr() as usize, text.len(), 0, 0, 0]);
        call(libc::SYS_close, [file as usize, 0, 0, 0, 0, 0]);
        len.max(0) as usize
    };
    text.get(..len).unwrap_or_default()
}

/// Long enough for another thread to get on.
pub const MOMENT: Duration = Duration::from_millis(1);

/// Lets less than a second pass. The C library's sleep is a point of cancellation, where a thread must not end that is in a call of ours.
pub fn pause(time: Duration) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: raw-call: the time outlives the call.
    unsafe { call(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// How much of a resource the process may have, such as bytes of addresses (`RLIMIT_AS`).
pub fn limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: raw-call: the kernel fills numbers of our own.
    unsafe { call(libc::SYS_prlimit64, [0, resource as usize, 0, &raw mut limit as usize, 0, 0]) };
    limit.rlim_cur
}

/// Changes the access of a range.
///
/// # Safety
/// *owned-range*: the range is ours, or the program asked for the change.
pub unsafe fn protect(start: usize, len: usize, prot: i32) -> isize {
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(libc::SYS_mprotect, [start, len, prot as usize, 0, 0, 0]) }
}

/// Reserves addresses that nobody may touch yet.
pub fn reserve(len: usize) -> Option<usize> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
    // SAFETY: raw-call: a fresh mapping replaces nothing.
    let start = unsafe { call(libc::SYS_mmap, [0, len, libc::PROT_NONE as usize, flags, usize::MAX, 0]) };
    (start > 0).then_some(start as usize)
}

/// While it lives, no handler of a signal runs on the thread that made it, but the C library's for setuid(3).
pub struct Quiet(SignalSet);

impl Quiet {
    /// From now on.
    pub fn begin() -> Quiet {
        Quiet(signal::block_all())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        signal::restore(self.0);
    }
}

/// Writes one line to standard error.
pub fn say(line: &str) {
    // SAFETY: raw-call: the bytes outlive the call.
    unsafe { call(libc::SYS_write, [2, line.as_ptr() as usize, line.len(), 0, 0, 0]) };
}

/// Ends the process with a line that says why.
pub fn abort(why: &str) -> ! {
    let line = ["selfpage: ", why, "\n"];
    if heap::is_pager() {
        // The process's own standard error: the table of pager threads has none.
        die::tell(&line);
    } else {
        // To look for that would be the end where the program filters its calls.
        line.into_iter().for_each(say);
    }
    die::end()
}
