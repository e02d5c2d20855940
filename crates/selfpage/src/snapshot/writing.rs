//! Adding a snapshot to a file so that, whatever happens, the one before stays whole: first its parts, each some pages with their table
//! and a trailer, behind everything that is there; then, when they are safe on the disk, the two places that say which is the newest,
//! one after the other. The first snapshot goes to a new file, and a rename makes it known.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{OFlags, fcntl_setfl, fstatvfs};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::linux::limit::{self, Resource};
use xxhash_rust::xxh3::xxh3_128;

use super::file::{data_at, named, newest, read, slot_at, unread};
use super::format::{Current, ENTRY_BYTES, Entry, Header, PAGE, RUN_BYTES, Run, SavedRegion, Trailer};
use super::place::Place;
use super::take::MOST_RUNS;
use crate::doctor::limits::TELL;
use crate::error::{Error, Kind, Result, SystemError};
use crate::pager::is_zero;
use crate::store::free_bytes;

/// Pages are written so many bytes at a time.
const REQUEST_BYTES: usize = 1 << 20;
/// A part ends when its table is so long: what a table takes does not grow with the snapshot. The tests' own files have parts, too.
const PART_BYTES: usize = if cfg!(test) { 16 } else { 8192 } * ENTRY_BYTES;

/// Pages that are written together, past the page cache: that would take a page of memory for each of them, which is long in coming where
/// a host has to supply it, and drop pages that somebody reads again.
struct Request {
    memory: Vec<u8>,
    /// Where the first page is: at an address that a disk can read from.
    first: usize,
    len_bytes: usize,
}

impl Request {
    fn new() -> Request {
        let memory = vec![0; REQUEST_BYTES + PAGE_BYTES];
        let first = memory.as_ptr().align_offset(PAGE_BYTES);
        Request { memory, first, len_bytes: 0 }
    }

    fn add(&mut self, page: &PageBytes) {
        self.memory[self.first + self.len_bytes..][..PAGE_BYTES].copy_from_slice(page);
        self.len_bytes += PAGE_BYTES;
    }

    fn write(&self, file: &File, at: u64) -> io::Result<()> {
        within_limit(at + self.len_bytes as u64)?;
        let bytes = &self.memory[self.first..][..self.len_bytes];
        match file.write_all_at(bytes, at) {
            // The file system wants larger steps than pages.
            Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => {
                through_the_cache(file);
                file.write_all_at(bytes, at)
            }
            written => written,
        }
    }
}

/// Beyond the limit on the size of files the kernel would send `SIGXFSZ`, which ends the process.
fn within_limit(end: u64) -> io::Result<()> {
    match limit::of_this_process(Resource::FileSize) {
        Ok(limit) if limit.is_none_or(|limit| end <= limit) => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        Err(why) => Err(io::Error::new(io::ErrorKind::Unsupported, format!("{}; {TELL}", why.into_io()))),
    }
}

/// Where a file system cannot, all goes through the page cache.
fn past_the_cache(file: &File) {
    let _ = fcntl_setfl(file, OFlags::DIRECT);
}

fn through_the_cache(file: &File) {
    let _ = fcntl_setfl(file, OFlags::empty());
}

/// A file that snapshots are added to.
pub(super) struct Target {
    place: Place,
    header: Header,
    /// The newest snapshot; sequence 0: there is none yet.
    current: Current,
    /// Where the next one begins.
    end: u64,
    /// The snapshot that was begun last came to an end for want of room, and nothing else.
    lacked_room: bool,
}

impl Target {
    /// Takes the place at `path` for snapshots of these regions. [`Target::begin_file`] comes next.
    pub(super) fn at(path: &Path, regions: Vec<SavedRegion>) -> Result<Target> {
        let header = Header { identity: [0; 16], regions };
        let end = data_at(&header);
        Ok(Target { place: Place::take(path)?, header, current: Current::NONE, end, lacked_room: false })
    }

    /// Begins a new file, which takes the place of the one that is there when its first snapshot is whole.
    pub(super) fn begin_file(&mut self) -> Result<()> {
        rustix::rand::getrandom(&mut self.header.identity, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::system("make", named(self.place.path()), errno).if_filtered("getrandom"))?;
        self.place.begin()?;
        (self.current, self.end) = (Current::NONE, data_at(&self.header));
        let header = self.header.encode();
        let written = self.place.file().and_then(|file| {
            // It may be that of a snapshot that failed, which could not be taken back to the page cache then.
            through_the_cache(&file);
            // What says which snapshot is the newest stands behind the header.
            within_limit(self.end)?;
            file.write_all_at(&header, 0)?;
            // From here on it is as long as what was written, or somebody has cut it.
            file.set_len(self.end)
        });
        written.map_err(|cause| failed(self.place.path(), cause))
    }

