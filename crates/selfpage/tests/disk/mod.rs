//! A small disk of memory, for what happens when one is full.

use std::ffi::CString;
use std::io;
use std::path::Path;
use std::ptr::null;

/// Mounts one at `dir`, where only this thread, and those it starts, see it: nothing is left of it when they end.
pub fn mount(dir: &Path, len_bytes: usize) -> io::Result<()> {
    let (dir, options) = (CString::new(dir.to_str().unwrap())?, CString::new(format!("size={len_bytes}"))?);
    // SAFETY: test: strings that end, and a namespace that is this thread's own.
    let done = unsafe {
        libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) == 0
            && libc::mount(null(), c"/".as_ptr(), null(), libc::MS_REC | libc::MS_PRIVATE, null()) == 0
            && libc::mount(c"tmpfs".as_ptr(), dir.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast()) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}
