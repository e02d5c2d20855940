//! Stacks for traps in which a handler of the program's own may run. A handler may fault in its turn, and the alternate signal stack of a
//! thread may have room for no second signal: so a thread that traps is given a stack of ours for good, as its alternate one. What
//! faults on it goes on below, and nothing is to be changed and changed back at each trap: no stack, and no mask of signals.

use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, compiler_fence};

use selfpage_core::linux::memory;
use selfpage_core::linux::signal::{self, SignalSet};
use selfpage_core::linux::{Errno, thread};

use super::stack::{self, GUARD_BYTES, STACKS};
use super::takeover;
use super::thread::TAKEN;
use crate::handler::Trouble;

const STACK_BYTES: usize = 256 << 10;
const HEAD_BYTES: usize = 4096;
/// What must be left of a stack for a trap to be served there within others, each of which takes up to 12 KiB for the kernel's own frame.
/// Not how many there are is counted: one that jumps out would have to be taken back.
const ROOM_BYTES: usize = 96 << 10;

/// What is known of a stack. All zeros: it is nobody's.
struct Mark {
    /// The kernel's number of the thread that has it; 0: nobody.
    owner: AtomicU32,
    /// Core is at work on it.
    core: AtomicBool,
    /// Signals for faults may be blocked: the program had blocked them, or one came while core was at work.
    shut: AtomicBool,
    /// Where its owner's own block of memory is, which a forked child's thread has at the same place.
    block: AtomicUsize,
}

/// The head of some stacks, which lie behind it.
struct Stacks {
    marks: [Mark; STACKS],
    /// More of them.
    next: AtomicPtr<Stacks>,
}

const _: () = assert!(size_of::<Stacks>() <= HEAD_BYTES);

static FIRST: AtomicPtr<Stacks> = AtomicPtr::new(ptr::null_mut());

/// One of them.
#[derive(Clone, Copy)]
pub(super) struct Stack {
    of: &'static Stacks,
    number: usize,
}

/// Where a trap has come in.
pub(super) enum Arrival {
    /// On the stack that its thread has of ours.
    Own(Stack),
    /// On another one; all signals are blocked. Which stack the thread has from its next trap on, or why none is for a handler now.
    Elsewhere(Result<Stack, Trouble>),
}

impl Stacks {
    fn at(place: &AtomicPtr<Stacks>) -> Option<&'static Stacks> {
        // SAFETY: trap-stack: stacks are published when they are ready, and never unmapped.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    }

    fn all() -> impl Iterator<Item = &'static Stacks> {
        iter::successors(Stacks::at(&FIRST), |stacks| Stacks::at(&stacks.next))
    }

    /// Maps more of them, unless another thread has just done so.
    fn map(place: &AtomicPtr<Stacks>) -> Result<(), Errno> {
        let head = stack::map(HEAD_BYTES, STACK_BYTES)?;
        let new = ptr::with_exposed_provenance_mut(head);
        if place.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: owned-range: just mapped, and nobody knows of it.
            let _ = unsafe { memory::unmap(head, HEAD_BYTES + STACKS * STACK_BYTES) };
        }
        Ok(())
    }
}

impl Stack {
    fn all() -> impl Iterator<Item = Stack> {
        Stacks::all().flat_map(|of| (0..STACKS).map(move |number| Stack { of, number }))
    }

    /// The one that the caller is on, and how much of it is left.
    pub(super) fn here() -> Option<(Stack, usize)> {
        let here = 0u8;
        Stacks::all().find_map(|of| {
            let at = (&raw const here as usize).wrapping_sub(ptr::from_ref(of).addr() + HEAD_BYTES);
            (at < STACKS * STACK_BYTES).then_some((Stack { of, number: at / STACK_BYTES }, at % STACK_BYTES))
        })
    }

    fn mark(&self) -> &'static Mark {
        &self.of.marks[self.number]
    }

    fn top(&self) -> usize {
        ptr::from_ref(self.of).addr() + HEAD_BYTES + (self.number + 1) * STACK_BYTES
    }

    /// As the kernel is told of it.
    fn as_alternate(&self) -> libc::stack_t {
        let len_bytes = STACK_BYTES - GUARD_BYTES;
        libc::stack_t {
            ss_sp: ptr::with_exposed_provenance_mut(self.top() - len_bytes),
            ss_flags: 0,
            ss_size: len_bytes,
        }
    }

    /// A stack for the calling thread: the one that it has, if something took that out of use; a free one; that of a thread which has
    /// ended; or one of some more.
    fn take() -> Result<Stack, Errno> {
        let own = thread::id();
        loop {
            let left = |stack: &Stack| stack.mark().owner.load(Ordering::Relaxed) == own;
            let free = |stack: &Stack| stack.passes(0, own);
            let mut found = Stack::all().find(left).or_else(|| Stack::all().find(free));
            found = found.or_else(|| Stack::all().find(|stack| stack.take_from_dead(own)));
            if let Some(stack) = found {
                let mark = stack.mark();
                mark.block.store(thread::block(), Ordering::Relaxed);
                mark.core.store(false, Ordering::Relaxed);
                mark.shut.store(false, Ordering::Relaxed);
                return Ok(stack);
            }
            Stacks::map(Stacks::all().last().map_or(&FIRST, |last| &last.next))?;
        }
    }

    fn passes(&self, from: u32, to: u32) -> bool {
        self.mark().owner.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes it, if its owner is no more. Nobody finds it by its owner's number meanwhile, which a new thread may have.
    fn take_from_dead(&self, own: u32) -> bool {
        let owner = self.mark().owner.load(Ordering::Relaxed);
        if owner == TAKEN || !self.passes(owner, TAKEN) {
            return false;
        }
        let lives = thread::exists(owner);
        self.mark().owner.store(if lives { owner } else { own }, Ordering::Release);
        !lives
    }

    /// Whether it may take the place of this alternate stack for good. Whoever has the kernel take one out of use at each signal changes
    /// stacks in handlers, and a larger one is there for a reason.
    fn may_replace(alternate: &libc::stack_t) -> bool {
        alternate.ss_flags & SS_AUTODISARM == 0 && alternate.ss_size < STACK_BYTES
    }

    /// Whether a trap that has come on it came in the middle of core's own work for another one.
    pub(super) fn is_within_core(&self) -> bool {
        self.mark().core.load(Ordering::Relaxed)
    }

    /// Has signals of the number that came wait until core is done: [`Arrival::call`] lets them in, or the return from the trap does.
    ///
    /// # Safety
    /// *signal-handler*: called from the handler, with its arguments, where [`Stack::is_within_core`].
    pub(super) unsafe fn put_off(&self, number: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // It would come at once.
        signal::block_all();
        self.mark().shut.store(true, Ordering::Relaxed);
        // SAFETY: signal-handler: what the kernel made and passed.
        unsafe {
            libc::sigaddset(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask, number);
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), thread::id(), number, info);
        }
    }

    /// Makes it the calling thread's alternate stack, as which it may be in use.
    fn set_as_alternate(&self) {
        // SAFETY: signal-handler: a stack of the thread's own. Where the thread is on its alternate stack this fails, and changes nothing.
        unsafe { libc::sigaltstack(&self.as_alternate(), ptr::null_mut()) };
    }
}

