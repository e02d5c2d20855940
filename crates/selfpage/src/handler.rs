//! Handlers of the program's own: what it does when somebody touches a page that it has protected, or one that is absent.
//!
//! # Source
//! AVM §2.1 (a fault is an upcall to the application), Appel & Li (TRAP, PROT1, PROTN, UNPROT), Nemesis §6.5 (a custom fault
//! handler in the place of a stretch driver's). libsigsegv offers the upcall; ours may also give contents, and may run on a thread of
//! its own.
#![allow(unsafe_code)]

pub(crate) mod given_up;

use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use selfpage_core::addr::{PAGE_BYTES, PageBytes, PageNo, PageRange};
pub use selfpage_core::fault::protect::Protection;
use selfpage_core::fault::{Failure, Outcome, protect, range};
use selfpage_core::linux::{Errno, memory, thread};
use selfpage_core::mmu::{Refusal, Trap};
use selfpage_core::pageset::PageSet;
use selfpage_core::region::{Access, Rights};

use crate::domain::Inner;
use crate::error::{self, Error, Kind, Result};
use crate::region::{Bound, Region};
use crate::trap::{handlers, upcall};

/// Why the handler is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The program has protected the page against this access. Another thread may have unprotected it meanwhile.
    Protection,
    /// The page is not in core, and the pager has not been asked yet: only for handlers that want that
    /// ([`FaultHandler::asks_first`]).
    Missing,
}

/// What is to become of the access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It is tried again. If it meets the same the handler is asked again, a bounded number of times.
    Handled,
    /// The handler has nothing to say: a missing page is fetched from its pager; a protected one is refused.
    Pass,
    /// It is the program's own fault: `SIGSEGV`, for the handler that the program has for that, if it has one. A system call
    /// on the page fails with `EFAULT`. If another thread has answered for the page meanwhile, the access is tried again instead.
    Refuse,
}

/// Answers the faults of one region.
///
/// It answers for the region: what it does by its [`MemoryFault`] needs no right `META` of the thread that stands there, which may be
/// in a protection domain without it.
///
/// # Context
/// In upcall regions ([`crate::Trap::Upcall`]) it runs on the faulting thread, as a signal handler of the program's own
/// would, on a stack of 256 KiB of ours, with signals blocked but those for faults: what the interrupted code holds (a lock, the
/// allocator's) it must not wait for, and those signals it must not let in. Of what that code may be in the middle of changing, thread-local data
/// above all, it uses atomics alone: Rust does not see to that. In worker regions it runs on a thread of its own, while the faulting one is stopped.
///
/// While it runs no lock of the domain is held, and nobody is inside its gate: it may touch any page, fault, and ask
/// anything of any region. What it may not do is drop its own region.
///
/// # Examples
/// ```no_run
/// # fn main() -> selfpage::Result<()> {
/// use selfpage::{Answer, Domain, MemoryFault, Protection, store::MemoryStore};
/// let domain = Domain::with_frames(1 << 20).build()?;
/// let unprotect = |fault: &MemoryFault<'_>| match fault.protect_page(Protection::ReadWrite) {
///     Ok(()) => Answer::Handled,
///     Err(_) => Answer::Refuse,
/// };
/// let mut region = domain.region(1 << 22).handler(unprotect).stored(MemoryStore::new(1 << 23)?)?;
/// region.protect(0, 4096, Protection::Read)?;
/// region.as_mut_slice::<u8>()[7] = 1; // the handler runs
/// # Ok(()) }
/// ```
pub trait FaultHandler: Send + Sync {
    /// Answers one fault.
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer;

    /// Whether it is asked before an absent page is brought in, too: then each such fault costs as much as a trap. Asked
    /// once, when the region is made.
    ///
    /// A page is absent before its first use, and again whenever it was evicted: a handler that has given it contents already says
    /// [`Answer::Pass`] then, and its pager brings back what the program wrote. To map it anew would overwrite that. Threads may fault on
    /// one page at once: docs/handlers.md has a handler that gives each page once.
    fn asks_first(&self) -> bool {
        false
    }
}

impl<F: Fn(&MemoryFault<'_>) -> Answer + Send + Sync> FaultHandler for F {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        self(fault)
    }
}

