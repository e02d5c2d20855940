//! Mappings of this process, by address.
//!
//! Addresses are numbers here: what lies at them may be absent, unreadable or another thread's, so none may become a
//! reference without more knowledge.

use super::descriptor::Descriptor;
use super::errno::Errno;
use super::syscall::call;
use crate::addr::PAGE_BYTES;
use crate::frame::GROUP;
use core::ffi::CStr;
use linux_raw_sys::general as raw;

/// Where a new mapping goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Where the kernel likes.
    Anywhere,
    /// At this address, which must be free (`EEXIST` otherwise).
    Free(usize),
    /// At this address, in place of what is there.
    Over(usize),
}

/// What the program may do with a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Nothing.
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Access {
    const fn bits(self) -> usize {
        (match self {
            Access::None => raw::PROT_NONE,
            Access::Read => raw::PROT_READ,
            Access::ReadWrite => raw::PROT_READ | raw::PROT_WRITE,
        }) as usize
    }
}

/// What the kernel maps by one entry, instead of a table of them.
pub const HUGE_PAGE_BYTES: usize = GROUP as usize * PAGE_BYTES;

/// Whether writes to a mapping of a file reach the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// They do, and others see them.
    Shared,
    /// They stay with this process.
    Private,
}

/// What madvise(2) is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Advice {
    /// Give every page memory, as a write would.
    PopulateWrite = raw::MADV_POPULATE_WRITE,
    /// Give every page memory, as a read would.
    PopulateRead = raw::MADV_POPULATE_READ,
    /// Drop what the pages hold, locked ones included.
    Drop = raw::MADV_DONTNEED_LOCKED,
    /// Drop what the pages hold when memory is short.
    Free = raw::MADV_FREE,
    /// Never use huge pages.
    NoHugePages = raw::MADV_NOHUGEPAGE,
    /// Use huge pages where they fit.
    HugePages = raw::MADV_HUGEPAGE,
    /// Never merge pages with equal ones.
    NotMerged = raw::MADV_UNMERGEABLE,
    /// A forked child gets the range empty.
    WipeForChild = raw::MADV_WIPEONFORK,
    /// A forked child does not get the range.
    NotForChild = raw::MADV_DONTFORK,
    /// A forked child gets the range.
    ForChild = raw::MADV_DOFORK,
    /// Nothing is known of the order in which pages are used.
    Usual = raw::MADV_NORMAL,
    /// They are used in no order.
    Scattered = raw::MADV_RANDOM,
    /// Leave the range out of core dumps.
    NotInDump = raw::MADV_DONTDUMP,
    /// Drop the contents and answer every access with `SIGSEGV` (Linux 6.13).
    GuardInstall = raw::MADV_GUARD_INSTALL,
    /// Undo `GuardInstall`.
    GuardRemove = raw::MADV_GUARD_REMOVE,
    /// Swap the pages out before others.
    Cold = raw::MADV_COLD,
}

/// Maps `len_bytes` of private anonymous memory, without a claim on swap space. Returns its address.
///
/// # Errors
/// What mmap(2) says.
///
/// # Safety
/// owned-range: what [`Place::Over`] replaces is the caller's, and no reference into it lives on.
pub unsafe fn map_anonymous(place: Place, len_bytes: usize, access: Access) -> Result<usize, Errno> {
    let flags = raw::MAP_PRIVATE | raw::MAP_ANONYMOUS | raw::MAP_NORESERVE;
    // SAFETY: owned-range: passed on from our caller.
    unsafe { map(place, len_bytes, access, flags, Descriptor::ABSENT, 0) }
}

/// Reserves `len_bytes` of addresses, which nobody may touch before [`protect`] opens them. What is opened is a claim on memory, and the kernel
/// notes that: what was touched and is closed again never becomes one mapping with what nobody has touched.
///
/// # Errors
/// What mmap(2) says.
///
/// # Safety
/// owned-range: as for [`map_anonymous`].
pub unsafe fn reserve(place: Place, len_bytes: usize) -> Result<usize, Errno> {
    let flags = raw::MAP_PRIVATE | raw::MAP_ANONYMOUS;
    // SAFETY: owned-range: passed on from our caller.
    unsafe { map(place, len_bytes, Access::None, flags, Descriptor::ABSENT, 0) }
}