/// Maps the first stacks, before the first region with a handler.
///
/// # Errors
/// There are no more addresses or mappings.
pub(super) fn lay_out() -> crate::Result<()> {
    if Stacks::at(&FIRST).is_some() {
        return Ok(());
    }
    Stacks::map(&FIRST).map_err(|errno| stack::no_room("the stacks of handlers", errno))
}

impl Arrival {
    /// Where this trap has come in: `here` ([`Stack::here`]). A thread that is on no stack of ours has one when the trap is over.
    ///
    /// # Safety
    /// *signal-handler*: `context` is what the kernel passed to the handler.
    pub(super) unsafe fn of(here: Option<(Stack, usize)>, context: *mut libc::c_void) -> Arrival {
        if let Some((stack, left_bytes)) = here {
            if left_bytes >= ROOM_BYTES {
                // SAFETY: signal-handler: passed on from our caller.
                let blocked = SignalSet::of(unsafe { takeover::interrupted_mask(context) });
                if blocked.meets(signal::FAULTS) {
                    stack.mark().shut.store(true, Ordering::Relaxed);
                }
                return Arrival::Own(stack);
            }
            // The handler that is at work here has faulted, again and again.
            signal::block_all();
            return Arrival::Elsewhere(Err(Trouble::Nested));
        }
        if Stacks::at(&FIRST).is_none() {
            // No region has a handler, and all signals are blocked.
            return Arrival::Elsewhere(Err(Trouble::NoStack));
        }
        // Core will be at work on a stack that the kernel does not know of: it would put the next signal where this one lies.
        signal::block_all();
        let stack = Stack::take();
        // SAFETY: signal-handler: the kernel keeps the context in place until the handler returns, and then makes the stack that is
        // named there the thread's alternate one.
        let alternate = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_stack };
        if let Ok(stack) = stack
            && Stack::may_replace(alternate)
        {
            *alternate = stack.as_alternate();
            // Since 6.12 it does not while the thread is on its alternate stack (x86). There it is not now.
            stack::run(|| stack.set_as_alternate());
        }
        Arrival::Elsewhere(stack.map_err(|_| Trouble::NoStack))
    }

    /// Does core's `work`, which no handler of a signal may come into.
    ///
    /// # Context
    /// Trap.
    pub(super) fn do_core<T>(&self, work: impl FnOnce() -> T) -> T {
        let Arrival::Own(stack) = self else { return stack::run(work) };
        let core = &stack.mark().core;
        core.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let result = work();
        compiler_fence(Ordering::SeqCst);
        core.store(false, Ordering::Relaxed);
        result
    }

    /// Calls a handler of the program's, with the signals for faults let in and all others blocked.
    ///
    /// # Context
    /// Trap.
    pub(super) fn call<T>(&self, handler: impl FnOnce() -> T) -> Result<T, Trouble> {
        match self {
            Arrival::Own(stack) => {
                // Nobody else writes there: it is this thread's.
                if stack.mark().shut.load(Ordering::Relaxed) {
                    stack.mark().shut.store(false, Ordering::Relaxed);
                    signal::let_faults_in();
                }
                Ok(handler())
            }
            Arrival::Elsewhere(Err(trouble)) => Err(*trouble),
            Arrival::Elsewhere(Ok(stack)) => {
                let result = stack::run_at(stack.top(), || {
                    stack.set_as_alternate();
                    signal::let_faults_in();
                    handler()
                });
                signal::block_all();
                Ok(result)
            }
        }
    }
}

/// Of `sigaltstack(2)`: a signal takes the stack out of use until its handler returns.
const SS_AUTODISARM: libc::c_int = 1 << 31;

/// In a forked child only the forking thread is left, under another number. It keeps its stack, on which it may be.
pub(super) fn forget_all() {
    let (own, block) = (thread::id(), thread::block());
    Stack::all().for_each(|stack| {
        let mark = stack.mark();
        let kept = mark.owner.load(Ordering::Relaxed) != 0 && mark.block.load(Ordering::Relaxed) == block;
        mark.owner.store(if kept { own } else { 0 }, Ordering::Relaxed);
        mark.core.store(false, Ordering::Relaxed);
    });
}
