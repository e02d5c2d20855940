//! Forked children of a test.
#![allow(dead_code, unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// How long one may take before it hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// A forked child.
pub struct Child(i32);

/// Begins `work` in one, which ends well where that returns true.
pub fn fork(work: impl FnOnce() -> bool) -> Child {
    // SAFETY: test: the child only does `work` and ends; what it needs of the library was made ready by its handlers.
    match unsafe { libc::fork() } {
        0 => end(catch_unwind(AssertUnwindSafe(work))),
        child => {
            assert!(child > 0, "no child");
            Child(child)
        }
    }
}

/// Begins `work` in a child that clone(2) makes with these flags, past the C library, which calls no handlers. `None`: it is refused.
pub fn bare(flags: libc::c_int, work: impl FnOnce() -> bool) -> Option<Child> {
    // SAFETY: test: as above, but for the library, which has nothing ready.
    match unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => {
            // SAFETY: test: a value. Where it hangs it is not there longer than its parent.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            end(catch_unwind(AssertUnwindSafe(work)))
        }
        child => (child > 0).then_some(Child(child as i32)),
    }
}

/// Ends a child as its work did. A panic that goes on would end its only thread, by the test's harness, and with that the process: well.
fn end(worked: std::thread::Result<bool>) -> ! {
    let right = worked.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        say(text.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic"));
        false
    });
    // SAFETY: test: ends without running what belongs to the parent.
    unsafe { libc::_exit(i32::from(!right)) }
}

/// Has a child say something: what it prints goes into the test runner's buffer, of which it has a copy that nobody reads.
pub fn say(text: &str) {
    let line = format!("child: {text}\n");
    // SAFETY: test: a buffer and its length.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

impl Child {
    /// How it ended: 0 for well.
    pub fn wait(self) -> i32 {
        let (mut status, began) = (0, Instant::now());
        // SAFETY: test: waits for our own child.
        while unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } != self.0 {
            if began.elapsed() > LIMIT {
                // SAFETY: test: ends it.
                unsafe { libc::kill(self.0, libc::SIGKILL) };
                panic!("the child hangs");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        status
    }
}

/// Runs `work` in a forked child, and says how that ended: 0 for well.
pub fn in_child(work: impl FnOnce() -> bool) -> i32 {
    fork(work).wait()
}

/// Runs `work` in a forked child whose first thread has ended, and says how that ended: 0 for well.
pub fn without_first_thread(work: impl FnOnce() -> bool + Send + 'static) -> i32 {
    in_child(|| {
        std::thread::spawn(move || {
            let is_there = || std::fs::read_dir("/proc/self/fd").is_ok_and(|fds| fds.count() > 0);
            while is_there() {
                std::thread::yield_now();
            }
            end(catch_unwind(AssertUnwindSafe(work)))
        });
        // SAFETY: test: this thread alone ends, and leaves the child to the other.
        unsafe { libc::syscall(libc::SYS_exit, 1) };
        false
    })
}

/// Runs `work` in a forked child, which ends well.
#[track_caller]
pub fn forked(work: impl FnOnce()) {
    let status = in_child(|| {
        work();
        true
    });
    assert_eq!(status, 0, "the forked child's end");
}

/// From now on this process can open no file.
pub fn opens_nothing() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: test: the limit is borrowed until the call returns.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
}

/// How many forks of [`fork_here`] are over, and whether this is the child of one.
pub static FORKS: AtomicU32 = AtomicU32::new(0);
pub static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// A handler of a signal that forks. The child goes on where its thread was interrupted, and ends where the test looks for it.
pub extern "C" fn fork_here(_: libc::c_int) {
    // SAFETY: test: calls that a handler may make.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(10);
            IS_CHILD.store(true, SeqCst);
            return;
        }
        let mut status = 0;
        if libc::waitpid(child, &mut status, 0) != child || status != 0 {
            say(&format!("it ended with {status:#x}"));
            libc::abort();
        }
        FORKS.fetch_add(1, SeqCst);
    }
}

/// Does `work`, in the middle of which [`fork_here`] may be called: a child of that ends with the work.
pub fn child_ends_after(work: impl FnOnce()) {
    let worked = catch_unwind(AssertUnwindSafe(work));
    if IS_CHILD.load(SeqCst) {
        end(worked.map(|()| true));
    }
    worked.unwrap_or_else(|panic| resume_unwind(panic));
}
