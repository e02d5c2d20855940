//! A library that stands in for the C library's `malloc`, preloaded into the process that measures.

use std::path::{Path, PathBuf};

use super::error::Error;

/// The library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// As in skips.
    pub name: &'static str,
    /// The file, in one of [`LIBRARIES`].
    pub file: &'static str,
    /// Who has it.
    pub package: &'static str,
}

/// Where Debian and others put shared libraries.
const LIBRARIES: [&str; 4] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

impl Preload {
    /// Where the library is.
    pub fn path(self) -> Result<PathBuf, Error> {
        let places = LIBRARIES.iter().map(|directory| Path::new(directory).join(self.file));
        places
            .into_iter()
            .find(|path| path.exists())
            .ok_or_else(|| Error::skip(self.name, format!("no {} here: install {}", self.file, self.package)))
    }
}
