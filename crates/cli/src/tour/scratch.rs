//! Where the tour's own data goes: on disk, and without a name, so that nothing is left however the tour ends.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use super::screen::Screen;
use super::{PAGE_BYTES, Stop, mib};
use crate::disk;

/// The directory for temporary files that lie on a disk: `/tmp` may be memory.
pub fn directory() -> PathBuf {
    let said = std::env::var_os("TMPDIR").filter(|said| !said.is_empty());
    said.map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Looks whether there is room for `len_bytes`. Where a page cannot be saved there is no frame for the next one, and the tour would end by a
/// signal in its middle.
pub fn check_room(len_bytes: usize) -> Result<(), Stop> {
    disk::check_room(&directory(), len_bytes as u64, "the tour", "TMPDIR=DIRECTORY names another").map_err(Stop::Failed)
}

/// A file of data that has no name any more.
pub struct Scratch(File);

impl Scratch {
    /// Writes `len_bytes` of numbers to a new file.
    pub fn write(screen: &mut Screen, len_bytes: usize) -> Result<Scratch, Stop> {
        let path = directory().join(format!("selfpage-tour-{}", std::process::id()));
        let failed = |error: std::io::Error| Stop::Failed(format!("write {}: {error}", path.display()));
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
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
