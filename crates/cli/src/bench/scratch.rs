//! The directory on disk that a run works in, and what an earlier run left when it was killed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::{identity, output};

use super::error::Error;
use super::{raw, swapfile};

const PREFIX: &str = "selfpage-bench-";
const LOCK: &str = "lock";
const NEW_LOCK: &str = "new-lock";
const CGROUP: &str = "cgroup";
const READAHEAD: &str = "readahead";

/// A directory of our own, removed with all that is in it when dropped. Its lock tells other runs that we live.
pub struct Scratch {
    directory: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Makes the directory below `parent`, after clearing away those of runs that are dead.
    pub fn create(parent: &Path) -> Result<Scratch, Error> {
        sweep(parent)?;
        Scratch::create_named(parent, std::process::id())
    }

    fn create_named(parent: &Path, number: u32) -> Result<Scratch, Error> {
        let directory = parent.join(format!("{PREFIX}{number}"));
        // What is swapped or copied here is nobody else's business.
        let made = fs::DirBuilder::new().mode(0o700).create(&directory);
        made.map_err(|cause| unusable("write in", parent, &cause))?;
        // Locked before it has its name: between the two another run would take this one for dead.
        let (new, path) = (directory.join(NEW_LOCK), directory.join(LOCK));
        let lock = File::create(&new).map_err(|error| Error::io("make", &new, error))?;
        lock.lock().map_err(|error| Error::io("lock", &new, error))?;
        fs::rename(&new, &path).map_err(|error| Error::io("make", &path, error))?;
        Ok(Scratch { directory, _lock: lock })
    }

    /// Notes a cgroup of the run, for a later run to remove if this one is killed.
    pub fn note_cgroup(&self, cgroup: &Path) -> Result<(), Error> {
        self.note(CGROUP, &cgroup.to_string_lossy())
    }

    /// Notes a setting that the run is about to change, for a later run to put back if this one is killed before the note goes.
    pub fn note_readahead(&self, (file, value): &(PathBuf, String), size_kib: u32) -> Result<Note, Error> {
        self.note(READAHEAD, &format!("{value} {size_kib} {}", file.display()))?;
        Ok(Note(self.directory.join(READAHEAD)))
    }

    fn note(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.directory.join(name);
        fs::write(&path, text).map_err(|error| Error::io("write", &path, error))
    }

    /// Where files of the run go.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// A note, taken away when dropped: what it tells is undone by then.
pub struct Note(PathBuf);

impl Drop for Note {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Who could not take it out of use has said so. The lock stays for a later run to find.
        if swapfile::in_use(&swapfile::path_in(&self.directory)) {
            return;
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            output::tell(format_args!("selfpage bench: could not remove {}: {error}", self.directory.display()));
        }
    }
}

fn unusable(operation: &str, parent: &Path, cause: &io::Error) -> Error {
    Error::Unusable(format!("cannot {operation} {}: {cause}; name another directory with --dir", parent.display()))
}

/// Removes what runs that were killed left below `parent`, swap files in use included.
fn sweep(parent: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(parent).map_err(|cause| unusable("list", parent, &cause))?;
    for directory in entries.flatten().map(|entry| entry.path()) {
        let named = directory.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        // Anybody may put a directory into /var/tmp: one that is not ours would tell root what to write where.
        let owned = fs::symlink_metadata(&directory).is_ok_and(|about| about.is_dir() && about.uid() == raw::user());
        if named && owned {
            bury(&directory)?;
        }
    }
    Ok(())
}

/// Removes the directory of a run if that is dead.
fn bury(directory: &Path) -> Result<(), Error> {
    // A run that lives holds its lock; one that has no lock yet is being made. We hold it until all is gone: another run that sweeps
    // meanwhile has nothing to do.
    let path = directory.join(LOCK);
    let Ok(lock) = File::open(&path) else { return Ok(()) };
    // A run may have ended, and another begun by the same name, after we opened the lock: that one's is another file.
    if lock.try_lock().is_err() || !is_at(&lock, &path) {
        return Ok(());
    }
    undo(directory)?;
    fs::remove_dir_all(directory).map_err(|error| Error::io("remove", directory, error))
}

fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(ours), Ok(there)) = (file.metadata(), fs::symlink_metadata(path)) else { return false };
    identity::of(&ours) == identity::of(&there)
}

/// Undoes what the dead run of `directory` did to the machine, and what is still so.
///
/// # Errors
/// Its swap file stays in use: so must its lock, for the next run to find.
fn undo(directory: &Path) -> Result<(), Error> {
    let swap = swapfile::path_in(directory);
    if let Err(error) = raw::swap_off(&swap)
        && swapfile::in_use(&swap)
    {
        let (path, why) = (swap.display(), "a run that was killed left it in use");
        return Err(Error::Failed(format!(
            "swapoff {path}: {error}; {why}: as root, with memory to spare, swapoff {path}"
        )));
    }
    if let Ok(cgroup) = fs::read_to_string(directory.join(CGROUP)) {
        let _ = fs::remove_dir(cgroup);
    }
    let note = fs::read_to_string(directory.join(READAHEAD)).unwrap_or_default();
    if let [before, ours, file] = note.splitn(3, ' ').collect::<Vec<_>>()[..]
        // The owner may have set it since.
        && fs::read_to_string(file).is_ok_and(|value| value.trim() == ours)
    {
        let _ = fs::write(file, before);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_are_swept_and_the_living_stay() {
        let parent = std::env::temp_dir().join(format!("selfpage-sweep-{}", std::process::id()));
        let dead = parent.join(format!("{PREFIX}dead"));
        fs::create_dir_all(&dead).unwrap();
        File::create(dead.join(LOCK)).unwrap();
        let (setting, cgroup) = (parent.join("setting"), parent.join("group"));
        fs::write(&setting, "128").unwrap();
        fs::create_dir(&cgroup).unwrap();
        fs::write(dead.join(READAHEAD), format!("8192 128 {}", setting.display())).unwrap();
        fs::write(dead.join(CGROUP), cgroup.to_str().unwrap()).unwrap();
        let (other, owners) = (parent.join(format!("{PREFIX}other")), parent.join("owners"));
        fs::create_dir_all(&other).unwrap();
        File::create(other.join(LOCK)).unwrap();
        fs::write(&owners, "256").unwrap();
        fs::write(other.join(READAHEAD), format!("8192 128 {}", owners.display())).unwrap();
        let living = parent.join(format!("{PREFIX}living"));
        fs::create_dir_all(&living).unwrap();
        let lock = File::create(living.join(LOCK)).unwrap();
        lock.lock().unwrap();
        let own = Scratch::create(&parent).unwrap();
        assert!(own.directory().exists() && living.exists() && !dead.exists());
        assert_eq!(fs::read_to_string(&owners).unwrap(), "256", "the owner has set it since");
        assert!(!cgroup.exists());
        assert_eq!(fs::read_to_string(&setting).unwrap(), "8192");
        let directory = own.directory().to_path_buf();
        drop(own);
        assert!(!directory.exists());
        fs::remove_dir_all(&parent).unwrap();
    }

    #[test]
    fn the_note_of_a_setting_goes_when_the_setting_is_back() {
        let parent = std::env::temp_dir().join(format!("selfpage-note-{}", std::process::id()));
        fs::create_dir(&parent).unwrap();
        let own = Scratch::create_named(&parent, 0).unwrap();
        let note = own.note_readahead(&("/none".into(), "8192".into()), 128).unwrap();
        assert_eq!(fs::read_to_string(own.directory().join(READAHEAD)).unwrap(), "8192 128 /none");
        drop(note);
        assert!(!own.directory().join(READAHEAD).exists());
        drop(own);
        fs::remove_dir(&parent).unwrap();
    }

    #[test]
    fn runs_that_start_and_end_together_leave_each_other_alone() {
        let parent = std::env::temp_dir().join(format!("selfpage-together-{}", std::process::id()));
        fs::create_dir(&parent).unwrap();
        std::thread::scope(|scope| {
            for number in 0..8 {
                let parent = &parent;
                scope.spawn(move || {
                    for _ in 0..500 {
                        sweep(parent).unwrap();
                        let own = Scratch::create_named(parent, number).unwrap();
                        own.note_cgroup(Path::new("none")).unwrap();
                    }
                });
            }
        });
        fs::remove_dir(&parent).unwrap();
    }
}
