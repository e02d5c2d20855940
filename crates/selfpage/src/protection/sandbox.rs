//! Code that may go wrong, run in a protection domain on a thread of its own.
//!
//! A thread whose access is refused for good is stopped where it is, for ever: it sleeps in the handler of its signal, with all
//! other signals blocked. Nothing of it is undone, since no destructor may run in the middle of an instruction, and so nothing
//! that it owned is freed, its stack least of all: no reference to it dangles. That is a leak for each violation, and the price of
//! soundness; to jump out of the frames (siglongjmp) would skip destructors that others rely on.

use std::any::Any;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use selfpage_core::linux::{futex, signal};

use super::fault::Access;
use super::rights::Rights;
use super::table::{self, Core};
use super::{ProtectionDomain, fork, thread};
use crate::error::{Error, Kind, Result};
use crate::pthread::{self, LOOK_EVERY, PROGRAM_STACK_BYTES};

/// How code in a domain ended.
#[derive(Debug)]
pub enum Ended<T> {
    /// It came to its end, with a result.
    Well(T),
    /// It panicked, with this payload.
    Panicked(Box<dyn Any + Send>),
    /// It was stopped at an access that its domain has no right to, and will never go on.
    Stopped(Violation),
}

/// An access that was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Violation {
    /// The protection domain's name.
    pub domain: String,
    /// The address.
    pub addr: usize,
    /// What was tried.
    pub access: Access,
    /// The memory that lies there, by the name that it was given, and what the domain may do with it.
    pub memory: Option<(String, Rights)>,
}

impl std::error::Error for Violation {}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = match self.access {
            Access::Read => "a read",
            Access::Write => "a write",
            Access::Execute => "a jump",
        };
        write!(f, "protection domain {}: {access} at {:#x} was refused: ", self.domain, self.addr)?;
        match &self.memory {
            Some((name, rights)) => write!(f, "that is memory {name}, where its rights are: {rights}"),
            None => f.write_str("no memory there allows it to anybody"),
        }
    }
}

const RUNNING: u32 = 0;
const ENDED: u32 = 1;
const STOPPED: u32 = 2;

/// What the thread, its handler and whoever waits share.
pub(super) struct Trial {
    state: AtomicU32,
    addr: AtomicUsize,
    access: AtomicU8,
    /// The domains that it was in when it was stopped.
    entered: [AtomicUsize; thread::MOST_NESTED],
    /// The thread's own, from its beginning on.
    here: AtomicPtr<thread::Here>,
}

/// Stops the calling thread for good, if it runs code on trial.
///
/// # Context
/// A handler of a signal.
pub(super) fn stop(here: &thread::Here, addr: usize, access: Access) {
    // SAFETY: protection-domain: the thread that is on trial owns one count of it, and never ends.
    let Some(trial) = (unsafe { here.trial().as_ref() }) else { return };
    trial.addr.store(addr, Ordering::Relaxed);
    trial.access.store(access as u8, Ordering::Relaxed);
    for (place, core) in trial.entered.iter().zip(here.entered()) {
        place.store(core as usize, Ordering::Relaxed);
    }
    trial.state.store(STOPPED, Ordering::Release);
    futex::wake(&trial.state, u32::MAX);
    signal::block_for_good();
    let never = AtomicU32::new(0);
    loop {
        let _ = futex::wait(&never, 0, 0);
    }
}

