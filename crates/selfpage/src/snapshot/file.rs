//! A snapshot file, opened to be read.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::format::{Current, ENTRY_BYTES, Entry, Header, PAGE, RUN_BYTES, Run, SavedRegion, Trailer};
use super::place::unnamed;
use super::take::MOST_RUNS;
use crate::error::{Error, Kind, Result};

/// Tables are read so many bytes at a time, which is so many whole entries.
const PIECE_BYTES: u64 = 1 << 20;
const _: () = assert!(PIECE_BYTES.is_multiple_of(ENTRY_BYTES as u64));

/// Where a page that is not zero stands in a file, and what its bytes must hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) page: u64,
    pub(crate) place: u64,
    pub(crate) hash: u128,
}

/// Where the pages of a snapshot are.
#[derive(Debug)]
pub(crate) struct Index(Vec<Placed>);

impl Index {
    /// Where `page` is. `None`: it is zero.
    pub(crate) fn find(&self, page: u64) -> Option<Placed> {
        self.0.binary_search_by_key(&page, |placed| placed.page).ok().and_then(|at| self.0.get(at).copied())
    }
}

/// A snapshot in a file: one instant of some regions. Opening it reads its table; pages are read when they are needed.
///
/// # Examples
/// ```no_run
/// # fn main() -> selfpage::Result<()> {
/// use selfpage::{Domain, snapshot::Snapshot, store::FileStore};
/// let snapshot = Snapshot::open("/var/lib/table.snap")?;
/// let domain = Domain::with_frames(64 << 20).build()?;
/// let store = FileStore::unnamed_in("/var/tmp", 1 << 30)?;
/// let region = domain.region(0).restored(&snapshot, 0, store)?;
/// println!("{:?}", region.as_slice::<u8>().first());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Snapshot {
    path: PathBuf,
    file: File,
    header: Header,
    current: Current,
    index: Arc<Index>,
    in_core: Vec<Run>,
}

impl Snapshot {
    /// Opens the newest whole snapshot of a file.
    ///
    /// # Errors
    /// The file cannot be read, is no snapshot, or its tables are damaged. That pages are not is found when they are read, or by
    /// [`Snapshot::verify`].
    pub fn open(path: impl AsRef<Path>) -> Result<Snapshot> {
        let path = path.as_ref().to_path_buf();
        // To open a pipe is to wait for a writer.
        check_path("open", &path)?;
        let file = File::open(&path).map_err(|cause| not_opened(&path, cause))?;
        let (header, current) = newest(&path, &file)?;
        let chain = Chain::read(&path, &file, &header, current)?;
        Ok(Snapshot { path, file, header, current, index: Arc::new(chain.index), in_core: chain.in_core })
    }

    /// The regions that it is of, in their order.
    pub fn regions(&self) -> &[SavedRegion] {
        &self.header.regions
    }

    /// The how manieth snapshot of its file it is, from 1 on.
    pub fn sequence(&self) -> u64 {
        self.current.sequence
    }

    /// How many of its pages are not zero.
    pub fn pages(&self) -> u64 {
        self.index.0.len() as u64
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads every page, and compares it with its hash.
    ///
    /// # Errors
    /// The first page that is damaged, by region and number.
    pub fn verify(&self) -> Result<()> {
        let mut bytes = [0; PAGE_BYTES];
        self.index.0.iter().try_for_each(|placed| self.read(placed, &mut bytes))
    }

    /// Reads page `index` of region `region`.
    ///
    /// # Errors
    /// There is no such page, or it is damaged.
    pub fn read_page(&self, region: usize, index: u64, bytes: &mut PageBytes) -> Result<()> {
        let known = self.header.regions.get(region).filter(|known| index < known.size_pages);
        if known.is_none() {
            let cause = format!("it has no page {index} of a region {region}");
            return Err(Error::new(Kind::Invalid, "read", named(&self.path), cause));
        }
        match self.index.find(self.first_page(region) + index) {
            Some(placed) => self.read(&placed, bytes),
            None => {
                bytes.fill(0);
                Ok(())
            }
        }
    }

    fn read(&self, placed: &Placed, bytes: &mut PageBytes) -> Result<()> {
        let name = || format!("{}, {}", named(&self.path), page_name(&self.header.regions, placed.page));
        self.file.read_exact_at(bytes, placed.place).map_err(|cause| Error::system("read", name(), cause))?;
        if xxh3_128(bytes) == placed.hash {
            return Ok(());
        }
        Err(Error::new(
            Kind::Lost,
            "read",
            name(),
            "the page is damaged: it does not have the hash that was taken of it; restore another file",
        ))
    }

    /// The number of a region's first page among all.
    pub(crate) fn first_page(&self, region: usize) -> u64 {
        self.header.regions.iter().take(region).map(|region| region.size_pages).sum()
    }

    pub(crate) fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The file once more, by a descriptor of the caller's.
    pub(crate) fn reopened(&self) -> Result<File> {
        self.file.try_clone().map_err(|cause| Error::system("open", named(&self.path), cause))
    }

    /// Which pages of a region were in core when the snapshot was taken, as runs of its own numbers.
    pub(crate) fn in_core(&self, region: usize) -> impl Iterator<Item = (u64, u64)> + '_ {
        let first = self.first_page(region);
        let end = first + self.header.regions.get(region).map_or(0, |region| region.size_pages);
        self.in_core.iter().filter_map(move |run| {
            let (from, to) = (run.first.max(first), run.first.saturating_add(run.count).min(end));
            (from < to).then(|| (from - first, to - from))
        })
    }
}

