//! The upcall trap: `SIGBUS` on the faulting thread, which resolves its own fault. Nemesis's notification handler.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use selfpage_core::addr::{PageNo, VirtAddr};
use selfpage_core::domain::DomainState;
use selfpage_core::fault::{self, Fault, Outcome};
use selfpage_core::linux::thread;
use selfpage_core::pager::Context;
use selfpage_core::region::Access;

use super::ask::{self, Asked};
use super::handler_stack::{self, Arrival, Stack};
use super::stack;
use super::takeover::{self, Blocked, Takeover};
use crate::domain::Inner;
use crate::error::Result;
use crate::handler::{Answer, FaultKind, Trouble};

pub(crate) const MOST_DOMAINS: usize = 64;
/// The code of a `SIGSEGV` for an access that the mapping does not allow.
pub(crate) const SEGV_ACCERR: libc::c_int = 2;

/// A domain that takes upcalls, and who is using the pointer right now.
struct Entry {
    inner: AtomicPtr<Inner>,
    users: AtomicU32,
}

impl Entry {
    /// Does `work` with the domain, which stays meanwhile. `None`: there is none.
    fn with<T>(&self, work: impl FnOnce(&Inner) -> T) -> Option<T> {
        self.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: domain-listed: a domain that is listed is alive, and `delist` waits for its users.
        let done = unsafe { self.inner.load(Ordering::SeqCst).as_ref() }.map(work);
        self.users.fetch_sub(1, Ordering::SeqCst);
        done
    }
}

static DOMAINS: [Entry; MOST_DOMAINS] =
    [const { Entry { inner: AtomicPtr::new(ptr::null_mut()), users: AtomicU32::new(0) } }; MOST_DOMAINS];
static SIGBUS: Takeover = Takeover::of(libc::SIGBUS);

