//! A swap file in use, and what lies in swap. Include it where tests need it, beside `skip`:
//! `#[path = "../../../tests/swap.rs"] mod swap;`.

use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::skip::skip;

const PAGE_BYTES: usize = 4096;

/// One at a time: the end of one brings back what others have swapped out.
static IN_USE: Mutex<()> = Mutex::new(());

/// A swap file, until it is dropped.
pub struct Swap {
    path: CString,
    _place: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Swap {
    /// 16 MiB of it. `None`: there can be none, and the calling test is skipped for want of it.
    ///
    /// # Panics
    /// As [`skip`].
    pub fn on() -> Option<Swap> {
        let alone = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = place.path().join("swap");
        std::fs::write(&file, vec![0u8; 16 << 20]).unwrap();
        let made = Command::new("mkswap").arg(&file).output();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path ends with zero.
        if !made.is_ok_and(|made| made.status.success()) || unsafe { libc::swapon(path.as_ptr(), 0) } != 0 {
            skip("swap", "mkswap and swapon(2) want root, and a file system that can hold swap");
            return None;
        }
        Some(Swap { path, _place: place, _alone: alone })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: the path ends with zero.
        unsafe { libc::swapoff(self.path.as_ptr()) };
    }
}

/// How many of `pages` pages from `start` on lie in swap now.
pub fn swapped(start: usize, pages: usize) -> usize {
    let mut entries = vec![0; pages * 8];
    let offset = (start / PAGE_BYTES * 8) as u64;
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entries, offset).unwrap();
    entries.chunks(8).filter(|entry| entry[7] & 0x40 != 0).count()
}
