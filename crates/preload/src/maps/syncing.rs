//! msync(2) on managed mappings, which have no file: what is left of it is whether all of a range is mapped.

use selfpage_heap::next;

use super::{Part, pages, serving, table};
use crate::sys::{call, in_c};

next!(MSYNC: c"msync" as fn(*mut std::ffi::c_void, usize, i32) -> i32, next_msync);

/// What is wrong with a range that the kernel has synchronized, as a kernel's error; else 0.
fn amiss(address: usize, len: usize, flags: i32) -> isize {
    let (Some(_), Ok(range)) = (serving(), pages(address, len)) else { return 0 };
    let mut result = 0;
    let table = table();
    for (part, range) in table.maps.parts(range) {
        match part {
            // The kernel sees the region's mapping where the program has none.
            Part::Free => result = -libc::ENOMEM as isize,
            Part::Managed if flags & libc::MS_INVALIDATE != 0 && table.maps.locked_within(&range) => {
                return -libc::EBUSY as isize;
            }
            _ => {}
        }
    }
    result
}

/// msync(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn msync(address: usize, len: usize, flags: i32) -> isize {
    // SAFETY: raw-call: passed on from our caller.
    let result = unsafe { call(libc::SYS_msync, [address, len, flags as usize, 0, 0, 0]) };
    if result == 0 { amiss(address, len, flags) } else { result }
}

/// As in the C library: a thread may be cancelled in it.
///
/// # Safety
/// As C has it.
#[unsafe(export_name = "msync")]
pub unsafe extern "C-unwind" fn msync_in_c(address: *mut std::ffi::c_void, len: usize, flags: i32) -> i32 {
    // SAFETY: c-library: passed on from our caller.
    let result = unsafe { next_msync()(address, len, flags) };
    if result == 0 { in_c(amiss(address as usize, len, flags)) as i32 } else { result }
}
