//! The C library's streams, and a fork.

use std::ffi::c_void;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap, attend_forks};

use crate::child::forked;
use crate::scenario::{PAGE, here, in_child, is_at, number_pages, own_number, until};

static WORD: OnceLock<Mutex<PipeWriter>> = OnceLock::new();

fn send_word() {
    WORD.get().unwrap().lock().unwrap().write_all(&[7; 8]).unwrap();
}

/// Installed before the library's, and so called when these hold the domain still.
extern "C" fn send_word_in_a_fork() {
    if WORD.get().is_some() {
        send_word();
    }
}

/// One thread has a stream, and waits for eight bytes of it to come, which go into an absent page. The next one flushes all streams, and
/// has their list.
#[test]
fn a_fork_while_one_reads_a_stream_and_another_flushes_all() {
    for trap in [Trap::Worker, Trap::Upcall] {
        in_child(here!(), &format!("{trap:?}"), || {
            // SAFETY: test: a function that stays loaded.
            unsafe { libc::pthread_atfork(Some(send_word_in_a_fork), None, None) };
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let region = domain.region(PAGE).trap(trap).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
            let (reads, writes) = std::io::pipe().unwrap();
            assert!(WORD.set(Mutex::new(writes)).is_ok());
            // SAFETY: test: its descriptor is the stream's now.
            let stream = unsafe { libc::fdopen(reads.into_raw_fd(), c"r".as_ptr()) };
            assert!(!stream.is_null());
            let (to, from) = (region.as_ptr() as usize, stream as usize);
            let a_moment = || std::thread::sleep(Duration::from_millis(200));
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    // SAFETY: test: eight bytes of the region's, which nobody else uses.
                    assert_eq!(unsafe { libc::fread(to as *mut c_void, 1, 8, from as *mut libc::FILE) }, 8);
                });
                a_moment();
                // SAFETY: test: all streams.
                scope.spawn(|| unsafe { libc::fflush(std::ptr::null_mut()) });
                a_moment();
                // A fork that locks the list first has to wait for those two.
                scope.spawn(move || {
                    a_moment();
                    send_word();
                });
                forked(|| {
                    // SAFETY: test: all streams, whose list is free in the child.
                    assert_eq!(unsafe { libc::fflush(std::ptr::null_mut()) }, 0);
                });
            });
            assert_eq!(region.as_slice::<u8>()[..8], [7; 8]);
            // SAFETY: test: opens, and closes.
            assert_eq!(unsafe { libc::fclose(stream) }, 0, "the list is free in the parent, too");
        })
        .well();
    }
}

/// How many forks are over.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn fork_and_wait(_: libc::c_int) {
    forked(|| {});
    FORKS.fetch_add(1, SeqCst);
}

/// One thread flushes all streams, and has their list, when a handler of a signal forks on it. Another forks meanwhile.
#[test]
fn a_handler_forks_on_the_thread_that_has_the_list_and_another_forks() {
    in_child(here!(), "", || {
        // SAFETY: test: a handler that forks.
        unsafe { libc::signal(libc::SIGUSR1, fork_and_wait as *const () as libc::sighandler_t) };
        let _domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let (mut reads, mut writes) = io::pipe().unwrap();
        // SAFETY: test: a flag of our own pipe, and a stream with a buffer of its own to it.
        let stream = unsafe {
            assert_eq!(libc::fcntl(writes.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK), 0);
            while writes.write(&[7; PAGE]).is_ok() {}
            assert_eq!(libc::fcntl(writes.as_raw_fd(), libc::F_SETFL, 0), 0);
            libc::fdopen(writes.into_raw_fd(), c"w".as_ptr())
        };
        let a_moment = || std::thread::sleep(Duration::from_millis(300));
        std::thread::scope(|scope| {
            let (stream, (tell, told)) = (stream as usize, channel());
            // SAFETY: test: the stream stays open. It is flushed once there is room in the pipe.
            scope.spawn(move || unsafe {
                tell.send(libc::pthread_self()).unwrap();
                assert_eq!(libc::fputc(7, stream as *mut libc::FILE), 7);
                assert_eq!(libc::fflush(std::ptr::null_mut()), 0);
            });
            a_moment();
            scope.spawn(|| fork_and_wait(0));
            a_moment();
            // SAFETY: test: the thread waits for the pipe.
            unsafe { libc::pthread_kill(told.recv().unwrap(), libc::SIGUSR1) };
            while FORKS.load(SeqCst) == 0 {
                a_moment();
            }
            assert!(reads.read(&mut [0; 16 * PAGE]).is_ok());
        });
    })
    .well();
}

