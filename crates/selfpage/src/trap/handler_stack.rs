//! Stacks for handlers of the program's own that run on the faulting thread. The alternate signal stack may have room for
//! no second signal, and a handler may fault in its turn: so it runs on a stack of ours, with the alternate one out of use, and
//! what faults within it goes on below it.

use std::iter;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{Errno, signal, thread};

use super::stack;
use crate::handler::Trouble;

/// Stacks that are mapped together.
const STACKS: usize = 64;
const STACK_BYTES: usize = 256 << 10;
const GUARD_BYTES: usize = 4096;
const HEAD_BYTES: usize = 4096;
/// What must be left of a stack for a handler to run there within others, each of which takes up to 12 KiB for the kernel's own frame.
/// Not how many there are is counted: one that jumps out would have to be taken back.
const ROOM_BYTES: usize = 96 << 10;

/// The head of some stacks, which lie behind it. All zeros: nobody's yet.
struct Stacks {
    /// Whose each stack is, by the thread's own block; 0: nobody's.
    owners: [AtomicUsize; STACKS],
    /// More of them.
    next: AtomicPtr<Stacks>,
}

const _: () = assert!(size_of::<Stacks>() <= HEAD_BYTES);

static FIRST: AtomicPtr<Stacks> = AtomicPtr::new(ptr::null_mut());

/// One of them.
#[derive(Clone, Copy)]
struct Stack {
    of: &'static Stacks,
    number: usize,
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

    /// The one that the caller is on.
    fn here() -> Option<(Stack, usize)> {
        let here = 0u8;
        Stacks::all().find_map(|of| {
            let at = (&raw const here as usize).wrapping_sub(ptr::from_ref(of).addr() + HEAD_BYTES);
            (at < STACKS * STACK_BYTES).then_some((Stack { of, number: at / STACK_BYTES }, at % STACK_BYTES))
        })
    }

    fn owner(&self) -> &'static AtomicUsize {
        &self.of.owners[self.number]
    }

    fn top(&self) -> usize {
        ptr::from_ref(self.of).addr() + HEAD_BYTES + (self.number + 1) * STACK_BYTES
    }
}

/// Maps the first stacks, before the first region with a handler.
pub(crate) fn lay_out() {
    if Stacks::at(&FIRST).is_none() && Stacks::map(&FIRST).is_err() {
        crate::die("no room for the stacks of handlers");
    }
}

/// Runs `work` on a stack for handlers, with the signals for faults let in and all others blocked. So it stays, and so that the
/// alternate signal stack is out of use, until the kernel returns to what was interrupted and restores both, or [`end`] does.
///
/// # Context
/// Trap, with signals blocked; on a thread that is on no other stack of ours but perhaps one of these.
pub(super) fn run<T>(work: impl FnOnce() -> T) -> Result<T, Trouble> {
    if let Some((_, left_bytes)) = Stack::here() {
        // The handler that is at work here has faulted.
        if left_bytes < ROOM_BYTES {
            return Err(Trouble::Nested);
        }
        signal::let_faults_in();
        return Ok(work());
    }
    let own = take(thread::block()).map_err(|_| Trouble::NoStack)?;
    let result = stack::run_at(own.top(), || {
        disable_alternate_stack();
        signal::let_faults_in();
        work()
    });
    own.owner().store(0, Ordering::Release);
    Ok(result)
}

/// Blocks all signals, and puts the alternate signal stack of the interrupted code in use again: before a handler that the program
/// has for a signal is called, or core.
///
/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
pub(super) unsafe fn end(context: *mut libc::c_void) {
    signal::block_all();
    // SAFETY: signal-handler: the kernel noted in the context which stack this thread had; none of ours is one.
    unsafe { libc::sigaltstack(&raw const (*context.cast::<libc::ucontext_t>()).uc_stack, ptr::null_mut()) };
}

/// From now on signals come on the stack that the thread is on.
fn disable_alternate_stack() {
    let none = libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
    // SAFETY: signal-handler: the thread is not on its alternate stack just now, but on one of ours.
    unsafe { libc::sigaltstack(&none, ptr::null_mut()) };
}

/// A stack for the thread with this block. Those of threads that jumped out of their handlers stay theirs: more are mapped where none
/// is free.
fn take(thread: usize) -> Result<Stack, Errno> {
    loop {
        // A handler that jumped out has left its stack behind: this thread is not on it any more.
        if let Some(left) = Stack::all().find(|stack| stack.owner().load(Ordering::Relaxed) == thread) {
            return Ok(left);
        }
        let taken =
            |stack: &Stack| stack.owner().compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if let Some(free) = Stack::all().find(taken) {
            return Ok(free);
        }
        Stacks::map(Stacks::all().last().map_or(&FIRST, |last| &last.next))?;
    }
}

/// In a forked child only the forking thread is left. It may have forked in a handler.
pub(super) fn forget_all() {
    Stack::all().for_each(|stack| stack.owner().store(0, Ordering::Relaxed));
    if let Some((stack, _)) = Stack::here() {
        stack.owner().store(thread::block(), Ordering::Relaxed);
    }
}