    /// Whether the file is still the one of its name, and has what the next snapshot builds on: whoever does not ask for the lock may have
    /// cut it, or copied another one over it.
    pub(super) fn is_in_place(&self) -> bool {
        self.check(self.end).is_ok()
    }

    /// Refuses a file that is not, and one that is not `len_bytes` long.
    fn check(&self, len_bytes: u64) -> Result<()> {
        let path = self.place.path();
        let failed = |cause| failed(path, cause);
        if !self.place.is_ours()? {
            return Err(failed(changed()));
        }
        let file = self.place.file().map_err(failed)?;
        // Past it pieces of a page can be neither read nor written.
        through_the_cache(&file);
        is_as_long(&file, len_bytes).map_err(failed)?;
        let has_front = if self.current == Current::NONE {
            let header = self.header.encode();
            read(&file, 0, header.len() as u64).map_err(|cause| unread(path, cause))? == Some(header)
        } else {
            match newest(path, &file) {
                Ok((header, current)) => header.identity == self.header.identity && current == self.current,
                Err(why) if why.kind() == Kind::Lost => false,
                Err(why) => return Err(why),
            }
        };
        if has_front { Ok(()) } else { Err(failed(changed())) }
    }

    /// A snapshot failed: what there is of a new file goes.
    pub(super) fn give_up(&mut self) {
        self.place.give_up();
    }

    /// How many snapshots the file has.
    pub(super) fn sequence(&self) -> u64 {
        self.current.sequence
    }

    /// How long the file is.
    pub(super) fn len_bytes(&self) -> u64 {
        self.end
    }

    /// Whether the disk has room for a new file beside this one, with so many pages. Where that is not known it is tried.
    pub(super) fn has_room(&self, pages: u64) -> bool {
        let parts = pages / (PART_BYTES / ENTRY_BYTES) as u64 + 1;
        let tables = pages * ENTRY_BYTES as u64 + (MOST_RUNS * RUN_BYTES) as u64 + parts * 2 * PAGE;
        let bytes = data_at(&self.header) + pages * PAGE + tables;
        let disk = self.place.file().and_then(|file| Ok(fstatvfs(&*file)?));
        // The file system notes where it all is.
        disk.map_or(true, |disk| free_bytes(&disk) >= bytes + bytes / 64)
    }

    /// Whether what was begun last failed for want of room, while it was written. Then the newest snapshot stands, and another may build on it.
    /// After any other error, of the disk's last word too, nobody knows what the disk has.
    pub(super) fn lacked_room(&mut self) -> bool {
        std::mem::take(&mut self.lacked_room)
    }

    /// Begins another snapshot, which builds on the newest, if there is one.
    pub(super) fn begin(&mut self) -> Writing<'_> {
        self.lacked_room = false;
        if let Ok(file) = self.place.file() {
            past_the_cache(&file);
        }
        // In one piece: a table that grows is remapped, and every fault of the process waits for that.
        let table = Vec::with_capacity(PART_BYTES + MOST_RUNS * RUN_BYTES + 2 * PAGE as usize);
        let (at, base_at) = (self.end, self.current.trailer_at);
        Writing { target: self, at, base_at, request: Request::new(), table, zeros: None, done: false }
    }

    /// The newest snapshot is `current` from now on.
    ///
    /// Both places say so in the end. What a crash tears is one of them, while the other says what held before; and one that is damaged
    /// later is not missed.
    fn publish(&mut self, current: Current) -> io::Result<()> {
        let Target { place, header, .. } = self;
        let bytes = current.encode(&header.identity);
        let [first, second] = [0, 1].map(|place| slot_at(header, place));
        let file = place.file()?;
        file.write_all_at(&bytes, first)?;
        file.sync_data()?;
        file.write_all_at(&bytes, second)?;
        place.publish()?;
        self.current = current;
        Ok(())
    }
}

/// Refuses a file that somebody has cut: what is written behind its end leaves a hole before it.
fn is_as_long(file: &File, len_bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() >= len_bytes { Ok(()) } else { Err(changed()) }
}

fn changed() -> io::Error {
    io::Error::other("somebody else has put a file there, changed it, or taken it away, meanwhile")
}

fn failed(path: &Path, cause: impl SystemError) -> Error {
    Error::system("write", named(path), cause)
}

/// What a snapshot took.
pub(super) struct Written {
    /// What the file grew by.
    pub(super) bytes: u64,
    /// The memory that it went through.
    pub(super) buffer_bytes: u64,
}

/// A snapshot in the making. Where it is not finished nothing has happened.
pub(super) struct Writing<'a> {
    target: &'a mut Target,
    /// Where `request` goes.
    at: u64,
    /// The trailer of the part before, of this snapshot or of the one that it builds on; 0: there is none.
    base_at: u64,
    request: Request,
    /// The entries of this part so far, as they will stand in the file.
    table: Vec<u8>,
    /// The last entry, pages that are zero, while it may still grow: the first, and how many.
    zeros: Option<(u64, u64)>,
    done: bool,
}