/// Maps `len_bytes` of memory that is no file's, and that forked children share. Returns its address.
///
/// # Errors
/// What mmap(2) says.
///
/// # Safety
/// owned-range: as for [`map_anonymous`].
pub unsafe fn map_shared(place: Place, len_bytes: usize, access: Access) -> Result<usize, Errno> {
    // SAFETY: owned-range: passed on from our caller.
    unsafe { map(place, len_bytes, access, raw::MAP_SHARED | raw::MAP_ANONYMOUS, Descriptor::ABSENT, 0) }
}

/// Maps `len_bytes` of an open file (or memfd) from `offset_bytes` on. Returns the address.
///
/// # Errors
/// What mmap(2) says.
///
/// # Safety
/// owned-range: as for [`map_anonymous`]. file-mapping: others may change the file, so the contents are never borrowed as if
/// they stood still.
pub unsafe fn map_file(
    place: Place,
    len_bytes: usize,
    access: Access,
    sharing: Sharing,
    file: Descriptor,
    offset_bytes: usize,
) -> Result<usize, Errno> {
    let flags = match sharing {
        Sharing::Shared => raw::MAP_SHARED,
        Sharing::Private => raw::MAP_PRIVATE | raw::MAP_NORESERVE,
    };
    // SAFETY: owned-range: passed on from our caller.
    unsafe { map(place, len_bytes, access, flags, file, offset_bytes) }
}

unsafe fn map(
    place: Place,
    len_bytes: usize,
    access: Access,
    flags: u32,
    file: Descriptor,
    offset_bytes: usize,
) -> Result<usize, Errno> {
    let (addr, fixed) = match place {
        Place::Anywhere => (0, 0),
        Place::Free(addr) => (addr, raw::MAP_FIXED_NOREPLACE),
        Place::Over(addr) => (addr, raw::MAP_FIXED),
    };
    let flags = (flags | fixed) as usize;
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(raw::__NR_mmap, [addr, len_bytes, access.bits(), flags, file.argument(), offset_bytes]) }
}

/// Removes the mappings of a range.
///
/// # Errors
/// What munmap(2) says; `EPERM`: the range is sealed.
///
/// # Safety
/// owned-range: the range is the caller's, and no reference into it lives on.
pub unsafe fn unmap(addr: usize, len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(raw::__NR_munmap, [addr, len_bytes, 0, 0, 0, 0]) }.map(drop)
}

/// Moves what a mapping holds, page tables and all, to `to`; what was there is replaced, and an empty mapping stays at `from`. Where
/// `from` is registered with a userfaultfd this goes page by page.
///
/// # Errors
/// What mremap(2) says.
///
/// # Safety
/// owned-range: both ranges are the caller's, and no reference into either lives on.
pub unsafe fn remap_contents(from: usize, len_bytes: usize, to: usize) -> Result<(), Errno> {
    let flags = (raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED | raw::MREMAP_DONTUNMAP) as usize;
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(raw::__NR_mremap, [from, len_bytes, len_bytes, flags, to, 0]) }.map(drop)
}

/// Makes a mapping longer where it is, if what follows is free.
///
/// # Errors
/// What mremap(2) says: `EFAULT` where the range is not within one mapping, before anything else is looked at.
pub fn grow(addr: usize, len_bytes: usize, new_len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: syscall-contract: what is mapped stays as it is, and nothing is replaced.
    unsafe { call(raw::__NR_mremap, [addr, len_bytes, new_len_bytes, 0, 0, 0]) }.map(drop)
}

/// Sets what the program may do with a range.
///
/// # Errors
/// What mprotect(2) says; `ENOMEM` also where the range is not wholly mapped.
///
/// # Safety
/// owned-range: the range is the caller's, and no reference lives that the new access would break.
pub unsafe fn protect(addr: usize, len_bytes: usize, access: Access) -> Result<(), Errno> {
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(raw::__NR_mprotect, [addr, len_bytes, access.bits(), 0, 0, 0]) }.map(drop)
}

