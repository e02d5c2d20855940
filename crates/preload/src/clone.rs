//! clone(2) and clone3(2): what is a fork by another name is made one, since other children get no memory of the domain's.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use selfpage_core::linux::thread;
use selfpage_heap::next;

use crate::maps;
use crate::space::PAGE;
use crate::sys::{self, Quiet, call};

next!(CLONE: c"clone" as
    fn(Body, *mut c_void, c_int, *mut c_void, *mut c_void, *mut c_void, usize) -> c_int, next_clone);

/// What a clone(3) runs.
type Body = unsafe extern "C" fn(*mut c_void) -> c_int;

/// As in the C library, with the last argument where there is one.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    body: Body,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    data: *mut c_void,
    child: usize,
) -> c_int {
    keep_for_end(flags as usize, child);
    // SAFETY: c-library: passed on from our caller.
    unsafe { next_clone()(body, stack, flags, argument, parent, data, child) }
}

/// Where a thread's number is to be cleared when it ends: the kernel waits for no pager then.
pub fn keep_for_end(flags: usize, child: usize) {
    if flags & libc::CLONE_CHILD_CLEARTID as usize != 0 {
        maps::keep(child, size_of::<c_int>());
    }
}

/// clone(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn clone_by_number(args: [usize; 5]) -> isize {
    let [flags, stack, parent, child, data] = args;
    // SAFETY: raw-call: passed on from our caller.
    unsafe {
        if let Some(fork) = Fork::by_clone(flags, stack, parent, child) {
            return fork.make();
        }
        keep_for_end(flags, child);
        call(libc::SYS_clone, [flags, stack, parent, child, data, 0])
    }
}

/// clone3(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn clone3(args: usize, len: usize) -> isize {
    // SAFETY: raw-call: passed on from our caller.
    unsafe {
        match Fork::by_clone3(args, len) {
            Some(fork) => fork.make(),
            None => call(libc::SYS_clone3, [args, len, 0, 0, 0, 0]),
        }
    }
}

/// What clone3(2) is told first; what may follow is newer.
#[repr(C)]
#[derive(Default)]
struct Arguments {
    flags: u64,
    pidfd: u64,
    child: u64,
    parent: u64,
    signal: u64,
    /// The stack and its length, data of a thread's own, the numbers that it is to have and how many, a control group.
    rest: [u64; 6],
}

/// The first of them that there was, without the numbers.
const LEAST_BYTES: usize = 64;

/// A process of its own, on the same stack, with nothing else about it: places that the program wants filled.
struct Fork {
    flags: usize,
    pidfd: usize,
    parent: usize,
    child: usize,
}

impl Fork {
    fn by_clone(flags: usize, stack: usize, parent: usize, child: usize) -> Option<Fork> {
        let signal = flags & 0xff;
        let fork = Fork { flags: flags & !0xff, pidfd: parent, parent, child };
        // One place is for both.
        let both = (libc::CLONE_PIDFD | libc::CLONE_PARENT_SETTID) as usize;
        (stack == 0 && flags & both != both && fork.is_plain(signal)).then_some(fork)
    }

    /// None for what is not known here, and for what cannot be read.
    fn by_clone3(args: usize, len: usize) -> Option<Fork> {
        let mut said = Arguments::default();
        if !(LEAST_BYTES..=size_of_val(&said)).contains(&len) {
            return None;
        }
        // SAFETY: zeroed-valid: numbers, of which any bytes are some.
        let bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut said).cast::<u8>(), len) };
        if sys::load(bytes, args) < 0 {
            return None;
        }
        let [pidfd, parent, child] = [said.pidfd, said.parent, said.child].map(|place| place as usize);
        let fork = Fork { flags: said.flags as usize, pidfd, parent, child };
        let at_one_place = fork.asks(libc::CLONE_PIDFD) && fork.asks(libc::CLONE_PARENT_SETTID) && pidfd == parent;
        (said.rest == [0; 6] && !at_one_place && fork.is_plain(said.signal as usize)).then_some(fork)
    }

    /// The C library's fork knows no other signal at the child's end.
    fn is_plain(&self, signal: usize) -> bool {
        let harmless =
            libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::CLONE_PARENT_SETTID | libc::CLONE_PIDFD;
        self.flags & !(harmless as usize) == 0 && signal == libc::SIGCHLD as usize
    }

    fn asks(&self, flag: c_int) -> bool {
        self.flags & flag as usize != 0
    }

    /// The child's number, 0 in the child, or an error.
    ///
    /// # Safety
    /// *raw-call*: the program gave places for what its flags ask for.
    unsafe fn make(&self) -> isize {
        if !self.asks(libc::CLONE_PIDFD) {
            // SAFETY: raw-call: passed on from our caller.
            return unsafe { self.fork() };
        }
        // A handler of a signal might wait for the child before it has a descriptor.
        let _quiet = Quiet::begin();
        // SAFETY: raw-call: passed on from our caller.
        unsafe {
            let reserved = match Reserved::at(self.pidfd) {
                Ok(reserved) => reserved,
                Err(errno) => return errno,
            };
            let child = self.fork();
            match child {
                0 => reserved.await_parent(),
                1.. => reserved.be_of(child as usize),
                _ => reserved.give_up(),
            }
            child
        }
    }

    unsafe fn fork(&self) -> isize {
        // SAFETY: raw-call: passed on from our caller.
        unsafe {
            let pid = libc::fork();
            if pid < 0 {
                return -sys::errno() as isize;
            }
            if pid > 0 && self.asks(libc::CLONE_PARENT_SETTID) {
                sys::store(self.parent, pid);
            }
            if pid == 0 && self.asks(libc::CLONE_CHILD_SETTID) {
                sys::store(self.child, thread::id() as i32);
            }
            if pid == 0 && self.asks(libc::CLONE_CHILD_CLEARTID) {
                keep_for_end(self.flags, self.child);
                call(libc::SYS_set_tid_address, [self.child, 0, 0, 0, 0, 0]);
            }
            pid as isize
        }
    }
}

