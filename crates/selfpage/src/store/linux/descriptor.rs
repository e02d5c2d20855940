//! A file known by the number of its descriptor, and locks that the kernel drops with the last descriptor.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use arrayvec::ArrayVec;
use rustix::fs::{Mode, OFlags, Stat, fstat, open, stat};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use selfpage_core::linux::limit::{self, Resource};

use crate::task;

pub(crate) mod over_fork;

/// Numbers from here on are out of the way of programs that count on small ones; the second is for those that live under a
/// low limit. Where even that is too high there is still one, above the standard streams, that is free in pager threads' tables as well.
const NUMBERS: [RawFd; 3] = [700, 100, STREAMS];

/// The standard streams have the numbers below this.
const STREAMS: RawFd = 3;

/// What the program lends pager threads has numbers below this, as a rule.
const LOW: usize = 256;

/// How often, and for how long at a time, a number is waited for that a pager thread has for a moment.
const TRIES: u32 = 50;
const MOMENT: Duration = Duration::from_millis(1);

/// No table has this number.
const NO_NUMBER: RawFd = RawFd::MAX;

/// An open file by its number, which may stand in several descriptor tables: the program's and the pager threads'.
///
/// A program may close our descriptor and open another file at its number. So nothing here trusts the number: it is only
/// closed where it still names our file, and whoever reads through it must be able to tell right bytes from wrong ones.
pub struct Descriptor {
    number: AtomicI32,
    identity: Identity,
}

/// Which file it is, whatever number or name leads to it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(stat: &Stat) -> Identity {
        Identity { device: stat.st_dev, inode: stat.st_ino }
    }

    fn of_number(number: RawFd) -> io::Result<Identity> {
        Ok(Identity::of(&fstat(borrow_number(number))?))
    }

    /// That the other is the same file, or an error.
    fn check(self, other: Identity) -> io::Result<()> {
        if self == other { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EBADF)) }
    }
}

/// A number, and which file it is to name. Nothing of ours comes to the number as long as this lives: the program, which may have closed the
/// descriptor, does not have it then, but pager threads do, and a forked child's are to have it.
#[derive(PartialEq, Eq)]
pub struct Numbered {
    pub number: RawFd,
    identity: Identity,
}