/// Gives the populated page at `addr` memory of its own if it is shared with a forked child, without writing to it: whoever is to
/// be told of writes is told of none. The kernel does so for those who pin a page to read it. The process goes by the calling thread's
/// number: its own is that of the first thread, which may have ended. Returns the byte at `addr`.
///
/// # Errors
/// What process_vm_readv(2) says: `EFAULT` where nothing can be read.
pub fn own_to_read(addr: usize) -> Result<u8, Errno> {
    let mut byte = 0u8;
    let to = raw::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let from = raw::iovec { iov_base: addr as *mut _, iov_len: 1 };
    let (to, from) = (&raw const to as usize, &raw const from as usize);
    // SAFETY: syscall-contract: one byte is written, to our own variable; what cannot be read at `addr` is an error.
    unsafe { call(raw::__NR_process_vm_readv, [super::thread::id() as usize, to, 1, from, 1, 0]) }.map(|_| byte)
}

/// Has the kernel write `byte` to a variable of this process as if it were another's.
///
/// # Errors
/// What process_vm_writev(2) says.
pub fn write_own(byte: u8, variable: &mut u8) -> Result<(), Errno> {
    let from = raw::iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: 1 };
    let to = raw::iovec { iov_base: (&raw mut *variable).cast(), iov_len: 1 };
    let (from, to) = (&raw const from as usize, &raw const to as usize);
    // SAFETY: syscall-contract: one byte is written, to a variable that is borrowed for it.
    unsafe { call(raw::__NR_process_vm_writev, [super::thread::id() as usize, from, 1, to, 1, 0]) }.map(drop)
}

