//! Files that regions are to be made over, opened and checked.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::mm::ProtFlags;

use super::{END_BYTES, PAGE};
use crate::FileAccess;
use crate::error::{Error, Kind, Result};
use crate::placement::taken::FilePart;
use crate::store::page_cache::{self, ReadLock};
use crate::store::{Descriptor, Numbered};

/// What a [`File`] is made of, opened and checked.
pub(crate) struct Opened {
    path: PathBuf,
    pub(super) direct: Option<Descriptor>,
    pub(super) buffered: Descriptor,
    pub(super) read_lock: ReadLock,
    pub(super) first: u64,
    pub(super) access: FileAccess,
    /// Device and inode.
    file: (u64, u64),
    offset_bytes: u64,
    /// How long the file is.
    file_bytes: u64,
    /// How much of the file follows, in bytes.
    pub(crate) len_bytes: u64,
}

impl Opened {
    /// Opens `path` to be a region from `offset_bytes` on.
    pub(crate) fn new(path: &Path, offset_bytes: u64, access: FileAccess) -> Result<Opened> {
        let object = path.display().to_string();
        let failed = |cause: io::Error| Error::system("map", object.clone(), cause);
        if !offset_bytes.is_multiple_of(PAGE) {
            let cause = format!("the offset {offset_bytes} is no multiple of {PAGE}");
            return Err(Error::new(Kind::Invalid, "map", object, cause));
        }
        if offset_bytes >= END_BYTES {
            let cause =
                format!("the offset {offset_bytes} is not below {END_BYTES}, the most that regions over files reach");
            return Err(Error::new(Kind::Invalid, "map", object, cause));
        }
        let mut options = fs::OpenOptions::new();
        // Opening a pipe must not wait for somebody who writes to it.
        options.read(true).write(access == FileAccess::ReadWrite).custom_flags(libc::O_NONBLOCK);
        let buffered = options.open(path).map_err(failed)?;
        let meta = buffered.metadata().map_err(failed)?;
        // The kernel makes some up as they are read, as in /proc: they have bytes, and no length.
        if !meta.is_file() || meta.len() == 0 && buffered.read_at(&mut [0], 0).is_ok_and(|count| count > 0) {
            return Err(Error::new(
                Kind::Invalid,
                "map",
                object,
                "it is not a regular file with a length: copy what it holds into one",
            ));
        }
        let rights = if access == FileAccess::ReadWrite { page_cache::WRITING } else { ProtFlags::READ };
        let takes_mappings = page_cache::takes_mappings(&buffered, rights);
        if access == FileAccess::ReadWrite && !takes_mappings {
            let cause = "it takes no shared mappings of single pages (its file system has none, or it is sealed), by which changed pages are \
                         saved where its lock is taken; open it with FileAccess::Read, or copy it to another file system";
            return Err(Error::new(Kind::Unsupported, "map", object, cause));
        }
        // Without mappings there is no other way.
        let read_lock = if takes_mappings { ReadLock::of(&buffered) } else { ReadLock::Direct };
        let buffered = Descriptor::new(buffered.into()).map_err(failed)?;
        let direct = options.custom_flags(libc::O_NONBLOCK | libc::O_DIRECT).open(path).ok();
        let direct = direct.map(|file| Descriptor::new(file.into())).transpose().map_err(failed)?;
        Ok(Opened {
            // By that name there may be another file by now.
            direct: direct.filter(|direct| direct.is_alike(&buffered)),
            buffered,
            read_lock,
            path: path.into(),
            first: offset_bytes / PAGE,
            access,
            file: (meta.dev(), meta.ino()),
            offset_bytes,
            file_bytes: meta.len(),
            len_bytes: meta.len().min(END_BYTES).saturating_sub(offset_bytes),
        })
    }

    /// Whether `len_bytes` of it can be a region. 0: the file has nothing there.
    pub(crate) fn check(&self, len_bytes: usize) -> Result<()> {
        let Opened { offset_bytes, file_bytes, len_bytes: rest, .. } = *self;
        let cause = match (file_bytes, rest) {
            _ if len_bytes > 0 && len_bytes as u64 <= rest => return Ok(()),
            (0, _) => "the file is empty, and a region needs bytes: make the file longer (truncate -s) before".into(),
            (_, 0) => format!("the file has {file_bytes} bytes, and none from {offset_bytes} on: begin before its end"),
            _ => format!(
                "{len_bytes} bytes wanted from {offset_bytes} on, and of the file's {file_bytes} bytes {rest} follow there: ask for no \
                 more, or for 0, which stands for the rest"
            ),
        };
        Err(Error::new(Kind::Invalid, "map", self.path.display().to_string(), cause))
    }

    /// So much of it, in whole pages.
    pub(crate) fn part(&self, len_bytes: usize) -> FilePart {
        let Opened { file, offset_bytes, access, .. } = *self;
        let end = offset_bytes + (len_bytes as u64).next_multiple_of(PAGE);
        FilePart { path: self.path.clone(), file, bytes: offset_bytes..end, access }
    }

    pub(crate) fn files(&self) -> Vec<Numbered> {
        self.direct.iter().chain([&self.buffered]).map(Descriptor::numbered).collect()
    }
}
