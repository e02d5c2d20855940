//! Threads, started so that whoever wants one is told where there can be none. std has each new thread make itself a stack for signals, and where
//! there are no addresses for that panics there, outside of all that catches: the process ends, and by a thread without standard error, without a
//! word. For this library, and `selfpage run`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::unix::thread::JoinHandleExt;
use std::ptr::{null, null_mut};
use std::thread::JoinHandle;
use std::time::Duration;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::memory::{self, Access, Place};

use crate::fork::Once;

/// For code of the program's own, as std has it.
pub(crate) const PROGRAM_STACK_BYTES: usize = 2 << 20;

/// How often one who waits for a thread's word looks whether there is the thread.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What is said then.
const ENDED: &str =
    "one of them has ended as it began; if a filter of system calls (seccomp) ends it, let that allow the call";

type LeastStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
static LEAST_STACK: Once<Option<LeastStack>> = Once::new();

/// A thread that was started. Where this is dropped it goes on by itself.
pub(crate) struct Pthread(libc::pthread_t);

impl Pthread {
    /// Waits for its end.
    pub(crate) fn join(self) {
        // SAFETY: thread-joined-once: it was started, and this is all that knows of it.
        unsafe { libc::pthread_join(self.0, null_mut()) };
        mem::forget(self);
    }

    /// What it says as it begins, for which `wait` waits for so long at most. A filter of system calls may end it without a word, and then
    /// nothing hangs up either.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) fn hear<T>(self, mut wait: impl FnMut(Duration) -> Option<T>) -> io::Result<(Pthread, T)> {
        loop {
            let has_ended = self.has_ended();
            match wait(LOOK_EVERY) {
                Some(said) => return Ok((self, said)),
                None if has_ended => {
                    self.join();
                    return Err(io::Error::other(ENDED));
                }
                None => {}
            }
        }
    }

    fn has_ended(&self) -> bool {
        // SAFETY: thread-joined-once: it was started, and has not been joined.
        unsafe { has_ended(self.0) }
    }

    /// One by the C library's name of it.
    ///
    /// # Safety
    /// *thread-joined-once*: it was started, [`Pthread::into_raw`] has given its name, and nobody has it any more.
    pub(crate) unsafe fn from_raw(name: libc::pthread_t) -> Pthread {
        Pthread(name)
    }

    /// The C library's name of it, to join it by.
    pub(crate) fn into_raw(self) -> libc::pthread_t {
        let name = self.0;
        mem::forget(self);
        name
    }
}

/// The C library's name of the calling thread.
pub(crate) fn own_name() -> libc::pthread_t {
    // SAFETY: c-library: a call without arguments.
    unsafe { libc::pthread_self() }
}

/// Whether a thread of std's has ended, with a word or without.
pub(crate) fn is_over<T>(thread: &JoinHandle<T>) -> bool {
    // SAFETY: thread-joined-once: by std, which started it, and not before the handle goes.
    unsafe { has_ended(thread.as_pthread_t()) }
}

/// As far as the C library knows: the kernel, which a filter may forbid to ask, tells it by a word of the thread's own.
///
/// # Safety
/// *thread-joined-once*: it was started, and has neither been joined nor left to itself.
pub unsafe fn has_ended(thread: libc::pthread_t) -> bool {
    let mut clock = 0;
    // SAFETY: out-pointer: the number of its clock outlives the call. thread-joined-once: passed on.
    unsafe { libc::pthread_getcpuclockid(thread, &raw mut clock) == libc::ESRCH }
}

impl Drop for Pthread {
    fn drop(&mut self) {
        // SAFETY: thread-joined-once: nobody will join it.
        unsafe { libc::pthread_detach(self.0) };
    }
}

/// Looks up, once and for all, what the C library says of its threads' stacks: later it could be between the program's `dlopen` and its
/// `dlerror`, which tells of the last call of that kind.
pub(crate) fn look_up() {
    LEAST_STACK.get_or_make(least_stack);
}

/// The C library's function for what it needs of a thread's stack: what the program's libraries keep for each thread lies there. std asks it, too.
fn least_stack() -> Option<LeastStack> {
    // SAFETY: c-library: the name ends with NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr()) };
    // SAFETY: c-library: its function of that name, of this type; null is `None`.
    unsafe { mem::transmute::<*mut c_void, Option<LeastStack>>(found) }
}