impl Writing<'_> {
    /// Adds a page, in any order.
    pub(super) fn page(&mut self, page: u64, bytes: &PageBytes) -> Result<()> {
        if is_zero(bytes) {
            return self.zero(page, 1);
        }
        self.end_zeros()?;
        self.make_room()?;
        let place = self.at + self.request.len_bytes as u64;
        Entry::Page { page, place, hash: xxh3_128(bytes) }.encode(&mut self.table);
        self.request.add(bytes);
        if self.request.len_bytes == REQUEST_BYTES { self.flush() } else { Ok(()) }
    }

    /// These pages are zero. In the first snapshot of a file, every page is that is not said to be something else.
    pub(super) fn zero(&mut self, first: u64, more: u64) -> Result<()> {
        if self.target.current.sequence == 0 {
            return Ok(());
        }
        match &mut self.zeros {
            Some((page, count)) if *page + *count == first => *count += more,
            _ => {
                self.end_zeros()?;
                self.zeros = Some((first, more));
            }
        }
        Ok(())
    }

    fn end_zeros(&mut self) -> Result<()> {
        if let Some((page, count)) = self.zeros.take() {
            self.make_room()?;
            Entry::Zero { page, count }.encode(&mut self.table);
        }
        Ok(())
    }

    /// Has room for an entry: ends a part whose table is full.
    fn make_room(&mut self) -> Result<()> {
        if self.table.len() < PART_BYTES {
            return Ok(());
        }
        self.flush()?;
        self.base_at = self.end_table(&[]);
        let (pages, _) = self.table.as_chunks::<PAGE_BYTES>();
        pages.iter().for_each(|page| self.request.add(page));
        self.table.clear();
        self.flush()
    }

    /// Ends the table, which goes where pages would go next, and puts the trailer behind it. Where that is.
    fn end_table(&mut self, in_core: &[Run]) -> u64 {
        let table = &mut self.table;
        let entries = (table.len() / ENTRY_BYTES) as u64;
        in_core.iter().for_each(|run| run.encode(table));
        let trailer = Trailer {
            sequence: self.target.current.sequence + 1,
            base_at: self.base_at,
            table_at: self.at,
            entries,
            runs: in_core.len() as u64,
            table_hash: xxh3_128(table),
        };
        table.resize(table.len().next_multiple_of(PAGE as usize), 0);
        let trailer_at = self.at + table.len() as u64;
        table.extend(trailer.encode(&self.target.header.identity));
        trailer_at
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.target.place.file().and_then(|file| {
            is_as_long(&file, self.at)?;
            self.request.write(&file, self.at)
        });
        written.map_err(|cause| self.not_written(cause))?;
        self.at += self.request.len_bytes as u64;
        self.request.len_bytes = 0;
        Ok(())
    }

    fn not_written(&mut self, cause: io::Error) -> Error {
        self.target.lacked_room = matches!(cause.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        failed(self.target.place.path(), cause)
    }

    /// Makes it the newest. When this returns, it survives a crash of the machine.
    pub(super) fn finish(mut self, in_core: &[Run]) -> Result<Written> {
        self.end_zeros()?;
        self.flush()?;
        let trailer_at = self.end_table(in_core);
        let end = self.at + self.table.len() as u64;
        let added = end - self.target.end;
        let failed = |target: &Target, cause| failed(target.place.path(), cause);
        let written = self.target.place.file().and_then(|file| {
            through_the_cache(&file);
            within_limit(end)?;
            is_as_long(&file, self.at)?;
            file.write_all_at(&self.table, self.at)
        });
        written.map_err(|cause| self.not_written(cause))?;
        let synced = self.target.place.file().and_then(|file| file.sync_data());
        synced.map_err(|cause| failed(self.target, cause))?;
        // From here on it may be the newest, even where the disk reports an error.
        self.done = true;
        let current = Current { sequence: self.target.current.sequence + 1, trailer_at };
        self.target.check(end)?;
        self.target.publish(current).map_err(|cause| failed(self.target, cause))?;
        self.target.end = end;
        let buffer_bytes = (self.request.memory.len() + self.table.capacity()) as u64;
        Ok(Written { bytes: added, buffer_bytes })
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if !self.done
            && let Ok(file) = self.target.place.file()
        {
            through_the_cache(&file);
            // The disk may be full of it. What is left otherwise is written over by the next one. A file that somebody has changed is not ours
            // to cut.
            if self.target.is_in_place() {
                let _ = file.set_len(self.target.end);
            }
        }
    }
}
