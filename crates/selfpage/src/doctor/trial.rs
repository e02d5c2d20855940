//! Trials on two pages of our own, of which the first is registered with a userfaultfd; and one on a variable.
#![allow(unsafe_code)]

use rustix::thread::gettid;
use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::Errno;
use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::memory::{self, Access, Place};
use selfpage_core::linux::probe::{Answer, Shortfall};
use selfpage_core::linux::uffd::{Features, Modes, Reach, Reading, Uffd, Waiters, Writing};

/// What is written into a page, to be found again.
const MARK: u8 = 0xA5;

struct Trial {
    uffd: Uffd,
    addr: usize,
}

impl Trial {
    fn new(modes: Modes) -> Result<Trial, Errno> {
        let uffd = Uffd::open(Reach::UserFaults, Reading::Polls)?;
        // With signals nobody has to answer: what the kernel is to touch for us, and may not, fails.
        let made = uffd.agree(Features::SIGBUS.and(Features::WP)).and_then(|_| {
            // SAFETY: owned-range: nothing is replaced.
            unsafe { memory::map_anonymous(Place::Anywhere, 2 * PAGE_BYTES, Access::ReadWrite) }
        });
        let addr = made.inspect_err(|_| _ = uffd.0.close())?;
        let trial = Trial { uffd, addr };
        // SAFETY: owned-range: the mapping is ours.
        unsafe { uffd.register(addr, PAGE_BYTES, modes) }?;
        Ok(trial)
    }

    fn second(&self) -> usize {
        self.addr + PAGE_BYTES
    }

    /// Marks a page that is not registered, or is there and not protected.
    fn mark(&self, page: usize) {
        // SAFETY: owned-range: the page is ours and writable.
        unsafe { (page as *mut u8).write_volatile(MARK) };
    }

    /// What the kernel answers when it is to write into the first page for us.
    fn written(&self) -> Result<(), Errno> {
        let file = Descriptor::open_pagemap()?;
        // SAFETY: owned-range: the page is ours, and nobody borrows from it.
        let read = unsafe { file.read_at(self.addr, size_of::<u64>(), 0) };
        let _ = file.close();
        read.map(drop)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = self.uffd.0.close();
        // SAFETY: owned-range: the mapping is ours, and nobody borrows from it.
        let _ = unsafe { memory::unmap(self.addr, 2 * PAGE_BYTES) };
    }
}

fn expect(held: bool) -> Answer {
    if held { Ok(()) } else { Err(Shortfall::Wrong) }
}

/// Whether a write to a protected page is a fault, until the protection is taken off.
pub(super) fn protects() -> Answer {
    let trial = Trial::new(Modes::WP)?;
    trial.mark(trial.addr);
    let set = |writing| {
        // SAFETY: owned-range: the page is ours.
        unsafe { trial.uffd.set_writing(trial.addr, PAGE_BYTES, writing) }
    };
    set(Writing::Protected)?;
    let stopped = trial.written() == Err(Errno::FAULT);
    set(Writing::Allowed)?;
    expect(stopped && trial.written().is_ok())
}

/// Whether an absent page can be given a copy of another.
pub(super) fn copies() -> Answer {
    let trial = Trial::new(Modes::MISSING)?;
    trial.mark(trial.second());
    // SAFETY: owned-range: both pages are ours.
    unsafe { trial.uffd.copy(trial.addr, trial.second(), PAGE_BYTES, Waiters::Wake, Writing::Allowed) }?;
    // SAFETY: owned-range: the page is ours, and there.
    expect(unsafe { (trial.addr as *const u8).read_volatile() } == MARK)
}

/// Whether this process may have its own memory read by the kernel as another's.
pub(super) fn reads_itself() -> Answer {
    let (from, mut to) = (MARK, 0u8);
    let from = libc::iovec { iov_base: (&raw const from).cast_mut().cast(), iov_len: 1 };
    let into = libc::iovec { iov_base: (&raw mut to).cast(), iov_len: 1 };
    // SAFETY: syscall-contract: one byte is read and one written, both of our own variables.
    let read = unsafe { libc::process_vm_readv(gettid().as_raw_pid(), &raw const into, 1, &raw const from, 1, 0) };
    if read < 0 {
        let why = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(Shortfall::Refused(Errno::from_raw_os_error(why)));
    }
    expect(read == 1 && to == MARK)
}
