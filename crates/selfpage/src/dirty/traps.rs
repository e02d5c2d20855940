//! Dirty pages by `mprotect` and a handler for `SIGSEGV`: what every Unix has, and what the others are measured against.
//!
//! Discarding is not noticed, a system call that writes to a clean page fails with `EFAULT`, and the memory must be readable
//! and writable, and not executable. A forked child goes on with what its parent had noted: a fork waits until nobody arms, disarms or re-arms.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::{iter, ptr};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::memory::{self, Access};
use selfpage_core::linux::thread;

use super::owner::{Id, Owner};
use super::{Dirty, object};
use crate::error::{Error, Kind, Result};
use crate::maps;
use crate::trap::takeover::{Blocked, Takeover};
use crate::trap::upcall::{self, SEGV_ACCERR};
use crate::undisturbed::Undisturbed;

/// Ranges that can be armed at a time, in the whole process.
const MOST_RANGES: usize = 64;

/// A range and what was written of it. A range armed again finds it, until its place is another's ([`list`]).
struct Watch {
    start: usize,
    bits: Vec<AtomicU64>,
    size_pages: usize,
    armed: AtomicBool,
    /// Where it is armed.
    tracker: Owner,
}

static WATCHES: [AtomicPtr<Watch>; MOST_RANGES] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST_RANGES];
/// How many handlers are looking at watches.
static LOOKING: AtomicUsize = AtomicUsize::new(0);
/// Written where ranges are armed and disarmed, read where they are looked at and armed again.
static CHANGE: RwLock<()> = RwLock::new(());
/// What handlers of `SIGSEGV` are letting writes through to at this moment: a page's address, [`WHOLE`] with that of a range, or
/// [`EVERYWHERE`]. A scan counts it as written. Else a scan could take a handler's note, protect the page before the handler has
/// allowed it, and so leave it open without any note until the handler goes on; what others write there meanwhile the next scan would
/// miss.
static OPENING: [Slot; MOST_OPENING] =
    [const { Slot { by: AtomicUsize::new(0), what: AtomicUsize::new(0) } }; MOST_OPENING];
/// Handlers at work at a time; further ones wait.
const MOST_OPENING: usize = 64;
/// The address is that of a range, and stands for all of it.
const WHOLE: usize = 1;
/// No address: all ranges, and the process whose handler it is.
const EVERYWHERE: usize = 1 << 63;
static SIGSEGV: Takeover = Takeover::of(libc::SIGSEGV);

/// What one handler is letting writes through to.
struct Slot {
    /// The block of its thread; 0: the slot is free.
    by: AtomicUsize,
    /// 0: nothing yet, or nothing any more.
    what: AtomicUsize,
}

/// What a fork has from before it until after it: nobody protects memory. The child would have his half of it, and his lock.
pub(crate) type Held = Undisturbed<RwLockWriteGuard<'static, ()>>;

/// Waits until nobody protects memory, and keeps it so.
pub(crate) fn hold() -> Held {
    Undisturbed::hold(|| CHANGE.write().unwrap_or_else(PoisonError::into_inner))
}

fn no_change() -> Undisturbed<RwLockReadGuard<'static, ()>> {
    Undisturbed::hold(|| CHANGE.read().unwrap_or_else(PoisonError::into_inner))
}

/// In a forked child, before it lets go of what [`hold`] has taken.
pub(crate) fn forked() {
    Opening::end_those_of_others();
    watches().for_each(|watch| watch.tracker.forget());
}

fn everywhere() -> usize {
    EVERYWHERE | std::process::id() as usize
}

