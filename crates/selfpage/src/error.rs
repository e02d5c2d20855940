//! What went wrong: operation, object, cause and remedy.

use std::fmt::{self, Write};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::fault::Failure;
use selfpage_core::linux::{Errno, die};
use selfpage_core::pager::PagerError;
use selfpage_core::shortage::Shortage;

use crate::doctor::descriptors::ALLOW_PIDFDS;
use crate::doctor::limits::{MORE_MAPPINGS, MOUNT, undumpable, unfilter};
use crate::doctor::userfaultfd::{MORE_ADDRESSES, MORE_THREADS};

/// What a caller can do about an error.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// The request makes no sense: change it.
    Invalid,
    /// This system lacks what is needed: the message names the feature and the remedy.
    Unsupported,
    /// Not enough frames, addresses or store: ask for less, or give more.
    OutOfSpace,
    /// Somebody holds what is wanted; the message says what lets go of it. Pages: unpin some, or give the region a store (a region
    /// that is zero at first has none to be flushed to). Pages of a file: another region has them, and one of the two may be written; drop
    /// that one. A region: its clone lacks pages still. A domain has its one
    /// [`Snapshots`](crate::snapshot::Snapshots) already, or another has the lock of a snapshot's file. Threads are in other protection
    /// domains.
    Held,
    /// A device or file failed.
    Io,
    /// Contents are damaged or gone.
    Lost,
    /// There is no right to that. The protection domain that the thread is in lacks it: leave it, or give it the right. Or this user
    /// may not open the file.
    Denied,
}

/// An error of the library.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    operation: &'static str,
    object: String,
    cause: String,
    source: Option<io::Error>,
}

/// What the system says when it refuses.
pub(crate) trait SystemError {
    fn into_io(self) -> io::Error;
}

impl SystemError for io::Error {
    fn into_io(self) -> io::Error {
        self
    }
}

impl SystemError for rustix::io::Errno {
    fn into_io(self) -> io::Error {
        self.into()
    }
}

impl SystemError for Errno {
    fn into_io(self) -> io::Error {
        io::Error::from_raw_os_error(self.raw_os_error())
    }
}

