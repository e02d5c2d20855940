//! How long a closure may run: a timer whose signal ends the machine's run, and nothing else.

use std::io;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::vm::Vm;

const OPERATION: &str = "limit a closure's time";
/// The timer goes on until it is heard.
const AGAIN: Duration = Duration::from_millis(10);

/// A timer of this thread. Its signal is blocked but while the machine runs, so no handler is ever called.
pub struct Limit {
    /// `None`: in no time that there is.
    ends: Option<Instant>,
    timer: libc::timer_t,
    signal: libc::sigset_t,
    mask_before: libc::sigset_t,
}

/// The signal that it sends.
fn signal() -> i32 {
    libc::SIGRTMAX() - 1
}

impl Limit {
    pub fn new(limit: Duration, vm: &mut Vm<'_>) -> Result<Limit> {
        // SAFETY: guest-limit: plain old data, all of which may be zero.
        let (mut only, mut mask_before, mut event): (libc::sigset_t, libc::sigset_t, libc::sigevent) =
            unsafe { std::mem::zeroed() };
        let mut timer = std::ptr::null_mut();
        // SAFETY: guest-limit: the sets and the timer are ours, and the signal is this thread's.
        unsafe {
            libc::sigemptyset(&raw mut only);
            libc::sigaddset(&raw mut only, signal());
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal();
            event.sigev_notify_thread_id = libc::gettid();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) != 0 {
                return Err(Error::system(OPERATION, io::Error::last_os_error()));
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const only, &raw mut mask_before);
        }
        let this = Limit { ends: Instant::now().checked_add(limit), timer, signal: only, mask_before };
        let mut while_running = mask_before;
        let spec = libc::itimerspec { it_interval: time(AGAIN), it_value: time(limit.max(Duration::from_nanos(1))) };
        // SAFETY: guest-limit: the timer and the set are ours.
        let set = unsafe {
            libc::sigdelset(&raw mut while_running, signal());
            libc::timer_settime(timer, 0, &raw const spec, std::ptr::null_mut())
        };
        if set != 0 {
            return Err(Error::system(OPERATION, io::Error::last_os_error()));
        }
        vm.set_signal_mask(&while_running)?;
        Ok(this)
    }

    pub fn is_over(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }

    /// Takes the signal back that ended a run, or the next would end at once.
    pub fn hear(&self) {
        let at_once = time(Duration::ZERO);
        // SAFETY: guest-limit: nobody else waits for the signal, which is blocked.
        while unsafe { libc::sigtimedwait(&raw const self.signal, std::ptr::null_mut(), &raw const at_once) } >= 0 {}
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // SAFETY: guest-limit: ours, once.
        unsafe { libc::timer_delete(self.timer) };
        self.hear();
        // SAFETY: guest-limit: as it was before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask_before, std::ptr::null_mut()) };
    }
}

fn time(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
