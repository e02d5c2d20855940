//! The signal mask of the calling thread.

use super::syscall::call;
use linux_raw_sys::general as raw;

/// A set of signals, as the kernel keeps it: bit `n-1` stands for signal `n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct SignalSet(u64);

impl SignalSet {
    /// No signal.
    pub const NONE: SignalSet = SignalSet(0);
    /// Every signal but the C library's own for setuid(3), which is never blocked.
    pub const ALL: SignalSet = SignalSet(!SETXID);
    /// Every signal but [`FAULTS`], and the one that is never blocked.
    pub const ALL_BUT_FAULTS: SignalSet = SignalSet(SignalSet::ALL.0 & !FAULTS.0);

    /// The set that the kernel keeps so.
    pub const fn of(kept: u64) -> SignalSet {
        SignalSet(kept)
    }

    /// Whether a signal is in both.
    pub const fn meets(self, other: SignalSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether `signal` is in the set.
    pub const fn contains(self, signal: u32) -> bool {
        signal >= 1 && signal <= 64 && self.0 >> (signal - 1) & 1 == 1
    }
}

/// The signal by which setuid(3) and its like have every thread follow, and wait until each has. It is never blocked: whoever waits holds the
/// C library's list of stacks, and a thread that starts another, or waits for one that does, would wait for that. Its handler is the C
/// library's, and does nothing but the system call.
const SETXID: u64 = 1 << (33 - 1);

/// Blocks every signal in the calling thread but the one that is never blocked, and returns what was blocked before. Threads that it
/// starts inherit the mask.
pub fn block_all() -> SignalSet {
    set_mask(raw::SIG_SETMASK, SignalSet::ALL)
}

/// Blocks every signal but the C library's own two, for a thread that keeps it so.
pub fn block_for_good() {
    set_mask(raw::SIG_SETMASK, SignalSet(!OF_THE_C_LIBRARY));
}

const OF_THE_C_LIBRARY: u64 = 1 << (32 - 1) | SETXID;

/// The same, with the signals for faults of its own let in too.
pub fn block_others_for_good() {
    set_mask(raw::SIG_SETMASK, SignalSet(SignalSet::ALL_BUT_FAULTS.0 & !OF_THE_C_LIBRARY));
}

/// While it lives, no handler runs on the thread that made it but one for a fault of its own: those signals stay open, since the
/// kernel ends a process whose thread takes one that it has blocked.
pub struct Quiet(SignalSet);

impl Quiet {
    /// From now on.
    pub fn begin() -> Quiet {
        Quiet(set_mask(raw::SIG_BLOCK, SignalSet::ALL_BUT_FAULTS))
    }
}

/// The signals that an instruction of the thread's own can cause.
pub const FAULTS: SignalSet = SignalSet(
    1 << (raw::SIGILL - 1)
        | 1 << (raw::SIGTRAP - 1)
        | 1 << (raw::SIGBUS - 1)
        | 1 << (raw::SIGFPE - 1)
        | 1 << (raw::SIGSEGV - 1)
        | 1 << (raw::SIGSYS - 1),
);

/// Lets in the signals for faults of the calling thread, and blocks all others.
pub fn let_faults_in() {
    set_mask(raw::SIG_SETMASK, SignalSet::ALL_BUT_FAULTS);
}

impl Drop for Quiet {
    fn drop(&mut self) {
        restore(self.0);
    }
}

/// Makes `mask` the set of blocked signals of the calling thread.
pub fn restore(mask: SignalSet) {
    set_mask(raw::SIG_SETMASK, mask);
}

fn set_mask(how: u32, mask: SignalSet) -> SignalSet {
    let mut before = SignalSet::NONE;
    let (new, old) = (&raw const mask as usize, &raw mut before as usize);
    // SAFETY: syscall-contract: both sets have the kernel's size and live until the call returns. It cannot fail.
    let _ = unsafe { call(raw::__NR_rt_sigprocmask, [how as usize, new, old, size_of::<u64>(), 0, 0]) };
    before
}
