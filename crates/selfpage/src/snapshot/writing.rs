//! Adding a snapshot to a file so that, whatever happens, the one before stays whole: first its pages, its table and its
//! trailer, behind everything that is there; then, when they are safe on the disk, the one place that says which is the
//! newest. The first snapshot goes to a new file, and a rename makes it known.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use selfpage_core::addr::PageBytes;
use xxhash_rust::xxh3::xxh3_128;

use super::file::{data_at, named, newest, slot_at};
use super::format::{Current, ENTRY_BYTES, Entry, Header, PAGE, RUN_BYTES, Run, SavedRegion, Trailer};
use crate::error::{Error, Kind, Result, SystemError};
use crate::pager::is_zero;

/// Pages are written so many bytes at a time.
const REQUEST_BYTES: usize = 1 << 20;

/// A file that snapshots are added to. One process at a time may.
pub(super) struct Target {
    path: PathBuf,
    /// Where it is written before its first snapshot is whole; none afterwards.
    unnamed: Option<PathBuf>,
    file: File,
    header: Header,
    /// The newest snapshot; sequence 0: there is none yet.
    current: Current,
    /// Where the next one begins.
    end: u64,
}

impl Target {
    /// A new file for snapshots of these regions. It takes the place of the one at `path`, which must be of ours, when its first
    /// snapshot is whole.
    pub(super) fn create(path: &Path, regions: Vec<SavedRegion>) -> Result<Target> {
        let mut identity = [0; 16];
        rustix::rand::getrandom(&mut identity, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::system("make", named(path), io::Error::from(errno)))?;
        let header = Header { identity, regions };
        let unnamed = unnamed(path);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&unnamed).map_err(|cause| Error::system("make", named(&unnamed), cause))?;
        take_alone(&file, &unnamed)?;
        let failed = |cause| failed(path, cause);
        file.set_len(0).and_then(|()| file.write_all_at(&header.encode(), 0)).map_err(failed)?;
        let end = data_at(&header);
        let current = Current { sequence: 0, trailer_at: 0 };
        Ok(Target { path: path.into(), unnamed: Some(unnamed), file, header, current, end })
    }

    /// How long the file is.
    pub(super) fn len_bytes(&self) -> u64 {
        self.end
    }

    /// How many snapshots it has.
    pub(super) fn sequence(&self) -> u64 {
        self.current.sequence
    }

    /// Begins another snapshot, of about so many pages, which builds on the newest, if there is one.
    pub(super) fn begin(&mut self, pages: u64) -> Writing<'_> {
        let request = Vec::with_capacity(REQUEST_BYTES);
        // In one piece: a list that grows is remapped, and every fault of the process waits for that.
        let mut entries = Vec::new();
        // Most of a first snapshot may be pages that hold zeros, which need no entry: without room for all it grows as it must.
        let _ = entries.try_reserve_exact(pages as usize);
        let at = self.end;
        Writing { target: self, at, request, entries, done: false }
    }

    /// The newest snapshot is `current` from now on.
    fn publish(&mut self, current: Current) -> io::Result<()> {
        let Target { file, header, .. } = self;
        file.write_all_at(&current.encode(&header.identity), slot_at(header, current.sequence))?;
        file.sync_data()?;
        if let Some(unnamed) = &self.unnamed {
            file.sync_all()?;
            std::fs::rename(unnamed, &self.path)?;
            self.unnamed = None;
            let directory = self.path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // Where a directory cannot be synced, the name is as safe as that file system makes it.
            let _ = File::open(directory).and_then(|directory| directory.sync_all());
        }
        self.current = current;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(unnamed) = &self.unnamed {
            let _ = std::fs::remove_file(unnamed);
        }
    }
}

/// Where a file is written before it has a snapshot.
fn unnamed(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Refuses what is at `path` if it is anything but a snapshot file that nobody else writes to.
pub(super) fn may_replace(path: &Path) -> Result<Option<File>> {
    let file = match OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(Error::system("open", named(path), cause)),
    };
    let meta = file.metadata().map_err(|cause| Error::system("open", named(path), cause))?;
    // What a crash of the machine left empty, or the user made so, is nobody's data.
    if meta.is_file() && meta.len() > 0 {
        let refused =
            |_| Error::new(Kind::Invalid, "replace", named(path), "the file holds something else: move it away");
        newest(path, &file).map_err(refused)?;
    } else if !meta.is_file() {
        return Err(Error::new(Kind::Invalid, "replace", named(path), "it is not a regular file"));
    }
    take_alone(&file, path)?;
    Ok(Some(file))
}