/// A fault, and what can be done about it.
///
/// # Context
/// All calls: within [`FaultHandler::handle`], on its thread.
pub struct MemoryFault<'a> {
    pub(crate) addr: usize,
    pub(crate) access: Access,
    pub(crate) kind: FaultKind,
    /// None: the calling one.
    pub(crate) thread: Option<u32>,
    pub(crate) context: Option<NonNull<c_void>>,
    pub(crate) bound: &'a Bound,
    pub(crate) inner: &'a Inner,
}

impl MemoryFault<'_> {
    /// The address, to the byte.
    pub fn address(&self) -> usize {
        self.addr
    }

    /// Where in the region that is.
    pub fn offset_bytes(&self) -> usize {
        self.addr.wrapping_sub(self.bound.start())
    }

    /// What was to be done there.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Why the handler is asked.
    pub fn kind(&self) -> FaultKind {
        self.kind
    }

    /// The kernel's number of the thread that stands there.
    pub fn thread(&self) -> u32 {
        self.thread.unwrap_or_else(thread::id)
    }

    /// In upcall regions, the interrupted thread's registers: a `ucontext_t`. A handler that changes them, and says
    /// [`Answer::Handled`], has the thread go on elsewhere or with other values. It lives until the handler returns.
    pub fn context(&self) -> Option<NonNull<c_void>> {
        self.context
    }

    /// As [`crate::Region::protect`], in the fault's region.
    ///
    /// # Errors
    /// As there.
    pub fn protect(&self, offset_bytes: usize, len_bytes: usize, protection: Protection) -> Result<()> {
        self.protect_range(self.bound.whole_pages("protect", offset_bytes, len_bytes)?, protection)
    }

    /// The same for the page of the fault.
    ///
    /// # Errors
    /// As for [`crate::Region::protect`].
    pub fn protect_page(&self, protection: Protection) -> Result<()> {
        self.protect_range(PageRange { first: self.page(), count: 1 }, protection)
    }

    fn protect_range(&self, range: PageRange, protection: Protection) -> Result<()> {
        let inner = self.inner;
        self.bound.protect(inner, range, protection, || {
            let state = inner.state();
            inner.in_handler(move |_| protect::protect(state, range, protection))
        })
    }

    /// Gives the absent page of the fault its contents, in its pager's place, and maps it: what it reads as from now on. They
    /// are saved when the page is evicted, where the region has somewhere to save them. An evicted page is absent, too: what the program
    /// wrote to it is gone then ([`FaultHandler::asks_first`]).
    ///
    /// # Errors
    /// The page is not absent any more, since another thread gave it or asked for it by name, or no access to it is allowed by now
    /// ([`Kind::Invalid`]): answer [`Answer::Handled`], and the access meets what is there. There is no frame.
    ///
    /// # Safety
    /// *region-contents*: the page has had no contents yet (it has them also by `pin` and its like), or nobody holds a reference into it
    /// that would see others now.
    pub unsafe fn map(&self, contents: &PageBytes) -> Result<()> {
        let (state, page) = (self.inner.state(), self.page());
        // They may be managed too: nobody must fault on them who is a pager thread, or has claimed the page.
        let contents = &{ *contents };
        let given = self.inner.in_handler(move |context| range::supply(state, context, page, contents));
        match self.inner.go_on_supplying(given, page, contents) {
            Outcome::Resolved => Ok(()),
            Outcome::Failed(failure) => Err(Error::failure("map", self.bound.page_name(page), failure)),
            _ => {
                let cause = "it is in core by now, or nobody may access it: the handler answers `Handled`, and the access meets that";
                Err(Error::new(Kind::Invalid, "map", self.bound.page_name(page), cause))
            }
        }
    }

    /// As [`crate::Region::discard`], in the fault's region.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// *region-contents*: nobody holds a reference into the range whose contents must stay.
    pub unsafe fn discard(&self, offset_bytes: usize, len_bytes: usize) -> Result<()> {
        let range = self.bound.whole_pages("discard", offset_bytes, len_bytes)?;
        self.bound.discard(self.inner, range)
    }

    fn page(&self) -> PageNo {
        selfpage_core::addr::VirtAddr(self.addr).page()
    }
}

impl fmt::Debug for MemoryFault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("MemoryFault");
        fields
            .field("address", &format_args!("{:#x}", self.addr))
            .field("access", &self.access)
            .field("kind", &self.kind);
        fields.field("region", &self.bound.name).finish_non_exhaustive()
    }
}

