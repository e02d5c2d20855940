//! Dirty pages by `mprotect` and a handler for `SIGSEGV`: what every Unix has, and what the others are measured against.
//!
//! Discarding is not noticed, a system call that writes to a clean page fails with `EFAULT`, and the memory must be readable
//! and writable. A forked child goes on with what its parent had noted.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::{iter, ptr};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::memory::{self, Access};

use super::{Dirty, object};
use crate::error::{Error, Kind, Result};

/// Ranges that can be armed at a time, in the whole process.
const MOST_RANGES: usize = 64;

/// A range and what was written of it. Never freed, since a handler may look at it at any time; a range armed again finds it.
struct Watch {
    start: usize,
    bits: Vec<AtomicU64>,
    size_pages: usize,
    armed: AtomicBool,
}

static WATCHES: [AtomicPtr<Watch>; MOST_RANGES] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST_RANGES];
static CHANGE: Mutex<()> = Mutex::new(());
static INSTALL: Once = Once::new();
static mut BEFORE: MaybeUninit<libc::sigaction> = MaybeUninit::uninit();

fn watches() -> impl Iterator<Item = &'static Watch> {
    // SAFETY: tracker-memory: a watch is leaked before it is listed.
    WATCHES.iter().map_while(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
}

impl Watch {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.size_pages * PAGE_BYTES
    }

    fn note(&self, page: usize) {
        if let Some(word) = self.bits.get(page / 64) {
            word.fetch_or(1 << (page % 64), Ordering::SeqCst);
        }
    }

    fn allow(&self, range: &Range<usize>, access: Access) -> bool {
        // SAFETY: owned-range: who armed it says that it may be protected; a write to it is let through by the handler.
        unsafe { memory::protect(range.start, range.len(), access) }.is_ok()
    }

    /// A write to a page. `false`: not ours.
    fn trapped(&self, addr: usize) -> bool {
        if !self.armed.load(Ordering::SeqCst) || !self.range().contains(&addr) {
            return false;
        }
        let page = (addr - self.start) / PAGE_BYTES;
        let at = self.start + page * PAGE_BYTES;
        // Before, so that another thread's write is noted that comes as soon as it may; after, since a scan may have taken the
        // note in between and protected the page before it was allowed.
        self.note(page);
        if self.allow(&(at..at + PAGE_BYTES), Access::ReadWrite) {
            self.note(page);
            return true;
        }
        // There are as many mappings as there can be: all of it, in one.
        (0..self.size_pages).for_each(|page| self.note(page));
        let all = self.allow(&self.range(), Access::ReadWrite);
        (0..self.size_pages).for_each(|page| self.note(page));
        all
    }
}

/// The watch that is armed over exactly this range.
fn armed(operation: &'static str, range: &Range<usize>) -> Result<&'static Watch> {
    watches().find(|watch| watch.armed.load(Ordering::SeqCst) && watch.range() == *range).ok_or_else(|| {
        let cause = "it is not armed as a whole; name the range as it was armed";
        Error::new(Kind::Invalid, operation, object(range), cause)
    })
}

pub(super) fn arm(range: Range<usize>) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    INSTALL.call_once(install);
    let _alone = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let meets = |watch: &Watch| watch.range().start < range.end && range.start < watch.range().end;
    let same = watches().find(|watch| watch.range() == range);
    if watches().any(|watch| watch.armed.load(Ordering::SeqCst) && meets(watch) && watch.range() != range) {
        let cause = "it overlaps another that is armed; disarm that one";
        return Err(Error::new(Kind::Invalid, "arm", object(&range), cause));
    }
    let watch = match same {
        Some(watch) => watch,
        None => list(&range)?,
    };
    watch.bits.iter().for_each(|word| word.store(0, Ordering::SeqCst));
    watch.armed.store(true, Ordering::SeqCst);
    if watch.allow(&range, Access::Read) {
        return Ok(());
    }
    watch.armed.store(false, Ordering::SeqCst);
    Err(Error::new(
        Kind::OutOfSpace,
        "arm",
        object(&range),
        "the kernel cannot protect it; there are too many mappings",
    ))
}

fn list(range: &Range<usize>) -> Result<&'static Watch> {
    let size_pages = range.len() / PAGE_BYTES;
    let bits = iter::repeat_with(AtomicU64::default).take(size_pages.div_ceil(64)).collect();
    let watch = Watch { start: range.start, bits, size_pages, armed: AtomicBool::new(false) };
    let Some(slot) = WATCHES.iter().find(|slot| slot.load(Ordering::SeqCst).is_null()) else {
        let cause = "as many ranges were armed by traps as there can be; use the same ranges again";
        return Err(Error::new(Kind::OutOfSpace, "arm", object(range), cause));
    };
    let watch: &'static Watch = Box::leak(Box::new(watch));
    slot.store(ptr::from_ref(watch).cast_mut(), Ordering::Release);
    Ok(watch)
}

pub(super) fn disarm(range: Range<usize>) -> Result<()> {
    let _alone = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let watch = armed("disarm", &range)?;
    watch.allow(&range, Access::ReadWrite);
    // Last: a thread that was trapped before finds its watch, and tries again.
    watch.armed.store(false, Ordering::SeqCst);
    Ok(())
}

pub(super) fn scan(range: Range<usize>, found: &mut Dirty) -> Result<()> {
    let watch = armed("scan", &range)?;
    for (index, word) in watch.bits.iter().enumerate() {
        found.mark_word(index, word.load(Ordering::SeqCst));
    }
    found.end(&range);
    Ok(())
}

pub(super) fn scan_and_rearm(range: Range<usize>, found: &mut Dirty) -> Result<()> {
    let watch = armed("scan and re-arm", &range)?;
    for (index, word) in watch.bits.iter().enumerate() {
        found.mark_word(index, word.swap(0, Ordering::SeqCst));
    }
    found.end(&range);
    for pages in found.ranges() {
        if !watch.allow(&pages, Access::Read) {
            // It stays as it is: written, now and next time.
            pages.step_by(PAGE_BYTES).for_each(|at| watch.note((at - watch.start) / PAGE_BYTES));
        }
    }
    Ok(())
}

fn install() {
    // SAFETY: signal-handler: `on_sigsegv` sets bits, calls mprotect(2), and the handler that was there before.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigsegv as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigaction(libc::SIGSEGV, &action, (&raw mut BEFORE).cast());
    }
}

extern "C" fn on_sigsegv(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: signal-handler: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let addr = unsafe { (*info).si_addr() } as usize;
    if watches().any(|watch| watch.trapped(addr)) {
        return;
    }
    // SAFETY: signal-handler: written by `install` before the first signal could come; the handler that was there before gets
    // what it would have got.
    unsafe {
        let before = &*(&raw const BEFORE).cast::<libc::sigaction>();
        match before.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                libc::sigaction(signal, before, ptr::null_mut());
            }
            handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(handler);
                handler(signal, info, context);
            }
            handler => {
                let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                handler(signal);
            }
        }
    }
}
