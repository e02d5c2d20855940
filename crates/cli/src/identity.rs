//! Which file something is, whatever its names.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Of an open file.
pub fn of(about: &Metadata) -> (u64, u64) {
    (about.dev(), about.ino())
}

/// Of what a name leads to, links followed.
pub fn at(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|about| of(&about))
}