/// What a region has to do with handlers.
pub(crate) struct Asking {
    handler: Option<Box<dyn FaultHandler>>,
    /// Whether the handler is asked of missing pages too.
    pub(crate) first: bool,
    /// Pages whose mapping itself was made to refuse an access. What the program forbids with mprotect(2) is not among them, and stays.
    refused: PageSet,
    /// How many came into that, or were [given up](selfpage_core::region::Region::given_up): while there was none, nobody looks.
    refusals: AtomicU64,
    /// What the program may do where nothing is protected.
    access: memory::Access,
    /// What rights of the whole process's leave of that, as the bits of mprotect(2). Changed with the gate closed.
    left: AtomicU32,
}

/// Why a tracked region is refused by whoever needs writes to be faults.
pub(crate) const ONE_CLIENT: &str = "a page has one bit that makes writes to it known, and tracking uses it: leave `tracked` out, and note writes by a handler";

impl Asking {
    pub(crate) fn of(handler: Option<Box<dyn FaultHandler>>, access: memory::Access) -> Asking {
        let first = handler.as_ref().is_some_and(|handler| handler.asks_first());
        let left = AtomicU32::new(u32::MAX);
        Asking { handler, first, refused: PageSet::none(), refusals: AtomicU64::new(0), access, left }
    }

    /// The same with room for the pages of a region that are refused.
    pub(crate) fn with_room(self, refused: PageSet) -> Asking {
        Asking { refused, ..self }
    }

    /// Provides what the handler runs on.
    pub(crate) fn make_ready(&self, trap: Trap, inner: &Arc<Inner>) -> Result<()> {
        match (trap, &self.handler) {
            (Trap::Upcall, Some(_)) => upcall::make_ready_for_handlers()?,
            (Trap::Worker, Some(_)) => handlers::start_one(inner)?,
            (Trap::TrackedWorker | Trap::TrackedUpcall, Some(_)) => {
                return Err(Error::new(Kind::Invalid, "make", "a tracked region with a handler", ONE_CLIENT));
            }
            (_, None) => {}
        }
        Ok(())
    }
}

impl Region {
    /// From its return on, accesses to `[offset, offset+len)` that `protection` does not allow are faults: the region's handler
    /// is asked ([`crate::RegionBuilder::handler`]), and where there is none it is the program's own `SIGSEGV`. Whole pages, of which
    /// each keeps its protection wherever it goes. Costs one call of the kernel for each run of neighbours in core.
    ///
    /// # Source
    /// Appel & Li's PROT1, PROTN and UNPROT; AVM §2.1.
    ///
    /// # Errors
    /// The range is not in the region, or begins or ends within a page; the region may only be read, a page is pinned and
    /// [`Protection::None`] would unmap it, or the thread's protection domain lacks the right `META` on the region: nothing was changed.
    /// The kernel cannot change a page: the pages before it are protected then.
    pub fn protect(&self, offset_bytes: usize, len_bytes: usize, protection: Protection) -> Result<()> {
        let inner = self.inner();
        let range = self.whole_pages("protect", offset_bytes, len_bytes)?;
        self.bound.protect(inner, range, protection, || {
            let state = inner.state();
            inner.on_table(move |_| protect::protect(state, range, protection))
        })
    }

    /// How the page at `offset_bytes` is protected.
    ///
    /// # Errors
    /// It is not in the region; or this is a forked child that did not get the region.
    pub fn protection(&self, offset_bytes: usize) -> Result<Protection> {
        self.inner().is_here("look at", || format!("region {}", self.bound.name))?;
        let PageRange { first, .. } = self.bound.range("look at", offset_bytes, 1)?;
        Ok(self.bound.protection_of(self.inner(), first))
    }
}

/// Why an access is refused that no handler has refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trouble {
    Panicked,
    Ended,
    Nested,
    NoThread,
    NoStack,
    Repeated,
}

impl Bound {
    /// The program's own handler of its faults.
    pub(crate) fn handler(&self) -> Option<&dyn FaultHandler> {
        self.asking.handler.as_deref()
    }

