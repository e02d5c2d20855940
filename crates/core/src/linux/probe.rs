//! Whether this kernel, for this process, does what selfpage needs: each question is answered by doing it on scratch memory.

use super::descriptor::Descriptor;
use super::errno::Errno;
use super::memory::{self, Access, Advice, HUGE_PAGE_BYTES, Place};
use super::pagemap::{Afterwards, Categories, Pagemap, Stretch};
use super::uffd::{Features, Message, Modes, Reach, Reading, Stopped, Uffd, Waiters, Writing};
use super::{clock, thread};
use crate::addr::PAGE_BYTES;

/// How long a fault may take to be told.
const PATIENCE_NS: u64 = 1_000_000_000;
/// What a probe writes, to be found again.
const MARK: u8 = 0xA5;

/// How the kernel fell short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortfall {
    /// It said so.
    Refused(Errno),
    /// It said yes and did something else.
    Wrong,
}

impl From<Errno> for Shortfall {
    fn from(why: Errno) -> Shortfall {
        Shortfall::Refused(why)
    }
}

impl From<Stopped> for Shortfall {
    fn from(stopped: Stopped) -> Shortfall {
        Shortfall::Refused(stopped.why)
    }
}

/// The answer of a probe.
pub type Answer = Result<(), Shortfall>;

fn expect(held: bool) -> Answer {
    if held { Ok(()) } else { Err(Shortfall::Wrong) }
}

/// Memory of nobody else's, unmapped when dropped.
struct Scratch {
    addr: usize,
    len_bytes: usize,
}

impl Scratch {
    fn pages(count: usize) -> Result<Scratch, Errno> {
        let scratch = Scratch::mapping(count * PAGE_BYTES)?;
        // A kernel without huge pages refuses, and needs no telling.
        let _ = scratch.advise(0, count, Advice::NoHugePages);
        Ok(scratch)
    }

    fn mapping(len_bytes: usize) -> Result<Scratch, Errno> {
        // SAFETY: owned-range: nothing is replaced.
        let addr = unsafe { memory::map_anonymous(Place::Anywhere, len_bytes, Access::ReadWrite) }?;
        Ok(Scratch { addr, len_bytes })
    }

    fn page(&self, index: usize) -> usize {
        self.addr + index * PAGE_BYTES
    }

    fn advise(&self, first: usize, count: usize, advice: Advice) -> Result<(), Errno> {
        // SAFETY: owned-range: the mapping is ours, and nobody borrows from it.
        unsafe { memory::advise(self.page(first), count * PAGE_BYTES, advice) }
    }

    /// Populates a page and marks it.
    fn mark(&self, index: usize) -> Result<(), Errno> {
        self.advise(index, 1, Advice::PopulateWrite)?;
        // SAFETY: owned-range: the page is ours, populated and writable.
        unsafe { (self.page(index) as *mut u8).write_volatile(MARK) };
        Ok(())
    }

    /// Whether a populated page has the mark.
    fn is_marked(&self, index: usize) -> bool {
        // SAFETY: owned-range: the page is ours, populated and readable.
        unsafe { (self.page(index) as *const u8).read_volatile() == MARK }
    }

    /// What the kernel answers when it is to write into a page for us.
    fn written_by_kernel(&self, index: usize) -> Result<(), Errno> {
        let file = Descriptor::open_pagemap()?;
        // SAFETY: owned-range: the page is ours, and nobody borrows from it.
        let read = unsafe { file.read_at(self.page(index), 8, 0) };
        let _ = file.close();
        read.map(drop)
    }

    fn categories(&self, index: usize) -> Result<Categories, Errno> {
        let pagemap = Pagemap(Descriptor::open_pagemap()?);
        let categories = pagemap.categories(self.page(index));
        let _ = pagemap.0.close();
        categories
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: owned-range: the mapping is ours, and nobody borrows from it.
        let _ = unsafe { memory::unmap(self.addr, self.len_bytes) };
    }
}

/// Two or more pages of which the first is registered with a userfaultfd.
struct Trial {
    scratch: Scratch,
    uffd: Uffd,
}

impl Trial {
    /// For the program's own faults.
    fn new(features: Features, modes: Modes) -> Result<Trial, Errno> {
        Trial::reaching(Reach::UserFaults, features, modes)
    }

