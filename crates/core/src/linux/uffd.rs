//! userfaultfd: faults told to this process, and pages moved by it.

use super::descriptor::{Descriptor, read_write};
use super::errno::Errno;
use super::syscall::call;
use linux_raw_sys::{general as raw, ioctl};

const KIND: u32 = 0xAA;
const NEW: u32 = KIND << 8;
const MOVE: u32 = read_write::<raw::uffdio_move>(KIND, raw::_UFFDIO_MOVE);
const POISON: u32 = read_write::<raw::uffdio_poison>(KIND, raw::_UFFDIO_POISON);
/// Without progress for so long, something other than a race keeps the kernel from its work.
const ROUNDS_WITHOUT_PROGRESS: u32 = 1000;

/// Whose faults a userfaultfd serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// The program's, and the kernel's on its behalf: system calls on absent pages work. Needs a right.
    EveryFault,
    /// The program's own only: a system call on an absent page fails with `EFAULT`.
    UserFaults,
}

/// What reading does while there is no fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// It waits.
    Waits,
    /// It returns `EAGAIN`; poll(2) works.
    Polls,
}

const fn flags(reach: Reach, reading: Reading) -> usize {
    let reach = match reach {
        Reach::EveryFault => 0,
        Reach::UserFaults => raw::UFFD_USER_MODE_ONLY,
    };
    let reading = match reading {
        Reading::Waits => 0,
        Reading::Polls => raw::O_NONBLOCK,
    };
    (raw::O_CLOEXEC | reach | reading) as usize
}

/// What a userfaultfd can do or is asked to do: a set of `UFFD_FEATURE_*`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features(pub u64);

impl Features {
    /// Nothing.
    pub const NONE: Features = Features(0);
    /// A fault is `SIGBUS` on the thread that took it; nothing is read.
    pub const SIGBUS: Features = Features(raw::UFFD_FEATURE_SIGBUS as u64);
    /// A message names the thread that waits.
    pub const THREAD_ID: Features = Features(raw::UFFD_FEATURE_THREAD_ID as u64);
    /// A message has the address itself, not its page's.
    pub const EXACT_ADDRESS: Features = Features(raw::UFFD_FEATURE_EXACT_ADDRESS as u64);
    /// [`Uffd::move_pages`] works (Linux 6.8).
    pub const MOVE: Features = Features(raw::UFFD_FEATURE_MOVE as u64);
    /// Pages of anonymous memory can be write-protected.
    pub const WP: Features = Features(raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64);
    /// A write to a protected page clears the protection in the kernel, and nobody waits (Linux 6.7).
    pub const WP_ASYNC: Features = Features(raw::UFFD_FEATURE_WP_ASYNC as u64);
    /// Absent pages can be write-protected.
    pub const WP_UNPOPULATED: Features = Features(raw::UFFD_FEATURE_WP_UNPOPULATED as u64);
    /// Pages of shared memory can be write-protected.
    pub const WP_SHMEM: Features = Features(raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64);
    /// [`Uffd::poison`] works (Linux 6.6).
    pub const POISON: Features = Features(raw::UFFD_FEATURE_POISON as u64);
    /// Pages absent from shared memory are faults.
    pub const MISSING_SHMEM: Features = Features(raw::UFFD_FEATURE_MISSING_SHMEM as u64);
    /// Pages of shared memory that are there and not mapped are faults, answered by [`Uffd::map_existing`].
    pub const MINOR_SHMEM: Features = Features(raw::UFFD_FEATURE_MINOR_SHMEM as u64);

    /// These and those.
    pub const fn and(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }
    /// Whether all of `other` are in the set.
    pub const fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Which accesses to a registered range are faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Modes(u64);

impl Modes {
    /// To absent pages.
    pub const MISSING: Modes = Modes(raw::UFFDIO_REGISTER_MODE_MISSING as u64);
    /// Writes to protected pages.
    pub const WP: Modes = Modes(raw::UFFDIO_REGISTER_MODE_WP as u64);
    /// To pages that the shared memory has and the range has not.
    pub const MINOR: Modes = Modes(raw::UFFDIO_REGISTER_MODE_MINOR as u64);

    /// These and those.
    pub const fn and(self, other: Modes) -> Modes {
        Modes(self.0 | other.0)
    }
}

/// Whether whoever waits for the pages is woken when they are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiters {
    /// They are woken.
    Wake,
    /// They stay asleep until [`Uffd::wake`].
    Leave,
}

pub use crate::mmu::Writing;

