//! A library that stands in for the C library's `malloc`, preloaded into the process that measures.

use std::path::{Path, PathBuf};

use super::error::Error;

/// The library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// As in skips.
    pub name: &'static str,
    /// The file.
    pub file: &'static str,
    /// Who has it.
    pub origin: Origin,
}

/// Where a library comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This package of the distribution, in one of [`LIBRARIES`].
    Distribution(&'static str),
    /// This crate of ours, beside the tool.
    Workspace(&'static str),
}

/// Where Debian and others put shared libraries.
const LIBRARIES: [&str; 4] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

impl Preload {
    /// Where the library is.
    pub fn path(self) -> Result<PathBuf, Error> {
        let (places, remedy) = match self.origin {
            Origin::Distribution(package) => (LIBRARIES.map(PathBuf::from).to_vec(), format!("install {package}")),
            Origin::Workspace(package) => {
                let own = std::env::current_exe().ok();
                let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
                (Vec::from_iter(beside), format!("build it with `cargo build --release -p {package}`"))
            }
        };
        let mut paths = places.into_iter().map(|directory| directory.join(self.file));
        paths
            .find(|path| path.exists())
            .ok_or_else(|| Error::skip(self.name, format!("no {} here: {remedy}", self.file)))
    }
}