impl Clone for Numbered {
    fn clone(&self) -> Numbered {
        Numbered::reserving(self.number, self.identity)
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        if let Some(times) = named(self.number) {
            times.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Numbered {
    fn reserving(number: RawFd, identity: Identity) -> Numbered {
        if let Some(times) = named(number) {
            times.fetch_add(1, Ordering::Relaxed);
        }
        Numbered { number, identity }
    }

    /// What the calling thread has at the number.
    pub fn of(number: RawFd) -> io::Result<Numbered> {
        if number < 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        Ok(Numbered::reserving(number, Identity::of_number(number)?))
    }

    /// That a descriptor which stands at the number in some table is of that file, or why not, in words.
    pub fn check(&self, found: BorrowedFd<'_>) -> io::Result<()> {
        match fstat(found).map(|stat| Identity::of(&stat) == self.identity) {
            Ok(true) => Ok(()),
            Ok(false) => {
                Err(io::Error::other("the program has closed its descriptor, and another file has the number by now"))
            }
            Err(_) => Err(io::Error::other("the program does not have its descriptor any more")),
        }
    }
}

/// A name for what descriptor `number` of `thread`'s table is.
fn name_in_table(thread: u32, number: RawFd) -> PathBuf {
    task::folder(thread).join("fd").join(number.to_string())
}

impl Descriptor {
    /// Takes the file over, at a high number where the limit on open files allows.
    pub fn new(file: OwnedFd) -> io::Result<Descriptor> {
        let stat = fstat(&file)?;
        let number = raise(file).into_raw_fd();
        Ok(Descriptor { number: AtomicI32::new(number), identity: Identity::of(&stat) })
    }

    /// The number.
    pub fn number(&self) -> RawFd {
        self.number.load(Ordering::Relaxed)
    }

    /// The number, and which file it is to name.
    pub fn numbered(&self) -> Numbered {
        Numbered::reserving(self.number(), self.identity)
    }

    /// The descriptor for a system call.
    pub fn borrow(&self) -> BorrowedFd<'_> {
        borrow_number(self.number())
    }

    /// Opens the same file anew: another open file description, so other locks. `table_of` is a thread of this process
    /// that has the descriptor in its table.
    pub fn reopen(&self, table_of: u32, flags: OFlags) -> io::Result<Descriptor> {
        let name = name_in_table(table_of, self.number());
        let anew = Descriptor::new(open(name, OFlags::RDWR | OFlags::CLOEXEC | flags, Mode::empty())?)?;
        anew.identity.check(self.identity)?;
        Ok(anew)
    }

    /// The file, for the calls of the standard library.
    pub fn as_file(&self) -> ManuallyDrop<File> {
        // SAFETY: fd-number: it is not dropped, and so not closed.
        ManuallyDrop::new(unsafe { File::from_raw_fd(self.number()) })
    }

    /// Closes the number and goes on under that of `anew`, which is the same file.
    pub fn go_on_as(&self, anew: Descriptor) {
        // The program may have closed ours, and so made its number free for this one.
        if self.number() != anew.number() {
            self.let_go();
        }
        self.number.store(anew.number(), Ordering::Relaxed);
        std::mem::forget(anew);
    }

    /// What the kernel knows of our file. `None`: the number does not name it in the calling thread's table.
    pub fn stat(&self) -> Option<Stat> {
        fstat(self.borrow()).ok().filter(|stat| self.is(stat))
    }

    /// Whether the number names our file, in the calling thread's table.
    pub fn is_ours(&self) -> bool {
        self.stat().is_some()
    }

    /// Whether `path` is a name of our file, which the number names. `Err`: there is nothing of this name, or it cannot be looked at.
    pub fn has_name(&self, path: &Path) -> io::Result<bool> {
        Ok(self.is(&stat(path)?) && self.is_ours())
    }

    /// Whether it is the same file, by another descriptor.
    pub fn is_alike(&self, other: &Descriptor) -> bool {
        self.identity == other.identity
    }

    fn is(&self, stat: &Stat) -> bool {
        Identity::of(stat) == self.identity
    }

    /// Closes the number, where it names our file. It names nothing of ours from then on.
    pub fn let_go(&self) {
        if self.is_ours() {
            // SAFETY: fd-number: it names our file, and nobody closes our file but us.
            drop(unsafe { OwnedFd::from_raw_fd(self.number()) });
        }
        release_number(self.number.swap(NO_NUMBER, Ordering::Relaxed));
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// The numbers that stand in pager threads' tables, a bit each, up to a number that is far. A number that is free in the
/// program's table, which may have closed ours, need not be free in theirs.
static TAKEN: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
/// Those of them that stand in no other table. A forked child has none of these.
static ALONE: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
/// How many [`Numbered`] there are of each number. Further than the others: where the program has thousands of descriptors, the next number that
/// is free is the very one that it has closed.
static NAMED: [AtomicU16; 1 << 16] = [const { AtomicU16::new(0) }; 1 << 16];

fn named(number: RawFd) -> Option<&'static AtomicU16> {
    NAMED.get(usize::try_from(number).ok()?)
}

fn is_named(number: RawFd) -> bool {
    named(number).is_some_and(|times| times.load(Ordering::Relaxed) > 0)
}

fn bit(of: &'static [AtomicU64; 64], number: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(number).ok()?;
    Some((of.get(number / 64)?, 1 << (number % 64)))
}

/// Sets the number's bit. `false`: it was set.
fn set(of: &'static [AtomicU64; 64], number: RawFd) -> bool {
    bit(of, number).is_none_or(|(word, bit)| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
}

/// Takes a number of a pager thread's table for what [`raise`] has not raised. `false`: it has been taken.
pub(super) fn take_number(number: RawFd) -> bool {
    set(&TAKEN, number) && {
        set(&ALONE, number);
        true
    }
}

/// The number of a [`raised`] descriptor stands in no pager thread's table any more.
pub(crate) fn release_number(number: RawFd) {
    for (word, bit) in [&ALONE, &TAKEN].into_iter().filter_map(|of| bit(of, number)) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// In a forked child, before it has pager threads: their numbers are the parent's.
pub(crate) fn forget_numbers() {
    for (taken, alone) in TAKEN.iter().zip(&ALONE) {
        taken.fetch_and(!alone.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// A descriptor of ours that the calling pager thread's table alone has, at a high number.
pub(crate) struct Alone(OwnedFd);

impl Alone {
    pub(crate) fn raised(file: OwnedFd) -> Alone {
        let file = raise(file);
        set(&ALONE, file.as_raw_fd());
        Alone(file)
    }

    /// Has it at the numbers of those standard streams that the table has not.
    pub(crate) fn fill_streams(&self) -> rustix::io::Result<()> {
        loop {
            let file = fcntl_dupfd_cloexec(self, 0)?;
            if file.as_raw_fd() >= STREAMS {
                return Ok(());
            }
            stays_on_exec(file.as_fd())?;
            let _ = file.into_raw_fd();
        }
    }

    pub(crate) fn number(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Alone {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        // It is closed a moment later, by one of the last threads that have the table.
        release_number(self.0.as_raw_fd());
    }
}

/// A high number, where the limit on open files allows, that is free in every table.
fn raise(file: OwnedFd) -> OwnedFd {
    let raised = NUMBERS.iter().find_map(|&min| {
        let mut min = min;
        loop {
            let file = fcntl_dupfd_cloexec(&file, min).ok()?;
            if !is_named(file.as_raw_fd()) && set(&TAKEN, file.as_raw_fd()) {
                return Some(file);
            }
            min = file.as_raw_fd() + 1;
        }
    });
    raised.unwrap_or_else(|| {
        set(&TAKEN, file.as_raw_fd());
        file
    })
}

/// Moves a descriptor of ours to a high number, where that can be.
pub(crate) fn raised(
    descriptor: selfpage_core::linux::descriptor::Descriptor,
) -> selfpage_core::linux::descriptor::Descriptor {
    // SAFETY: fd-number: just opened, and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(descriptor.raw()) };
    selfpage_core::linux::descriptor::Descriptor::from_raw(raise(file).into_raw_fd())
}

/// A copy of descriptor `number` of `thread`'s table in the calling thread's. What it is a copy of the program says, which may have
/// closed ours: whoever takes it looks.
pub(crate) fn copied_descriptor(thread: u32, number: RawFd) -> io::Result<OwnedFd> {
    match of_table(thread, PIDFD_THREAD, number) {
        // Before Linux 6.9 only the first thread's can be had, which the program's others share.
        Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => {
            let taken = of_table(std::process::id(), 0, number)?;
            Identity::of(&fstat(&taken)?).check(Identity::of(&stat(name_in_table(thread, number))?))?;
            Ok(taken)
        }
        taken => taken,
    }
}

/// Does `open` where the pager threads' table has something at each low number, so that what it opens gets a higher one: for what can have
/// no other later. Where the limit on open files leaves little above, it is a low one all the same: nobody else could open a file meanwhile.
pub(super) fn above_low_numbers<R>(open: impl FnOnce() -> R) -> R {
    let taken = take_low_numbers();
    let opened = open();
    drop(taken);
    opened
}

/// What somebody who writes there meanwhile meets is `EBADF`, as at numbers that nothing has.
fn take_low_numbers() -> ArrayVec<OwnedFd, { LOW + 1 }> {
    let mut taken = ArrayVec::new();
    let limit = limit::of_this_process(Resource::OpenFiles);
    if !limit.is_ok_and(|most| most.is_none_or(|most| most >= 2 * LOW as u64)) {
        return taken;
    }
    taken.extend(open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()));
    while let Some(Ok(file)) = taken.first().map(|first| fcntl_dupfd_cloexec(first, 0)) {
        if file.as_raw_fd() as usize >= LOW {
            return taken;
        }
        taken.push(file);
    }
    ArrayVec::new()
}

/// Gives a descriptor of the calling thread's table this number there, where nothing has it.
pub(crate) fn place_descriptor(taken: OwnedFd, number: RawFd) -> io::Result<()> {
    if taken.as_raw_fd() == number {
        let _ = taken.into_raw_fd();
        return Ok(());
    }
    for _ in 0..TRIES {
        let placed = fcntl_dupfd_cloexec(&taken, number)?;
        if placed.as_raw_fd() == number {
            let _ = placed.into_raw_fd();
            return Ok(());
        }
        thread::sleep(MOMENT);
    }
    // Under a low limit numbers are small ones, which a store or pager of the program's own may have here for a file that it opened.
    let cause = "a thread of the domain's has that number for something else; have the file at another number, below 256 \
                 (dup(2)), or where the limit on open files is low raise that (ulimit -n)";
    Err(io::Error::other(cause))
}

/// What stands in a pager threads' table for standard streams that it has not, and where something that a region uses stands in its place.
pub(crate) struct Nowhere {
    number: AtomicI32,
    /// A bit for each standard stream.
    covered: AtomicU8,
}

impl Nowhere {
    /// For a table that there is not yet.
    pub(crate) const fn new() -> Nowhere {
        Nowhere { number: AtomicI32::new(-1), covered: AtomicU8::new(0) }
    }

    /// It has this number in the table, in which something of regions has these from the beginning. What it is covered by elsewhere a forked
    /// child has of its parent.
    pub(crate) fn begin(&self, number: RawFd, covered: impl IntoIterator<Item = RawFd>) {
        self.number.store(number, Ordering::Relaxed);
        let bits = covered.into_iter().filter(is_stream).fold(0, |bits, number| bits | 1 << number);
        self.covered.fetch_or(bits, Ordering::Relaxed);
    }

    /// As [`place_descriptor`], in the calling thread's table, which is the pager threads': a standard stream that it has not is free.
    pub(crate) fn place_over(&self, taken: OwnedFd, number: RawFd) -> io::Result<()> {
        if is_stream(&number)
            && let Ok(there) = Identity::of_number(number)
        {
            if Identity::of_number(self.number.load(Ordering::Relaxed)).is_ok_and(|nowhere| nowhere == there) {
                put(taken.as_raw_fd(), number)?;
                self.covered.fetch_or(1 << number, Ordering::Relaxed);
                return Ok(());
            }
            // A stream that the table has had from its beginning.
            if there == Identity::of(&fstat(&taken)?) {
                self.covered.fetch_and(!(1 << number), Ordering::Relaxed);
                return Ok(());
            }
        }
        place_descriptor(taken, number)
    }

    /// Takes what [`Nowhere::place_over`] has placed out of the calling thread's table. A standard stream that the table has had from its
    /// beginning stays as long as the table.
    pub(crate) fn vacate(&self, number: RawFd) {
        if !is_stream(&number) {
            let _ = selfpage_core::linux::descriptor::Descriptor::from_raw(number).close();
        } else if self.covered.fetch_and(!(1 << number), Ordering::Relaxed) & 1 << number != 0
            && put(self.number.load(Ordering::Relaxed), number).is_ok()
        {
            let _ = stays_on_exec(borrow_number(number));
        }
    }
}

fn is_stream(number: &RawFd) -> bool {
    (0..STREAMS).contains(number)
}

/// A program that is executed from there begins with its streams.
fn stays_on_exec(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    fcntl_setfd(file, FdFlags::empty())
}

/// Has a number of the calling thread's table be of the same file as another, whatever it was of.
fn put(from: RawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: fd-number: in this table `to` is ours, and nobody uses it.
    checked(libc::c_long::from(unsafe { libc::dup3(from, to, libc::O_CLOEXEC) })).map(drop)
}

/// Gives a descriptor another number, in a table that has nothing but what is ours, and where a standard stream may stand at a stream's number.
pub(crate) fn move_descriptor((from, to): (RawFd, RawFd)) -> io::Result<()> {
    // SAFETY: fd-number: in this table it is ours, and nobody uses it yet.
    let moving = unsafe { OwnedFd::from_raw_fd(from) };
    if is_stream(&to) { put(from, to) } else { place_descriptor(moving, to) }
}

/// A copy of descriptor `number` of the thread's table.
fn of_table(thread: u32, flags: libc::c_int, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fd-number: numbers go in, and a new descriptor of our own comes out.
    unsafe {
        let of = OwnedFd::from_raw_fd(checked(libc::syscall(libc::SYS_pidfd_open, thread, flags))?);
        Ok(OwnedFd::from_raw_fd(checked(libc::syscall(libc::SYS_pidfd_getfd, of.as_raw_fd(), number, 0))?))
    }
}

const PIDFD_THREAD: libc::c_int = libc::O_EXCL;

fn checked(result: libc::c_long) -> io::Result<RawFd> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
}

/// The descriptor of this number, if there is one, for a system call.
pub(crate) fn borrow_number<'a>(number: RawFd) -> BorrowedFd<'a> {
    // What a store of the program's own says is lent may be -1, which cannot be borrowed.
    let number = if number < 0 { NO_NUMBER } else { number };
    // SAFETY: fd-number: whatever it names, the call that gets it reports an error or touches only memory given to it.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Locks the bytes for this open file description, where no other holds a lock there. Says whether it did.
pub fn lock(file: BorrowedFd<'_>, first_byte: u64, count: u64) -> io::Result<bool> {
    match set_lock(file, libc::F_WRLCK, first_byte, count) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives the lock on the bytes up.
pub fn unlock(file: BorrowedFd<'_>, first_byte: u64, count: u64) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK, first_byte, count)
}

/// Whether another open file description has a lock on this byte.
pub fn is_locked(file: BorrowedFd<'_>, byte: u64) -> io::Result<bool> {
    let mut lock = lock_of(libc::F_WRLCK, byte, 1);
    // SAFETY: fd-number: the kernel reads `lock` and writes what is in its way there, and it outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

fn lock_of(kind: libc::c_int, first_byte: u64, count: u64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first_byte as libc::off_t,
        l_len: count as libc::off_t,
        l_pid: 0,
    }
}

fn set_lock(file: BorrowedFd<'_>, kind: libc::c_int, first_byte: u64, count: u64) -> io::Result<()> {
    let lock = lock_of(kind, first_byte, count);
    // SAFETY: fd-number: the kernel only reads `lock`, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
