//! A Linux swap file for the peer `swap`: made, put in use before any other swap space, and always taken away again.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::output;

use super::error::Error;
use super::raw::{self, PAGE_BYTES};

/// Where the swap file of a run lies.
pub fn path_in(directory: &Path) -> PathBuf {
    directory.join("swap")
}

/// Whether the kernel swaps to the file at `path`.
pub fn in_use(path: &Path) -> bool {
    // The kernel names it whole, with numbers for spaces.
    let path = fs::canonicalize(path).unwrap_or_default().to_string_lossy().replace(' ', "\\040");
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    swaps.lines().any(|line| line.split_whitespace().next() == Some(path.as_str()))
}

/// A swap file in use; out of use and removed when dropped.
pub struct SwapFile {
    path: PathBuf,
}

impl SwapFile {
    /// Makes a swap file of `len_bytes` in `directory` and puts it in use.
    pub fn enable(directory: &Path, len_bytes: u64) -> Result<SwapFile, Error> {
        if raw::user() != 0 {
            return Err(Error::skip("swap", "a swap file needs root"));
        }
        let path = path_in(directory);
        // What is swapped out is other people's memory: nobody else may read it.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|error| Error::io("make", &path, error))?;
        let swap = SwapFile { path };
        swap.format(&file, len_bytes).map_err(|error| Error::io("format", &swap.path, error))?;
        raw::swap_on(&swap.path)
            .map_err(|error| Error::skip("swap", format!("swapon {}: {error}", swap.path.display())))?;
        Ok(swap)
    }

    /// What mkswap does: all blocks allocated, and a header page of version 1.
    fn format(&self, mut file: &File, len_bytes: u64) -> std::io::Result<()> {
        raw::allocate(file, len_bytes)?;
        let last_page = (len_bytes / PAGE_BYTES as u64 - 1) as u32;
        let mut header = [0u8; PAGE_BYTES];
        header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
        header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
        header[PAGE_BYTES - 10..].copy_from_slice(b"SWAPSPACE2");
        file.write_all(&header)?;
        file.sync_all()
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        if let Err(error) = raw::swap_off(&self.path)
            && in_use(&self.path)
        {
            let path = self.path.display();
            output::tell(format_args!(
                "selfpage bench: swapoff {path}: {error}; it is still in use: as root, with memory to spare, swapoff {path}"
            ));
            return;
        }
        let _ = fs::remove_file(&self.path);
    }
}