    fn reaching(reach: Reach, features: Features, modes: Modes) -> Result<Trial, Errno> {
        let uffd = Uffd::open(reach, Reading::Polls)?;
        let made = uffd.agree(features).and_then(|_| Scratch::pages(2)).and_then(|scratch| {
            // SAFETY: owned-range: the mapping is ours.
            unsafe { uffd.register(scratch.addr, PAGE_BYTES, modes) }?;
            Ok(scratch)
        });
        match made {
            Ok(scratch) => Ok(Trial { scratch, uffd }),
            Err(why) => {
                let _ = uffd.0.close();
                Err(why)
            }
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = self.uffd.0.close();
    }
}

/// What the kernel says that its userfaultfd can do.
///
/// # Errors
/// As for [`Uffd::open`].
pub fn features() -> Result<Features, Errno> {
    let uffd = Uffd::open(Reach::UserFaults, Reading::Polls)?;
    let features = uffd.agree(Features::NONE);
    let _ = uffd.0.close();
    features
}

/// Whether `/dev/userfaultfd` may be used.
///
/// # Errors
/// As for [`Uffd::open_by_device`].
pub fn opens_device() -> Answer {
    Ok(Uffd::open_by_device(Reach::EveryFault, Reading::Polls)?.0.close()?)
}

/// Who touches the absent page of a [`ThreadTrial`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Toucher {
    /// The program.
    Program,
    /// The kernel, in a system call of the program.
    Kernel,
}

/// One thread touches an absent page, another answers.
pub struct ThreadTrial(Trial);

impl ThreadTrial {
    /// Makes ready.
    ///
    /// # Errors
    /// As for [`Uffd::open`] and [`Uffd::agree`].
    pub fn new(reach: Reach) -> Result<ThreadTrial, Errno> {
        Trial::reaching(reach, Features::THREAD_ID, Modes::MISSING).map(ThreadTrial)
    }

    /// Touches the page and returns, when it is answered, the number of the calling thread.
    ///
    /// # Errors
    /// What the system call failed with.
    pub fn touch(&self, toucher: Toucher) -> Result<u32, Errno> {
        match toucher {
            // SAFETY: owned-range: the page is ours; it is answered with zeros, or its registration ends.
            Toucher::Program => drop(unsafe { (self.0.scratch.addr as *const u8).read_volatile() }),
            Toucher::Kernel => self.0.scratch.written_by_kernel(0)?,
        }
        Ok(thread::id())
    }

    /// Answers the touch and returns the thread that the kernel named. Whatever happens, the touch ends.
    ///
    /// # Errors
    /// `ETIMEDOUT`: nothing was told. What the calls failed with.
    pub fn answer(&self) -> Result<u32, Errno> {
        let Trial { scratch, uffd } = &self.0;
        let end = clock::monotonic_ns() + PATIENCE_NS;
        let mut messages = [Message::EMPTY];
        let told = loop {
            match (uffd.read(&mut messages), messages) {
                (Ok(_), [message]) => break message.fault().map(|fault| fault.thread).ok_or(Errno::PROTO),
                (Err(Errno::AGAIN), _) if clock::monotonic_ns() < end => thread::give_way(),
                (Err(Errno::AGAIN), _) => break Err(Errno::TIMEDOUT),
                (Err(why), _) => break Err(why),
            }
        };
        // SAFETY: owned-range: the page is ours and holds nothing that was saved.
        unsafe { uffd.unregister(scratch.addr, PAGE_BYTES) }?;
        told
    }
}

/// Whether pages move (`UFFDIO_MOVE`) and keep their contents.
///
/// # Errors
/// [`Shortfall`].
pub fn moves_pages() -> Answer {
    let Trial { scratch, uffd } = &Trial::new(Features::MOVE, Modes::MISSING)?;
    scratch.mark(1)?;
    // SAFETY: owned-range: both pages are ours.
    unsafe { uffd.move_pages(scratch.page(0), scratch.page(1), PAGE_BYTES, Waiters::Wake) }?;
    expect(scratch.is_marked(0) && !scratch.categories(1)?.populated())
}

/// Whether a page that moves stays write-protected.
///
/// # Errors
/// [`Shortfall::Wrong`]: it does not.
pub fn moves_keep_protection() -> Answer {
    let features = Features::MOVE.and(Features::WP_ASYNC);
    let Trial { scratch, uffd } = &Trial::new(features, Modes::MISSING.and(Modes::WP))?;
    // SAFETY: owned-range: both pages are ours.
    unsafe { uffd.register(scratch.page(1), PAGE_BYTES, Modes::WP) }?;
    scratch.mark(1)?;
    // SAFETY: owned-range: as above.
    unsafe { uffd.set_writing(scratch.page(1), PAGE_BYTES, Writing::Protected) }?;
    // SAFETY: owned-range: as above.
    unsafe { uffd.move_pages(scratch.page(0), scratch.page(1), PAGE_BYTES, Waiters::Wake) }?;
    expect(!scratch.categories(0)?.contains(Categories::WRITTEN))
}

