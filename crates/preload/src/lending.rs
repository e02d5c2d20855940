//! Memory that a program lends to the kernel, which looks at it after the call. It refers to frames then, and does not keep them where they
//! are: a page that goes out would be sent with what its frame holds by that time. What would be lent is copied instead.

use std::ffi::c_int;

use crate::managed;
use crate::sys::call;

/// The flags that vmsplice(2) takes.
const SPLICE_FLAGS: usize =
    (libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT) as usize;

/// setsockopt(2): no socket sends without a copy. Programs have to do without that anyway: most kinds of sockets cannot.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn setsockopt([socket, level, name, value, len]: [usize; 5]) -> isize {
    // SAFETY: raw-call: passed on from our caller.
    let result = unsafe { call(libc::SYS_setsockopt, [socket, level, name, value, len, 0]) };
    let is_meant = (level as c_int, name as c_int) == (libc::SOL_SOCKET, libc::SO_ZEROCOPY);
    if result < 0 || !is_meant || managed::get().is_none() {
        return result;
    }
    // The program's value was the kernel's to read: the socket knows it.
    let (mut on, off, mut len) = (0 as c_int, 0 as c_int, size_of::<c_int>());
    // SAFETY: raw-call: all three outlive the calls, and have the size that is said.
    unsafe {
        call(libc::SYS_getsockopt, [socket, level, name, &raw mut on as usize, &raw mut len as usize, 0]);
        if on == 0 {
            return result;
        }
        call(libc::SYS_setsockopt, [socket, level, name, &raw const off as usize, len, 0]);
    }
    -libc::EOPNOTSUPP as isize
}

/// vmsplice(2): into a pipe goes a copy.
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn vmsplice([file, vector, count, flags]: [usize; 4]) -> isize {
    // SAFETY: raw-call: no memory is passed.
    let [access, pipe_bytes] = [libc::F_GETFL, libc::F_GETPIPE_SZ]
        .map(|what| unsafe { call(libc::SYS_fcntl, [file, what as usize, 0, 0, 0, 0]) });
    let reads = access < 0 || access as c_int & libc::O_ACCMODE == libc::O_RDONLY;
    if managed::get().is_none() || reads || pipe_bytes < 0 || flags as u32 as usize & !SPLICE_FLAGS != 0 {
        // SAFETY: raw-call: passed on from our caller.
        return unsafe { call(libc::SYS_vmsplice, [file, vector, count, flags, 0, 0]) };
    }
    // By way of another pipe: what waits for room, and for how much of it, is the kernel's to know.
    let mut ends = [0 as c_int; 2];
    // SAFETY: raw-call: there is a place for both ends.
    let made = unsafe { call(libc::SYS_pipe2, [ends.as_mut_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0, 0, 0]) };
    if made < 0 {
        return made;
    }
    let [from, to] = ends.map(|end| end as usize);
    // SAFETY: raw-call: the program gave the vector; both ends are our own.
    unsafe {
        call(libc::SYS_fcntl, [to, libc::F_SETPIPE_SZ as usize, pipe_bytes as usize, 0, 0, 0]);
        let mut result = call(libc::SYS_pwritev2, [to, vector, count, usize::MAX, 0, libc::RWF_NOWAIT as usize]);
        if result > 0 {
            result = call(libc::SYS_splice, [from, 0, file, 0, result as usize, flags]);
        }
        for end in [from, to] {
            call(libc::SYS_close, [end, 0, 0, 0, 0, 0]);
        }
        result
    }
}