pub(super) fn named(path: &Path) -> String {
    format!("snapshot {}", path.display())
}

/// A page of all, as its user knows it.
pub(super) fn page_name(regions: &[SavedRegion], page: u64) -> String {
    let mut left = page;
    for (number, region) in regions.iter().enumerate() {
        if left < region.size_pages {
            let name = if region.name.is_empty() { format!("number {number}") } else { region.name.clone() };
            return format!("page {left} of region {name}");
        }
        left -= region.size_pages;
    }
    format!("page {page}, which no region has")
}

/// Refuses a path that can be no snapshot's, before anything is made. What is not there can become one's.
pub(super) fn check_path(operation: &'static str, path: &Path) -> Result<()> {
    let cause = match std::fs::metadata(path) {
        _ if path.file_name().is_none() => "the path names no file: give the name of one, in a directory or alone",
        Ok(about) if about.is_dir() => "it is a directory: name a file in it",
        Ok(about) if !about.is_file() => "it is not a regular file: name another",
        _ => return Ok(()),
    };
    let object = if path.as_os_str().is_empty() { "snapshot \"\"".into() } else { named(path) };
    Err(Error::new(Kind::Invalid, operation, object, cause))
}

fn not_opened(path: &Path, cause: io::Error) -> Error {
    let new = unnamed(path);
    let none_yet = cause.kind() == io::ErrorKind::NotFound && new.exists();
    let error = Error::system("open", named(path), cause);
    if none_yet { error.with(format!("{} is there: no snapshot was whole yet", new.display())) } else { error }
}

fn damaged(path: &Path, what: &str) -> Error {
    Error::new(Kind::Lost, "open", named(path), format!("{what} is damaged; restore another file"))
}

pub(super) fn unread(path: &Path, cause: io::Error) -> Error {
    Error::system("open", named(path), cause)
}

/// The header of a file, and which of its snapshots is the newest whole one.
pub(super) fn newest(path: &Path, file: &File) -> Result<(Header, Current)> {
    let mut front = [0; PAGE as usize];
    let known = match file.read_exact_at(&mut front, 0) {
        Ok(()) => Header::len_bytes(&front),
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => None,
        Err(cause) => return Err(unread(path, cause)),
    };
    let Some(len_bytes) = known else {
        let cause = "this is no snapshot file, or its first bytes are damaged: open another";
        return Err(Error::new(Kind::Lost, "open", named(path), cause));
    };
    let read = |at, len_bytes| read(file, at, len_bytes).map_err(|cause| unread(path, cause));
    let header = read(0, len_bytes)?.and_then(|bytes| Header::decode(&bytes));
    let header = header.ok_or_else(|| damaged(path, "its header"))?;
    // One that cannot be read may be the newest.
    let [first, second] = [0, 1].map(|place| read(slot_at(&header, place), PAGE));
    let slots = [first?, second?].into_iter().flatten().filter_map(|bytes| Current::decode(&bytes, &header.identity));
    match slots.max_by_key(|current| current.sequence) {
        Some(current) => Ok((header, current)),
        None => Err(damaged(path, "the place that says which snapshot is the newest")),
    }
}