/// Has the domain's faults come here. `false`: there are too many domains with upcall regions.
pub(crate) fn enlist(inner: *const Inner) -> bool {
    install();
    let is_there = |entry: &Entry| ptr::eq(entry.inner.load(Ordering::Acquire), inner);
    let takes = |entry: &Entry| {
        let free = ptr::null_mut();
        entry.inner.compare_exchange(free, inner.cast_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    // A place that came free before its own must not become a second one.
    DOMAINS.iter().any(is_there) || DOMAINS.iter().any(takes)
}

fn install() {
    // SAFETY: signal-handler: `on_sigbus` calls core in a trap's context, and the handler that was there before. Every signal is
    // blocked in it: a handler that came in and touched the page at hand would wait for itself.
    unsafe { SIGBUS.install(on_sigbus, Blocked::Every) };
}

/// Before the first region with a handler: that may fault, so the signals for faults are not blocked any more. Where one comes
/// while core is at work, [`on_sigbus`] finds out.
///
/// # Errors
/// There is no room for the stacks that they run on.
pub(crate) fn make_ready_for_handlers() -> Result<()> {
    handler_stack::lay_out()?;
    install();
    // SAFETY: signal-handler: as above.
    unsafe { SIGBUS.block(on_sigbus, Blocked::AllButFaults) };
    Ok(())
}

/// Ends that, and waits until no trap uses the domain any more.
pub(crate) fn delist(inner: *const Inner) {
    for entry in &DOMAINS {
        let cleared =
            entry.inner.compare_exchange(inner.cast_mut(), ptr::null_mut(), Ordering::SeqCst, Ordering::Relaxed);
        while cleared.is_ok() && entry.users.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
    }
}

/// In a forked child only the forking thread is left, and it is in no trap.
pub(crate) fn forget_users() {
    for entry in &DOMAINS {
        entry.users.store(0, Ordering::Relaxed);
    }
    stack::forget_all();
    handler_stack::forget_all();
}

/// In a process that has no domain yet: those that are listed were its parent's.
pub(crate) fn forget_all() {
    DOMAINS.iter().for_each(|entry| entry.inner.store(ptr::null_mut(), Ordering::Release));
    forget_users();
}

extern "C" fn on_sigbus(number: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // The interrupted code may be just about to look at it, and calls of the C library fail here, or in a handler of the program's.
    // SAFETY: signal-handler: the thread's own.
    let errno = unsafe { *libc::__errno_location() };
    take(number, info, context);
    // SAFETY: signal-handler: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Does what the signal is for.
fn take(number: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: signal-handler: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let (addr, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    let here = Stack::here();
    if let Some((stack, _)) = here
        && stack.is_within_core()
    {
        if code == libc::BUS_ADRERR {
            crate::die("in a trap, code of a pager, a policy or a store touched memory that is not there, or managed");
        }
        // SAFETY: signal-handler: the arguments are the kernel's.
        return unsafe { stack.put_off(number, info, context) };
    }
    if code != libc::BUS_ADRERR {
        // Sent by somebody, or the hardware lost the page: no fill helps there, and the access would come back for ever.
        // SAFETY: signal-handler: the arguments are the kernel's.
        return unsafe { SIGBUS.chain(info, context) };
    }
    // The kernel begins a handler with no right to any memory with a key.
    crate::protection::refresh();
    // SAFETY: signal-handler: the kernel passes the interrupted context; bit 1 of the error code is set for a write.
    let write = unsafe { write_access(context) };
    let access = if write { Access::Write } else { Access::Read };
    let fault = Fault { addr: VirtAddr(addr), access, thread: 0 };
    // SAFETY: signal-handler: the context is the kernel's.
    let arrival = unsafe { Arrival::of(here, context) };
    let (mut outcome, asked) = arrival.do_core(|| resolve(fault));
    if let Some((asked, kind)) = asked {
        // The handler may jump out, so nothing is held but a count.
        outcome = ask(&asked, kind, fault, &arrival, context);
        arrival.do_core(|| let_go(asked, fault.addr.page()));
        if outcome == Outcome::Protected {
            return raise_segv(info, context);
        }
    }
    match outcome {
        Outcome::Violation => raise_segv(info, context),
        // SAFETY: signal-handler: the arguments are the kernel's.
        Outcome::NotOurs | Outcome::Failed(_) => unsafe { SIGBUS.chain(info, context) },
        // The access is tried again: also where its region went meanwhile.
        Outcome::Resolved | Outcome::Retry | Outcome::Busy | Outcome::Protected | Outcome::Missing => {}
    }
}

/// Has the domain that the fault is of resolve it; or finds out what its handler is to be asked.
fn resolve(fault: Fault) -> (Outcome, Option<(Asked, FaultKind)>) {
    let resolved = |entry: &Entry| {
        let resolved = entry.with(|inner| resolve_in(inner, fault))?;
        (resolved.0 != Outcome::NotOurs).then_some(resolved)
    };
    DOMAINS.iter().find_map(resolved).unwrap_or((Outcome::NotOurs, None))
}

/// Lets go of what was asked. Nothing may be freed here, so a count goes only where another is there: the domain's own while it is listed,
/// and its list's while the region is in its map. What went meanwhile leaves its memory behind.
fn let_go(asked: Asked, page: PageNo) {
    let own = &raw const *asked.inner;
    let is_own = |inner: *const Inner| ptr::eq(inner, own);
    let mut asked = Some(asked);
    if let Some(entry) = DOMAINS.iter().find(|entry| is_own(entry.inner.load(Ordering::SeqCst))) {
        entry.with(|inner| {
            // Another may have come to its place.
            if let Some(asked) = asked.take_if(|_| is_own(inner)) {
                asked.let_go(inner, page);
            }
        });
    }
    std::mem::forget(asked);
}

fn resolve_in(inner: &Inner, mut fault: Fault) -> (Outcome, Option<(Asked, FaultKind)>) {
    let state: &DomainState = inner.state();
    let page = fault.addr.page();
    if state.tracer.is_on() {
        fault.thread = thread::id();
    }
    let outcome = fault::resolve_asking(state, Context::Trap, fault);
    if let Outcome::Failed(failure) = outcome {
        inner.report("SIGBUS", page, failure);
    }
    if is_the_programs_own(state, outcome, fault) {
        return (Outcome::NotOurs, None);
    }
    if outcome == Outcome::Violation {
        return (violation(inner, page), None);
    }
    let asked = ask::kind(outcome).and_then(|kind| Some((Asked::about(inner, page)?, kind)));
    (outcome, asked)
}

/// The program's own fault, a write: it gets the `SIGSEGV` that it would have had without us. The kernel makes it, where it lets the page
/// be protected: the access is tried again.
fn violation(inner: &Inner, page: PageNo) -> Outcome {
    let Some(asked) = Asked::about(inner, page) else { return Outcome::Retry };
    let refused = asked.bound.refuse_writes(inner, page);
    asked.let_go(inner, page);
    refused.map_or(Outcome::Violation, |()| Outcome::Retry)
}

/// Whether an access that is to be tried again would only raise its signal again, since what is there is not a region's any more.
fn is_the_programs_own(state: &DomainState, outcome: Outcome, fault: Fault) -> bool {
    outcome == Outcome::Retry && state.mmu.fails_of_itself(fault.addr.page(), fault.access)
}

/// Asks the program's handler. [`Outcome::Protected`]: the access is refused.
fn ask(asked: &Asked, kind: FaultKind, fault: Fault, arrival: &Arrival, context: *mut libc::c_void) -> Outcome {
    let bound = &asked.bound;
    let answered = match bound.handler() {
        None => Ok(ask::without_handler(kind)),
        Some(_) => {
            // SAFETY: signal-handler: the kernel passes the interrupted context.
            let before = unsafe { registers(context) };
            match arrival.call(|| asked.answer(fault, kind, None, NonNull::new(context))).flatten() {
                // SAFETY: signal-handler: as above.
                Ok(Answer::Handled) if unsafe { registers(context) } != before => Ok(Answer::Handled),
                Ok(Answer::Handled) if !arrival.do_core(|| ask::goes_on(asked, fault, kind, thread::block())) => {
                    Err(Trouble::Repeated)
                }
                answered => answered,
            }
        }
    };
    match answered {
        Ok(Answer::Handled) => Outcome::Resolved,
        // Another thread may have given the page meanwhile, or unprotected it: there is nothing to refuse then.
        Ok(Answer::Refuse) if !arrival.do_core(|| asked.is_still(fault, kind)) => Outcome::Retry,
        Ok(Answer::Refuse) => Outcome::Protected,
        Ok(Answer::Pass) => match arrival.do_core(|| fetch(asked, fault)) {
            // It has been protected since, or its region is gone: the access is tried again and meets that.
            Outcome::Protected | Outcome::NotOurs => Outcome::Retry,
            outcome if is_the_programs_own(asked.inner.state(), outcome, fault) => Outcome::NotOurs,
            outcome => outcome,
        },
        Err(trouble) => {
            bound.complain(fault.addr.0, trouble);
            Outcome::Protected
        }
    }
}

/// Fetches a page whose handler has nothing to say.
fn fetch(asked: &Asked, fault: Fault) -> Outcome {
    let (inner, of) = (&asked.inner, asked.bound.core().serial());
    let outcome = fault::resolve_further(inner.state(), Context::Trap, fault, of);
    if let Outcome::Failed(failure) = outcome {
        inner.report("SIGBUS", fault.addr.page(), failure);
    }
    outcome
}

/// Where the interrupted thread stands, and what it has in the registers that addresses are made from.
///
/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
unsafe fn registers(context: *mut libc::c_void) -> impl PartialEq {
    // SAFETY: signal-handler: the kernel keeps the context in place until the handler returns.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    // In two parts: the compiler copies and compares each of them in place, and calls nobody.
    #[cfg(target_arch = "x86_64")]
    return {
        let gregs = &context.uc_mcontext.gregs;
        (gregs.first_chunk::<16>().copied(), [gregs[libc::REG_RIP as usize], gregs[libc::REG_EFL as usize]])
    };
    #[cfg(target_arch = "aarch64")]
    return (context.uc_mcontext.pc, context.uc_mcontext.sp, context.uc_mcontext.regs);
}

/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
pub(crate) unsafe fn write_access(context: *mut libc::c_void) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: signal-handler: the kernel keeps the context in place until the handler returns.
        let context = unsafe { &*context.cast::<libc::ucontext_t>() };
        context.uc_mcontext.gregs[libc::REG_ERR as usize] & 2 != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        false
    }
}

/// The program's own `SIGSEGV`, made by us.
fn raise_segv(info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: signal-handler: the arguments that the kernel made, of which the first now tells of this signal.
    unsafe {
        (*info).si_signo = libc::SIGSEGV;
        (*info).si_code = SEGV_ACCERR;
        takeover::raise(libc::SIGSEGV, info, context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Domain;
    use selfpage_core::addr::PAGE_BYTES;
    use selfpage_core::mmu::Trap;

    #[test]
    fn a_domain_has_one_place_whatever_comes_free_before_it() {
        let build = || Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let region = |domain: &Domain| domain.region(PAGE_BYTES).trap(Trap::Upcall).zero().unwrap();
        let before: Vec<_> = [(); 8].map(|()| build()).into();
        let their_regions: Vec<_> = before.iter().map(region).collect();
        let domain = build();
        let first = region(&domain);
        drop((their_regions, before));
        let second = region(&domain);
        let inner = &raw const *domain.life().inner;
        let places = DOMAINS.iter().filter(|entry| ptr::eq(entry.inner.load(Ordering::Acquire), inner));
        assert_eq!(places.count(), 1);
        drop((first, second));
    }
}