/// What the library's calls return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(
        kind: Kind,
        operation: &'static str,
        object: impl Into<String>,
        cause: impl Into<String>,
    ) -> Error {
        Error { kind, operation, object: object.into(), cause: cause.into(), source: None }
    }

    pub(crate) fn system(operation: &'static str, object: impl Into<String>, source: impl SystemError) -> Error {
        let source = source.into_io();
        let object = object.into();
        let kind = match source.raw_os_error() {
            Some(libc::EACCES) if opens_file(operation, &object) => Kind::Denied,
            Some(
                libc::ENOMEM | libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EMFILE | libc::ENFILE | libc::EAGAIN,
            ) => Kind::OutOfSpace,
            Some(libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EOPNOTSUPP) => Kind::Unsupported,
            Some(libc::EINVAL) => Kind::Invalid,
            None if source.kind() == io::ErrorKind::InvalidInput => Kind::Invalid,
            None if source.kind() == io::ErrorKind::Unsupported => Kind::Unsupported,
            None if source.kind() == io::ErrorKind::QuotaExceeded => Kind::OutOfSpace,
            _ => Kind::Io,
        };
        let cause = match remedy(operation, &object, &source) {
            Some(remedy) => format!("{source}; {remedy}"),
            None => source.to_string(),
        };
        Error { kind, operation, object, cause, source: Some(source) }
    }

    pub(crate) fn failure(operation: &'static str, object: impl Into<String>, failure: Failure) -> Error {
        let (kind, cause) = match failure {
            Failure::Pager(error) => (kind_of(error), describe(error)),
            Failure::Shortage(Shortage::AllHeld) => (
                Kind::Held,
                "no frame can be had (ENOMEM): every resident page is pinned, by the program, the kernel or a device, or its \
                 pager has nowhere to save it, or the policy names none that can go; unpin pages, or give the domain more \
                 frames"
                    .into(),
            ),
            Failure::Shortage(Shortage::NoMemory) => (
                Kind::OutOfSpace,
                "no frame can be had (ENOMEM): the system has no memory for the frames that the domain may still claim; raise \
                 the memory limit of the cgroup, or give the domain fewer frames"
                    .into(),
            ),
            Failure::Shortage(Shortage::Unsaved(error)) => {
                (kind_of(error), format!("no frame can be had: pages cannot be saved: {}", describe(error)))
            }
            Failure::Machine(refusal) | Failure::Writing(refusal) => (Kind::Io, refusal.to_string()),
        };
        let source = errno_of(failure).map(io::Error::from_raw_os_error);
        Error { kind, operation, object: object.into(), cause, source }
    }

    /// There are no pager threads, because the system refused this call.
    pub(crate) fn no_threads(call: &'static str, why: impl SystemError) -> Error {
        let why = why.into_io();
        let is_filtered = matches!(why.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS));
        let error = Error::system("start", format!("pager threads ({call})"), why);
        if is_filtered { error.with(unfilter(call)) } else { error }
    }

    /// The same, with the remedy where a filter has refused `call`: the kernel itself does not refuse it so.
    pub(crate) fn if_filtered(self, call: &str) -> Error {
        match self.source.as_ref().and_then(io::Error::raw_os_error) {
            Some(libc::EPERM | libc::ENOSYS) => self.with(unfilter(call)),
            _ => self,
        }
    }

    /// The same, and what else there is to say.
    pub(crate) fn with(self, more: impl fmt::Display) -> Error {
        Error { cause: format!("{}; {more}", self.cause), ..self }
    }

    /// The same, of a part of `whole`.
    pub(crate) fn for_a(self, whole: impl fmt::Display) -> Error {
        Error { object: format!("{} for {whole}", self.object), ..self }
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

/// Whether it was to open a file that the program has named, or to make one.
fn opens_file(operation: &str, object: &str) -> bool {
    matches!(operation, "open" | "map" | "make") && !object.starts_with("/proc/")
}

/// What helps, where a limit is the cause, rights are, or no /proc is mounted.
fn remedy(operation: &str, object: &str, cause: &io::Error) -> Option<&'static str> {
    match cause.raw_os_error()? {
        libc::EMFILE => Some("raise `ulimit -n`"),
        libc::ENFILE => Some("raise fs.file-max (sysctl -w)"),
        libc::EAGAIN if matches!(operation, "start" | "run") => Some(MORE_THREADS),
        libc::ENOMEM if matches!(operation, "start" | "run") => Some(MORE_ADDRESSES),
        libc::ENOMEM if matches!(operation, "reserve" | "map") => Some(
            "make it smaller, or raise the limits on addresses (ulimit -v, ulimit -d, sysctl vm.overcommit_memory)",
        ),
        libc::ENOMEM if operation == "protect" => Some(MORE_MAPPINGS),
        libc::ENOENT if object.starts_with("/proc/") => Some(MOUNT),
        libc::ENOENT if opens_file(operation, object) => Some("make it, or its directory, or name another"),
        libc::EACCES if object.starts_with("/proc/") => undumpable(),
        libc::EPERM | libc::EACCES | libc::ENOSYS if operation == "share" => Some(ALLOW_PIDFDS),
        libc::EACCES if opens_file(operation, object) => {
            Some("give this user the right to the file and to all directories above it, or name another file")
        }
        libc::EROFS => Some("nothing can be written there: name another place"),
        errno => room(errno),
    }
}

/// What helps where there is no room for what is written to a file.
fn room(errno: i32) -> Option<&'static str> {
    match errno {
        libc::ENOSPC => Some("free space on the disk that it is saved to"),
        libc::EDQUOT => Some("free space that this user has on the disk that it is saved to, or raise the quota"),
        libc::EFBIG => Some("raise `ulimit -f`"),
        _ => None,
    }
}

fn kind_of(error: PagerError) -> Kind {
    match error {
        PagerError::Io(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Kind::OutOfSpace,
        PagerError::Io(_) => Kind::Io,
        PagerError::Corrupt | PagerError::Truncated | PagerError::Panicked | PagerError::Orphaned => Kind::Lost,
        PagerError::Full => Kind::OutOfSpace,
        PagerError::NoStore => Kind::Held,
        PagerError::WrongContext => Kind::Invalid,
    }
}

/// The system's number for it, if it has one.
fn errno_of(failure: Failure) -> Option<i32> {
    match failure {
        Failure::Pager(error) | Failure::Shortage(Shortage::Unsaved(error)) => match error {
            PagerError::Io(errno) => Some(errno),
            PagerError::Full => Some(libc::ENOSPC),
            _ => None,
        },
        Failure::Shortage(Shortage::NoMemory | Shortage::AllHeld) => Some(libc::ENOMEM),
        Failure::Machine(_) | Failure::Writing(_) => None,
    }
}

/// A pager's error in words, with the remedy.
pub(crate) fn describe(error: PagerError) -> String {
    match error {
        PagerError::Io(errno) => {
            let cause = io::Error::from_raw_os_error(errno);
            match (errno, room(errno)) {
                (_, Some(remedy)) => format!("{cause}; {remedy}"),
                (libc::EPERM | libc::ENOSYS, _) => format!("{cause}; {error}"),
                (libc::EIO, _) => format!(
                    "{cause}; if a disk has failed, the kernel's log (dmesg) says at what; else look for a quota, for room on the file system, \
                     or into a pager of the program's own"
                ),
                _ => cause.to_string(),
            }
        }
        PagerError::Full => "the store is full (ENOSPC); give it more room, or free space on the disk that it is on".into(),
        PagerError::NoStore => {
            "the pager has no store to save it to: make the region with one (`RegionBuilder::stored`); a file is the parent's to write \
             in a forked child"
                .into()
        }
        PagerError::Corrupt | PagerError::Truncated | PagerError::Panicked | PagerError::WrongContext => error.to_string(),
        PagerError::Orphaned => {
            "the region that this one is a clone of was dropped when it could not be copied any more, for want of a \
                                 frame or because its store could not read it; discard the page to use it anew"
                .into()
        }
    }
}

/// Says which pages of a region an error is about.
pub(crate) fn pages(name: &str, first: u64, count: u64) -> String {
    let (from, to) = (first * PAGE_BYTES as u64, (first + count) * PAGE_BYTES as u64);
    format!("region {name}, bytes {from}..{to}")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.operation, self.object, self.cause)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        // With all that it says: an errno alone would name neither the object nor the remedy. It is the source's.
        let kind = error.source.as_ref().map_or(io::ErrorKind::Other, io::Error::kind);
        io::Error::new(kind, error)
    }
}