/// Gives the kernel `advice` on a range.
///
/// # Errors
/// What madvise(2) says.
///
/// # Safety
/// owned-range: the range is the caller's; for advice that drops contents, no reference into it lives on.
pub unsafe fn advise(addr: usize, len_bytes: usize, advice: Advice) -> Result<(), Errno> {
    // SAFETY: owned-range: passed on from our caller.
    unsafe { call(raw::__NR_madvise, [addr, len_bytes, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Has the kernel keep its hands off memory whose pages a domain moves: no huge pages, no merging of equal ones, which would map a page
/// anew without the protection that somebody waits for, and nothing for children.
///
/// # Errors
/// What madvise(2) says.
///
/// # Safety
/// owned-range: the range is the caller's.
pub unsafe fn keep_hands_off(addr: usize, len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: owned-range: passed on from our caller. A kernel that merges nothing knows no such advice, and one without huge pages not the other.
    unsafe {
        let _ = advise(addr, len_bytes, Advice::NotMerged);
        match advise(addr, len_bytes, Advice::NoHugePages) {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(why) => return Err(why),
        }
        advise(addr, len_bytes, Advice::NotForChild)
    }
}

/// Keeps a range in memory. Counts the whole range against `RLIMIT_MEMLOCK`.
///
/// # Errors
/// `ENOMEM`: above the limit, or part of the range is not mapped. `EPERM`: the limit is 0.
pub fn lock(addr: usize, len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: syscall-contract: locking changes no contents and is refused where nothing is mapped.
    unsafe { call(raw::__NR_mlock, [addr, len_bytes, 0, 0, 0, 0]) }.map(drop)
}

/// As [`lock`], for pages as they come: absent pages stay absent.
///
/// # Errors
/// As for [`lock`].
pub fn lock_on_fault(addr: usize, len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: syscall-contract: locking changes no contents and is refused where nothing is mapped.
    unsafe { call(raw::__NR_mlock2, [addr, len_bytes, raw::MLOCK_ONFAULT as usize, 0, 0, 0]) }.map(drop)
}

/// Undoes [`lock`] and [`lock_on_fault`].
///
/// # Errors
/// `ENOMEM`: part of the range is not mapped.
pub fn unlock(addr: usize, len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: syscall-contract: unlocking changes no contents.
    unsafe { call(raw::__NR_munlock, [addr, len_bytes, 0, 0, 0, 0]) }.map(drop)
}

/// Whether any page of a range is locked in memory.
pub fn is_locked(addr: usize, len_bytes: usize) -> bool {
    // It would drop what others have cached of a file, which a lock forbids; of memory that is no file's there is nothing to drop.
    let flags = (raw::MS_ASYNC | raw::MS_INVALIDATE) as usize;
    // SAFETY: syscall-contract: the call changes no contents.
    let answer = unsafe { call(raw::__NR_msync, [addr, len_bytes, flags, 0, 0, 0]) };
    answer == Err(Errno::BUSY)
}

/// Whether every page of a range is mapped.
pub fn mapped(addr: usize, len_bytes: usize) -> bool {
    // An msync(2) that waits for nothing does nothing either, but looks at each mapping.
    // SAFETY: syscall-contract: the call changes no contents, and is refused where nothing is mapped.
    unsafe { call(raw::__NR_msync, [addr, len_bytes, raw::MS_ASYNC as usize, 0, 0, 0]) }.is_ok()
}

/// Sets bit 0 of `resident[i]` where page `i` from `addr` on is in memory.
///
/// # Errors
/// `ENOMEM`: part of the range is not mapped.
pub fn residency(addr: usize, resident: &mut [u8]) -> Result<(), Errno> {
    let len_bytes = resident.len().saturating_mul(crate::addr::PAGE_BYTES);
    // SAFETY: syscall-contract: the kernel writes one byte a page, as many as the slice has.
    unsafe { call(raw::__NR_mincore, [addr, len_bytes, resident.as_mut_ptr() as usize, 0, 0, 0]) }.map(drop)
}

/// What a sealed memfd refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seals(u32);

impl Seals {
    /// Getting longer.
    pub const GROW: Seals = Seals(raw::F_SEAL_GROW);
    /// Getting shorter.
    pub const SHRINK: Seals = Seals(raw::F_SEAL_SHRINK);
    /// New mappings that may write, and writes.
    pub const FUTURE_WRITE: Seals = Seals(raw::F_SEAL_FUTURE_WRITE);
    /// More seals.
    pub const SEAL: Seals = Seals(raw::F_SEAL_SEAL);

    /// These and those.
    pub const fn and(self, other: Seals) -> Seals {
        Seals(self.0 | other.0)
    }
}

/// Makes a file that lives in memory, `len_bytes` long, not inherited by exec and open to seals.
///
/// # Errors
/// What memfd_create(2) and ftruncate(2) say.
pub fn memfd(name: &CStr, len_bytes: usize) -> Result<Descriptor, Errno> {
    let flags = (raw::MFD_CLOEXEC | raw::MFD_ALLOW_SEALING) as usize;
    // SAFETY: syscall-contract: the name ends with NUL and lives until the call returns.
    let number = unsafe { call(raw::__NR_memfd_create, [name.as_ptr() as usize, flags, 0, 0, 0, 0]) }?;
    let file = Descriptor::from_raw(number as i32);
    if let Err(why) = set_len(file, len_bytes) {
        let _ = file.close();
        return Err(why);
    }
    Ok(file)
}

/// Makes a file `len_bytes` long. Shortening takes pages from everybody who maps them: they get `SIGBUS`.
///
/// # Errors
/// What ftruncate(2) says; `EPERM`: sealed.
pub fn set_len(file: Descriptor, len_bytes: usize) -> Result<(), Errno> {
    // SAFETY: syscall-contract: the call takes no pointer.
    unsafe { call(raw::__NR_ftruncate, [file.argument(), len_bytes, 0, 0, 0, 0]) }.map(drop)
}

/// Adds seals to a memfd.
///
/// # Errors
/// `EPERM`: it is sealed against seals. `EBUSY`: a mapping stands against it.
pub fn seal(file: Descriptor, seals: Seals) -> Result<(), Errno> {
    // SAFETY: syscall-contract: the call takes no pointer.
    unsafe { call(raw::__NR_fcntl, [file.argument(), raw::F_ADD_SEALS as usize, seals.0 as usize, 0, 0, 0]) }.map(drop)
}
