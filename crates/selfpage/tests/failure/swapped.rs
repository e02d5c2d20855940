//! The kernel swaps out pages that are protected. It keeps the protection there, and takes it along when such a page moves.

use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Locking, Protection, Region, Trap};

use crate::rights::skip;
use crate::scenario::{Ended, PAGE, check_pages, here, in_child, number_pages, until};

const FRAMES: usize = 32;
/// Pages in core that are protected.
const PROTECTED: std::ops::Range<usize> = 0..8;

/// One at a time: the end of one brings back what others have swapped out.
static IN_USE: Mutex<()> = Mutex::new(());

/// A swap file in use.
struct Swap {
    path: CString,
    _place: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Swap {
    /// `None`, and said so, where there can be none.
    fn on() -> Option<Swap> {
        let alone = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = place.path().join("swap");
        std::fs::write(&file, vec![0u8; 16 << 20]).unwrap();
        let made = Command::new("mkswap").arg(&file).output();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        // SAFETY: test: the path ends with zero.
        if !made.is_ok_and(|made| made.status.success()) || unsafe { libc::swapon(path.as_ptr(), 0) } != 0 {
            skip("swap", "mkswap and swapon(2) want root, and a file system that can hold swap");
            return None;
        }
        Some(Swap { path, _place: place, _alone: alone })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: test: as above.
        unsafe { libc::swapoff(self.path.as_ptr()) };
    }
}

/// Four times as many pages as frames, numbered; the first are in core, protected, and swapped out.
fn swapped_out(trap: Trap) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).locking(Locking::Never).build().unwrap();
    let store = MemoryStore::new(1 << 30).unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).stored(store).unwrap();
    number_pages(&mut region);
    check_pages(&region, PROTECTED);
    let (start, len) = (PROTECTED.start * PAGE, PROTECTED.len() * PAGE);
    region.pin(start, len).unwrap();
    region.protect(start, len, Protection::Read).unwrap();
    let advised = region.as_ptr().wrapping_add(start).cast();
    until("all is swapped out", || {
        // SAFETY: test: the contents stay as they are.
        assert_eq!(unsafe { libc::madvise(advised, len, libc::MADV_PAGEOUT) }, 0);
        PROTECTED.into_iter().all(|page| is_swapped(&region, page))
    });
    region.unpin(start, len).unwrap();
    (domain, region)
}

fn is_swapped(region: &Region, page: usize) -> bool {
    let mut entry = [0; 8];
    let offset = (region.as_ptr() as usize / PAGE + page) * 8;
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entry, offset as u64).unwrap();
    entry[7] & 0x40 != 0
}

fn each_trap(test: &str, scenario: fn(Trap)) {
    let inside = std::env::var_os("SELFPAGE_SCENARIO").is_some();
    let swap = if inside { None } else { Swap::on() };
    if inside || swap.is_some() {
        for (trap, case) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
            Ended::well(in_child(test, case, || scenario(trap)));
        }
    }
}

#[test]
fn a_protected_page_that_was_swapped_out_protects_no_frame() {
    each_trap(here!(), |trap| {
        let (_domain, mut region) = swapped_out(trap);
        region.evict(0, PROTECTED.len() * PAGE).unwrap();
        // Through each frame, by the library's own writes.
        for _ in 0..3 {
            check_pages(&region, 0..4 * FRAMES);
        }
        region.protect(0, PROTECTED.len() * PAGE, Protection::ReadWrite).unwrap();
        number_pages(&mut region);
        check_pages(&region, 0..4 * FRAMES);
    });
}

#[test]
fn a_protection_that_ends_while_the_page_is_elsewhere_has_ended() {
    each_trap(here!(), |trap| {
        let (_domain, mut region) = swapped_out(trap);
        let len = PROTECTED.len() * PAGE;
        // Without any access the pages lie in the pool, as they are.
        region.protect(0, len, Protection::None).unwrap();
        region.protect(0, len, Protection::ReadWrite).unwrap();
        number_pages(&mut region);
        check_pages(&region, 0..4 * FRAMES);
    });
}