impl ProtectionDomain {
    /// Runs `work` in this domain, on a thread of its own, and waits for its end. An access that the domain has no right to, or
    /// that nobody has, stops it; the caller goes on.
    ///
    /// A thread that was stopped never ends: it keeps what it holds, its stack, its locks and what it captured. It is no
    /// defence against code that means harm: see CAVEATS.md.
    ///
    /// # Context
    /// Normal, outside of all domains where there are no protection keys.
    ///
    /// # Errors
    /// No thread is to be had, or the domain cannot be entered ([`ProtectionDomain::enter`]). [`Kind::Lost`]: the thread has ended without a
    /// word, since a filter of system calls has killed it, or by a bare exit(2). It keeps what one that was stopped does.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<Ended<T>> {
        let forks = fork::passed();
        let trial = Arc::new(Trial {
            state: AtomicU32::new(RUNNING),
            addr: AtomicUsize::new(0),
            access: AtomicU8::new(0),
            entered: [const { AtomicUsize::new(0) }; thread::MOST_NESTED],
            here: AtomicPtr::new(ptr::null_mut()),
        });
        let result: Arc<Mutex<Option<Result<std::thread::Result<T>>>>> = Arc::default();
        let (door, own_trial, place) = (self.door.clone(), trial.clone(), result.clone());
        // The system's names have no NUL.
        let name = self.name().replace('\0', " ");
        let failed = |why| Error::system("run", format!("protection domain {}", self.name()), why);
        // By std: the work may panic on its thread, and use up its stack, as on any other of the program's. Where there is no room std ends
        // the process.
        pthread::has_room(PROGRAM_STACK_BYTES).map_err(failed)?;
        let started = std::thread::Builder::new().name(name).spawn(move || {
            thread::with(|here| own_trial.here.store(ptr::from_ref(here).cast_mut(), Ordering::Release));
            let ended = door.enter().map(|entered| {
                thread::with(|here| here.set_trial(Arc::as_ptr(&own_trial)));
                let ended = panic::catch_unwind(AssertUnwindSafe(work));
                thread::with(|here| here.set_trial(ptr::null()));
                // Where the work has forgotten a guard, this one is not the innermost.
                std::mem::forget(entered);
                super::leave_all(|| thread::with(thread::Here::leave_all));
                super::refresh();
                ended
            });
            drop(door);
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
            drop(place);
            own_trial.state.store(ENDED, Ordering::Release);
            futex::wake(&own_trial.state, u32::MAX);
        });
        let thread = started.map_err(failed)?;
        loop {
            // First: what it had to say, one that has ended said before.
            let is_over = pthread::is_over(&thread);
            match trial.state.load(Ordering::Acquire) {
                RUNNING if is_over => return Err(self.miss(&trial, thread, forks)),
                RUNNING => {
                    let _ = futex::wait(&trial.state, RUNNING, LOOK_EVERY.as_micros() as u32);
                }
                STOPPED => return Ok(Ended::Stopped(self.bury(&trial, forks))),
                _ => break,
            }
        }
        let ended = result.lock().unwrap_or_else(PoisonError::into_inner).take();
        match ended.unwrap_or_else(|| crate::die("a thread ended without a result"))? {
            Ok(value) => Ok(Ended::Well(value)),
            Err(payload) => Ok(Ended::Panicked(payload)),
        }
    }

    /// Takes a thread that has ended without a word out of its domains. `forks`: as for [`ProtectionDomain::bury`].
    fn miss(&self, trial: &Trial, thread: JoinHandle<()>, forks: u32) -> Error {
        super::leave_all(|| {
            if fork::passed() != forks {
                return Vec::new();
            }
            // SAFETY: thread-joined-once: it changes its own no more, and that is there as long as the handle of its thread.
            let here = unsafe { trial.here.load(Ordering::Acquire).as_ref() };
            here.map_or_else(Vec::new, |here| here.entered().collect())
        });
        if fork::passed() != forks {
            // It is a parent's: in this process another thread may have its memory.
            std::mem::forget(thread);
        }
        let cause = "its thread has ended without a word, and keeps what it had; if a filter of system calls (seccomp) ends it, let that \
                     allow the call, answer with an error, or kill the process";
        Error::new(Kind::Lost, "run", format!("protection domain {}", self.name()), cause)
    }

    /// Takes a thread that was stopped out of its domains. `forks`: how many had passed when it began.
    fn bury(&self, trial: &Trial, forks: u32) -> Violation {
        let entered = || trial.entered.iter().map(|core| core.load(Ordering::Relaxed)).take_while(|core| *core != 0);
        let entered: Vec<*const Core> = entered().map(|core| core as *const Core).collect();
        let innermost = entered.last().copied().unwrap_or(ptr::null());
        // Where a handler of a signal has forked since, the thread is not in the child, and does not count there.
        super::leave_all(|| if fork::passed() == forks { entered } else { Vec::new() });
        let addr = trial.addr.load(Ordering::Relaxed);
        let access = match trial.access.load(Ordering::Relaxed) {
            access if access == Access::Write as u8 => Access::Write,
            access if access == Access::Execute as u8 => Access::Execute,
            _ => Access::Read,
        };
        let table = table::hold();
        let memory = table.memory_at(addr).map(|record| (record.name.clone(), table.rights(innermost, record.id)));
        // SAFETY: protection-domain: a domain that a thread is in stays.
        let domain = unsafe { innermost.as_ref() }.map_or_else(|| self.name().into(), |core| core.name.clone());
        Violation { domain, addr, access, memory }
    }
}
