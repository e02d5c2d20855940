//! Stacks for handlers of the program's own that run on the faulting thread. The alternate signal stack may have room for
//! no second signal, and a handler may fault in its turn: so it runs on a stack of ours, with the alternate one out of use, and
//! what faults within it goes on below it.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{signal, thread};

use super::stack;

const STACKS: usize = 64;
const STACK_BYTES: usize = 256 << 10;
const GUARD_BYTES: usize = 4096;
/// How deep handlers may fault within handlers on one thread: each takes up to 12 KiB for the kernel's own frame.
const MOST_NESTED: u32 = 8;

/// Whose a stack is, by the thread's own block (0: nobody's), and how many handlers run on it.
struct Owner {
    thread: AtomicUsize,
    depth: AtomicU32,
}

static OWNERS: [Owner; STACKS] = [const { Owner { thread: AtomicUsize::new(0), depth: AtomicU32::new(0) } }; STACKS];
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
    let at = (&raw const here as usize).wrapping_sub(*first) / STACK_BYTES;
    if let Some(owner) = OWNERS.get(at) {
        // The handler that is at work here has faulted.
        return nested(owner, work);
    }
    let number = take(thread::block());
    let result = stack::run_at(first + (number + 1) * STACK_BYTES, || {
        disable_alternate_stack();
        nested(&OWNERS[number], work)
    });
    OWNERS[number].thread.store(0, Ordering::Release);
    result
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

fn nested<T>(owner: &Owner, work: impl FnOnce() -> T) -> Result<T, TooDeep> {
    if owner.depth.fetch_add(1, Ordering::Relaxed) >= MOST_NESTED {
        owner.depth.fetch_sub(1, Ordering::Relaxed);
        return Err(TooDeep);
    }
    signal::let_faults_in();
    let result = work();
    owner.depth.fetch_sub(1, Ordering::Relaxed);
    Ok(result)
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
        if let Some(left) = OWNERS.iter().position(|owner| owner.thread.load(Ordering::Relaxed) == thread) {
            OWNERS[left].depth.store(0, Ordering::Relaxed);
            return left;
        }
        let taken =
            |owner: &Owner| owner.thread.compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed).is_ok();
        match OWNERS.iter().position(taken) {
            Some(free) => {
                OWNERS[free].depth.store(0, Ordering::Relaxed);
                return free;
            }
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
        owner.thread.store(whose, Ordering::Relaxed);
    }
}
