//! A filter on system calls that comes later, and pages whose contents are in their frames alone: an access to one fails, and nothing
//! of it is lost.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use selfpage::pager::{Context, PagerError, UserPager};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};
use selfpage::{Domain, FileAccess, Locking, Protection, Region, Sampling};
use selfpage_core::addr::PageBytes;

use crate::filter::Call;
use crate::over_memory::over_memory;
use crate::scenario::{here, in_child, until};
use crate::{PAGE, TRAPS, tried, word};

const MOVE: Call = Call::with(libc::SYS_ioctl, 1, 0xc028_aa05);

/// Why a page is aside; the second in a region that is tracked.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Aside {
    Protected,
    Sampled,
}

#[test]
fn an_access_to_a_page_that_is_set_aside_fails_where_no_page_may_move() {
    for (trap, name) in TRAPS {
        for aside in [Aside::Protected, Aside::Sampled] {
            in_child(here!(), &format!("{name} {aside:?}"), || {
                tried::catch();
                let domain = Domain::with_frames(256 * PAGE).build().unwrap();
                let builder = domain.region(16 * PAGE).trap(trap);
                let builder = if aside == Aside::Sampled { builder.tracked() } else { builder };
                let region = builder.stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
                // SAFETY: test: a word of the region.
                unsafe { word(&region, 0).write_volatile(7) };
                match aside {
                    Aside::Protected => {
                        region.protect(0, PAGE, Protection::None).unwrap();
                        region.protect(0, PAGE, Protection::ReadWrite).unwrap();
                    }
                    Aside::Sampled => drop(region.sample(Sampling::Whole).unwrap()),
                }
                MOVE.fails_everywhere(libc::EPERM).unwrap();
                let signal = if trap.is_signal() { libc::SIGBUS } else { libc::SIGSEGV };
                assert_eq!(tried::read(word(&region, 0)), Err(signal));
                assert_eq!(tried::write(word(&region, 0), 1), Err(signal), "and the next");
                if aside == Aside::Protected {
                    reads_seven_once_it_is_copied_in(&region);
                }
            })
            .well();
        }
    }
}

/// A page that is protected against writes comes in by a copy, which nobody forbids. The kernel may tell a fault twice, and the second
/// time is refused later than the page is asked for by name.
fn reads_seven_once_it_is_copied_in(region: &Region) {
    until("the page is read", || {
        region.protect(0, PAGE, Protection::Read).unwrap();
        tried::read(word(region, 0)).inspect(|word| assert_eq!(*word, 7)).is_ok()
    });
}

/// A store whose writes wait until they may go on.
struct Waits {
    store: MemoryStore,
    begun: AtomicBool,
    goes_on: AtomicBool,
}

impl BackingStore for Waits {
    over_memory!(store: claim, release, read);

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        self.begun.store(true, SeqCst);
        until("the store may go on", || self.goes_on.load(SeqCst));
        self.store.write(bloks);
    }
}

#[test]
fn an_access_to_a_page_that_is_being_saved_fails_where_no_page_may_move() {
    in_child(here!(), "", || {
        tried::catch();
        let store =
            Arc::new(Waits { store: MemoryStore::new(1 << 20).unwrap(), begun: false.into(), goes_on: false.into() });
        let domain = Domain::with_frames(256 * PAGE).build().unwrap();
        let region = domain.region(16 * PAGE).stored_in(store.clone()).unwrap();
        // SAFETY: test: a word of the region.
        unsafe { word(&region, 0).write_volatile(7) };
        region.evict(0, PAGE).unwrap();
        until("it is being saved", || store.begun.load(SeqCst));
        MOVE.fails_everywhere(libc::EPERM).unwrap();
        assert_eq!(tried::read(word(&region, 0)), Err(libc::SIGSEGV));
        store.goes_on.store(true, SeqCst);
        region.flush(0, PAGE).unwrap();
        reads_seven_once_it_is_copied_in(&region);
    })
    .well();
}

#[test]
fn a_flush_says_that_a_page_cannot_be_read() {
    in_child(here!(), "", || {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        std::fs::write(file.path(), [5; 4 * PAGE]).unwrap();
        let domain = Domain::with_frames(256 * PAGE).locking(Locking::Never).build().unwrap();
        let region = domain.region(0).file(file.path(), 0, FileAccess::ReadWrite).unwrap();
        // SAFETY: test: a word of the region.
        unsafe { word(&region, 0).write_volatile(7) };
        Call::any(libc::SYS_pread64).fails_everywhere(libc::EPERM).unwrap();
        let flushed = region.flush(0, PAGE);
        let saved = std::fs::read(file.path()).unwrap();
        assert!(flushed.is_err() || saved[0] == 7, "{flushed:?}, and the file has {}", saved[0]);
        // What is dropped behind our back is nothing to save.
        // SAFETY: test: memory of the region.
        assert_eq!(unsafe { libc::madvise(word(&region, 0).cast(), PAGE, libc::MADV_DONTNEED) }, 0);
        region.flush(0, PAGE).unwrap();
    })
    .well();
}

/// Takes its time over each page.
struct Slow;

impl UserPager for Slow {
    fn fill(&self, _index: u64, _bytes: &mut PageBytes) -> io::Result<()> {
        std::thread::sleep(Duration::from_millis(100));
        Ok(())
    }

    fn save(&self, _index: u64, _bytes: &PageBytes) -> io::Result<()> {
        unreachable!("nothing is written")
    }
}

/// And each time that it looks whether something does it may have to wait for others' fills.
#[test]
fn a_fork_gives_up_a_page_that_nothing_maps_any_more() {
    let here = here!();
    std::thread::scope(|scope| {
        for readers in [0, 2] {
            scope.spawn(move || in_child(here, &format!("{readers} readers"), || gives_up_a_page(readers)).well());
        }
    });
}

/// Forks where a page is aside that nothing maps, beside so many readers of other pages, which come by copies.
fn gives_up_a_page(readers: usize) {
    const PAGES: usize = 2048;
    let domain = Domain::with_frames(2 * PAGES * PAGE).build().unwrap();
    let region = domain.region(16 * PAGE).tracked().stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    let slow = domain.region(PAGES * PAGE).user(Slow).unwrap();
    slow.protect(0, slow.len_bytes(), Protection::Read).unwrap();
    // SAFETY: test: a word of the region.
    unsafe { word(&region, 0).write_volatile(7) };
    drop(region.sample(Sampling::Whole).unwrap());
    MOVE.fails_everywhere(libc::EPERM).unwrap();
    for reader in 0..readers {
        let first = word(&slow, 0).addr();
        std::thread::spawn(move || {
            // Each page once, in an order that no reading ahead follows.
            for turn in (reader..PAGES).step_by(readers) {
                let at = (first + turn * 521 % PAGES * PAGE) as *const u64;
                // SAFETY: test: a word of a region that stays as long as the process.
                assert_eq!(unsafe { at.read_volatile() }, 0);
            }
        });
    }
    until("readers are at it", || domain.stats().counts.fills_total >= readers as u64);
    // SAFETY: test: the child accesses a word, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: test: as above.
        unsafe { libc::_exit(word(&region, 0).read_volatile() as i32) };
    }
    let mut status = 0;
    // SAFETY: test: a child of ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
    // Under the readers.
    std::mem::forget(slow);
}
