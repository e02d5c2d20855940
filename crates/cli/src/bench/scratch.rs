//! The directory on disk that a run works in, and what an earlier run left when it was killed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::error::Error;
use super::raw;

const PREFIX: &str = "selfpage-bench-";
const LOCK: &str = "lock";

/// A directory of our own, removed with all that is in it when dropped. Its lock tells other runs that we live.
pub struct Scratch {
    directory: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Makes the directory below `parent`, after clearing away those of runs that are dead.
    pub fn create(parent: &Path) -> Result<Scratch, Error> {
        sweep(parent)?;
        let directory = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&directory).map_err(|error| Error::io("make", &directory, error))?;
        let path = directory.join(LOCK);
        let lock = File::create(&path).map_err(|error| Error::io("make", &path, error))?;
        lock.lock().map_err(|error| Error::io("lock", &path, error))?;
        Ok(Scratch { directory, _lock: lock })
    }

    /// Where files of the run go.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("selfpage bench: could not remove {}: {error}", self.directory.display());
        }
    }
}

/// Removes what runs that were killed left below `parent`, swap files in use included.
fn sweep(parent: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(parent).map_err(|error| Error::io("list", parent, error))?;
    for directory in entries.flatten().map(|entry| entry.path()) {
        let ours = directory
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
        // A run that lives holds its lock; one that has no lock yet is being made.
        let dead = || File::open(directory.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok());
        if ours && dead() {
            let swap = super::swapfile::path_in(&directory);
            if swap.exists() {
                // EINVAL: it was not in use.
                let _ = raw::swap_off(&swap);
            }
            fs::remove_dir_all(&directory).map_err(|error| Error::io("remove", &directory, error))?;
        }
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
        let living = parent.join(format!("{PREFIX}living"));
        fs::create_dir_all(&living).unwrap();
        let lock = File::create(living.join(LOCK)).unwrap();
        lock.lock().unwrap();
        let own = Scratch::create(&parent).unwrap();
        assert!(own.directory().exists() && living.exists() && !dead.exists());
        let directory = own.directory().to_path_buf();
        drop(own);
        assert!(!directory.exists());
        fs::remove_dir_all(&parent).unwrap();
    }
}
