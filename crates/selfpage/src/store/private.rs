//! Files with the program's memory in them, which are nobody else's to read. Whoever has opened a file goes on to read and write it, whatever
//! becomes of its owner and mode: such a file is not taken.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, fchmod, fstat, open, statat, unlink, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// What others may do with such a file: nothing.
pub(crate) const MODE: u32 = 0o600;

/// Who may have a file open that was there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Openers {
    /// This process's user.
    Ours,
    /// Others, too: it is this user's, and its mode lets them in.
    Anybody,
    /// The other user whose it is.
    Another,
}

impl Openers {
    pub(crate) fn of(file: impl AsFd) -> io::Result<Openers> {
        let about = fstat(&file)?;
        Ok(match about.st_mode & 0o077 {
            _ if about.st_uid != geteuid().as_raw() => Openers::Another,
            0 => Openers::Ours,
            _ => Openers::Anybody,
        })
    }
}

/// Takes its name from a file, so that one can be made there which nobody has open. Where that is: what a link names, and not the link.
pub(crate) fn unname(path: &Path, file: impl AsFd) -> io::Result<PathBuf> {
    let path = path.canonicalize()?;
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::ISDIR.into()) };
    // By the directory: were that replaced meanwhile, the same name in another one would go.
    let dir = open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let (there, taken) = (statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?, fstat(file)?);
    if (there.st_dev, there.st_ino) == (taken.st_dev, taken.st_ino) {
        unlinkat(&dir, name, AtFlags::empty())?;
    }
    Ok(path)
}

/// A file in the place of `old`, which others may have open. `Err`: why there can be none, and what helps.
pub(crate) fn made_anew(path: &Path, old: impl AsFd, flags: OFlags) -> Result<OwnedFd, (io::Error, &'static str)> {
    const REMEDY: &str = "remove it, or name another: others may read what it is to hold";
    let path = unname(path, old).map_err(|cause| (cause, REMEDY))?;
    let made = open(&path, flags | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(MODE));
    let file = made.map_err(|errno| match errno {
        Errno::EXIST => {
            (io::Error::new(io::ErrorKind::ResourceBusy, "another process has just made it"), "name another")
        }
        _ => (errno.into(), REMEDY),
    })?;
    make_private(&file).map_err(|cause| {
        let _ = unlink(&path);
        (cause, "name a place on a file system with owners and modes: others may read what it is to hold")
    })?;
    Ok(file)
}

/// Has a file that this process has just made be nobody else's to read.
fn make_private(file: impl AsFd) -> io::Result<()> {
    let about = fstat(&file)?;
    let is_ours = about.st_uid == geteuid().as_raw();
    if is_ours && about.st_mode & 0o777 == MODE {
        return Ok(());
    }
    match fchmod(&file, Mode::from_raw_mode(MODE)) {
        // A file system without modes.
        Err(_) if is_ours => Ok(()),
        // A server that takes root for nobody shows another owner than this process, and lets nobody in either.
        set => Ok(set?),
    }
}