fn watches() -> impl Iterator<Item = &'static Watch> {
    // SAFETY: tracker-memory: who looks holds [`CHANGE`], or is counted in [`LOOKING`].
    WATCHES.iter().map_while(|slot| unsafe { slot.load(Ordering::SeqCst).as_ref() })
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
        // There may be as many mappings as there can be: then all of it, in one.
        let at = self.start + page * PAGE_BYTES;
        self.open(at, page..page + 1, || self.allow(&(at..at + PAGE_BYTES), Access::ReadWrite))
            || self.open_all()
            || self.open_with_neighbours()
    }

    fn open_all(&self) -> bool {
        self.open(self.start | WHOLE, 0..self.size_pages, || self.allow(&self.range(), Access::ReadWrite))
    }

    /// Lets writes through to the ranges around it as well, which all count as written: where the kernel has made one mapping of
    /// ranges side by side, and there are as many mappings as there can be, a part cannot be opened by itself.
    fn open_with_neighbours(&self) -> bool {
        // Before it is asked which are armed: `disarm` waits for its end.
        let opening = Opening::begin(everywhere());
        let armed = || watches().filter(|watch| watch.armed.load(Ordering::SeqCst));
        let next = |end: &usize| armed().map(Watch::range).find(|range| range.start == *end).map(|range| range.end);
        let before =
            |start: &usize| armed().map(Watch::range).find(|range| range.end == *start).map(|range| range.start);
        let range = self.range();
        let starts = || iter::successors(Some(range.start), before);
        let ends = || iter::successors(Some(range.end), next);
        let allowed = starts().any(|start| ends().any(|end| self.allow(&(start..end), Access::ReadWrite)));
        let (first, end) = (starts().last().unwrap_or(range.start), ends().last().unwrap_or(range.end));
        for watch in armed().filter(|watch| (first..end).contains(&watch.start)) {
            (0..watch.size_pages).for_each(|page| watch.note(page));
        }
        drop(opening);
        allowed
    }

    /// Has `allow` let writes to `pages` through, which are `what` in [`OPENING`] until they are noted.
    fn open(&self, what: usize, pages: Range<usize>, allow: impl FnOnce() -> bool) -> bool {
        let opening = Opening::begin(what);
        let allowed = allow();
        pages.for_each(|page| self.note(page));
        drop(opening);
        allowed
    }

    /// Finds what was written: first what is being opened, since what is in there no more was noted before.
    fn find(&self, found: &mut Dirty, take: impl Fn(&AtomicU64) -> u64) {
        OPENING.iter().filter_map(|slot| self.part(slot.what.load(Ordering::SeqCst))).for_each(|part| found.mark(part));
        for (index, word) in self.bits.iter().enumerate() {
            found.mark_word(index, take(word));
        }
        found.end(&self.range());
    }

    /// Of its range, what `what` among [`OPENING`] stands for.
    fn part(&self, what: usize) -> Option<Range<usize>> {
        let range = self.range();
        match what {
            at if at & EVERYWHERE != 0 || at == self.start | WHOLE => Some(range),
            at if range.contains(&at) && at & WHOLE == 0 => Some(at..at + PAGE_BYTES),
            _ => None,
        }
    }
}

