//! A signal that the library has taken over from the program, and the handler that it had before.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use selfpage_core::linux::signal::SignalSet;

use crate::fork::Once;

/// A handler of a signal, as the kernel calls it.
pub(crate) type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Which signals wait until our handler returns, beside the one that it is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// All there are.
    Every,
    /// All but those that an instruction of the thread's own can cause, its own number among them.
    AllButFaults,
    /// None, and not its own either: a handler of another signal that comes in may meet what this one puts right.
    None,
}

/// A signal, and who had it before us.
pub(crate) struct Takeover {
    signal: libc::c_int,
    installed: Once<()>,
    /// Known before our handler is there. To read it takes no lock.
    before: Once<libc::sigaction>,
    /// The handler that was there before was to be called once, and has been.
    spent: AtomicBool,
}

impl Takeover {
    /// Of `signal`, which goes on as it is until [`Takeover::install`].
    pub(crate) const fn of(signal: libc::c_int) -> Takeover {
        Takeover { signal, installed: Once::new(), before: Once::new(), spent: AtomicBool::new(false) }
    }

    /// Has the signal come to `handler` from the first call on. It runs on the thread's alternate stack: the thread's own may be what is
    /// absent, or have overflowed.
    ///
    /// # Safety
    /// *signal-handler*: `handler` is async-signal-safe.
    pub(crate) unsafe fn install(&self, handler: Handler, blocked: Blocked) {
        self.installed.get_or_make(|| {
            // First to know it: a signal may come as soon as ours is there.
            self.before.get_or_make(|| action_of(self.signal));
            // SAFETY: signal-handler: passed on.
            unsafe { self.set(handler, blocked) };
        });
    }

    /// Changes what waits until `handler` returns, unless the program has put another in its place.
    ///
    /// # Safety
    /// *signal-handler*: as for [`Takeover::install`].
    pub(crate) unsafe fn block(&self, handler: Handler, blocked: Blocked) {
        if action_of(self.signal).sa_sigaction == handler as *const () as usize {
            // SAFETY: signal-handler: passed on.
            unsafe { self.set(handler, blocked) };
        }
    }

    /// # Safety
    /// *signal-handler*: as for [`Takeover::install`].
    unsafe fn set(&self, handler: Handler, blocked: Blocked) {
        let mut action = default_action();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        let mask = match blocked {
            Blocked::Every => SignalSet::ALL,
            Blocked::AllButFaults => SignalSet::ALL_BUT_FAULTS,
            Blocked::None => SignalSet::NONE,
        };
        if blocked != Blocked::Every {
            action.sa_flags |= libc::SA_NODEFER;
        }
        // SAFETY: signal-handler: the caller's handler, of the type that the flags say. The first 64 bits of the mask are the kernel's own; the
        // C library's calls would leave out the signal by which it cancels threads, whose handler does not come back.
        unsafe {
            (&raw mut action.sa_mask).cast::<SignalSet>().write(mask);
            libc::sigaction(self.signal, &action, ptr::null_mut());
        }
    }

    /// Hands the signal to whoever handled it before us.
    ///
    /// # Safety
    /// *signal-handler*: called from the handler, with its arguments.
    pub(crate) unsafe fn chain(&self, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let default = default_action();
        let is_over = |before: &libc::sigaction| is_called_once(before) && self.spent.swap(true, Ordering::Relaxed);
        let before = self.before.get().filter(|before| !is_over(before)).unwrap_or(&default);
        // SAFETY: signal-handler: it was installed for the signal; the rest is the kernel's.
        unsafe { call(self.signal, before, info, context) };
    }
}

/// Hands a signal to whoever has it now, as the kernel would.
///
/// # Safety
/// *signal-handler*: called from a handler, with what the kernel passed to it; `info` tells of `signal`.
pub(super) unsafe fn raise(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let action = action_of(signal);
    // SAFETY: signal-handler: the call of a handler that is installed, with the arguments that the kernel made; the default action
    // is taken by returning to the faulting access with the handler reset.
    unsafe {
        if is_called_once(&action) {
            libc::sigaction(signal, &default_action(), ptr::null_mut());
        }
        call(signal, &action, info, context);
    }
}

/// What is done at the signal now.
fn action_of(signal: libc::c_int) -> libc::sigaction {
    let mut action = default_action();
    // SAFETY: signal-handler: it fills in a value of ours, and changes nothing.
    unsafe { libc::sigaction(signal, ptr::null(), &mut action) };
    action
}

fn default_action() -> libc::sigaction {
    // SAFETY: signal-handler: all zeros are an action, the default one, with an empty mask.
    unsafe { std::mem::zeroed() }
}

fn is_called_once(action: &libc::sigaction) -> bool {
    action.sa_flags & libc::SA_RESETHAND != 0
}

/// # Safety
/// *signal-handler*: `action` was installed for `signal`; the rest as the kernel passed it.
unsafe fn call(signal: libc::c_int, action: &libc::sigaction, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: signal-handler: the program's handler has the type that its flags say.
    unsafe {
        if action.sa_sigaction == libc::SIG_IGN && (*info).si_code <= 0 {
            // Sent by somebody.
            return;
        }
        if action.sa_sigaction == libc::SIG_DFL || action.sa_sigaction == libc::SIG_IGN {
            // A fault cannot be ignored, nor blocked. Sent again, it ends the process when the handler returns.
            libc::sigaction(signal, &default_action(), ptr::null_mut());
            let mut own: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&mut own, signal);
            libc::pthread_sigmask(libc::SIG_BLOCK, &own, ptr::null_mut());
            libc::sigdelset(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask, signal);
            libc::raise(signal);
            return;
        }
        let before = own_mask(signal, action, context);
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            let handler: Handler = std::mem::transmute(action.sa_sigaction);
            handler(signal, info, context);
        } else {
            let handler: extern "C" fn(libc::c_int) = std::mem::transmute(action.sa_sigaction);
            handler(signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
    }
}

/// What the interrupted code had blocked, as the kernel keeps a set.
///
/// # Safety
/// *signal-handler*: `context` is what the kernel passed to the handler.
pub(super) unsafe fn interrupted_mask(context: *mut libc::c_void) -> u64 {
    // SAFETY: signal-handler: the kernel keeps the context in place until the handler returns; the first 64 bits are its own.
    unsafe { (&raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>().read() }
}

/// Blocks what the kernel would block for this handler, and no more: the handler may touch managed memory, so `SIGBUS`
/// stays open. Returns what was blocked.
///
/// # Safety
/// *signal-handler*: as for [`call`].
unsafe fn own_mask(signal: libc::c_int, action: &libc::sigaction, context: *mut libc::c_void) -> libc::sigset_t {
    // SAFETY: signal-handler: sets of this thread's signals, of which the first 64 bits are the kernel's own.
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        // Not by the C library's calls: those refuse its own signals, which may be in a set of ours, and change errno.
        let of_action = (&raw const action.sa_mask).cast::<u64>().read();
        (&raw mut mask).cast::<u64>().write(interrupted_mask(context) | of_action);
        if action.sa_flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&mut mask, signal);
        }
        libc::sigdelset(&mut mask, libc::SIGBUS);
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, &mut before);
        before
    }
}