/// How long a child waits for its descriptor at most: its parent may be gone.
static PATIENCE: libc::timespec = libc::timespec { tv_sec: 1, tv_nsec: 0 };

/// A descriptor for a child that is to be forked (`CLONE_PIDFD`), which the program knows already: what can fail does so before there is a
/// child. Until then it is this process's own.
struct Reserved {
    number: usize,
    /// A word in memory that parent and child share, 1 when the child has its descriptor: it might end before, and where nobody is to wait for
    /// children be gone.
    done: usize,
}

impl Reserved {
    /// # Safety
    /// *raw-call*: the program gave the place.
    unsafe fn at(place: usize) -> Result<Reserved, isize> {
        let checked = |result: isize| if result < 0 { Err(result) } else { Ok(result as usize) };
        let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as usize;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        // SAFETY: raw-call: a fresh mapping replaces nothing.
        unsafe {
            let number = checked(call(libc::SYS_pidfd_open, [sys::pid() as usize, 0, 0, 0, 0, 0]))?;
            let done = checked(call(libc::SYS_mmap, [0, PAGE, access, flags, usize::MAX, 0]));
            let reserved = Reserved { number, done: done.unwrap_or(0) };
            if let Err(errno) = done.and_then(|_| checked(sys::store(place, number as i32))) {
                reserved.give_up();
                return Err(errno);
            }
            Ok(reserved)
        }
    }

    fn done(&self) -> &AtomicU32 {
        // SAFETY: raw-call: the mapping of `at`, which is aligned, and stays until `forget`.
        unsafe { &*(self.done as *const AtomicU32) }
    }

    /// In the parent. The kernel's are closed by exec too.
    fn be_of(self, child: usize) {
        // SAFETY: raw-call: descriptors of our own.
        unsafe {
            let pidfd = call(libc::SYS_pidfd_open, [child, 0, 0, 0, 0, 0]);
            // Another thread has taken the last number. None is better than that of another process.
            let left_over = if pidfd < 0 { self.number } else { pidfd as usize };
            call(libc::SYS_dup3, [pidfd as usize, self.number, libc::O_CLOEXEC as usize, 0, 0, 0]);
            call(libc::SYS_close, [left_over, 0, 0, 0, 0, 0]);
        }
        self.done().store(1, Ordering::Release);
        // SAFETY: raw-call: the word outlives the call.
        unsafe { call(libc::SYS_futex, [self.done, libc::FUTEX_WAKE as usize, 1, 0, 0, 0]) };
        self.forget();
    }

    /// In the child, which has no such descriptor.
    fn await_parent(self) {
        if self.done().load(Ordering::Acquire) == 0 {
            let patience = &raw const PATIENCE as usize;
            // SAFETY: raw-call: the word and the time outlive the call.
            unsafe { call(libc::SYS_futex, [self.done, libc::FUTEX_WAIT as usize, 0, patience, 0, 0]) };
        }
        self.give_up();
    }

    fn give_up(self) {
        // SAFETY: raw-call: a descriptor of our own.
        unsafe { call(libc::SYS_close, [self.number, 0, 0, 0, 0, 0]) };
        self.forget();
    }

    fn forget(self) {
        // SAFETY: raw-call: our own mapping, if there is one.
        unsafe { call(libc::SYS_munmap, [self.done, PAGE, 0, 0, 0, 0]) };
    }
}
