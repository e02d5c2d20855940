//! Work that a handler of a signal interrupts after each of its instructions, for tests.

use std::arch::asm;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Such a handler.
pub(super) type OnStep = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Has `on_step` called on this thread after each instruction of `work`. One such work at a time: the process has one handler of traps.
pub(super) fn after_each<T>(on_step: OnStep, work: impl FnOnce() -> T) -> T {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: signal-handler: it uses its thread's own cells and atomics.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_step as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGTRAP, &action, ptr::null_mut()), 0);
    }
    // SAFETY: signal-handler: the CPU traps after each instruction from here on, which `on_step` answers.
    unsafe { asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
    let result = work();
    // SAFETY: signal-handler: it does no longer.
    unsafe { asm!("pushfq", "and qword ptr [rsp], -257", "popfq") };
    result
}