/// It opens a stream, as whoever looks up the name of a host does.
struct OpensOne(Sender<()>);

impl UserPager for OpensOne {
    fn fill(&self, _index: u64, bytes: &mut [u8; PAGE]) -> io::Result<()> {
        self.0.send(()).unwrap();
        // Time for a fork to come to it.
        std::thread::sleep(Duration::from_millis(300));
        // SAFETY: test: a stream that nobody else has.
        let closed = unsafe { libc::fclose(libc::fopen(c"/dev/null".as_ptr(), c"r".as_ptr())) };
        assert_eq!(closed, 0);
        bytes.fill(7);
        Ok(())
    }

    fn save(&self, _index: u64, _bytes: &[u8; PAGE]) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_fork_while_a_pager_opens_a_stream() {
    in_child(here!(), "pager", || {
        let (tell, told) = channel();
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let region = domain.region(PAGE).user(OpensOne(tell)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(region.as_slice::<u8>()[0], 7));
            told.recv().unwrap();
            forked(|| assert_eq!(region.as_slice::<u8>()[0], 7));
        });
    })
    .well();
}

/// Of forks at the same time one may find a domain that the other did not.
#[test]
fn forks_while_domains_come_and_go() {
    in_child(here!(), "", || {
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !ended.load(SeqCst) {
                        forked(|| {});
                    }
                });
            }
            for _ in 0..300 {
                let domain = Domain::with_frames(64 * PAGE).build().unwrap();
                assert_eq!(domain.region(PAGE).zero().unwrap().as_slice::<u8>()[0], 0);
            }
            ended.store(true, SeqCst);
        });
    })
    .well();
}

unsafe extern "C" {
    fn flockfile(stream: *mut libc::FILE);
    fn funlockfile(stream: *mut libc::FILE);
}

/// Which domains there are a fork knows once it has the library's locks, for which it waits: first of all for the list.
#[test]
fn a_child_has_the_first_domain_which_was_made_while_its_fork_waited() {
    in_child(here!(), "", || {
        static MADE: OnceLock<(Domain, Region)> = OnceLock::new();
        attend_forks();
        // SAFETY: test: a stream that stays open, and that this thread locks.
        let stream = unsafe { libc::fopen(c"/dev/null".as_ptr(), c"w".as_ptr()) };
        assert!(!stream.is_null());
        // SAFETY: test: as above.
        unsafe { flockfile(stream) };
        let begin = |number: &'static AtomicI32, work: fn()| {
            let thread = std::thread::spawn(move || {
                number.store(own_number(), SeqCst);
                work();
            });
            until("it waits for another", || is_at(number.load(SeqCst), libc::SYS_futex) == Some(true));
            thread
        };
        static NUMBERS: [AtomicI32; 2] = [const { AtomicI32::new(0) }; 2];
        // SAFETY: test: all streams.
        let flushes = begin(&NUMBERS[0], || assert_eq!(unsafe { libc::fflush(std::ptr::null_mut()) }, 0));
        let forks = begin(&NUMBERS[1], || {
            forked(|| {
                let (_, region) = MADE.get().unwrap();
                region.pin(0, PAGE).unwrap();
                forked(|| assert_eq!(region.as_slice::<u64>()[0], 1));
            });
        });
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let mut region = domain.region(PAGE).zero().unwrap();
        number_pages(&mut region);
        assert!(MADE.set((domain, region)).is_ok());
        // SAFETY: test: as above.
        unsafe { funlockfile(stream) };
        [flushes, forks].into_iter().for_each(|thread| thread.join().unwrap());
    })
    .well();
}
