//! Threads at once, and forks among them: what a block holds stays its own.

use std::ptr::NonNull;
use std::sync::mpsc;
use std::thread;

use selfpage::alloc;

use crate::child::{forked, in_child};
use crate::own_process;
use crate::random::{Random, seed};

/// A block that says how long it is and whose, at both ends.
struct Marked(NonNull<u8>, usize, u64);

// SAFETY: one owner at a time.
unsafe impl Send for Marked {}

impl Marked {
    fn new(len_bytes: usize, mark: u64) -> Marked {
        let block = Marked(alloc::allocate(len_bytes, 1).expect("memory"), len_bytes, mark);
        block.write();
        block
    }
    fn write(&self) {
        // SAFETY: within the block.
        unsafe {
            self.0.cast::<u64>().write(self.2);
            self.0.add(self.1 - 8).cast::<u64>().write_unaligned(!self.2);
        }
    }
    fn check(&self) {
        // SAFETY: within the block.
        let ends = unsafe { (self.0.cast::<u64>().read(), self.0.add(self.1 - 8).cast::<u64>().read_unaligned()) };
        assert_eq!(ends, (self.2, !self.2));
    }
    fn resize(&mut self, len_bytes: usize) {
        // SAFETY: ours, and the old address is forgotten.
        self.0 = unsafe { alloc::resize(self.0, len_bytes) }.expect("memory");
        // SAFETY: within the block.
        assert_eq!(unsafe { self.0.cast::<u64>().read() }, self.2);
        self.1 = len_bytes;
        self.write();
    }
    fn free(self) {
        self.check();
        // SAFETY: ours, and gone.
        unsafe { alloc::free(self.0) };
    }
}

fn storm(seed: u64, calls: usize) {
    println!("seed {seed}");
    thread::scope(|scope| {
        let (to_right, from_left) = mpsc::channel::<Marked>();
        let (to_left, from_right) = mpsc::channel::<Marked>();
        for (number, send, receive) in [(1, to_right, from_right), (2, to_left, from_left)] {
            scope.spawn(move || {
                let mut random = Random(seed.wrapping_mul(number));
                let mut blocks: Vec<Marked> = Vec::new();
                for _ in 0..calls {
                    let most = [100 << 10, 4 << 20, 16 << 20][random.below(3)];
                    let len_bytes = 16 + random.below(most);
                    let chosen = random.below(blocks.len().max(1));
                    match random.below(6) {
                        0..=1 if blocks.len() < 30 => blocks.push(Marked::new(len_bytes, random.next())),
                        2 if !blocks.is_empty() => blocks[chosen].resize(len_bytes),
                        3 if !blocks.is_empty() => drop(send.send(blocks.swap_remove(chosen))),
                        4 if !blocks.is_empty() => blocks.swap_remove(chosen).free(),
                        5 => drop(alloc::trim(8 << 20)),
                        _ => receive.try_iter().for_each(Marked::free),
                    }
                }
                blocks.into_iter().for_each(Marked::free);
                drop(send);
                receive.into_iter().for_each(Marked::free);
            });
        }
    });
}

#[test]
fn two_threads_allocate_and_free_for_each_other() {
    own_process::run("threads::two_threads_allocate_and_free_for_each_other", || {
        storm(seed(), 4000);
        assert_eq!(alloc::stats().live_bytes, 0);
    });
}

#[test]
fn forks_in_a_storm_leave_both_sides_right() {
    own_process::run("threads::forks_in_a_storm_leave_both_sides_right", || {
        alloc::fork::register();
        let seed = seed();
        let mine: Vec<Marked> = (0..8).map(|at| Marked::new(200_000 << at, at)).collect();
        thread::scope(|scope| {
            let storm = scope.spawn(|| storm(seed, 3000));
            while !storm.is_finished() {
                let ended = in_child(|| {
                    // A lock that nobody gives back would hold it for ever.
                    // SAFETY: a call without pointers.
                    unsafe { libc::alarm(120) };
                    mine.iter().for_each(Marked::check);
                    let mut grown = Marked::new(100_000, 9);
                    grown.resize(30 << 20);
                    grown.free();
                    // SAFETY: the child's own copies, not used any more.
                    mine.iter().for_each(|block| unsafe { alloc::free(block.0) });
                    alloc::trim(0);
                    true
                });
                assert_eq!(ended, 0, "the child, seed {seed}");
                mine.iter().for_each(Marked::check);
            }
        });
        mine.into_iter().for_each(Marked::free);
    });
}

/// As a library does whose handlers were registered before the allocator's, so that in the child they run before those let go.
extern "C" fn allocates_over_a_fork() {
    // A lock that nobody gives back would hold a child for ever.
    // SAFETY: a call without pointers.
    unsafe { libc::alarm(120) };
    let mut block = Marked::new(3 << 20, 7);
    block.resize(20 << 20);
    block.free();
    Marked::new(40 << 20, 8).free();
}

#[test]
fn handlers_of_a_fork_may_allocate_whenever_they_were_registered() {
    own_process::run("threads::handlers_of_a_fork_may_allocate_whenever_they_were_registered", || {
        let handler: Option<unsafe extern "C" fn()> = Some(allocates_over_a_fork);
        // SAFETY: functions without arguments.
        unsafe { libc::pthread_atfork(handler, handler, handler) };
        alloc::fork::register();
        // SAFETY: as above.
        unsafe { libc::pthread_atfork(handler, handler, handler) };
        for _ in 0..10 {
            forked(|| allocates_over_a_fork());
            allocates_over_a_fork();
        }
    });
}