impl From<crate::store::StoreError> for Error {
    fn from(error: crate::store::StoreError) -> Error {
        let kind = match error.cause.kind() {
            io::ErrorKind::ResourceBusy => Some(Kind::Held),
            io::ErrorKind::AlreadyExists => Some(Kind::Invalid),
            _ => None,
        };
        let cause = format!("{}; {}", error.cause, error.remedy);
        let system = Error::system("open", format!("store {}", error.object), error.cause);
        Error { kind: kind.unwrap_or(system.kind), cause, ..system }
    }
}

impl From<crate::store::StoreError> for io::Error {
    fn from(error: crate::store::StoreError) -> io::Error {
        Error::from(error).into()
    }
}

/// Runs code of the program's own. `None`: it panicked. What it panicked with may be anything, and panic in its turn as it is dropped: what
/// that panics with stays.
pub(crate) fn unless_it_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    let payload = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => return Some(done),
        Err(payload) => payload,
    };
    if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(payload))) {
        std::mem::forget(again);
    }
    None
}

/// As much of a region's name as a line of our own has room for.
pub(crate) const MOST_OF_NAME: usize = 200;

/// The end of a name.
pub(crate) fn end_of_name(name: &str) -> &str {
    (name.len().saturating_sub(MOST_OF_NAME)..).find_map(|from| name.get(from..)).unwrap_or("")
}

/// Says in one line on standard error why an access to the region at `start` ends with this signal. A region without a name of its own has
/// an empty one.
///
/// # Context
/// Trap: this neither allocates nor locks.
pub(crate) fn tell_of_signal(signal: &str, name: &str, start: usize, offset_bytes: usize, why: impl fmt::Display) {
    let name = end_of_name(name);
    let space = if name.is_empty() { "" } else { " " };
    let mut line = arrayvec::ArrayString::<640>::new();
    let _ = writeln!(line, "selfpage: {signal}: region {name}{space}at {start:#x}, offset {offset_bytes}: {why}");
    die::tell(&[&line]);
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_failure_keeps_its_errno_on_the_way_to_an_error_of_stds() {
        let full = PagerError::Io(libc::ENOSPC);
        for (failure, kind) in [
            (Failure::Pager(full), io::ErrorKind::StorageFull),
            (Failure::Pager(PagerError::Full), io::ErrorKind::StorageFull),
            (Failure::Pager(PagerError::Io(libc::EDQUOT)), io::ErrorKind::QuotaExceeded),
            (Failure::Shortage(Shortage::Unsaved(full)), io::ErrorKind::StorageFull),
            (Failure::Shortage(Shortage::NoMemory), io::ErrorKind::OutOfMemory),
            (Failure::Shortage(Shortage::AllHeld), io::ErrorKind::OutOfMemory),
            (Failure::Pager(PagerError::Corrupt), io::ErrorKind::Other),
        ] {
            let why = io::Error::from(Error::failure("flush", "x", failure));
            assert_eq!(why.kind(), kind, "{why}");
            assert_eq!(why.source().is_some(), kind != io::ErrorKind::Other, "{why}");
        }
    }

    #[test]
    fn what_is_in_the_way_of_a_write_is_named_wherever_it_is_met() {
        for (errno, word) in [(libc::ENOSPC, "disk"), (libc::EDQUOT, "quota"), (libc::EFBIG, "ulimit -f")] {
            let errors = [
                Error::failure("flush", "x", Failure::Pager(PagerError::Io(errno))),
                Error::system("write", "x", io::Error::from_raw_os_error(errno)),
            ];
            for error in errors {
                assert!(error.kind() == Kind::OutOfSpace && error.to_string().contains(word), "{error}");
            }
        }
    }
}