/// A place among [`OPENING`].
struct Opening(&'static Slot);

impl Opening {
    fn begin(what: usize) -> Opening {
        let own = thread::block();
        let free = |slot: &&Slot| slot.by.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        loop {
            if let Some(slot) = OPENING.iter().find(free) {
                slot.what.store(what, Ordering::SeqCst);
                return Opening(slot);
            }
            thread::give_way();
        }
    }

    /// In a forked child: notes what handlers of threads that are not here may have opened, and frees their places. They would be taken for
    /// good, and once all are every trap would wait for one.
    fn end_those_of_others() {
        let own = thread::block();
        for slot in OPENING.iter().filter(|slot| ![0, own].contains(&slot.by.load(Ordering::SeqCst))) {
            let what = slot.what.load(Ordering::SeqCst);
            for watch in watches() {
                let pages = watch.part(what).into_iter().flat_map(|part| part.step_by(PAGE_BYTES));
                pages.for_each(|at| watch.note((at - watch.start) / PAGE_BYTES));
            }
            drop(Opening(slot));
        }
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.0.what.store(0, Ordering::SeqCst);
        self.0.by.store(0, Ordering::SeqCst);
    }
}

/// The watch that is armed over exactly this range.
fn armed(operation: &'static str, range: &Range<usize>) -> Result<&'static Watch> {
    watches().find(|watch| watch.armed.load(Ordering::SeqCst) && watch.range() == *range).ok_or_else(|| {
        let cause = "it is not armed as a whole; name the range as it was armed";
        Error::new(Kind::Invalid, operation, object(range), cause)
    })
}

pub(super) fn arm(id: Id, range: Range<usize>) -> Result<()> {
    // SAFETY: signal-handler: `on_sigsegv` sets bits, calls mprotect(2), and the handler that was there before.
    unsafe { SIGSEGV.install(on_sigsegv, Blocked::AllButFaults) };
    crate::fork::attend();
    let _alone = hold();
    let meets = |watch: &Watch| watch.range().start < range.end && range.start < watch.range().end;
    let same = watches().find(|watch| watch.range() == range);
    if watches().any(|watch| watch.armed.load(Ordering::SeqCst) && meets(watch) && watch.range() != range) {
        let cause = "it overlaps another that is armed; disarm that one";
        return Err(Error::new(Kind::Invalid, "arm", object(&range), cause));
    }
    let watch = match same {
        Some(watch) if watch.armed.load(Ordering::SeqCst) => watch,
        same => {
            check_rights(&range)?;
            same.map_or_else(|| list(&range), Ok)?
        }
    };
    watch.tracker.claim(id, "arm", &range)?;
    watch.bits.iter().for_each(|word| word.store(0, Ordering::SeqCst));
    watch.armed.store(true, Ordering::SeqCst);
    if watch.allow(&range, Access::Read) {
        return Ok(());
    }
    // A part may be protected by now. It stays armed, and written: whoever meets that part is let through.
    watch.open_all();
    Err(Error::new(
        Kind::OutOfSpace,
        "arm",
        object(&range),
        "the kernel cannot protect it; there are too many mappings",
    ))
}

/// What is let through is readable and writable afterwards, and nothing else: other memory would have rights that it did not have.
fn check_rights(range: &Range<usize>) -> Result<()> {
    let has_others = |mapping: &maps::Mapping| !mapping.readable || !mapping.writable || mapping.executable;
    let all = maps::within(range).map_err(|why| why.for_a(object(range)))?;
    match all.iter().find(|mapping| has_others(mapping)) {
        None => Ok(()),
        Some(mapping) => {
            let Range { start, end } = mapping.range;
            let cause = format!(
                "traps are for memory that may be read and written and not executed, and {start:#x}..{end:#x} is not such; name the \
                 parts that are, or use Mechanism::WriteProtection"
            );
            Err(Error::new(Kind::Invalid, "arm", object(range), cause))
        }
    }
}

/// Gives a range a watch, in the place of one that is disarmed where no place is free. The caller holds [`CHANGE`].
fn list(range: &Range<usize>) -> Result<&'static Watch> {
    let is_free = |watch: *mut Watch| {
        // SAFETY: tracker-memory: the caller holds the lock.
        unsafe { watch.as_ref() }.is_none_or(|watch| !watch.armed.load(Ordering::SeqCst))
    };
    let is_new = WATCHES.iter().find(|slot| slot.load(Ordering::SeqCst).is_null());
    let Some(slot) = is_new.or_else(|| WATCHES.iter().find(|slot| is_free(slot.load(Ordering::SeqCst)))) else {
        let cause = "as many ranges are armed by traps as there can be; disarm one";
        return Err(Error::new(Kind::OutOfSpace, "arm", object(range), cause));
    };
    let size_pages = range.len() / PAGE_BYTES;
    let bits = iter::repeat_with(AtomicU64::default).take(size_pages.div_ceil(64)).collect();
    let (armed, tracker) = (AtomicBool::new(false), Owner::default());
    let watch = Watch { start: range.start, bits, size_pages, armed, tracker };
    let watch: &'static Watch = Box::leak(Box::new(watch));
    let before = slot.swap(ptr::from_ref(watch).cast_mut(), Ordering::SeqCst);
    // A handler that is at it now, or that was left by a jump, keeps it for good.
    if !before.is_null() && LOOKING.load(Ordering::SeqCst) == 0 {
        // SAFETY: tracker-memory: it was leaked here, nobody finds it any more, and nobody who has found it is still looking.
        drop(unsafe { Box::from_raw(before) });
    }
    Ok(watch)
}

pub(super) fn disarm(id: Id, range: Range<usize>) -> Result<()> {
    let _alone = hold();
    let watch = armed("disarm", &range)?;
    watch.tracker.claim(id, "disarm", &range)?;
    if !watch.open_all() && !watch.open_with_neighbours() {
        // A part may be opened by now. It stays armed, and written.
        let cause = "the kernel cannot take its protection off; there are too many mappings, and it is one with others";
        return Err(Error::new(Kind::OutOfSpace, "disarm", object(&range), cause));
    }
    // Last: a thread that was trapped before finds its watch, and tries again.
    watch.armed.store(false, Ordering::SeqCst);
    watch.tracker.release(id);
    // A handler that saw it armed may be opening it for a neighbour, and from here on the memory may be somebody else's.
    while OPENING.iter().any(|slot| slot.what.load(Ordering::SeqCst) == everywhere()) {
        thread::give_way();
    }
    Ok(())
}

/// Has the notes that are the tracker's be nobody's; what is armed stays so.
pub(super) fn release(id: Id) {
    let _whole = no_change();
    watches().for_each(|watch| watch.tracker.release(id));
}

pub(super) fn scan(range: Range<usize>, found: &mut Dirty) -> Result<()> {
    let _whole = no_change();
    let watch = armed("scan", &range)?;
    watch.find(found, |word| word.load(Ordering::SeqCst));
    Ok(())
}

pub(super) fn scan_and_rearm(id: Id, range: Range<usize>, found: &mut Dirty) -> Result<()> {
    let _whole = no_change();
    let watch = armed("scan and re-arm", &range)?;
    watch.tracker.claim(id, "scan and re-arm", &range)?;
    watch.find(found, |word| word.swap(0, Ordering::SeqCst));
    for pages in found.ranges() {
        if !watch.allow(&pages, Access::Read) {
            // It stays as it is: written, now and next time.
            pages.step_by(PAGE_BYTES).for_each(|at| watch.note((at - watch.start) / PAGE_BYTES));
        }
    }
    Ok(())
}

extern "C" fn on_sigsegv(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: signal-handler: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let (addr, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    // SAFETY: signal-handler: the kernel passes the interrupted context.
    let writes = cfg!(not(target_arch = "x86_64")) || unsafe { upcall::write_access(context) };
    // To let writes through helps nothing else: a jump to a page, or what a protection key refuses, would come back for ever.
    if code == SEGV_ACCERR && writes && let_through(addr) {
        return;
    }
    // SAFETY: signal-handler: the arguments are the kernel's.
    unsafe { SIGSEGV.chain(info, context) };
}

/// A write to what is armed. `false`: it is not.
pub(crate) fn let_through(addr: usize) -> bool {
    LOOKING.fetch_add(1, Ordering::SeqCst);
    let is_armed = watches().any(|watch| watch.trapped(addr));
    LOOKING.fetch_sub(1, Ordering::SeqCst);
    is_armed
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::child::in_child;
    use selfpage_core::linux::memory::Place;

    #[test]
    fn a_scan_in_the_middle_of_a_trap_hides_no_write() {
        let id = Id::new();
        // SAFETY: a fresh mapping.
        let start = unsafe { memory::map_anonymous(Place::Anywhere, 4 * PAGE_BYTES, Access::ReadWrite) }.unwrap();
        let range = start..start + 4 * PAGE_BYTES;
        let page = start + PAGE_BYTES..start + 2 * PAGE_BYTES;
        let found = || {
            let mut found = Dirty::new();
            found.begin(&range);
            scan_and_rearm(id, range.clone(), &mut found).unwrap();
            found.ranges().collect::<Vec<_>>()
        };
        for whole in [false, true] {
            arm(id, range.clone()).unwrap();
            let watch = armed("look at", &range).unwrap();
            let (what, pages, expected) =
                if whole { (start | WHOLE, 0..4, range.clone()) } else { (page.start, 1..2, page.clone()) };
            watch.open(what, pages, || {
                // The trap is found, and the page protected, before it is allowed; and then somebody else writes, without a trap.
                assert_eq!(found(), std::slice::from_ref(&expected));
                let allowed = watch.allow(&expected, Access::ReadWrite);
                // SAFETY: mapped, and nobody holds a reference to it.
                unsafe { (page.start as *mut u8).write_volatile(1) };
                assert_eq!(found(), std::slice::from_ref(&expected), "written before this scan began");
                allowed
            });
            assert_eq!(found(), std::slice::from_ref(&expected), "a page too many");
            assert_eq!(found(), []);
            disarm(id, range.clone()).unwrap();
        }
        // SAFETY: mapped above, and nobody holds a reference to it.
        unsafe { memory::unmap(start, 4 * PAGE_BYTES) }.unwrap();
    }

    /// Each place is a handler's of another thread, which the child does not have.
    #[test]
    fn a_child_frees_the_places_of_others_and_notes_their_pages_once() {
        let id = Id::new();
        // SAFETY: a fresh mapping.
        let start = unsafe { memory::map_anonymous(Place::Anywhere, 4 * PAGE_BYTES, Access::ReadWrite) }.unwrap();
        let range = start..start + 4 * PAGE_BYTES;
        let page = |number: usize| start + number * PAGE_BYTES..start + (number + 1) * PAGE_BYTES;
        arm(id, range.clone()).unwrap();
        let (tell, told) = channel();
        let (end, ends) = channel::<()>();
        let others = std::thread::spawn(move || {
            let opening: Vec<_> = (0..MOST_OPENING).map(|_| Opening::begin(start + PAGE_BYTES)).collect();
            tell.send(()).unwrap();
            let _ = ends.recv();
            drop(opening);
        });
        told.recv().unwrap();
        let ended = in_child(|| {
            // SAFETY: a call without pointers, which ends the child where it hangs.
            unsafe { libc::alarm(10) };
            let found = || {
                let mut found = Dirty::new();
                found.begin(&range);
                scan_and_rearm(id, range.clone(), &mut found).unwrap();
                found.ranges().collect::<Vec<_>>()
            };
            let (noted, later) = (found() == [page(1)], found().is_empty());
            // SAFETY: mapped, and nobody holds a reference to it.
            unsafe { (page(2).start as *mut u8).write_volatile(1) };
            noted && later && found() == [page(2)]
        });
        assert_eq!(ended, 0, "it waits for a place, or has a wrong note");
        drop(end);
        others.join().unwrap();
        disarm(id, range.clone()).unwrap();
        // SAFETY: mapped above, and nobody holds a reference to it.
        unsafe { memory::unmap(start, 4 * PAGE_BYTES) }.unwrap();
    }

    #[test]
    fn no_handler_of_a_signal_comes_in_where_one_that_forks_would_wait_for_its_own_thread() {
        static CAME: AtomicBool = AtomicBool::new(false);
        extern "C" fn comes(_: libc::c_int) {
            CAME.store(true, Ordering::Relaxed);
        }
        // SAFETY: the handler sets a word, and nobody else here has this signal.
        unsafe { libc::signal(libc::SIGRTMIN() + 7, comes as *const () as usize) };
        let comes_after = |held: Box<dyn std::any::Any>| {
            // SAFETY: the handler is ours.
            unsafe { libc::raise(libc::SIGRTMIN() + 7) };
            let (early, late) = (CAME.load(Ordering::Relaxed), {
                drop(held);
                CAME.swap(false, Ordering::Relaxed)
            });
            assert_eq!((early, late), (false, true));
        };
        comes_after(Box::new(hold()));
        comes_after(Box::new(no_change()));
    }
}
