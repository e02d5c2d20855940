//! Where the tour's own data goes: on disk, and without a name, so that nothing is left however the tour ends.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use selfpage::store::FileStore;

use super::screen::Screen;
use super::{PAGE_BYTES, Stop, mib};
use crate::disk;

const REMEDY: &str = "TMPDIR=DIRECTORY names another";

/// The directory for temporary files that lie on a disk: `/tmp` may be memory.
fn directory() -> PathBuf {
    let said = std::env::var_os("TMPDIR").filter(|said| !said.is_empty());
    said.map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Looks whether there is room for `len_bytes`. Where a page cannot be saved there is no frame for the next one, and the tour would end by a
/// signal in its middle.
pub fn check_room(len_bytes: usize) -> Result<(), Stop> {
    disk::check_room(&directory(), len_bytes as u64, "the tour", REMEDY).map_err(Stop::Failed)
}

/// A store without a name.
pub fn store(len_bytes: usize) -> Result<FileStore, Stop> {
    let store = FileStore::unnamed_in(directory(), len_bytes as u64);
    store.map_err(|error| {
        // Another place is no remedy for this process's limits, or for what it asks of I/O, which is no error of the system's.
        let is_of_place = Errno::from_io_error(&error.cause)
            .is_some_and(|errno| ![Errno::MFILE, Errno::NFILE, Errno::NOMEM].contains(&errno));
        let remedy = if is_of_place { format!("; {REMEDY}") } else { String::new() };
        Stop::Failed(format!("{}{remedy}", selfpage::Error::from(error)))
    })
}

/// A file of data that has no name.
pub struct Scratch(File);

impl Scratch {
    /// Writes `len_bytes` of numbers to a new file.
    pub fn write(screen: &mut Screen, len_bytes: usize) -> Result<Scratch, Stop> {
        let directory = directory();
        let failed =
            |error: io::Error| Stop::Failed(format!("write a file in {}: {error}; {REMEDY}", directory.display()));
        let mut file = unnamed_in(&directory).map_err(failed)?;
        let pages = len_bytes / PAGE_BYTES;
        screen.begin(pages);
        let mut page = [0u8; PAGE_BYTES];
        for number in 0..pages {
            for (word, place) in page.chunks_exact_mut(8).enumerate() {
                place.copy_from_slice(&((number * PAGE_BYTES / 8 + word) as u64).to_ne_bytes());
            }
            file.write_all(&page).map_err(failed)?;
            if screen.is_due() {
                screen.show(
                    number,
                    &format!("writing a file: {} of {}", mib((number * PAGE_BYTES) as u64), mib(len_bytes as u64)),
                );
            }
        }
        // What is still on its way to the disk would slow the first reader.
        file.sync_data().map_err(failed)?;
        Ok(Scratch(file))
    }

    /// A path that opens it, for this process.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

fn unnamed_in(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options.clone().custom_flags(libc::O_TMPFILE).open(directory).or_else(|_| {
        // Not every file system has files that never had a name.
        let path = directory.join(format!("selfpage-tour-{}", std::process::id()));
        let file = options.create_new(true).open(&path)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    })
}
