//! The data file of a run: made once, by O_DIRECT writes, of contents that do not compress.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::content::{self, Versions};
use super::error::Error;
use super::raw::{self, PAGE_BYTES};

const CHUNK_BYTES: usize = 2 << 20;

/// Bytes that O_DIRECT accepts: they begin at a page.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len_bytes: usize,
}

impl Buffer {
    /// Zeros.
    pub fn new(len_bytes: usize) -> Buffer {
        let bytes = vec![0; len_bytes + PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        Buffer { bytes, start, len_bytes }
    }

    /// The aligned part.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len_bytes]
    }
}

/// Where the data file of a run lies.
pub fn path_in(directory: &Path) -> PathBuf {
    directory.join("data")
}

/// Where the versions of its pages lie.
pub fn versions_path_in(directory: &Path) -> PathBuf {
    directory.join("versions")
}

/// Opens the data file without the page cache.
pub fn open_direct(path: &Path) -> Result<File, Error> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
    file.map_err(|error| Error::io("open (O_DIRECT)", path, error))
}

/// Makes the data file in `directory`, all pages in version 0.
pub fn create(directory: &Path, len_bytes: u64) -> Result<(), Error> {
    let path = path_in(directory);
    let failed = |error| Error::io("write", &path, error);
    let file = OpenOptions::new().write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT).open(&path);
    let file = file.map_err(failed)?;
    raw::allocate(&file, len_bytes).map_err(failed)?;
    let mut buffer = Buffer::new(CHUNK_BYTES);
    for offset in (0..len_bytes).step_by(CHUNK_BYTES) {
        if raw::interrupted() {
            return Err(Error::Interrupted);
        }
        let first = offset as usize / PAGE_BYTES;
        for (index, page) in buffer.bytes().chunks_exact_mut(PAGE_BYTES).enumerate() {
            content::fill_page(page, first + index, 0);
        }
        file.write_all_at(buffer.bytes(), offset).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    Versions::zero((len_bytes / PAGE_BYTES as u64) as usize).save(&versions_path_in(directory))
}
