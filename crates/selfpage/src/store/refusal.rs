//! Why a file cannot be a store, with what helps.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::StoreError;

/// That the path is not an empty one, by which the kernel finds nothing.
pub(super) fn has_name(path: &Path) -> Result<(), StoreError> {
    if !path.as_os_str().is_empty() {
        return Ok(());
    }
    let cause = io::Error::new(io::ErrorKind::InvalidInput, "its name is empty");
    Err(StoreError {
        object: "\"\"".to_owned(),
        cause,
        remedy: "name a file, a device, or a directory (. for this one)",
    })
}

/// The error for a file that cannot be made in `dir`. Some file systems say of a directory that is there, as of one that is not, that there is none.
pub(super) fn not_made(object: &str, dir: &Path, errno: Errno) -> StoreError {
    let error = refused(object)(errno);
    match errno == Errno::NOENT && dir.is_dir() {
        true => StoreError { remedy: "name another: the directory is there, and no files can be made in it", ..error },
        false => error,
    }
}

/// The error for a system call that said no.
pub(super) fn refused<E: Into<io::Error>>(object: &str) -> impl Fn(E) -> StoreError {
    move |cause| {
        let cause = cause.into();
        let remedy = match cause.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOENT | Errno::NOTDIR) => "make its directory first, or name another",
            Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => "name a place where you may write",
            Some(Errno::NOSPC | Errno::DQUOT) => "free disk space, or name a place on another disk",
            Some(Errno::BUSY) => "unmount the device, or name another",
            Some(Errno::FBIG) => "ask for less, or name another file system: this one has no files that large",
            Some(Errno::MFILE | Errno::NFILE) => "raise the limit on open files (ulimit -n)",
            _ => "name another place",
        };
        StoreError { object: object.to_owned(), cause, remedy }
    }
}