/// Where the first or the second place is that says which snapshot is the newest.
pub(super) fn slot_at(header: &Header, place: u64) -> u64 {
    header.encode().len() as u64 + place * PAGE
}

/// Where data begins.
pub(super) fn data_at(header: &Header) -> u64 {
    slot_at(header, 0) + 2 * PAGE
}

/// `None`: the file has not got as much.
pub(super) fn read(file: &File, at: u64, len_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let all = each_piece(file, at, len_bytes, |piece| {
        bytes.extend(piece);
        Some(())
    })?;
    Ok(all.map(|()| bytes))
}

/// Shows `each` a part of a file, a piece at a time: a damaged file has any numbers for lengths, and may say that it is as long itself
/// without having a byte of it. `None`: `each` has had enough, or as for [`read`].
fn each_piece(
    file: &File,
    at: u64,
    len_bytes: u64,
    mut each: impl FnMut(&[u8]) -> Option<()>,
) -> io::Result<Option<()>> {
    let file_bytes = file.metadata()?.len();
    let Some(end) = at.checked_add(len_bytes).filter(|end| *end <= file_bytes) else { return Ok(None) };
    let mut bytes = vec![0; len_bytes.min(PIECE_BYTES) as usize];
    let mut at = at;
    while at < end {
        let piece = &mut bytes[..(end - at).min(PIECE_BYTES) as usize];
        match file.read_exact_at(piece, at) {
            // Somebody has cut it.
            Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            done => done?,
        }
        if each(piece).is_none() {
            return Ok(None);
        }
        at += piece.len() as u64;
    }
    Ok(Some(()))
}

/// A snapshot and all that it builds on.
struct Chain {
    index: Index,
    in_core: Vec<Run>,
}

impl Chain {
    fn read(path: &Path, file: &File, header: &Header, current: Current) -> Result<Chain> {
        let (mut pages, mut zero) = (HashMap::new(), Zero::default());
        let (mut in_core, mut cleared) = (Vec::new(), Vec::new());
        let (mut sequence, mut trailer_at) = (current.sequence, current.trailer_at);
        // From the newest back: what is known of a page already is newer.
        loop {
            let is_newest = trailer_at == current.trailer_at;
            let bytes = read(file, trailer_at, PAGE).map_err(|cause| unread(path, cause))?;
            let trailer = bytes.and_then(|bytes| Trailer::decode(&bytes, &header.identity));
            // The parts of a snapshot have its number.
            let follows = |trailer: &Trailer| {
                let is_before = !is_newest && trailer.sequence.checked_add(1) == Some(sequence);
                // So no two name one table, which would be read for each of them.
                let is_apart = trailer.base_at < trailer.table_at && table_end(trailer) == Some(trailer_at);
                (is_before || trailer.sequence == sequence) && is_apart
            };
            let trailer = trailer.filter(follows).ok_or_else(|| damaged(path, "a trailer"))?;
            if trailer.sequence != sequence {
                zero.add(&mut cleared);
                sequence = trailer.sequence;
            }
            let runs = note_table(file, header, &trailer, &mut pages, &zero, &mut cleared);
            let runs = runs.map_err(|cause| unread(path, cause))?.ok_or_else(|| damaged(path, "a table"))?;
            if is_newest {
                in_core = runs;
            }
            if trailer.base_at == 0 {
                break;
            }
            trailer_at = trailer.base_at;
        }
        let mut placed: Vec<Placed> = pages.into_values().collect();
        placed.sort_unstable_by_key(|placed| placed.page);
        Ok(Chain { index: Index(placed), in_core })
    }
}

/// Pages that are zero, as runs from first to end that do not meet: there may be more of them than there is memory for a note each. There may
/// be as many snapshots, of which each adds a few.
#[derive(Default)]
struct Zero(BTreeMap<u64, u64>);

impl Zero {
    fn contains(&self, page: u64) -> bool {
        self.0.range(..=page).next_back().is_some_and(|(_, end)| page < *end)
    }

    fn add(&mut self, runs: &mut Vec<(u64, u64)>) {
        for (mut first, mut end) in runs.drain(..) {
            while let Some((&before, &until)) = self.0.range(..=end).next_back().filter(|(_, until)| **until >= first) {
                self.0.remove(&before);
                (first, end) = (first.min(before), end.max(until));
            }
            self.0.insert(first, end);
        }
    }
}

