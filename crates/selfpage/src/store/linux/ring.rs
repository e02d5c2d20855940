//! Many requests in one system call, through io_uring.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use rustix::thread::sched_yield;
use selfpage_core::linux::thread;

use super::descriptor::{above_low_numbers, release_number, take_number};
use super::transfer::{Batch, Direction};

/// How many requests are under way at a time: the disk gains nothing from more.
const DEPTH: usize = 64;
/// How many batches the calling thread moves itself once the kernel could not start a thread: it tries for 45 ms before it says so (Linux 6.18).
const BATCHES_ALONE: u32 = 256;

/// An io_uring of the thread that made it.
///
/// Its descriptor lies in that thread's table, so a number means something else, or nothing, anywhere else: in another
/// thread's table, or in a forked child. There it must not be closed.
pub struct Ring {
    ring: ManuallyDrop<IoUring>,
    owner: u32,
    /// Its number where that is taken, so that no file of a region's comes there.
    number: Option<RawFd>,
    /// How many batches are still not given to the kernel.
    alone: u32,
}

/// The ring's descriptor is not ours any more, or the kernel refuses it. The requests that it did not complete are untouched.
pub struct RingLost;

impl Ring {
    /// A ring for the calling thread.
    pub fn new() -> std::io::Result<Ring> {
        // Its number is in what it keeps, and cannot be changed.
        let ring = above_low_numbers(|| IoUring::builder().dontfork().build(DEPTH as u32))?;
        let number = Some(ring.as_raw_fd()).filter(|number| take_number(*number));
        Ok(Ring { ring: ManuallyDrop::new(ring), owner: thread::id(), number, alone: 0 })
    }

    /// Works off every request, up to [`DEPTH`] at a time.
    pub fn run(&mut self, file: RawFd, batch: &mut Batch<'_>) -> Result<(), RingLost> {
        if self.alone > 0 {
            self.alone -= 1;
            batch.run_serially(file);
            return Ok(());
        }
        // Requests from `next` on were never submitted; `again` are those that want another round.
        let mut next = 0;
        let mut again = [0_usize; DEPTH];
        let mut again_len = 0;
        let mut in_flight = 0;
        loop {
            while in_flight < DEPTH && (again_len > 0 || next < batch.requests.len()) {
                let index = if again_len > 0 {
                    again_len -= 1;
                    again[again_len]
                } else {
                    next += 1;
                    next - 1
                };
                if !batch.requests[index].is_done() {
                    self.push(file, batch, index);
                    in_flight += 1;
                }
            }
            if in_flight == 0 {
                return Ok(());
            }
            match self.ring.submit_and_wait(in_flight) {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                // Nothing of this batch has reached the kernel yet where the queue still holds all of it.
                Err(_) if self.ring.submission().len() == in_flight => return Err(RingLost),
                // What has reached it will complete: its buffers are not ours to give back before that.
                Err(_) => sched_yield(),
            }
            for entry in self.ring.completion() {
                let index = entry.user_data() as usize;
                let request = &mut batch.requests[index];
                match usize::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result())) {
                    // Nobody has begun with it. What would wait the kernel hands to a thread of its own, and it can start none where the
                    // process, its user or its control group may have no more.
                    Err(Errno::CANCELED) => {
                        request.run(file, batch.direction, batch.vectors);
                        self.alone = BATCHES_ALONE;
                    }
                    moved => request.took(moved, batch.direction),
                }
                in_flight -= 1;
                if !request.is_done() {
                    again[again_len] = index;
                    again_len += 1;
                }
            }
        }
    }

    fn push(&mut self, file: RawFd, batch: &Batch<'_>, index: usize) {
        let (rest, offset) = batch.requests[index].rest(batch.vectors);
        let (vectors, count) = (rest.as_ptr(), rest.len() as u32);
        let entry = match batch.direction {
            Direction::Read => opcode::Readv::new(types::Fd(file), vectors, count).offset(offset).build(),
            Direction::Write => opcode::Writev::new(types::Fd(file), vectors, count).offset(offset).build(),
            Direction::WriteUnlessLocked => {
                opcode::Writev::new(types::Fd(file), vectors, count).offset(offset).rw_flags(libc::RWF_NOWAIT).build()
            }
        };
        // SAFETY: batch-borrowed: `run` returns when nothing is in flight, or when nothing was submitted.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(index as u64)) };
        assert!(pushed.is_ok(), "the queue is as deep as what may be in flight");
    }

    /// Gives the ring up without a word to the kernel: its descriptor may be another's by now.
    pub fn forget(self) {
        self.number.into_iter().for_each(release_number);
        std::mem::forget(self);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if thread::id() == self.owner {
            // SAFETY: ring-own-thread: this is the last use, on the thread in whose table the descriptor lies.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
            self.number.into_iter().for_each(release_number);
        }
    }
}
