//! Numbers of descriptors over a fork: the child begins with the table of the thread that forks, which may lack what pager threads have.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags, open, stat};
use rustix::io::fcntl_dupfd_cloexec;

use super::{Descriptor, Identity, Numbered, PIDFD_THREAD, borrow_number, is_named, name_in_table, of_table};
use crate::task;

/// The files of a domain's regions, but for those of stores, as the thread that forks finds them.
#[derive(Default)]
pub(crate) struct OwnFiles {
    /// Those that it has too, and so a child: the file that pager threads have at the number now, which may have come there after the region
    /// was made.
    here: Vec<Numbered>,
    lost: Vec<Lost>,
}

/// A file that it does not have under the number that pager threads know it by.
struct Lost {
    copy: Descriptor,
    number: RawFd,
}

impl OwnFiles {
    /// What is at these numbers in `thread`'s table and in the calling thread's. Copies what only the former has.
    pub(crate) fn of(thread: u32, numbers: &BTreeSet<RawFd>) -> io::Result<OwnFiles> {
        let mut files = OwnFiles::default();
        for &number in numbers {
            let theirs = Identity::of(&stat(name_in_table(thread, number))?);
            if Identity::of_number(number).is_ok_and(|ours| ours == theirs) {
                files.here.push(Numbered::reserving(number, theirs));
            } else {
                files.lost.push(Lost::copied(thread, number)?);
            }
        }
        Ok(files)
    }

    /// What the thread that forked had at the number, where pager threads had the same.
    pub(crate) fn here(&self, number: RawFd) -> Option<&Numbered> {
        self.here.iter().find(|file| file.number == number)
    }

    /// Where the copies are of those that are lost, and where they are to be.
    pub(crate) fn ways(&self) -> impl Iterator<Item = (RawFd, RawFd)> {
        self.lost.iter().map(|lost| (lost.copy.number(), lost.number))
    }
}

impl Lost {
    fn copied(thread: u32, number: RawFd) -> io::Result<Lost> {
        let copy = match of_table(thread, PIDFD_THREAD, number) {
            // Before Linux 6.9 only the first thread's can be had, whose table is not this one.
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => opened_anew(thread, number)?,
            taken => taken?,
        };
        let copy = Descriptor::new(copy)?;
        if is_named(copy.number()) {
            // No other number is free. The file that belongs here would be taken for one that is not lost, or would replace the copy.
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        Ok(Lost { copy, number })
    }
}

/// Opens the file of descriptor `number` of the thread's table once more, as it is open there.
fn opened_anew(thread: u32, number: RawFd) -> io::Result<OwnedFd> {
    let info = std::fs::read_to_string(task::folder(thread).join("fdinfo").join(number.to_string()))?;
    let flags = info.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    // That it was made without a name is no way to open it.
    let flags = OFlags::from_bits_retain(flags.ok_or(io::ErrorKind::InvalidData)?).difference(OFlags::TMPFILE);
    Ok(open(name_in_table(thread, number), flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// Numbers of a forked child's that are free, and that its regions name, taken meanwhile: what stores and pagers of the program's open does
/// not come there, where it would be taken for what the parent had. Whoever uses one meets `EBADF`, as where there is nothing.
pub(crate) struct Reserved(Vec<Numbered>);

impl Reserved {
    /// Where none can be had, nobody else can open anything there either.
    pub(crate) fn of(numbers: &BTreeSet<RawFd>) -> Reserved {
        let mut taken = Vec::new();
        let Ok(nothing) = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return Reserved(taken) };
        let mut take = |file: OwnedFd| {
            if numbers.contains(&file.as_raw_fd()) {
                taken.extend(Numbered::of(file.into_raw_fd()));
            }
        };
        for number in numbers {
            if let Ok(file) = fcntl_dupfd_cloexec(&nothing, *number)
                && file.as_raw_fd() == *number
            {
                take(file);
            }
        }
        take(nothing);
        Reserved(taken)
    }

    /// Gives back all but these.
    pub(crate) fn keep_only(&mut self, numbers: &BTreeSet<RawFd>) {
        let (kept, rest) = std::mem::take(&mut self.0).into_iter().partition(|there| numbers.contains(&there.number));
        self.0 = kept;
        drop(Reserved(rest));
    }

    /// Those at which nothing has come meanwhile: a pager, or a store, may have put a file of its own there.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = RawFd> {
        self.0.iter().filter(|there| there.check(borrow_number(there.number)).is_ok()).map(|there| there.number)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        for number in self.numbers() {
            let _ = selfpage_core::linux::descriptor::Descriptor::from_raw(number).close();
        }
    }
}