/// Notes what a table says of pages that no later snapshot has said anything of, and in `cleared` those that are zero. The runs of pages
/// in core; `None`: it is damaged, or makes no sense.
fn note_table(
    file: &File,
    header: &Header,
    trailer: &Trailer,
    pages: &mut HashMap<u64, Placed>,
    zero: &Zero,
    cleared: &mut Vec<(u64, u64)>,
) -> io::Result<Option<Vec<Run>>> {
    let size_pages = header.size_pages();
    // The pages of a snapshot stand before its table.
    let places = data_at(header)..trailer.table_at;
    let mut note = |entry: Entry| {
        match entry {
            Entry::Page { page, place, hash } => {
                let end = place.checked_add(PAGE)?;
                if page >= size_pages || !place.is_multiple_of(PAGE) || place < places.start || end > places.end {
                    return None;
                }
                if !zero.contains(page) {
                    pages.entry(page).or_insert(Placed { page, place, hash });
                }
            }
            // Nobody writes this, and a hole in the file reads so.
            Entry::Zero { count: 0, .. } => return None,
            Entry::Zero { page, count } => {
                cleared.push((page, page.checked_add(count).filter(|end| *end <= size_pages)?));
            }
        }
        Some(())
    };
    let mut hash = Xxh3::new();
    let Some((entries_bytes, runs_at, runs_bytes)) = table_parts(trailer) else { return Ok(None) };
    let noted = each_piece(file, trailer.table_at, entries_bytes, |piece| {
        hash.update(piece);
        piece.chunks_exact(ENTRY_BYTES).try_for_each(|entry| note(Entry::decode(entry)?))
    })?;
    let (Some(()), Some(runs)) = (noted, read(file, runs_at, runs_bytes)?) else { return Ok(None) };
    hash.update(&runs);
    let is_right = hash.digest128() == trailer.table_hash;
    Ok(is_right.then(|| runs.chunks_exact(RUN_BYTES).filter_map(Run::decode).collect()))
}

/// How long a table's entries are, where its runs are, and how long. `None`: longer than any.
fn table_parts(trailer: &Trailer) -> Option<(u64, u64, u64)> {
    let entries_bytes = trailer.entries.checked_mul(ENTRY_BYTES as u64)?;
    let runs = Some(trailer.runs).filter(|runs| *runs <= MOST_RUNS as u64)?;
    Some((entries_bytes, trailer.table_at.checked_add(entries_bytes)?, runs * RUN_BYTES as u64))
}

/// Where a table's last page ends: its trailer stands there.
fn table_end(trailer: &Trailer) -> Option<u64> {
    let (_, runs_at, runs_bytes) = table_parts(trailer)?;
    runs_at.checked_add(runs_bytes)?.checked_next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a look at each run in each addition it would take an hour.
    #[test]
    fn a_long_chain_adds_to_many_runs_of_zero_pages() {
        const RUNS: u64 = 100_000;
        let mut zero = Zero::default();
        let mut runs: Vec<_> = (0..RUNS).rev().map(|run| (4 * run, 4 * run + 1)).collect();
        zero.add(&mut runs);
        for run in 0..RUNS {
            zero.add(&mut runs);
            runs.push((4 * run + 2, 4 * run + 3));
            zero.add(&mut runs);
        }
        assert!((0..4 * RUNS).all(|page| zero.contains(page) == page.is_multiple_of(2)));
        assert_eq!(zero.0.len() as u64, 2 * RUNS);
    }

    #[test]
    fn runs_of_zero_pages_that_meet_are_one() {
        let mut zero = Zero::default();
        zero.add(&mut vec![(10, 20), (40, 50), (30, 35), (12, 15), (20, 22), (8, 10)]);
        assert_eq!(zero.0, [(8, 22), (30, 35), (40, 50)].into());
        zero.add(&mut vec![(21, 40), (60, 61)]);
        assert_eq!(zero.0, [(8, 50), (60, 61)].into());
        assert!([8, 49, 60].iter().all(|page| zero.contains(*page)));
        assert!(![7, 50, 59, 61].iter().any(|page| zero.contains(*page)));
    }
}
