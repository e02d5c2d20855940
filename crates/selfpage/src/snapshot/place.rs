//! Where snapshots go: a path that one `Snapshots` at a time may write to, of this process or another.
//!
//! Whoever may has a lock on the file of that name; where there is none yet, on the one that is renamed to it when its first snapshot is
//! whole. A lock is on a file and not on a name: who has taken one looks whether the name still has that file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::syncfs;

use super::file::{check_path, named, newest};
use super::format::MAGIC;
use crate::error::{Error, Kind, Result};
use crate::fork::lineage::Process;
use crate::store::private::{MODE, Openers, unname};
use crate::store::{Descriptor, holds_nothing};
use crate::undisturbed::{self, Locked};

/// Looks for the file that has the name, while others rename theirs to it. Each time one of them gets on.
const MOST_LOOKS: u32 = 100;
/// Links that are followed, as by the kernel.
const MOST_LINKS: u32 = 40;
/// How long whoever holds the new file by mistake has to let go of it, each time.
const PAUSE: Duration = Duration::from_millis(2);

/// The files of every place of this process. A lock is its holder's and that of all that are forked from it, so a child lets go of
/// these. They are closed with the list held, so that no fork comes between.
static FILES: Mutex<Vec<Arc<Descriptor>>> = Mutex::new(Vec::new());

/// The open files of every place, for a fork.
pub(crate) fn files() -> Locked<'static, Vec<Arc<Descriptor>>> {
    undisturbed::lock(&FILES)
}

/// A path that only this process writes snapshots to.
pub(super) struct Place {
    path: PathBuf,
    /// Where a file is written before its first snapshot is whole.
    unnamed: PathBuf,
    /// What is at `path`. None: nothing is, and then there is a `new` one.
    old: Option<Arc<Descriptor>>,
    /// What is at `unnamed`.
    new: Option<Arc<Descriptor>>,
    /// Whose it is: what a child has a copy of is not the child's to remove.
    process: Process,
}

impl Place {
    /// Takes it. What is there must be a snapshot file, or empty; so must what is at the name that a new one has at first.
    pub(super) fn take(path: &Path) -> Result<Place> {
        let path = &resolved(path)?;
        check_path("make", path)?;
        for _ in 0..MOST_LOOKS {
            let old = existing(path).inspect_err(|_| close_unused())?;
            let process = Process::this()?;
            let mut place = Place { path: path.into(), unnamed: unnamed(path), old, new: None, process };
            if place.old.is_none() {
                place.new = Some(made(&place.unnamed).inspect_err(|_| close_unused())?);
            }
            if place.is_ours()? {
                return Ok(place);
            }
        }
        Err(held(path))
    }

    /// Whether both names still have the files that this process has locked.
    pub(super) fn is_ours(&self) -> Result<bool> {
        let is_free = self.old.is_some()
            || self.new.is_some() && !std::fs::exists(&self.path).map_err(|cause| unseen(&self.path, cause))?;
        Ok(is_free && has_name(self.old.as_deref(), &self.path)? && has_name(self.new.as_deref(), &self.unnamed)?)
    }

    /// Begins a new file, which has nothing yet. Where somebody has removed or replaced what was there, the place is taken anew.
    pub(super) fn begin(&mut self) -> Result<()> {
        if !self.is_ours()? {
            let path = self.path.clone();
            self.close();
            *self = Place::take(&path)?;
        }
        self.make_new()?;
        let emptied = self.file().and_then(|file| file.set_len(0));
        emptied.map_err(|cause| Error::system("write", named(&self.path), cause))
    }