    /// Has the mapping itself refuse what `access` does not allow in a page, as long as that is `right`: only the kernel can fail an
    /// access of a thread that it has stopped.
    ///
    /// # Errors
    /// There are as many mappings as there can be.
    pub(crate) fn refuse(
        &self,
        inner: &Inner,
        page: PageNo,
        access: memory::Access,
        right: impl Fn() -> bool,
    ) -> std::result::Result<(), Errno> {
        // Where it is wrong already nobody may come to see it, not even for a moment.
        if !right() {
            return Ok(());
        }
        let one = PageRange { first: page, count: 1 };
        let note = || {
            self.asking.refused.insert(self.core().index(page));
            self.asking.refusals.fetch_add(1, Ordering::SeqCst);
        };
        // Before: a child that is forked in between has the mapping, and must know of it.
        note();
        let refused = self.allow(inner, one, access);
        // And after: whoever takes it back meanwhile takes it out of the set, and the refusal would stay.
        if refused.is_ok() {
            note();
        }
        // Whoever makes it wrong looks for refusals afterwards, and we for that: one of us sees the other.
        fence(Ordering::SeqCst);
        if !right() {
            // Not by a pager thread, which this may be: it would wait for itself.
            self.take_back(inner, one, |page| inner.is_ours(page));
            return Ok(());
        }
        refused
    }

    /// Has the mapping refuse writes to a page of a region that may only be read: for good, since that never changes. One that may be written
    /// to has come to the addresses of another, which refused the write: nothing is refused there.
    ///
    /// # Errors
    /// There are as many mappings as there can be.
    pub(crate) fn refuse_writes(&self, inner: &Inner, page: PageNo) -> std::result::Result<(), Errno> {
        if self.core().allows(Access::Write) {
            return Ok(());
        }
        self.allow(inner, PageRange { first: page, count: 1 }, memory::Access::Read)
    }

    /// Has the mapping allow so much in a range, and no more than the rights that are in force leave of it.
    fn allow(&self, inner: &Inner, range: PageRange, access: memory::Access) -> std::result::Result<(), Errno> {
        // What it uses has moved into it: inside the gate nobody waits for a stack.
        inner.undisturbed(move || {
            let state = inner.state();
            let _inside = state.gate.enter(state.mmu);
            // One that has left its domain allows nothing any more: nobody answers for a fault there.
            if !state.regions.find(range.first).is_some_and(|region| ptr::eq(region, self.core())) {
                return Ok(());
            }
            let left = self.asking.left.load(Ordering::Relaxed).cast_signed();
            let access = match access {
                _ if left & libc::PROT_READ == 0 => memory::Access::None,
                memory::Access::ReadWrite if left & libc::PROT_WRITE == 0 => memory::Access::Read,
                access => access,
            };
            // SAFETY: region-owned: what somebody wants of its pages stands in their words; a refusal is of what the program may not do.
            unsafe { memory::protect(range.first.addr().0, range.count as usize * PAGE_BYTES, access) }
        })
    }

    /// Rights of the whole process's leave so much of the region from now on: the bits of mprotect(2). The caller has the gate closed, and
    /// changes the mapping.
    pub(crate) fn leave_access(&self, prot: u32) {
        self.asking.left.store(prot, Ordering::Relaxed);
    }

    /// Has the mapping refuse nothing of its own in a range any more, after what is wanted of its pages has changed, or somebody has asked
    /// for them by name.
    ///
    /// # Context
    /// Normal, outside the gate.
    pub(crate) fn take_refusals_back(&self, inner: &Inner, range: PageRange) {
        let is_ours = |page: PageNo| inner.in_handler(move |_| inner.is_ours(page));
        self.take_back(inner, range, is_ours);
    }

    /// The same for those pages that are ours still.
    fn take_back(&self, inner: &Inner, range: PageRange, is_ours: impl Fn(PageNo) -> bool) {
        // As in `refuse`: what the caller has changed comes before this look.
        fence(Ordering::SeqCst);
        let Asking { refused, refusals, access, .. } = &self.asking;
        if refusals.load(Ordering::SeqCst) == 0 || *access != memory::Access::ReadWrite {
            return;
        }
        let is_refused = |page: &PageNo| refused.contains(self.core().index(*page));
        // What the program has mapped over a page since is not ours to open.
        for page in range.pages().filter(is_refused).filter(|page| !is_ours(*page)) {
            refused.remove(self.core().index(page));
        }
        let mut at = range.first;
        while let Some(first) = (at.0..range.end().0).map(PageNo).find(is_refused) {
            let count = (first.0..range.end().0).map(PageNo).take_while(is_refused).count() as u64;
            let run = PageRange { first, count };
            // In this order: who refuses one of them anew meanwhile puts it in again after the mapping refuses it.
            run.pages().for_each(|page| refused.remove(self.core().index(page)));
            if self.allow(inner, run, memory::Access::ReadWrite).is_err() {
                run.pages().for_each(|page| refused.insert(self.core().index(page)));
            }
            at = run.end();
        }
    }