const fn mode(waiters: Waiters, writing: Writing) -> u64 {
    (match waiters {
        Waiters::Wake => 0,
        Waiters::Leave => 1, // ..._MODE_DONTWAKE has this value in every call that has it.
    }) | (match writing {
        Writing::Allowed => 0,
        Writing::Protected => 2, // ..._MODE_WP, likewise.
    })
}

/// A call on a range that stopped early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// How much of the front is done.
    pub done_bytes: usize,
    /// Why no more.
    pub why: Errno,
}

/// A message read from a userfaultfd: the kernel's `struct uffd_msg`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u32,
    padding: u32,
}

const _: () = assert!(size_of::<Message>() == size_of::<raw::uffd_msg>());

/// A fault that a message tells of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultMessage {
    /// Where; to the byte with [`Features::EXACT_ADDRESS`].
    pub addr: usize,
    /// Whether it was a write.
    pub write: bool,
    /// Whether it was a write to a protected page.
    pub protected: bool,
    /// Whether the page is there and only not mapped.
    pub minor: bool,
    /// The thread that waits, with [`Features::THREAD_ID`], else 0.
    pub thread: u32,
}

impl Message {
    /// Nothing yet, to be read into.
    pub const EMPTY: Message = Message { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0, padding: 0 };

    /// The fault, or `None` for another event.
    pub fn fault(&self) -> Option<FaultMessage> {
        if u32::from(self.event) != raw::UFFD_EVENT_PAGEFAULT {
            return None;
        }
        let flag = |bit: u32| self.flags & u64::from(bit) != 0;
        Some(FaultMessage {
            addr: self.address as usize,
            write: flag(raw::UFFD_PAGEFAULT_FLAG_WRITE),
            protected: flag(raw::UFFD_PAGEFAULT_FLAG_WP),
            minor: flag(raw::UFFD_PAGEFAULT_FLAG_MINOR),
            thread: self.thread,
        })
    }
}

/// A userfaultfd, by its descriptor; not owned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Uffd(pub Descriptor);

impl Uffd {
    /// Opens one by the system call, or by `/dev/userfaultfd` where that is refused: a container's filter may forbid the call and let the
    /// device through.
    ///
    /// # Errors
    /// What the call said. `EPERM`: refused. `ENOSYS`: not in this kernel.
    pub fn open(reach: Reach, reading: Reading) -> Result<Uffd, Errno> {
        Uffd::open_by_call(reach, reading).or_else(|why| Uffd::open_by_device(reach, reading).map_err(|_| why))
    }

    /// Opens one by the system call.
    ///
    /// # Errors
    /// `EPERM`: the reach needs `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd=1`. `ENOSYS`: not in this kernel.
    fn open_by_call(reach: Reach, reading: Reading) -> Result<Uffd, Errno> {
        // SAFETY: syscall-contract: the call takes no pointer.
        let number = unsafe { call(raw::__NR_userfaultfd, [flags(reach, reading), 0, 0, 0, 0, 0]) }?;
        Ok(Uffd(Descriptor::from_raw(number as i32)))
    }

    /// Opens one by `/dev/userfaultfd`, whose right is for every fault.
    ///
    /// # Errors
    /// `EACCES`: no right to open the device. `ENOENT`: there is none.
    pub fn open_by_device(reach: Reach, reading: Reading) -> Result<Uffd, Errno> {
        let device = Descriptor::open(c"/dev/userfaultfd", raw::O_RDWR)?;
        // SAFETY: syscall-contract: the request takes the flags of the system call.
        let number = unsafe { device.control_number(NEW, flags(reach, reading)) };
        let _ = device.close();
        Ok(Uffd(Descriptor::from_raw(number? as i32)))
    }

    /// Agrees with the kernel on `wanted`; once for each userfaultfd, before anything else. Returns all that the kernel has.
    ///
    /// # Errors
    /// `EINVAL`: the kernel lacks a wanted feature, or agreement was reached before.
    pub fn agree(self, wanted: Features) -> Result<Features, Errno> {
        let mut api = raw::uffdio_api { api: u64::from(KIND), features: wanted.0, ioctls: 0 };
        // SAFETY: syscall-contract: the structure is the request's.
        unsafe { self.0.control(ioctl::UFFDIO_API, &mut api) }?;
        Ok(Features(api.features))
    }

