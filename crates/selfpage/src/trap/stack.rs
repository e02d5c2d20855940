//! Stacks for traps. An alternate signal stack may have a few KiB, of which the kernel's own frame takes most (`AT_MINSIGSTKSZ`
//! is 11,952 bytes with AMX, and std gives a thread no more); a fault that reads from a store needs more.

use std::sync::atomic::{AtomicU64, Ordering};

use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::thread;

use crate::fork::Once;

const STACKS: usize = 64;
const STACK_BYTES: usize = 64 << 10;

static TAKEN: AtomicU64 = AtomicU64::new(0);
static FIRST: Once<usize> = Once::new();

/// Maps the stacks, before the first trap.
pub(super) fn lay_out() {
    FIRST.get_or_make(|| {
        // SAFETY: owned-range: a fresh mapping, used as stacks from here on, each by one trap at a time.
        let first = unsafe { memory::map_anonymous(Place::Anywhere, STACKS * STACK_BYTES, Access::ReadWrite) };
        let first = first.unwrap_or_else(|_| crate::die("no room for the stacks of traps"));
        // SAFETY: owned-range: just mapped.
        let _ = unsafe { memory::advise(first, STACKS * STACK_BYTES, Advice::NoHugePages) };
        first
    });
}

/// Runs `work` on a stack of ours. More than 64 traps at once take turns.
///
/// # Context
/// Trap, with signals blocked.
pub(super) fn run<F: FnOnce() -> T, T>(work: F) -> T {
    lay_out();
    let number = take();
    let top = FIRST.get().map_or(0, |first| first + (number + 1) * STACK_BYTES);
    let result = run_at(top, work);
    TAKEN.fetch_and(!(1 << number), Ordering::Release);
    result
}

/// Runs `work` on the stack that ends at `top`, which is the caller's until this returns.
pub(super) fn run_at<F: FnOnce() -> T, T>(top: usize, work: F) -> T {
    let mut call = Call { work: Some(work), result: None };
    // SAFETY: trap-stack: `top` is the end of a stack that is ours until it is given back; `call` outlives the call, and
    // `enter::<F, T>` is the function for its type.
    unsafe { switch(top, enter::<F, T> as *const () as usize, (&raw mut call).cast()) };
    call.result.unwrap_or_else(|| crate::die("a trap came back without an outcome"))
}

struct Call<F, T> {
    work: Option<F>,
    result: Option<T>,
}

extern "C" fn enter<F: FnOnce() -> T, T>(call: *mut Call<F, T>) {
    // SAFETY: trap-stack: `run` passes its own.
    let call = unsafe { &mut *call };
    call.result = call.work.take().map(|work| work());
}

fn take() -> usize {
    loop {
        let taken = TAKEN.load(Ordering::Relaxed);
        let free = taken.trailing_ones();
        if free == 64 {
            thread::give_way();
        } else if TAKEN.compare_exchange_weak(taken, taken | 1 << free, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return free as usize;
        }
    }
}

/// Calls `function(argument)` with the stack pointer at `top`.
///
/// # Safety
/// *trap-stack*: there is a stack below `top` that nobody else uses, and `function` takes `argument` and does not unwind.
#[cfg(target_arch = "x86_64")]
unsafe fn switch(top: usize, function: usize, argument: *mut ()) {
    // SAFETY: trap-stack: r12 keeps our own stack pointer over the call, as the C ABI promises; `top` is 16-byte aligned, and
    // nothing below our own stack pointer is in use (no red zone survives a call).
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            // A backtrace that a panic prints ends here: below is another stack.
            ".cfi_remember_state",
            ".cfi_undefined rip",
            "call {function}",
            ".cfi_restore_state",
            "mov rsp, r12",
            top = in(reg) top,
            function = in(reg) function,
            in("rdi") argument,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// # Safety
/// *trap-stack*.
#[cfg(target_arch = "aarch64")]
unsafe fn switch(top: usize, function: usize, argument: *mut ()) {
    // SAFETY: trap-stack: x20 keeps our own stack pointer over the call, as the C ABI promises.
    unsafe {
        std::arch::asm!(
            "mov x20, sp",
            "mov sp, {top}",
            ".cfi_remember_state",
            ".cfi_undefined x30",
            "blr {function}",
            ".cfi_restore_state",
            "mov sp, x20",
            top = in(reg) top,
            function = in(reg) function,
            in("x0") argument,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

/// In a forked child only the forking thread is left, and it is in no trap.
pub(super) fn forget_all() {
    TAKEN.store(0, Ordering::Relaxed);
}