/// Starts a thread that calls `run` with `given`, on a stack of so much beside what the C library itself puts there.
///
/// # Errors
/// `EAGAIN`: there can be no more threads, or there is no room for its stack.
///
/// # Safety
/// *thread-owns-share*: `run` may be called with `given`, once, on another thread.
pub(crate) unsafe fn create(
    stack_bytes: usize,
    run: extern "C" fn(*mut c_void) -> *mut c_void,
    given: *mut c_void,
) -> io::Result<Pthread> {
    let mut thread = MaybeUninit::uninit();
    // SAFETY: plain-old-data, out-pointer, c-library: the attributes and the thread's name outlive the calls. thread-owns-share: passed on.
    let error = unsafe {
        let mut attributes: libc::pthread_attr_t = mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        // Where the C library does not say what it takes, its own length for stacks is long enough.
        if let Some(least) = *LEAST_STACK.get_or_make(least_stack) {
            let bytes = stack_bytes + least(&attributes);
            libc::pthread_attr_setstacksize(&mut attributes, bytes.next_multiple_of(PAGE_BYTES));
        }
        let error = libc::pthread_create(thread.as_mut_ptr(), &attributes, run, given);
        libc::pthread_attr_destroy(&mut attributes);
        // There may be even more for each thread than was said.
        if error == libc::EINVAL { libc::pthread_create(thread.as_mut_ptr(), null(), run, given) } else { error }
    };
    match error {
        // SAFETY: thread-joined-once: `pthread_create` succeeded and so wrote it.
        0 => Ok(Pthread(unsafe { thread.assume_init() })),
        _ => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Whether there is room for such a stack now, and for what a thread begins with: one that has no memory for that ends the process.
///
/// # Errors
/// `ENOMEM`: not. The C library says the same of that and of a limit on threads.
pub(crate) fn has_room(stack_bytes: usize) -> io::Result<()> {
    let with_blocks = stack_bytes + (256 << 10);
    // SAFETY: owned-range: a fresh mapping replaces nothing, and nobody knows of it.
    let mapped = unsafe {
        memory::map_anonymous(Place::Anywhere, with_blocks, Access::ReadWrite)
            .and_then(|found| memory::unmap(found, with_blocks))
    };
    mapped.map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Starts a thread of this name that does `work`, with so much stack. It has the caller's signals blocked.
///
/// # Errors
/// `EAGAIN`: there can be no more threads. `ENOMEM`: there is no room for one.
pub(crate) fn start(
    name: &'static CStr,
    stack_bytes: usize,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<Pthread> {
    // SAFETY: thread-owns-share: the work borrows nothing.
    unsafe { start_borrowing(name, stack_bytes, work) }
}

/// Does `work` on a thread of its own while the caller does something else, and waits for both.
///
/// # Errors
/// As [`start`]: then neither is done.
pub(crate) fn beside<A: Send, B>(work: impl FnOnce() -> A + Send, meanwhile: impl FnOnce() -> B) -> io::Result<(A, B)> {
    struct Joined(Option<Pthread>);
    impl Drop for Joined {
        fn drop(&mut self) {
            self.0.take().into_iter().for_each(Pthread::join);
        }
    }
    let mut done = None;
    let work = || done = Some(work());
    // SAFETY: thread-owns-share: what it borrows lives until the thread is joined, also where the caller panics.
    let thread = unsafe { start_borrowing(c"selfpage-trial", PROGRAM_STACK_BYTES, work) }?;
    let joined = Joined(Some(thread));
    let met = meanwhile();
    drop(joined);
    Ok((done.unwrap_or_else(|| crate::die("a thread ended without a result")), met))
}

/// # Safety
/// *thread-owns-share*: what the work borrows outlives the thread.
unsafe fn start_borrowing<W: FnOnce() + Send>(name: &'static CStr, stack_bytes: usize, work: W) -> io::Result<Pthread> {
    extern "C" fn run<W: FnOnce() + Send>(begin: *mut c_void) -> *mut c_void {
        // SAFETY: thread-owns-share: `start_borrowing` gave it to this thread.
        let (name, work) = *unsafe { Box::from_raw(begin.cast::<(&CStr, W)>()) };
        let _ = rustix::thread::set_name(name);
        work();
        null_mut()
    }
    has_room(stack_bytes)?;
    let begin = Box::into_raw(Box::new((name, work)));
    // SAFETY: thread-owns-share: the thread takes over what it is given; where none starts it is taken back.
    unsafe { create(stack_bytes, run::<W>, begin.cast()).inspect_err(|_| drop(Box::from_raw(begin))) }
}