    /// Makes the accesses of `modes` to a range faults of this userfaultfd.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has it. `EINVAL`: the mapping is of a kind without such faults, or unmapped.
    ///
    /// # Safety
    /// owned-range: the range is the caller's to make absent pages of wait (or signal) instead of reading zero.
    pub unsafe fn register(self, addr: usize, len_bytes: usize, modes: Modes) -> Result<(), Errno> {
        let mut argument = raw::uffdio_register { range: range(addr, len_bytes), mode: modes.0, ioctls: 0 };
        // SAFETY: owned-range: passed on from our caller.
        unsafe { self.0.control(ioctl::UFFDIO_REGISTER, &mut argument) }.map(drop)
    }

    /// Ends the registration of a range and wakes whoever waits there. Absent pages read as zero from then on.
    ///
    /// # Errors
    /// `EINVAL`: the range was not registered.
    ///
    /// # Safety
    /// owned-range: nobody reads an absent page of the range and expects what was saved from it.
    pub unsafe fn unregister(self, addr: usize, len_bytes: usize) -> Result<(), Errno> {
        // SAFETY: owned-range: passed on from our caller.
        unsafe { self.0.control(ioctl::UFFDIO_UNREGISTER, &mut range(addr, len_bytes)) }.map(drop)
    }

    /// Whether a range of private anonymous memory lies in one mapping that is registered with a userfaultfd. Nothing is changed: the call
    /// is the one of [`Uffd::map_existing`], which such memory is refused, and before that any memory without registration. (Of shared
    /// memory, and private mappings of it, it would map what is there.)
    ///
    /// # Errors
    /// `EBADF`, `ENOTTY`: this is no userfaultfd, so nothing is known.
    pub fn registered(self, addr: usize, len_bytes: usize) -> Result<bool, Errno> {
        let range = range(addr, len_bytes);
        let mut argument = raw::uffdio_continue { range, mode: mode(Waiters::Leave, Writing::Allowed), mapped: 0 };
        // SAFETY: syscall-contract: the structure is the request's; what it could map is what the memory has there anyway.
        match unsafe { self.0.control(ioctl::UFFDIO_CONTINUE, &mut argument) } {
            Ok(_) | Err(Errno::INVAL) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// Moves pages of private anonymous memory from `from` to `to`, which is registered here and absent. `from` is absent
    /// afterwards. Both ranges lie in one mapping each.
    ///
    /// # Errors
    /// `EEXIST`: the destination is populated. `ENOENT`: the source is absent, or an address is not mapped. `EBUSY`: pinned, or
    /// shared with a forked child. `EINVAL`: protection, locking or keys differ or forbid writing, or a range crosses mappings.
    ///
    /// # Safety
    /// owned-range: both ranges are the caller's, and no reference into `from` lives on.
    pub unsafe fn move_pages(self, to: usize, from: usize, len_bytes: usize, waiters: Waiters) -> Result<(), Stopped> {
        resuming(len_bytes, |done, rest| {
            let (dst, src) = (to.wrapping_add(done) as u64, from.wrapping_add(done) as u64);
            let mode = mode(waiters, Writing::Allowed);
            let mut argument = raw::uffdio_move { dst, src, len: rest as u64, mode, move_: 0 };
            // SAFETY: owned-range: passed on from our caller.
            let result = unsafe { self.0.control(MOVE, &mut argument) };
            (result, argument.move_)
        })
    }

    /// Copies `from` into new pages at `to`, which is registered here and absent. Also into mappings that the program may not
    /// write. An absent page of private memory at `from` counts as zero.
    ///
    /// # Errors
    /// `EEXIST`: the destination is populated. `ENOENT`: it is not registered here. `EFAULT`: `from` cannot be read.
    ///
    /// # Safety
    /// owned-range: `to` is the caller's to fill, and `from` to read.
    pub unsafe fn copy(
        self,
        to: usize,
        from: usize,
        len_bytes: usize,
        waiters: Waiters,
        writing: Writing,
    ) -> Result<(), Stopped> {
        resuming(len_bytes, |done, rest| {
            let (dst, src) = (to.wrapping_add(done) as u64, from.wrapping_add(done) as u64);
            let mode = mode(waiters, writing);
            let mut argument = raw::uffdio_copy { dst, src, len: rest as u64, mode, copy: 0 };
            // SAFETY: owned-range: passed on from our caller.
            let result = unsafe { self.0.control(ioctl::UFFDIO_COPY, &mut argument) };
            (result, argument.copy)
        })
    }

    /// Maps the pages that shared memory has for a range (`UFFDIO_CONTINUE`).
    ///
    /// # Errors
    /// `EEXIST`: mapped already. `EFAULT`: the memory has no such page.
    ///
    /// # Safety
    /// owned-range: the range is the caller's to fill.
    pub unsafe fn map_existing(
        self,
        addr: usize,
        len_bytes: usize,
        waiters: Waiters,
        writing: Writing,
    ) -> Result<(), Stopped> {
        resuming(len_bytes, |done, rest| {
            let range = range(addr.wrapping_add(done), rest);
            let mut argument = raw::uffdio_continue { range, mode: mode(waiters, writing), mapped: 0 };
            // SAFETY: owned-range: passed on from our caller.
            let result = unsafe { self.0.control(ioctl::UFFDIO_CONTINUE, &mut argument) };
            (result, argument.mapped)
        })
    }

    /// Makes every access to the absent pages of a range `SIGBUS`, and wakes whoever waits there.
    ///
    /// # Errors
    /// `EEXIST`: populated. `ENOENT`: not registered here.
    ///
    /// # Safety
    /// owned-range: the range is the caller's.
    pub unsafe fn poison(self, addr: usize, len_bytes: usize, waiters: Waiters) -> Result<(), Stopped> {
        resuming(len_bytes, |done, rest| {
            let range = range(addr.wrapping_add(done), rest);
            let mode = mode(waiters, Writing::Allowed);
            let mut argument = raw::uffdio_poison { range, mode, updated: 0 };
            // SAFETY: owned-range: passed on from our caller.
            let result = unsafe { self.0.control(POISON, &mut argument) };
            (result, argument.updated)
        })
    }

    /// Write-protects the populated pages of a range, or lets them be written again and wakes who waits to.
    ///
    /// # Errors
    /// `ENOENT`: not registered here with [`Modes::WP`]. `EAGAIN`: the mappings change under us.
    ///
    /// # Safety
    /// owned-range: the range is the caller's.
    pub unsafe fn set_writing(self, addr: usize, len_bytes: usize, writing: Writing) -> Result<(), Errno> {
        let mode = u64::from(writing == Writing::Protected); // UFFDIO_WRITEPROTECT_MODE_WP is 1 here.
        let mut argument = raw::uffdio_writeprotect { range: range(addr, len_bytes), mode };
        // SAFETY: owned-range: passed on from our caller.
        unsafe { self.0.control(ioctl::UFFDIO_WRITEPROTECT, &mut argument) }.map(drop)
    }

    /// Wakes whoever waits for a range; they try again.
    ///
    /// # Errors
    /// `EINVAL`: not a range of whole pages.
    pub fn wake(self, addr: usize, len_bytes: usize) -> Result<(), Errno> {
        // SAFETY: syscall-contract: the structure is the request's, and waking changes no memory.
        unsafe { self.0.control(ioctl::UFFDIO_WAKE, &mut range(addr, len_bytes)) }.map(drop)
    }

    /// Reads what faults there are into `messages`; returns how many came.
    ///
    /// # Errors
    /// `EAGAIN`: none, with [`Reading::Polls`]. `EINTR`: a signal.
    pub fn read(self, messages: &mut [Message]) -> Result<usize, Errno> {
        let (into, len_bytes) = (messages.as_mut_ptr() as usize, size_of_val(messages));
        // SAFETY: syscall-contract: the slice is borrowed until the call returns, and any bytes make a message.
        unsafe { call(raw::__NR_read, [self.0.argument(), into, len_bytes, 0, 0, 0]) }
            .map(|read| read / size_of::<Message>())
    }
}

const fn range(addr: usize, len_bytes: usize) -> raw::uffdio_range {
    raw::uffdio_range { start: addr as u64, len: len_bytes as u64 }
}

/// Calls `part(done, rest)` until the whole length is done or the kernel gives a reason that lasts: it answers `EAGAIN` to
/// a call that it did in part, and tells how much.
fn resuming(
    len_bytes: usize,
    mut part: impl FnMut(usize, usize) -> (Result<usize, Errno>, i64),
) -> Result<(), Stopped> {
    let (mut done_bytes, mut idle) = (0, 0);
    while done_bytes < len_bytes {
        let (result, progress) = part(done_bytes, len_bytes - done_bytes);
        match result {
            Ok(_) => return Ok(()),
            Err(Errno::AGAIN) if progress > 0 => (done_bytes, idle) = (done_bytes + progress as usize, 0),
            Err(Errno::AGAIN) if idle < ROUNDS_WITHOUT_PROGRESS => idle += 1,
            Err(why) => return Err(Stopped { done_bytes, why }),
        }
    }
    Ok(())
}
