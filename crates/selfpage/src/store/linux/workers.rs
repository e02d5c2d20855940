//! Many requests at once where io_uring is refused: a few threads that read and write.

use std::ffi::c_void;
use std::io;
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use selfpage_core::linux::{signal, thread};

use super::transfer::{Batch, Direction, Request};
use crate::pthread::{self, Pthread};
use crate::trap::thread::Known;

/// Besides the thread that waits for them, which works too.
const THREADS: usize = 3;
/// They call `preadv` and little else.
const STACK_BYTES: usize = 256 << 10;

/// Threads that share the descriptor table of the thread that made them.
///
/// They are bare: no allocation, no thread-local storage. In a program whose `malloc` is ours, a pager thread waits for them.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<Pthread>,
    owner: u32,
}

struct Shared {
    work: Mutex<Work>,
    begin: Condvar,
    end: Condvar,
}

/// The batch at hand, if any: `next` is the request to take, `left` how many are not done.
struct Work {
    requests: NonNull<Request>,
    len: usize,
    vectors: NonNull<libc::iovec>,
    vectors_len: usize,
    direction: Direction,
    file: RawFd,
    next: usize,
    left: usize,
    stop: bool,
}

// SAFETY: batch-borrowed: the pointers are followed only while `left` is not zero, and `run` waits for that.
unsafe impl Send for Work {}

impl Workers {
    /// Starts the threads, with all signals blocked.
    pub fn new() -> io::Result<Workers> {
        let work = Work {
            requests: NonNull::dangling(),
            len: 0,
            vectors: NonNull::dangling(),
            vectors_len: 0,
            direction: Direction::Read,
            file: -1,
            next: 0,
            left: 0,
            stop: false,
        };
        let shared = Arc::new(Shared { work: Mutex::new(work), begin: Condvar::new(), end: Condvar::new() });
        let mut workers = Workers { shared, threads: Vec::with_capacity(THREADS), owner: thread::id() };
        for _ in 0..THREADS {
            workers.threads.push(start(Arc::clone(&workers.shared))?);
        }
        Ok(workers)
    }

    /// Works off every request.
    pub fn run(&mut self, file: RawFd, batch: &mut Batch<'_>) {
        let len = batch.requests.len();
        let mut work = self.shared.lock();
        work.requests = NonNull::from(&mut *batch.requests).cast();
        work.vectors = NonNull::from(batch.vectors).cast();
        (work.len, work.vectors_len, work.direction, work.file) = (len, batch.vectors.len(), batch.direction, file);
        (work.next, work.left) = (0, len);
        self.shared.begin.notify_all();
        let mut work = self.shared.work_off(work);
        while work.left > 0 {
            work = self.shared.end.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives the threads up: in a forked child there are none.
    pub fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads).into_iter();
        if thread::id() != self.owner {
            // In a forked child there are none.
            return threads.for_each(std::mem::forget);
        }
        self.shared.lock().stop = true;
        self.shared.begin.notify_all();
        threads.for_each(Pthread::join);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes requests until none is left to take.
    fn work_off<'s>(&'s self, mut work: MutexGuard<'s, Work>) -> MutexGuard<'s, Work> {
        while work.next < work.len {
            let (file, direction) = (work.file, work.direction);
            // SAFETY: batch-borrowed: `left` counts this request until it is done; `next` gives it to nobody else.
            let (request, vectors) = unsafe {
                let vectors = std::slice::from_raw_parts(work.vectors.as_ptr(), work.vectors_len);
                (&mut *work.requests.as_ptr().add(work.next), vectors)
            };
            work.next += 1;
            drop(work);
            request.run(file, direction, vectors);
            work = self.lock();
            work.left -= 1;
            if work.left == 0 {
                self.end.notify_one();
            }
        }
        work
    }
}

fn start(shared: Arc<Shared>) -> io::Result<Pthread> {
    let shared = Arc::into_raw(shared);
    let mask = signal::block_all();
    // SAFETY: thread-owns-share: `serve` takes the count over.
    let started = unsafe { pthread::create(STACK_BYTES, serve, shared as *mut c_void) };
    signal::restore(mask);
    // SAFETY: thread-owns-share: nobody took the count over.
    started.inspect_err(|_| drop(unsafe { Arc::from_raw(shared) }))
}

extern "C" fn serve(shared: *mut c_void) -> *mut c_void {
    // SAFETY: thread-owns-share: `start` gave this thread the count.
    let shared = unsafe { Arc::from_raw(shared as *const Shared) };
    // For whoever tells the program's threads from ours, or has ours follow a change of rights.
    let _known = Known::enter();
    // Whoever starts this one may follow a thread that it serves from CPU to CPU.
    let _ = thread::CpuSet::of(std::process::id()).and_then(|everywhere| everywhere.bind(thread::id()));
    let mut work = shared.lock();
    while !work.stop {
        work = shared.work_off(work);
        if !work.stop {
            work = shared.begin.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }
    drop(work);
    null_mut()
}
