//! Stacks for traps. An alternate signal stack may have a few KiB, of which the kernel's own frame takes most (`AT_MINSIGSTKSZ`
//! is 11,952 bytes with AMX, and std gives a thread no more); a fault that reads from a store needs more.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use selfpage_core::addr::{PageNo, VirtAddr};
use selfpage_core::linux::memory::{self, Access, Advice, Place};
use selfpage_core::linux::{Errno, thread};

use crate::error::{Error, Result};

/// Stacks that are mapped together.
pub(super) const STACKS: usize = 64;
const STACK_BYTES: usize = 64 << 10;
/// At the low end of each: a trap that goes too deep ends the process before it has overwritten anything.
pub(super) const GUARD_BYTES: usize = 4096;

static TAKEN: AtomicU64 = AtomicU64::new(0);
/// Where they begin; 0: no domain was built yet.
static FIRST: AtomicUsize = AtomicUsize::new(0);

/// Maps the stacks, before there is anything that could be on an absent page.
///
/// # Errors
/// There are no more addresses or mappings.
pub(crate) fn lay_out() -> Result<()> {
    if FIRST.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    let first = map(0, STACK_BYTES).map_err(|errno| no_room("the stacks of traps", errno))?;
    if FIRST.compare_exchange(0, first, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        // SAFETY: owned-range: just mapped, and nobody knows of it.
        let _ = unsafe { memory::unmap(first, STACKS * STACK_BYTES) };
    }
    Ok(())
}

/// Maps stacks with guards, behind a head. Nothing is left of it where that fails.
///
/// # Context
/// Trap.
pub(super) fn map(head_bytes: usize, stack_bytes: usize) -> std::result::Result<usize, Errno> {
    let len_bytes = head_bytes + STACKS * stack_bytes;
    // SAFETY: owned-range: a fresh mapping, used as stacks from here on, each by one trap or thread at a time.
    let start = unsafe { memory::map_anonymous(Place::Anywhere, len_bytes, Access::ReadWrite) }?;
    // SAFETY: owned-range: just mapped.
    let _ = unsafe { memory::advise(start, len_bytes, Advice::NoHugePages) };
    let mut bottoms = (0..STACKS).map(|number| start + head_bytes + number * stack_bytes);
    let guarded = bottoms.try_for_each(guard);
    if guarded.is_err() {
        // SAFETY: owned-range: just mapped, and nobody knows of it.
        let _ = unsafe { memory::unmap(start, len_bytes) };
    }
    guarded.map(|()| start)
}

/// Has the kernel refuse every access to the low end of a stack.
fn guard(bottom: usize) -> std::result::Result<(), Errno> {
    // It takes a third of the time, and no mapping; before Linux 6.13, and in locked memory, there is none.
    // SAFETY: owned-range: just mapped.
    unsafe { memory::advise(bottom, GUARD_BYTES, Advice::GuardInstall) }
        // SAFETY: owned-range: as above.
        .or_else(|_| unsafe { memory::protect(bottom, GUARD_BYTES, Access::None) })
}

/// Why there are none of these stacks.
pub(super) fn no_room(stacks: &'static str, errno: Errno) -> Error {
    Error::system("lay out", stacks, errno)
        .with("raise the limits on mappings and addresses (sysctl vm.max_map_count, ulimit -v), or unmap something")
}

/// The page of the stack that the caller is on.
#[inline(always)]
pub(crate) fn here() -> PageNo {
    let here = 0u8;
    VirtAddr((&raw const here).addr()).page()
}