/// Locks a file that this process writes to.
fn take_alone(file: &File, path: &Path) -> Result<()> {
    file.try_lock().map_err(|cause| match cause {
        std::fs::TryLockError::WouldBlock => {
            Error::new(Kind::Held, "lock", named(path), "another process, or this one, writes snapshots there")
        }
        std::fs::TryLockError::Error(cause) => Error::system("lock", named(path), cause),
    })
}

fn failed(path: &Path, cause: impl SystemError) -> Error {
    Error::system("write", named(path), cause)
}

/// A snapshot in the making. Where it is not finished nothing has happened.
pub(super) struct Writing<'a> {
    target: &'a mut Target,
    /// Where `request` goes.
    at: u64,
    /// Pages to be written together.
    request: Vec<u8>,
    entries: Vec<Entry>,
    done: bool,
}

impl Writing<'_> {
    /// Adds a page, in any order.
    pub(super) fn page(&mut self, page: u64, bytes: &PageBytes) -> Result<()> {
        if is_zero(bytes) {
            self.zero(page, 1);
            return Ok(());
        }
        let place = self.at + self.request.len() as u64;
        self.entries.push(Entry::Page { page, place, hash: xxh3_128(bytes) });
        self.request.extend_from_slice(bytes);
        if self.request.len() >= REQUEST_BYTES { self.flush() } else { Ok(()) }
    }

    /// These pages are zero. In the first snapshot of a file, every page is that is not said to be something else.
    pub(super) fn zero(&mut self, first: u64, more: u64) {
        if self.target.current.sequence == 0 {
            return;
        }
        match self.entries.last_mut() {
            Some(Entry::Zero { page, count }) if *page + *count == first => *count += more,
            _ => self.entries.push(Entry::Zero { page: first, count: more }),
        }
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.target.file.write_all_at(&self.request, self.at);
        written.map_err(|cause| failed(&self.target.path, cause))?;
        self.at += self.request.len() as u64;
        self.request.clear();
        Ok(())
    }

    /// Makes it the newest. When this returns, it survives a crash of the machine. How many bytes were added.
    pub(super) fn finish(mut self, in_core: &[Run]) -> Result<u64> {
        self.flush()?;
        let len_bytes = self.entries.len() * ENTRY_BYTES + in_core.len() * RUN_BYTES + 2 * PAGE as usize;
        let mut table = Vec::with_capacity(len_bytes);
        self.entries.iter().for_each(|entry| entry.encode(&mut table));
        in_core.iter().for_each(|run| run.encode(&mut table));
        let Current { sequence, trailer_at } = self.target.current;
        let trailer = Trailer {
            sequence: sequence + 1,
            base_at: trailer_at,
            table_at: self.at,
            entries: self.entries.len() as u64,
            runs: in_core.len() as u64,
            table_hash: xxh3_128(&table),
        };
        table.resize(table.len().next_multiple_of(PAGE as usize), 0);
        let trailer_at = self.at + table.len() as u64;
        table.extend(trailer.encode(&self.target.header.identity));
        let end = self.at + table.len() as u64;
        let added = end - self.target.end;
        let path = self.target.path.clone();
        let file = &self.target.file;
        file.write_all_at(&table, self.at).and_then(|()| file.sync_data()).map_err(|cause| failed(&path, cause))?;
        // From here on it may be the newest, even where the disk reports an error.
        self.done = true;
        let current = Current { sequence: sequence + 1, trailer_at };
        self.target.publish(current).map_err(|cause| failed(&path, cause))?;
        self.target.end = end;
        Ok(added)
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if !self.done {
            // The disk may be full of it. What is left otherwise is written over by the next one.
            let _ = self.target.file.set_len(self.target.end);
        }
    }
}