    /// Another process that saw nothing at `path` before the first snapshot was published may make and lock a new file too. It
    /// looks again, and removes that.
    fn make_new(&mut self) -> Result<()> {
        for _ in 0..MOST_LOOKS {
            if self.new.is_none() {
                match made(&self.unnamed).inspect_err(|_| close_unused()) {
                    Ok(new) => self.new = Some(new),
                    Err(error) if error.kind() == Kind::Held => {
                        std::thread::sleep(PAUSE);
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            if self.is_ours()? {
                return Ok(());
            }
            self.remove_new();
        }
        Err(held(&self.path))
    }

    /// The file to write to. `begin` comes first.
    ///
    /// # Errors
    /// The program has closed its descriptor: what is written to that number now may be the program's own.
    pub(super) fn file(&self) -> io::Result<ManuallyDrop<File>> {
        let opened = self.new.as_ref().or(self.old.as_ref()).filter(|opened| opened.is_ours());
        opened.map(|opened| opened.as_file()).ok_or_else(|| io::Error::other("the program has closed its descriptor"))
    }

    /// The path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file has a whole snapshot: from now on the path is its name.
    pub(super) fn publish(&mut self) -> io::Result<()> {
        if self.new.is_none() {
            return Ok(());
        }
        if !self.is_ours()? {
            return Err(io::Error::other("somebody else has put a file there, or taken it away, meanwhile"));
        }
        let file = self.file()?;
        file.sync_all()?;
        std::fs::rename(&self.unnamed, &self.path)?;
        self.old = self.new.take();
        close_unused();
        sync_name(&self.path, &file)
    }

    /// The new file comes to nothing. It takes no room any more; where it is all that the lock is on it stays.
    pub(super) fn give_up(&mut self) {
        if self.old.is_some() {
            self.remove_new();
        } else if let Ok(new) = self.file() {
            let _ = new.set_len(0);
        }
    }

    fn remove_new(&mut self) {
        if let Some(new) = self.new.take() {
            if self.process.is_this() && matches!(new.has_name(&self.unnamed), Ok(true)) {
                let _ = std::fs::remove_file(&self.unnamed);
            }
            self.part_with(new);
        }
    }

    fn close(&mut self) {
        self.remove_new();
        if let Some(old) = self.old.take() {
            self.part_with(old);
        }
    }

    /// A process that another thread is just starting has the descriptor until it calls exec, and the lock with it: whoever takes the
    /// place next need not wait for that.
    fn part_with(&self, file: Arc<Descriptor>) {
        if self.process.is_this() && file.is_ours() {
            let _ = file.as_file().unlock();
        }
        drop(file);
        close_unused();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.close();
    }
}

/// Has the name of `file` survive a crash of the machine. Where the file system syncs no directories it is as safe as that makes it.
fn sync_name(path: &Path, file: &File) -> io::Result<()> {
    let directory = path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = match File::open(directory) {
        // Names may be made in it, and not read: it is synced with all that there is.
        Err(cause) if cause.kind() == io::ErrorKind::PermissionDenied => return Ok(syncfs(file)?),
        opened => opened?.sync_all(),
    };
    synced.or_else(|cause| if cause.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(cause) })
}

/// Where the links lead that a path ends with. To rename a file to a link's name would leave the one that it leads to, which is locked,
/// and has what was taken last.
fn resolved(path: &Path) -> Result<PathBuf> {
    let mut resolved = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        let Ok(target) = std::fs::read_link(&resolved) else { return Ok(resolved) };
        // Where the kernel does not follow it (fs.protected_symlinks), nobody does. What it leads to need not be there.
        if let Err(cause) = std::fs::metadata(&resolved)
            && cause.raw_os_error() == Some(libc::EACCES)
        {
            let link = format!("the kernel does not follow the link {} for this user", resolved.display());
            return Err(Error::system("make", named(path), cause).with(link));
        }
        resolved.pop();
        resolved.push(target);
    }
    Err(Error::system("make", named(path), io::Error::from_raw_os_error(libc::ELOOP)))
}

/// The name that a new file has before its first snapshot is whole.
pub(super) fn unnamed(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// What is at `path`, locked. Refuses everything but a snapshot file that nobody else writes to.
fn existing(path: &Path) -> Result<Option<Arc<Descriptor>>> {
    let opened = match opened(OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK), path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(Error::system("open", named(path), cause)),
    };
    let file = opened.as_file();
    let meta = file.metadata().map_err(|cause| Error::system("open", named(path), cause))?;
    // What a crash of the machine left empty, or the user made so, is nobody's data.
    if meta.is_file() && meta.len() > 0 {
        newest(path, &file).map_err(|why| match why.kind() {
            Kind::Lost => {
                Error::new(Kind::Invalid, "replace", named(path), "the file holds something else: move it away")
            }
            _ => why,
        })?;
    } else if !meta.is_file() {
        return Err(Error::new(Kind::Invalid, "replace", named(path), "it is not a regular file: name another"));
    }
    lock(&file, path)?;
    Ok(Some(opened))
}

/// What is at the name of a new file, made and locked. Refuses what is nobody's beginning of a snapshot, which it would cut and remove, and
/// what is another user's.
fn made(unnamed: &Path) -> Result<Arc<Descriptor>> {
    let not_made = |cause| Error::system("make", named(unnamed), cause);
    let refused = |cause| Err(Error::new(Kind::Invalid, "replace", named(unnamed), cause));
    for _ in 0..MOST_LOOKS {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(MODE).custom_flags(libc::O_NOFOLLOW);
        let (file, was_there) = match opened(&options, unnamed) {
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {
                (opened(options.create_new(false).create(true).truncate(false), unnamed).map_err(not_made)?, true)
            }
            made => (made.map_err(not_made)?, false),
        };
        // Whoever holds it may be at its first bytes.
        lock(&file.as_file(), unnamed)?;
        match is_begun(&file.as_file()) {
            Ok(true) if !was_there => return Ok(file),
            Ok(true) => {}
            Ok(false) => {
                return refused("new snapshots begin under this name, and the file holds something else: move it away");
            }
            Err(cause) => return Err(Error::system("read", named(unnamed), cause)),
        }
        match Openers::of(&*file.as_file()).map_err(not_made)? {
            Openers::Ours => return Ok(file),
            Openers::Another => {
                return refused("new snapshots begin under this name, and it is another user's: remove it");
            }
            Openers::Anybody => drop(unname(unnamed, &*file.as_file()).map_err(not_made)?),
        }
    }
    Err(held(unnamed))
}

/// Whether a file is one that somebody began for a snapshot: its first bytes, or nothing but what a crash of the machine leaves of them.
fn is_begun(file: &File) -> io::Result<bool> {
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Ok(false);
    }
    let mut magic = [0; MAGIC.len()];
    if meta.len() >= magic.len() as u64 {
        file.read_exact_at(&mut magic, 0)?;
    }
    if magic == MAGIC {
        return Ok(true);
    }
    holds_nothing(file, u64::MAX)
}

