//! Stacks for handlers of the program's own that run on the faulting thread. The alternate signal stack may have room for
//! no second signal, and a handler may fault in its turn: so it runs on a stack of ours, with the alternate one out of use, and
//! what faults within it goes on below it.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{signal, thread};

use super::stack;

const STACKS: usize = 64;
const STACK_BYTES: usize = 256 << 10;
const GUARD_BYTES: usize = 4096;
/// What must be left of a stack for a handler to run there within others, each of which takes up to 12 KiB for the kernel's own frame.
/// Not how many there are is counted: one that jumps out would have to be taken back.
const ROOM_BYTES: usize = 96 << 10;

/// Whose each stack is, by the thread's own block; 0: nobody's.
static OWNERS: [AtomicUsize; STACKS] = [const { AtomicUsize::new(0) }; STACKS];
static FIRST: OnceLock<usize> = OnceLock::new();

/// Handlers fault within handlers too deep.
pub(super) struct TooDeep;

/// Maps the stacks, before the first region with a handler.
pub(crate) fn lay_out() {
    FIRST.get_or_init(|| {
        // SAFETY: owned-range: a fresh mapping, used as stacks from here on, each by one thread at a time.
        let first = unsafe { memory::map_anonymous(Place::Anywhere, STACKS * STACK_BYTES, Access::ReadWrite) };
        let first = first.unwrap_or_else(|_| crate::die("no room for the stacks of handlers"));
        // SAFETY: owned-range: just mapped.
        let _ = unsafe { memory::advise(first, STACKS * STACK_BYTES, Advice::NoHugePages) };
        for number in 0..STACKS {
            // SAFETY: owned-range: just mapped.
            let _ = unsafe { memory::protect(first + number * STACK_BYTES, GUARD_BYTES, Access::None) };
        }
        first
    });
}

/// Runs `work` on a stack for handlers, with the signals for faults let in and all others blocked. So it stays, and so that the
/// alternate signal stack is out of use, until the kernel returns to what was interrupted and restores both, or [`end`] does.
///
/// # Context
/// Trap, with signals blocked; on a thread that is on no other stack of ours but perhaps one of these.
pub(super) fn run<T>(work: impl FnOnce() -> T) -> Result<T, TooDeep> {
    let Some(first) = FIRST.get() else { return Err(TooDeep) };
    let here = 0u8;
    let at = (&raw const here as usize).wrapping_sub(*first);
    if at < STACKS * STACK_BYTES {
        // The handler that is at work here has faulted.
        if at % STACK_BYTES < ROOM_BYTES {
            return Err(TooDeep);
        }
        signal::let_faults_in();
        return Ok(work());
    }
    let number = take(thread::block());
    let result = stack::run_at(first + (number + 1) * STACK_BYTES, || {
        disable_alternate_stack();
        signal::let_faults_in();
        work()
    });
    OWNERS[number].store(0, Ordering::Release);
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

fn take(thread: usize) -> usize {
    loop {
        // A handler that jumped out has left its stack behind: this thread is not on it any more.
        if let Some(left) = OWNERS.iter().position(|owner| owner.load(Ordering::Relaxed) == thread) {
            return left;
        }
        let taken =
            |owner: &AtomicUsize| owner.compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed).is_ok();
        match OWNERS.iter().position(taken) {
            Some(free) => return free,
            None => selfpage_core::linux::thread::give_way(),
        }
    }
}

/// In a forked child only the forking thread is left. It may have forked in a handler.
pub(super) fn forget_all() {
    let here = 0u8;
    let at = FIRST.get().map(|first| (&raw const here as usize).wrapping_sub(*first) / STACK_BYTES);
    for (number, owner) in OWNERS.iter().enumerate() {
        let whose = if at == Some(number) { thread::block() } else { 0 };
        owner.store(whose, Ordering::Relaxed);
    }
}