    /// Whether pages of the region may be protected so.
    fn may_protect(&self, protection: Protection) -> Result<()> {
        if protection == Protection::ReadWrite && self.core().rights == Rights::Read {
            let cause = "the region may only be read: make it with FileAccess::ReadWrite";
            return Err(Error::new(Kind::Invalid, "protect", format!("region {}", self.name), cause));
        }
        if self.core().trap.is_tracked() {
            return Err(Error::new(Kind::Invalid, "protect", format!("region {}", self.name), ONE_CLIENT));
        }
        Ok(())
    }

    /// Says in one line on standard error why an access is refused.
    ///
    /// # Context
    /// Trap.
    pub(crate) fn complain(&self, addr: usize, trouble: Trouble) {
        let why = match trouble {
            Trouble::Panicked => "its handler panicked",
            Trouble::Ended => {
                "the thread ended on which its handler ran; if a filter of system calls (seccomp) ends it, let that allow the call, or \
                 answer it with an error"
            }
            Trouble::Nested => "its handler faults within itself, again and again",
            Trouble::NoThread => "its handler faults, and there is no thread to answer that",
            Trouble::NoStack => "there is no memory for a stack that its handler could run on",
            Trouble::Repeated => "its handler says that it has handled the fault, and nothing changes",
        };
        error::tell_of_signal("SIGSEGV", self.given_name(), self.start(), addr.wrapping_sub(self.start()), why);
    }

    /// Protects a part of the region by `change`, or on a pager thread if it has no descriptor.
    pub(crate) fn protect(
        &self,
        inner: &Inner,
        range: PageRange,
        protection: Protection,
        change: impl FnOnce() -> std::result::Result<(), (PageNo, protect::Unprotected)>,
    ) -> Result<()> {
        self.may_protect(protection)?;
        let state = inner.state();
        let mut done = change();
        if matches!(done, Err((_, protect::Unprotected::Machine(Refusal::NoDescriptor)))) {
            done = inner.on_pager_thread(move || protect::protect(state, range, protection));
        }
        self.take_refusals_back(inner, range);
        done.map_err(|(page, why)| unprotected(self.page_name(page), why))
    }

    /// How a page is protected.
    pub(crate) fn protection_of(&self, inner: &Inner, page: PageNo) -> Protection {
        inner.undisturbed(|| protect::protection(inner.state(), page)).unwrap_or(Protection::ReadWrite)
    }
}

fn unprotected(page: String, why: protect::Unprotected) -> Error {
    match why {
        protect::Unprotected::Pinned => {
            let cause = "it is pinned, and a page that nobody may access is not mapped: unpin it, or protect it against \
                         writes only";
            Error::new(Kind::Held, "protect", page, cause)
        }
        protect::Unprotected::Machine(Refusal::Pinned) => {
            let cause =
                "the kernel or a device works on it (a transfer in flight, a registered buffer): try again later";
            Error::new(Kind::Held, "protect", page, cause)
        }
        protect::Unprotected::Machine(why) => Error::failure("protect", page, Failure::Machine(why)),
    }
}

/// How many bytes [`MemoryFault::map`] takes.
const _: () = assert!(size_of::<PageBytes>() == PAGE_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Domain;
    use crate::maps;

    #[test]
    fn a_write_that_a_region_refused_says_nothing_of_the_next_one_at_its_addresses() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let region = domain.region(4 * PAGE_BYTES).zero().unwrap();
        let page = region.bound.core().range.first;
        assert!(region.bound.refuse_writes(&domain.life().inner, page).is_ok());
        let start = page.addr().0;
        let all = maps::within(&(start..start + PAGE_BYTES)).unwrap();
        assert!(all.iter().all(|mapping| mapping.writable), "it may be written to");
    }
}
