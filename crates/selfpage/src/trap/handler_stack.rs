//! Stacks for traps in which a handler of the program's own may run. A handler may fault in its turn, and the alternate signal stack of a
//! thread may have room for no second signal: so a thread that traps is given a stack of ours for good, as its alternate one. What
//! faults on it goes on below, and nothing is to be changed and changed back at each trap: no stack, and no mask of signals.

use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering, compiler_fence};

use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{Errno, signal, thread};

use super::stack;
use crate::handler::Trouble;

/// Stacks that are mapped together.
const STACKS: usize = 64;
const STACK_BYTES: usize = 256 << 10;
const GUARD_BYTES: usize = 4096;
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
    /// A signal that came while core was at work waits, and all others of its number with it.
    waits: AtomicBool,
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
        const LEN_BYTES: usize = HEAD_BYTES + STACKS * STACK_BYTES;
        // SAFETY: owned-range: a fresh mapping, used as stacks from here on, each by one thread at a time.
        let head = unsafe { memory::map_anonymous(Place::Anywhere, LEN_BYTES, Access::ReadWrite) }?;
        // SAFETY: owned-range: just mapped.
        let _ = unsafe { memory::advise(head, LEN_BYTES, Advice::NoHugePages) };
        for number in 0..STACKS {
            // SAFETY: owned-range: just mapped.
            let _ = unsafe { memory::protect(head + HEAD_BYTES + number * STACK_BYTES, GUARD_BYTES, Access::None) };
        }
        let new = ptr::with_exposed_provenance_mut(head);
        if place.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: owned-range: just mapped, and nobody knows of it.
            let _ = unsafe { memory::unmap(head, LEN_BYTES) };
        }
        Ok(())
    }
}

impl Stack {
    fn all() -> impl Iterator<Item = Stack> {
        Stacks::all().flat_map(|of| (0..STACKS).map(move |number| Stack { of, number }))
    }

    /// The one that an address lies in, and how far from its end.
    fn around(addr: usize) -> Option<(Stack, usize)> {
        Stacks::all().find_map(|of| {
            let at = addr.wrapping_sub(ptr::from_ref(of).addr() + HEAD_BYTES);
            (at < STACKS * STACK_BYTES).then_some((Stack { of, number: at / STACK_BYTES }, at % STACK_BYTES))
        })
    }

    /// The one that the caller is on, and how much of it is left.
    fn here() -> Option<(Stack, usize)> {
        let here = 0u8;
        Stack::around(&raw const here as usize)
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
            let has = |stack: &Stack, owner| stack.mark().owner.load(Ordering::Relaxed) == owner;
            if let Some(left) = Stack::all().find(|stack| has(stack, own)) {
                return Ok(left);
            }
            let taken = |stack: &Stack, owner| {
                stack.mark().owner.compare_exchange(owner, own, Ordering::Acquire, Ordering::Relaxed).is_ok()
            };
            if let Some(free) = Stack::all().find(|stack| taken(stack, 0)) {
                return Ok(free);
            }
            let orphaned = |stack: &Stack| {
                let owner = stack.mark().owner.load(Ordering::Relaxed);
                !thread::exists(owner) && taken(stack, owner)
            };
            if let Some(orphan) = Stack::all().find(orphaned) {
                orphan.mark().core.store(false, Ordering::Relaxed);
                return Ok(orphan);
            }
            Stacks::map(Stacks::all().last().map_or(&FIRST, |last| &last.next))?;
        }
    }
}

/// Maps the first stacks, before the first region with a handler.
pub(super) fn lay_out() {
    if Stacks::at(&FIRST).is_none() && Stacks::map(&FIRST).is_err() {
        crate::die("no room for the stacks of handlers");
    }
}

/// Whether the trap has come in the middle of core's own work for another one, on the same stack.
pub(super) fn within_core() -> bool {
    Stack::here().is_some_and(|(stack, _)| stack.mark().core.load(Ordering::Relaxed))
}

/// Has signals of the number that came wait until core is done: [`Arrival::call`] lets them in, or the return from the trap does.
///
/// # Safety
/// *signal-handler*: called from the handler, with its arguments, where [`within_core`] says so.
pub(super) unsafe fn put_off(number: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // It would come at once.
    signal::block_all();
    if let Some((stack, _)) = Stack::here() {
        stack.mark().waits.store(true, Ordering::Relaxed);
    }
    // SAFETY: signal-handler: what the kernel made and passed.
    unsafe {
        libc::sigaddset(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask, number);
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), thread::id(), number, info);
    }
}

impl Arrival {
    /// Where this trap has come in. A thread that is on no stack of ours has one when the trap is over.
    ///
    /// # Safety
    /// *signal-handler*: `context` is what the kernel passed to the handler.
    pub(super) unsafe fn here(context: *mut libc::c_void) -> Arrival {
        if let Some((stack, left_bytes)) = Stack::here() {
            if left_bytes >= ROOM_BYTES {
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
        if let Ok(stack) = stack {
            // SAFETY: signal-handler: the kernel keeps the context in place until the handler returns, and then makes this the
            // thread's alternate stack.
            let alternate = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_stack };
            // Whoever has the kernel take the stack out of use at each signal changes stacks in handlers.
            if alternate.ss_flags & SS_AUTODISARM == 0 {
                *alternate = stack.as_alternate();
            }
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
                if stack.mark().waits.swap(false, Ordering::Relaxed) {
                    signal::let_faults_in();
                }
                Ok(handler())
            }
            Arrival::Elsewhere(Err(trouble)) => Err(*trouble),
            Arrival::Elsewhere(Ok(stack)) => {
                let result = stack::run_at(stack.top(), || {
                    // SAFETY: signal-handler: the thread is on this stack of its own, and on no alternate one.
                    unsafe { libc::sigaltstack(&stack.as_alternate(), ptr::null_mut()) };
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

/// In a forked child only the forking thread is left. It may have forked in a handler, and keeps its alternate stack.
pub(super) fn forget_all() {
    Stack::all().for_each(|stack| {
        stack.mark().owner.store(0, Ordering::Relaxed);
        stack.mark().core.store(false, Ordering::Relaxed);
    });
    let mut alternate = libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: 0, ss_size: 0 };
    // SAFETY: signal-handler: it fills in a value of ours, and changes nothing.
    unsafe { libc::sigaltstack(ptr::null(), &mut alternate) };
    let kept = Stack::around(alternate.ss_sp.addr()).or_else(Stack::here);
    if let Some((stack, _)) = kept {
        stack.mark().owner.store(thread::id(), Ordering::Relaxed);
    }
}