/// Runs `work` on a stack of ours. More than 64 traps at once take turns.
///
/// # Context
/// Trap or Normal, with signals blocked.
pub fn run<F: FnOnce() -> T, T>(work: F) -> T {
    let first = FIRST.load(Ordering::Acquire);
    if first == 0 {
        // Without a domain every page is there.
        return work();
    }
    let number = take();
    let result = run_at(first + (number + 1) * STACK_BYTES, work);
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

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use selfpage_core::addr::PAGE_BYTES;
    use selfpage_core::mmu::Trap;

    use super::*;
    use crate::store::FileStore;
    use crate::{Domain, FileAccess, Region};

    /// Uses `bytes` of the stack and more, all of them written.
    fn go_down(bytes: usize) {
        let frame = black_box([1u8; 1024]);
        if bytes > frame.len() {
            go_down(bytes - frame.len());
        }
        black_box(&frame);
    }

    #[test]
    fn a_trap_that_goes_too_deep_ends_the_process() {
        drop(Domain::with_frames(16 * PAGE_BYTES).build().unwrap());
        // SAFETY: test: the child writes to its own memory, and ends without a look at anything else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // Below the second stack is the first, which nobody is on: nothing there would stop it but the guard.
            TAKEN.store(1, Ordering::Relaxed);
            run(|| go_down(STACK_BYTES + 8192));
            // SAFETY: test: as above.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: test: a child of ours, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
    }

    /// Whoever finds it so may be in need of one, and can have no error.
    #[test]
    fn a_domain_at_rest_has_its_stacks() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let inner = &domain.life().inner;
        inner.close_gate();
        let at = inner.undisturbed(|| here().addr().0);
        inner.state().gate.open(inner.state().mmu);
        let first = FIRST.load(Ordering::Acquire);
        assert!((first..first + STACKS * STACK_BYTES).contains(&at), "{at:#x}");
    }

    /// How much of any stack was ever used, at most.
    fn deepest_bytes() -> usize {
        let first = FIRST.load(Ordering::Acquire);
        let used = |number: usize| {
            let bottom = first + number * STACK_BYTES + GUARD_BYTES;
            let words = (bottom..first + (number + 1) * STACK_BYTES).step_by(size_of::<usize>());
            // SAFETY: test: the stacks stay mapped, and what is written there meanwhile is only deeper.
            let untouched = words.take_while(|word| unsafe { (*word as *const usize).read_volatile() } == 0).count();
            STACK_BYTES - GUARD_BYTES - untouched * size_of::<usize>()
        };
        (0..STACKS).map(used).max().unwrap()
    }

    /// Writes every page, and reads them all with the stride of a stream and without.
    fn wander(region: &mut Region) {
        let pages = region.len_bytes() / PAGE_BYTES;
        (0..pages).for_each(|page| region.as_mut_slice::<u8>()[page * PAGE_BYTES] = page as u8 | 1);
        let orders: [&dyn Fn(usize) -> usize; 3] = [&|page| page, &|page| page * 17 % pages, &|page| pages - 1 - page];
        for order in orders {
            for page in (0..pages).map(order) {
                assert_eq!(region.as_slice::<u8>()[page * PAGE_BYTES], page as u8 | 1);
            }
        }
    }

    #[test]
    fn faults_use_less_than_half_of_a_stack() {
        const FRAMES_BYTES: usize = 256 * PAGE_BYTES;
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let domain = Domain::with_frames(FRAMES_BYTES).build().unwrap();
        let region = || domain.region(4 * FRAMES_BYTES).trap(Trap::Upcall);
        let store = FileStore::create(dir.path().join("store"), 16 * FRAMES_BYTES as u64).unwrap();
        wander(&mut region().stored(store).unwrap());
        let file = dir.path().join("file");
        std::fs::File::create(&file).unwrap().set_len(4 * FRAMES_BYTES as u64).unwrap();
        wander(&mut region().file(&file, 0, FileAccess::ReadWrite).unwrap());
        let deepest = deepest_bytes();
        assert!(deepest > 0 && deepest < STACK_BYTES / 2, "{deepest} of {STACK_BYTES} bytes");
    }

    #[test]
    fn a_stack_in_another_domains_region_is_left() {
        let [other, own] = [(); 2].map(|()| Domain::with_frames(64 * PAGE_BYTES).build().unwrap());
        let region = own.region(16 * PAGE_BYTES).trap(Trap::Upcall).zero().unwrap();
        let top = region.as_ptr().addr() + region.len_bytes();
        let inner = &other.life().inner;
        let (before, within) = run_at(top, || (here(), inner.undisturbed(here)));
        let has = |page: PageNo| (region.as_ptr().addr()..top).contains(&(page.0 as usize * PAGE_BYTES));
        assert!(has(before) && !has(within));
    }
}
