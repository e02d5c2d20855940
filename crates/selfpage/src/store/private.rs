//! Files with the program's memory in them, which are nobody else's to read.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{Mode, fchmod, fchown, fstat};
use rustix::process::geteuid;

/// What others may do with such a file: nothing.
pub(crate) const MODE: u32 = 0o600;

/// Has a file that was there be this process's user's, and nobody else's to read.
pub(crate) fn make_private(file: impl AsFd) -> io::Result<()> {
    let (about, user) = (fstat(&file)?, geteuid());
    let is_ours = about.st_uid == user.as_raw();
    if is_ours && about.st_mode & 0o777 == MODE {
        return Ok(());
    }
    // Only root may. A server that takes root for nobody shows another owner than this process, and lets nobody in either.
    let _ = fchown(&file, Some(user), None);
    match fchmod(&file, Mode::from_raw_mode(MODE)) {
        // A file system without modes.
        Err(_) if is_ours => Ok(()),
        set => Ok(set?),
    }
}
