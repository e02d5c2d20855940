//! The handler of `SIGSEGV`: what only looks like a violation is put right and tried again, code on trial is stopped, and
//! everything else goes to the handler that was there before.
//!
//! A refused access looks like a violation where the thread's register denies more than its domain: a new thread and a handler of
//! a signal begin with a register that denies all keys but 0, and keys may have changed since the register was loaded. The
//! handler writes what the domain has into the register that is saved for the return.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use selfpage_core::linux::{futex, key, signal};

use super::keys::Ours;
use super::table::Core;
use super::{Mechanism, mechanism, places, thread};
use crate::dirty::traps;
use crate::trap::takeover::{Blocked, Takeover};
use crate::trap::upcall::SEGV_ACCERR;

/// The code of a `SIGSEGV` for an access that the key's register does not allow.
const SEGV_PKUERR: libc::c_int = 4;

/// Odd while protections change; another number after each change. Sleepers wait for one.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// The domain whose rights the whole process has.
static WIDE: AtomicPtr<Core> = AtomicPtr::new(ptr::null_mut());
static SIGSEGV: Takeover = Takeover::of(libc::SIGSEGV);

/// A time in which protections change. Whoever meets them tries again afterwards.
pub(super) struct Change(());

impl Change {
    pub(super) fn begin() -> Change {
        EPOCH.fetch_add(1, Ordering::AcqRel);
        Change(())
    }

    /// Threads outside of the domain wait from the end of this change on; null: no longer. In the change of the protections
    /// themselves: a thread that met these between two changes would be refused twice with nothing changed in between.
    pub(super) fn set_wide(&self, core: *const Core) {
        WIDE.store(core.cast_mut(), Ordering::Release);
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        EPOCH.fetch_add(1, Ordering::AcqRel);
        futex::wake(&EPOCH, u32::MAX);
    }
}

pub(super) fn install() {
    // SAFETY: signal-handler: `on_sigsegv` reads atomics and its thread's own cells, changes the interrupted context, waits on
    // a futex, and calls the handler that was there before.
    unsafe { SIGSEGV.install(on_sigsegv, Blocked::None) };
}

/// How the refused access came about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// A read.
    Read,
    /// A write.
    Write,
    /// The fetch of an instruction.
    Execute,
}