fn opened(options: &OpenOptions, path: &Path) -> io::Result<Arc<Descriptor>> {
    // Before the list is held for the first time.
    crate::fork::attend();
    let mut files = files();
    let file = Arc::new(Descriptor::new(options.open(path)?.into())?);
    files.retain(|file| Arc::strong_count(file) > 1);
    files.push(file.clone());
    Ok(file)
}

fn close_unused() {
    files().retain(|file| Arc::strong_count(file) > 1);
}

fn lock(file: &File, path: &Path) -> Result<()> {
    file.try_lock().map_err(|cause| match cause {
        TryLockError::WouldBlock => held(path),
        TryLockError::Error(cause) => Error::system("lock", named(path), cause),
    })
}

/// Whether the file, if there is one, still has this name. What is not known does not make it somebody else's.
fn has_name(file: Option<&Descriptor>, path: &Path) -> Result<bool> {
    match file.map(|file| file.has_name(path)) {
        None => Ok(true),
        Some(Err(cause)) if cause.kind() != io::ErrorKind::NotFound => Err(unseen(path, cause)),
        Some(found) => Ok(found.unwrap_or(false)),
    }
}

fn unseen(path: &Path, cause: io::Error) -> Error {
    Error::system("look at", named(path), cause).if_filtered("newfstatat and statx")
}

fn held(path: &Path) -> Error {
    Error::new(
        Kind::Held,
        "lock",
        named(path),
        "another process, or this one, writes snapshots there: drop its `Snapshots`, or name another file",
    )
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;
    use crate::child::forked;

    #[test]
    fn a_childs_copy_removes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = Cell::new(Some(Place::take(&dir.path().join("one.snap")).unwrap()));
        let unnamed = unnamed(&dir.path().join("one.snap"));
        forked(|| drop(place.take()));
        assert!(unnamed.exists());
        drop(place);
        assert!(!unnamed.exists());
    }

    /// Whoever has opened a file goes on to read it, whatever becomes of its mode.
    #[test]
    fn a_beginning_that_others_may_have_open_is_made_anew_or_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.snap");
        let unnamed = unnamed(&path);
        let begin = |mode| {
            std::fs::write(&unnamed, MAGIC).unwrap();
            std::fs::set_permissions(&unnamed, Permissions::from_mode(mode)).unwrap();
        };
        begin(0o644);
        let others = File::open(&unnamed).unwrap();
        let place = Place::take(&path).unwrap();
        place.file().unwrap().write_all_at(b"what nobody else may read", 0).unwrap();
        assert_eq!(others.metadata().unwrap().len(), MAGIC.len() as u64);
        assert_eq!(std::fs::metadata(&unnamed).unwrap().permissions().mode() & 0o777, MODE);
        drop(place);
        assert!(!unnamed.exists());
        for mode in [0o644, 0o600] {
            begin(mode);
            if chown(&unnamed, Some(65534), Some(65534)).is_err() {
                return crate::skip::skip("root", "only root makes files of another user");
            }
            let why = Place::take(&path).map(drop).unwrap_err();
            let said = why.to_string();
            assert!(said.contains("one.snap.new") && said.contains("another user's: remove it"), "{said}");
            assert_eq!(std::fs::read(&unnamed).unwrap(), MAGIC);
            std::fs::remove_file(&unnamed).unwrap();
        }
    }
}