/// Whether an access to an absent page fails at once (`SIGBUS`) instead of waiting.
///
/// # Errors
/// [`Shortfall`].
pub fn signals_faults() -> Answer {
    let Trial { scratch, .. } = &Trial::new(Features::SIGBUS, Modes::MISSING)?;
    expect(scratch.written_by_kernel(0) == Err(Errno::FAULT))
}

/// Whether a page can be poisoned.
///
/// # Errors
/// [`Shortfall`].
pub fn poisons() -> Answer {
    let Trial { scratch, uffd } = &Trial::new(Features::POISON, Modes::MISSING)?;
    // SAFETY: owned-range: the page is ours.
    unsafe { uffd.poison(scratch.page(0), PAGE_BYTES, Waiters::Wake) }?;
    expect(scratch.written_by_kernel(0).is_err())
}

/// Whether a write to a protected page is a fault, until the protection is taken off.
///
/// # Errors
/// [`Shortfall`].
pub fn protects() -> Answer {
    // With signals nobody has to answer: what the kernel is to write, and may not, fails.
    let Trial { scratch, uffd } = &Trial::new(Features::SIGBUS.and(Features::WP), Modes::WP)?;
    scratch.mark(0)?;
    let set = |writing| {
        // SAFETY: owned-range: the page is ours.
        unsafe { uffd.set_writing(scratch.page(0), PAGE_BYTES, writing) }
    };
    set(Writing::Protected)?;
    let stopped = scratch.written_by_kernel(0) == Err(Errno::FAULT);
    set(Writing::Allowed)?;
    expect(stopped && scratch.written_by_kernel(0).is_ok())
}

/// Whether an absent page can be given a copy of another.
///
/// # Errors
/// [`Shortfall`].
pub fn copies() -> Answer {
    let Trial { scratch, uffd } = &Trial::new(Features::SIGBUS, Modes::MISSING)?;
    scratch.mark(1)?;
    // SAFETY: owned-range: both pages are ours.
    unsafe { uffd.copy(scratch.page(0), scratch.page(1), PAGE_BYTES, Waiters::Wake, Writing::Allowed) }?;
    expect(scratch.is_marked(0))
}

/// Whether the kernel notes which pages are written, without stopping the writer (`WP_ASYNC`), and tells (`PAGEMAP_SCAN`).
///
/// # Errors
/// [`Shortfall`].
pub fn notes_writes() -> Answer {
    let Trial { scratch, uffd } = &Trial::new(Features::WP_ASYNC, Modes::WP)?;
    scratch.mark(0)?;
    // SAFETY: owned-range: the page is ours.
    unsafe { uffd.set_writing(scratch.page(0), PAGE_BYTES, Writing::Protected) }?;
    let clean = !scratch.categories(0)?.contains(Categories::WRITTEN);
    scratch.mark(0)?;
    let pagemap = Pagemap(Descriptor::open_pagemap()?);
    let mut stretches = [Stretch::default()];
    let found = pagemap.written(scratch.page(0), scratch.page(1), Afterwards::Protect, &mut stretches);
    let _ = pagemap.0.close();
    expect(clean && found?.stretches == 1 && !scratch.categories(0)?.contains(Categories::WRITTEN))
}

/// Whether the kernel tells about pages (`PAGEMAP_SCAN`).
///
/// # Errors
/// [`Shortfall`].
pub fn scans_pages() -> Answer {
    let scratch = Scratch::pages(2)?;
    scratch.mark(0)?;
    expect(scratch.categories(0)?.contains(Categories::PRESENT) && !scratch.categories(1)?.populated())
}

/// Whether the kernel has soft-dirty bits: then a page that was just written has one, in a process that never cleared any.
///
/// # Errors
/// [`Shortfall::Wrong`]: it has none.
pub fn has_soft_dirty() -> Answer {
    const SOFT_DIRTY: u64 = 1 << 55;
    let scratch = Scratch::pages(2)?;
    scratch.mark(0)?;
    let pagemap = Descriptor::open_pagemap()?;
    let entry_bytes = size_of::<u64>();
    // SAFETY: owned-range: the page that the entry is read into is ours, and nobody borrows from it.
    let read = unsafe { pagemap.read_at(scratch.page(1), entry_bytes, scratch.page(0) / PAGE_BYTES * entry_bytes) };
    let _ = pagemap.close();
    // SAFETY: owned-range: the page is ours, and any bits are a number.
    let entry = unsafe { (scratch.page(1) as *const u64).read_volatile() };
    expect(read? == entry_bytes && entry & SOFT_DIRTY != 0)
}