extern "C" fn on_sigsegv(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: signal-handler: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let (addr, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    let again = thread::with(|here| match code {
        // SAFETY: signal-handler: the kernel passed the context.
        SEGV_PKUERR => (unsafe { load_register(here, context) }) || is_worth_a_try(here, addr, context, None),
        // SAFETY: signal-handler: the kernel passed the context.
        SEGV_ACCERR if unsafe { is_awaited(addr, context) } => true,
        // SAFETY: signal-handler: the kernel passed the context.
        SEGV_ACCERR => is_worth_a_try(here, addr, context, Some(unsafe { access(context) })),
        _ => false,
    });
    if again {
        return;
    }
    // Sent by another process, it is no access of the code on trial.
    if code > 0 {
        // SAFETY: signal-handler: as above.
        thread::with(|here| unsafe { super::sandbox::stop(here, addr, access(context)) });
    }
    // The kernel begins a handler with no right to any memory with a key. In the program's nobody can put that right: the signal is blocked.
    super::refresh();
    // SAFETY: signal-handler: the arguments are the kernel's.
    unsafe { SIGSEGV.chain(info, context) };
}

/// Whether it is a write that a tracker waits for by traps, and may go on now. The tracker's own handler may come after this one, and code
/// on trial never comes to it.
///
/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
unsafe fn is_awaited(addr: usize, context: *mut libc::c_void) -> bool {
    // SAFETY: signal-handler: as above.
    let writes = cfg!(not(target_arch = "x86_64")) || unsafe { access(context) } == Access::Write;
    if places::any_at(addr) || !writes {
        return false;
    }
    // As in the tracker's own handler: no other comes in, which might not come back.
    let _quiet = signal::Quiet::begin();
    traps::let_through(addr)
}

/// Whether the access may be allowed by now. Waits for as long as protections change, or another domain's are in force, and it is refused
/// for that. `by_mapping`: what the mapping did not allow; none where it was the register of keys that refused.
fn is_worth_a_try(here: &thread::Here, addr: usize, context: *mut libc::c_void, by_mapping: Option<Access>) -> bool {
    loop {
        let wide = WIDE.load(Ordering::Acquire);
        // Not where the thread has entered another since: that one's rights are what it has, in the place of the other's. Nor what no
        // domain has to do with: that stays refused.
        let foreign = !wide.is_null()
            && !ptr::eq(here.current(), wide)
            && places::any_at(addr)
            && by_mapping.is_some_and(is_the_whole_processs);
        // After what it is compared with: where that has changed since, so has this, and the access is tried once more.
        let epoch = EPOCH.load(Ordering::Acquire);
        let is_changing = epoch & 1 == 1;
        // Each change may have given the domain the right, or the memory back.
        let this = (addr, context.addr(), epoch);
        if !is_changing && epoch != 0 && here.tried.replace(this) != this {
            return true;
        }
        if !is_changing && !foreign {
            // Refused twice with nothing changed in between, it is refused.
            return false;
        }
        let _ = futex::wait(&EPOCH, epoch, 0);
    }
}

/// Whether a domain that is entered may have taken such an access from the whole process.
fn is_the_whole_processs(access: Access) -> bool {
    match mechanism() {
        Mechanism::PageTables => true,
        Mechanism::Keys => access == Access::Execute,
    }
}

/// The bytes of registers before the pointer to what XSAVE wrote, in the kernel's `struct sigcontext`.
const BEFORE_XSAVE: usize = 23 * 8;
/// Where the kernel says that XSAVE was used, and with which number.
const MAGIC: (usize, u32) = (464, 0x4650_5853);
/// Where XSAVE says which parts are there.
const HEADER: usize = 512;
const PKRU: u32 = 9;

/// Puts the register right that is loaded on return. `false`: it is.
///
/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
unsafe fn load_register(here: &thread::Here, context: *mut libc::c_void) -> bool {
    let ours = Ours::now();
    // SAFETY: signal-handler: the kernel keeps the context, and what its pointer names, in place until the handler returns; the
    // magic number says that PKRU is where the CPU says.
    unsafe {
        let registers = (&raw const (*context.cast::<libc::ucontext_t>()).uc_mcontext).cast::<u8>();
        let saved = registers.add(BEFORE_XSAVE).cast::<*mut u8>().read_unaligned();
        if saved.is_null() || saved.add(MAGIC.0).cast::<u32>().read_unaligned() != MAGIC.1 {
            return false;
        }
        let (parts, register) = (saved.add(HEADER).cast::<u64>(), saved.add(key::offset_in_xsave()).cast::<u32>());
        let is_there = parts.read_unaligned() >> PKRU & 1 == 1;
        let before = if is_there { register.read_unaligned() } else { key::EVERYTHING };
        let after = ours.set(before, here.current().as_ref().map_or(0, |core| core.word().denied()));
        parts.write_unaligned(parts.read_unaligned() | 1 << PKRU);
        register.write_unaligned(after);
        before != after
    }
}

/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
unsafe fn access(context: *mut libc::c_void) -> Access {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: signal-handler: the kernel keeps the context in place until the handler returns.
        let error = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] };
        if error & 16 != 0 {
            return Access::Execute;
        }
        if error & 2 != 0 {
            return Access::Write;
        }
    }
    let _ = context;
    Access::Read
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::AtomicBool;

    use super::super::{steps, table};
    use super::*;

    const REFUSED: Range<usize> = 1 << 46..(1 << 46) + 4096;
    const INSIDE: *const Core = ptr::without_provenance(8);
    static STEPS_LEFT: AtomicU32 = AtomicU32::new(0);
    static IS_LEFT: AtomicBool = AtomicBool::new(false);
    static WAITED: AtomicBool = AtomicBool::new(false);
    static WRONG: AtomicU32 = AtomicU32::new(0);

    /// A refused access, to execute: that is the whole process's on every machine.
    fn is_tried(context: usize) -> bool {
        let context = ptr::without_provenance_mut(context);
        thread::with(|here| is_worth_a_try(here, REFUSED.start, context, Some(Access::Execute)))
    }

    /// The domain is left, and the handler meets the same refusal, after so many steps; or before the call by which the access would wait.
    extern "C" fn on_step(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: signal-handler: the kernel passed the context, of a thread that stands before an instruction.
        let (is_call, expected) = unsafe {
            let registers = &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
            let at = registers[libc::REG_RIP as usize] as *const [u8; 2];
            (at.read() == [0x0f, 0x05], registers[libc::REG_RDX as usize] as u32)
        };
        if IS_LEFT.load(Ordering::Relaxed) {
            if is_call && expected == EPOCH.load(Ordering::Relaxed) {
                WRONG.fetch_add(1, Ordering::Relaxed);
                // So that it does not wait for ever.
                drop(Change::begin());
            }
        } else if STEPS_LEFT.fetch_sub(1, Ordering::Relaxed) == 0 || is_call {
            Change::begin().set_wide(ptr::null());
            IS_LEFT.store(true, Ordering::Relaxed);
            WAITED.store(is_call, Ordering::Relaxed);
            WRONG.fetch_add(u32::from(!is_tried(1)), Ordering::Relaxed);
        }
    }

    #[test]
    fn an_access_is_tried_once_more_whenever_a_handler_has_tried_the_same() {
        let _place = {
            let _table = table::hold();
            places::Place::new(REFUSED)
        };
        for steps in 0.. {
            Change::begin().set_wide(INSIDE);
            assert!(is_tried(2), "each change may have allowed it");
            STEPS_LEFT.store(steps, Ordering::Relaxed);
            IS_LEFT.store(false, Ordering::Relaxed);
            let again = steps::after_each(on_step, || is_tried(2));
            assert!(again, "an access that is allowed is refused: left after {steps} steps");
            assert_eq!(
                WRONG.load(Ordering::Relaxed),
                0,
                "it waits for a change that is over: left after {steps} steps"
            );
            if WAITED.load(Ordering::Relaxed) {
                assert!(steps > 10, "{steps} steps");
                return;
            }
        }
    }
}
