//! The record of a process that filters its system calls: its line in the file, mapped, which is written anew without a call of the kernel.

use super::{Line, Who};
use crate::lock::Lock;
use crate::managed;
use crate::sys::call;

/// Nobody waits for it: whoever has it is about to write the same, or to give it up.
static MAPPED: Lock<Option<Mapped>> = Lock::new(None);

struct Mapped {
    /// Where the file is mapped, from its beginning to the end of the line.
    start: usize,
    len: usize,
    line_bytes: usize,
    who: Who,
}

/// Maps the line that has just been appended to an open file, by whoever `make`s calls on it.
pub fn map(file: usize, line_bytes: usize, make: impl Fn(i64, [usize; 5]) -> isize, who: Who) {
    // A file that is only appended to is at the end of what was.
    let Ok(len @ 1..) = usize::try_from(make(libc::SYS_lseek, [file, 0, libc::SEEK_CUR as usize, 0, 0])) else {
        return;
    };
    let prot = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let start = make(libc::SYS_mmap, [0, len, prot, libc::MAP_SHARED as usize, file]);
    if let (1.., Some(mut mapped)) = (start, MAPPED.try_take()) {
        *mapped = Some(Mapped { start: start as usize, len, line_bytes, who });
    }
}

/// Writes anew what has been counted, if there is such a line.
pub fn write() {
    let Some(mapped) = MAPPED.try_take() else { return };
    let (Some(Mapped { start, len, line_bytes, who }), Some(managed)) = (&*mapped, managed::get()) else { return };
    let mut line = Line::new();
    let described = line.describe(who, managed);
    let spare = line_bytes.checked_sub(line.len + 1);
    if let (Ok(()), Some(spare)) = (described, spare)
        && line.end(spare).is_ok()
    {
        // SAFETY: owned-range: the line is the end of our own mapping, and this process's alone.
        unsafe {
            std::ptr::copy_nonoverlapping(line.bytes.as_ptr(), (start + len - line_bytes) as *mut u8, *line_bytes)
        };
    }
}

/// The line counts no more.
pub fn forget() {
    if let Some(Mapped { start, len, .. }) = MAPPED.try_take().and_then(|mut mapped| mapped.take()) {
        // SAFETY: raw-call: our own mapping, which nobody knows any more.
        unsafe { call(libc::SYS_munmap, [start, len, 0, 0, 0, 0]) };
    }
}

/// It is the parent's.
pub fn settle_in_child() {
    if let Some(mut mapped) = MAPPED.try_take() {
        *mapped = None;
    }
}