/// Whether pages of shared memory are mapped on demand (`UFFDIO_CONTINUE`).
///
/// # Errors
/// [`Shortfall`].
pub fn maps_existing() -> Answer {
    let Trial { scratch, uffd } = &Trial::new(Features::MINOR_SHMEM, Modes::MISSING)?;
    // No file's: to make one that long is a signal where files may have no bytes (`RLIMIT_FSIZE`).
    // SAFETY: owned-range: the page is ours.
    unsafe { memory::map_shared(Place::Over(scratch.page(1)), PAGE_BYTES, Access::ReadWrite) }?;
    scratch.mark(1)?;
    scratch.advise(1, 1, Advice::Drop)?; // Shared memory keeps the page.
    // SAFETY: owned-range: the page is ours.
    unsafe { uffd.register(scratch.page(1), PAGE_BYTES, Modes::MINOR) }?;
    // SAFETY: owned-range: as above.
    unsafe { uffd.map_existing(scratch.page(1), PAGE_BYTES, Waiters::Wake, Writing::Allowed) }?;
    expect(scratch.is_marked(1))
}

/// Whether pages can be given memory ahead of use (`MADV_POPULATE_WRITE`).
///
/// # Errors
/// [`Shortfall`].
pub fn populates() -> Answer {
    let scratch = Scratch::pages(1)?;
    scratch.advise(0, 1, Advice::PopulateWrite)?;
    let mut resident = [0];
    memory::residency(scratch.page(0), &mut resident)?;
    expect(resident == [1])
}

/// Whether a page can be guarded, so that an access is `SIGSEGV` (`MADV_GUARD_INSTALL`).
///
/// # Errors
/// [`Shortfall`].
pub fn guards() -> Answer {
    let scratch = Scratch::pages(1)?;
    scratch.advise(0, 1, Advice::GuardInstall)?;
    let guarded = scratch.written_by_kernel(0) == Err(Errno::FAULT);
    scratch.advise(0, 1, Advice::GuardRemove)?;
    expect(guarded && scratch.written_by_kernel(0).is_ok())
}

/// Whether pages that the program may not read are readable for us (`/proc/self/mem`).
///
/// # Errors
/// [`Shortfall`].
pub fn reads_protected() -> Answer {
    let scratch = Scratch::pages(2)?;
    scratch.mark(0)?;
    // SAFETY: owned-range: the page is ours, and nobody borrows from it.
    unsafe { memory::protect(scratch.page(0), PAGE_BYTES, Access::None) }?;
    scratch.advise(1, 1, Advice::PopulateWrite)?;
    let file = Descriptor::open_memory()?;
    // SAFETY: owned-range: both pages are ours, and nobody borrows from them.
    let read = unsafe { file.read_at(scratch.page(1), PAGE_BYTES, scratch.page(0)) };
    let _ = file.close();
    expect(read? == PAGE_BYTES && scratch.is_marked(1))
}

/// Whether this process may have its own memory read by the kernel as another's (process_vm_readv(2)).
///
/// # Errors
/// [`Shortfall`].
pub fn reads_itself() -> Answer {
    let byte = MARK;
    expect(memory::own_to_read((&raw const byte) as usize)? == MARK)
}

/// Whether this process may have its own memory written by the kernel as another's (process_vm_writev(2)).
///
/// # Errors
/// [`Shortfall`].
pub fn writes_itself() -> Answer {
    let mut byte = 0;
    memory::write_own(MARK, &mut byte)?;
    expect(byte == MARK)
}

/// Whether a range can be kept free of huge pages.
///
/// # Errors
/// [`Shortfall`].
pub fn keeps_pages_small() -> Answer {
    let scratch = Scratch::pages(2 * HUGE_PAGE_BYTES / PAGE_BYTES)?;
    let inside = scratch.addr.next_multiple_of(HUGE_PAGE_BYTES) - scratch.addr;
    scratch.mark(inside / PAGE_BYTES)?;
    expect(!scratch.categories(inside / PAGE_BYTES)?.contains(Categories::HUGE))
}

/// Whether `len_bytes` of addresses can be reserved without memory behind them.
///
/// # Errors
/// [`Shortfall`].
pub fn reserves(len_bytes: usize) -> Answer {
    Ok(Scratch::mapping(len_bytes).map(drop)?)
}

/// Whether `len_bytes` can be kept from being swapped out.
///
/// # Errors
/// [`Shortfall`].
pub fn locks(len_bytes: usize) -> Answer {
    let scratch = Scratch::mapping(len_bytes)?;
    Ok(memory::lock_on_fault(scratch.addr, len_bytes)?)
}
