//! Traces: what happened to which page and when, written to a file by a thread of the domain's own, and read back.
//!
//! A trace file is little-endian. It begins with 32 bytes: the magic `SELFPGTR`, the version (u32), bytes of a page (u32), bytes
//! of a record (u32), the process (u32), and nanoseconds since 1970 when it began (u64). Then come records of 32 bytes: kind (u8),
//! access (u8: 0 unknown, 1 read, 2 write), two bytes of zero, thread (u32, 0 unknown), nanoseconds since the trace began (u64),
//! page (u64, an address divided by the bytes of a page), value (u64). `docs/monitoring.md` lists the kinds.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use selfpage_core::addr::{Frame, PAGE_BYTES, PageNo};
use selfpage_core::fault::sample;
use selfpage_core::linux::die;
use selfpage_core::region::Access;
use selfpage_core::sync;
pub use selfpage_core::tracer::{Event, Kind};

use crate::cancel::Uncancelled;
use crate::domain::Inner;
use crate::error::{self, Error, Result};
use crate::store::Descriptor;
use crate::usage::{Drawn, Sampling};

/// What a trace file begins with.
pub const MAGIC: [u8; 8] = *b"SELFPGTR";
/// The version of the format.
pub const VERSION: u32 = 1;
/// Bytes of a record, and of the header.
pub const RECORD_BYTES: usize = 32;
/// Events that may wait to be written: a few milliseconds' worth.
pub(crate) const PLACES: usize = 1 << 16;
/// Pages that are sampled for each estimate of the working set.
const SAMPLED: u32 = 256;
/// How often the queue is emptied.
const EVERY_US: u32 = 5_000;

const REGION: u8 = 64;
const NAME: u8 = 65;
const WORKING_SET: u8 = 66;
const DROPPED: u8 = 67;

/// Where a domain's trace goes.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    pub(crate) path: PathBuf,
    /// How often the working set is estimated; zero: never.
    pub(crate) working_set_every: Duration,
}

/// What the writer and those who wait for it share.
#[derive(Default)]
pub(crate) struct Writing {
    wake: sync::Event,
    asked: AtomicU32,
    written: AtomicU32,
    ended: AtomicU64,
    /// Whether the domain is a forked child's, which had it from its parent.
    inherited: AtomicBool,
}

/// One record of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// Something happened to a page.
    Event(Event),
    /// From now on there is a region.
    Region {
        /// Its first page.
        first: PageNo,
        /// How many pages it has.
        pages: u64,
        /// What it is called.
        name: String,
    },
    /// The working set of the time since the last such record, in pages, by a sample.
    WorkingSet {
        /// When.
        time_ns: u64,
        /// The estimate.
        pages: u64,
        /// No fewer, in 95 of 100 cases.
        least: u32,
        /// No more, in 95 of 100 cases.
        most: u32,
    },
    /// So many events did not fit the queue since the last such record.
    Dropped(u64),
}

/// A trace that was read.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Trace {
    /// What it begins with.
    pub head: Head,
    /// The records, about in the order of time.
    pub records: Vec<Record>,
}

/// What a trace is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Head {
    /// The process that was traced.
    pub pid: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Nanoseconds since 1970 when it began.
    pub began_unix_ns: u64,
}

/// A trace that is being read: its records, one after the other, in memory that does not grow with it. An error is the last.
#[derive(Debug)]
pub struct Records<R> {
    head: Head,
    source: R,
    /// The last that was read: a region's name comes behind it.
    last: Option<Record>,
    /// How many records of the file were read.
    count: usize,
    ended: bool,
    failure: Option<io::Error>,
}

/// Makes the trace's file: the first free name of PATH, PATH.PID, PATH.PID.2 and so on. The program may have children, and may
/// become another program.
fn create(path: &Path) -> Result<(PathBuf, File)> {
    // Whoever names a directory wants the trace in it, and would not look beside it.
    if path.is_dir() {
        let cause = "it is a directory; name a file, in it or elsewhere";
        return Err(Error::new(error::Kind::Invalid, "open", named(path), cause));
    }
    let with = |end: String| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    let pid = std::process::id();
    let names = [path.to_owned(), with(format!(".{pid}"))].into_iter();
    for name in names.chain((2..1000).map(|number| with(format!(".{pid}.{number}")))) {
        match File::create_new(&name) {
            Err(taken) if taken.kind() == io::ErrorKind::AlreadyExists => {}
            Ok(file) => return Ok((name, file)),
            Err(why) => return Err(Error::system("open", named(&name), why)),
        }
    }
    Err(Error::system("open", named(path), io::Error::from(io::ErrorKind::AlreadyExists)))
}

fn named(path: &Path) -> String {
    format!("trace {}", path.display())
}

/// The writer of a trace.
pub(crate) struct Writer {
    name: PathBuf,
    file: Descriptor,
    bytes: Vec<u8>,
    /// The regions that were told and are there still, by their first page: how many pages, and the name.
    regions: BTreeMap<u64, (u64, String)>,
    every: Duration,
    /// When the last sample of the writer's was due, and what was drawn, unless the program had one of its own then.
    sample: Option<(u64, Option<Drawn>)>,
}

impl Writer {
    /// Begins the file.
    pub(crate) fn begin(to: &Destination) -> Result<Writer> {
        let (name, mut file) = create(&to.path)?;
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let mut head = [0; RECORD_BYTES];
        head[..8].copy_from_slice(&MAGIC);
        for (at, value) in [(8, VERSION), (12, PAGE_BYTES as u32), (16, RECORD_BYTES as u32), (20, std::process::id())]
        {
            head[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        head[24..].copy_from_slice(&began.to_le_bytes());
        if let Err(why) = file.write_all(&head) {
            let _ = std::fs::remove_file(&name);
            return Err(Error::system("write", named(&name), why));
        }
        let file = Descriptor::new(file.into()).map_err(|why| Error::system("open", named(&name), why))?;
        Ok(Writer {
            name,
            file,
            bytes: Vec::new(),
            regions: BTreeMap::new(),
            every: to.working_set_every,
            sample: None,
        })
    }

    fn put(&mut self, kind: u8, event: [u64; 3], access: u8, thread: u32) {
        self.bytes.extend_from_slice(&[kind, access, 0, 0]);
        self.bytes.extend_from_slice(&thread.to_le_bytes());
        event.iter().for_each(|word| self.bytes.extend_from_slice(&word.to_le_bytes()));
    }

    fn put_event(&mut self, event: Event) {
        let access = match event.access {
            None => 0,
            Some(Access::Read) => 1,
            Some(Access::Write) => 2,
        };
        self.put(event.kind as u8, [event.time_ns, event.page.0, 0], access, event.thread);
    }

    /// Tells the regions that are new, if nobody is changing them just now.
    fn put_regions(&mut self, inner: &Inner, now_ns: u64) {
        let Ok(regions) = inner.regions.try_lock() else { return };
        for bound in regions.values() {
            let range = bound.core().range;
            let given = bound.given_name();
            let told = self.regions.get(&range.first.0);
            if told.is_some_and(|(count, name)| *count == range.count && name == given) {
                continue;
            }
            self.regions.insert(range.first.0, (range.count, given.into()));
            self.put(REGION, [now_ns, range.first.0, range.count], 0, 0);
            let mut name = [0; RECORD_BYTES];
            name[0] = NAME;
            let len = (0..=given.len().min(RECORD_BYTES - 1)).rev().find(|at| given.is_char_boundary(*at)).unwrap_or(0);
            name[1..1 + len].copy_from_slice(&given.as_bytes()[..len]);
            self.bytes.extend_from_slice(&name);
        }
        self.regions.retain(|first, _| regions.contains_key(first));
    }

    fn put_working_set(&mut self, inner: &Inner, now_ns: u64) {
        if self.every.is_zero() {
            return;
        }
        if let Some((began_ns, drawn)) = &self.sample {
            if u128::from(now_ns.saturating_sub(*began_ns)) < self.every.as_nanos() {
                return;
            }
            // The program may have begun a sample of its own, or forked: then nothing is known of this time.
            if let Some(drawn) = drawn.as_ref().filter(|drawn| drawn.is_going_on(inner)) {
                let usage = drawn.usage(inner, |pages| sample::unused(inner.state(), pages));
                let set = usage.working_set();
                let page = PAGE_BYTES as u64;
                let narrow = |bytes: u64| u64::from(u32::try_from(bytes / page).unwrap_or(u32::MAX));
                let bounds = narrow(set.least_bytes) | narrow(set.most_bytes) << 32;
                self.put(WORKING_SET, [now_ns, set.bytes / page, bounds], 0, 0);
            }
        }
        // Pages that somebody is at are left out: the queue is not emptied meanwhile.
        let unmap = |pages: &[(PageNo, Frame)]| sample::begin(inner.state(), pages);
        let turn = inner.drawing.begin();
        // Another would end the program's.
        let is_free = inner.own_sample.load(Ordering::SeqCst) == 0;
        let drawn = is_free.then(|| Drawn::draw(inner, &turn, None, Sampling::Pages(SAMPLED), unmap));
        self.sample = Some((now_ns, drawn));
    }

    /// Writes what happens until the domain ends.
    ///
    /// # Context
    /// PagerThread.
    pub(crate) fn run(mut self, inner: &Arc<Inner>) {
        let (state, writing) = (inner.state(), &inner.writing);
        let began_ns = state.tracer.began_ns();
        loop {
            let ending = inner.stopping();
            let asked = writing.asked.load(Ordering::SeqCst);
            // What happened before anybody asked is among these, perhaps behind an event that a thread is still putting down.
            let due = state.tracer.queued();
            let mut taken = 0;
            let seen = writing.wake.count();
            let now_ns = state.mmu.now_ns().saturating_sub(began_ns);
            self.put_regions(inner, now_ns);
            // No more at a time than there can be: the thread has other things to do.
            for _ in 0..PLACES {
                let Some(event) = state.tracer.next() else { break };
                self.put_event(event);
                taken += 1;
            }
            let dropped = state.tracer.take_dropped();
            if dropped > 0 {
                self.put(DROPPED, [now_ns, 0, dropped], 0, 0);
            }
            if !ending {
                self.put_working_set(inner, now_ns);
            }
            if let Err(why) = self.file.as_file().write_all(&self.bytes) {
                return writing.end(&format!("the trace {} ends here: {why}", self.name.display()));
            }
            self.bytes.clear();
            if taken >= due {
                writing.written.store(asked, Ordering::SeqCst);
            }
            if ending {
                return;
            }
            writing.wake.wait(state.mmu, seen, EVERY_US);
        }
    }
}

impl Writing {
    /// In a forked child: nothing that was asked for is waited for here. Who waited when a handler of its signals forked knows the number.
    pub(crate) fn restart(&self) {
        self.written.store(self.asked.load(Ordering::SeqCst), Ordering::SeqCst);
        self.ended.store(0, Ordering::SeqCst);
        self.inherited.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_inherited(&self) -> bool {
        self.inherited.load(Ordering::SeqCst)
    }

    /// Nothing is written any more, because of this.
    pub(crate) fn end(&self, why: &str) {
        die::tell(&[&format!("selfpage: {why}\n")]);
        self.ended.store(1, Ordering::SeqCst);
    }

    /// Waits until what has happened so far is written.
    pub(crate) fn flush(&self, inner: &Inner) {
        let _uncancelled = Uncancelled::begin();
        let wanted = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.wake.signal(inner.state().mmu);
        while self.written.load(Ordering::SeqCst) < wanted
            && self.ended.load(Ordering::SeqCst) == 0
            && inner.is_served()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What is wrong with a trace.
fn wrong(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

fn cut(after: usize, what: &str) -> io::Error {
    wrong(format!("it is cut short after {after} bytes, within {what}"))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |half, byte| half << 8 | u32::from(*byte))
}

/// Fills `bytes` as far as there is something. How far.
fn read_up_to(source: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < bytes.len() {
        match source.read(&mut bytes[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(len)
}

impl Records<BufReader<File>> {
    /// Begins to read a trace file.
    ///
    /// # Errors
    /// The file cannot be read, is no trace, or is of another version.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Records<BufReader<File>>> {
        Records::begin(BufReader::new(File::open(path)?))
    }
}

impl<R: Read> Records<R> {
    fn begin(mut source: R) -> io::Result<Records<R>> {
        let mut head = [0; RECORD_BYTES];
        let len = read_up_to(&mut source, &mut head)?;
        if len == 0 {
            return Err(wrong("it is empty: nothing was traced"));
        }
        if !head.starts_with(&MAGIC[..len.min(MAGIC.len())]) {
            return Err(wrong("it is no trace of selfpage (a trace begins with SELFPGTR)"));
        }
        if len < RECORD_BYTES {
            return Err(cut(len, "its header"));
        }
        let version = half(&head, 8);
        if version != VERSION {
            return Err(wrong(format!("it has version {version} of the format, and this program reads {VERSION}")));
        }
        let (page_bytes, record_bytes) = (half(&head, 12), half(&head, 16));
        // No processor has others, and who reads a trace multiplies by it.
        if !page_bytes.is_power_of_two() || page_bytes < PAGE_BYTES as u32 || record_bytes != RECORD_BYTES as u32 {
            return Err(wrong(format!(
                "its header is damaged: it has pages of {page_bytes} bytes and records of {record_bytes}"
            )));
        }
        let head = Head { pid: half(&head, 20), page_bytes, began_unix_ns: word(&head, 24) };
        Ok(Records { head, source, last: None, count: 0, ended: false, failure: None })
    }

    /// What the trace is of.
    pub fn head(&self) -> Head {
        self.head
    }

    /// The next record that is no name. `None`: there is no more.
    fn read(&mut self) -> io::Result<Option<Record>> {
        let mut bytes = [0; RECORD_BYTES];
        loop {
            match read_up_to(&mut self.source, &mut bytes)? {
                0 => return Ok(None),
                RECORD_BYTES => {}
                len => return Err(cut((self.count + 1) * RECORD_BYTES + len, "a record")),
            }
            let at = self.count;
            self.count += 1;
            if let (NAME, Some(Record::Region { name, .. })) = (bytes[0], &mut self.last) {
                *name = String::from_utf8_lossy(&bytes[1..]).trim_end_matches('\0').to_owned();
                continue;
            }
            let known = record(&bytes).ok_or_else(|| format!("there is no kind {}", bytes[0]));
            let whole = known.and_then(|record| match lies_in_memory(&record, self.head.page_bytes.into()) {
                true => Ok(record),
                false => Err("no address is that high".into()),
            });
            return whole.map(Some).map_err(|why| wrong(format!("record {at} is damaged: {why}")));
        }
    }
}

impl<R: Read> Iterator for Records<R> {
    type Item = io::Result<Record>;

    fn next(&mut self) -> Option<io::Result<Record>> {
        while !self.ended {
            match self.read() {
                Ok(Some(record)) => {
                    if let Some(before) = self.last.replace(record) {
                        return Some(Ok(before));
                    }
                }
                Ok(None) => self.ended = true,
                Err(why) => (self.ended, self.failure) = (true, Some(why)),
            }
        }
        self.last.take().map(Ok).or_else(|| self.failure.take().map(Err))
    }
}

impl Trace {
    /// Reads a trace file.
    ///
    /// # Errors
    /// The file cannot be read, is no trace, is of another version, or is cut short; or memory does not hold what is in it.
    pub fn read(path: impl AsRef<Path>) -> io::Result<Trace> {
        Trace::of(Records::open(path)?)
    }

    /// Reads a trace from memory.
    ///
    /// # Errors
    /// As for [`Trace::read`].
    pub fn parse(bytes: &[u8]) -> io::Result<Trace> {
        Trace::of(Records::begin(bytes)?)
    }

    fn of(source: Records<impl Read>) -> io::Result<Trace> {
        let (head, mut records) = (source.head, Vec::new());
        for record in source {
            records.try_reserve(1)?;
            records.push(record?);
        }
        Ok(Trace { head, records })
    }

    /// The events, about in the order of time.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.records.iter().filter_map(|record| match record {
            Record::Event(event) => Some(event),
            _ => None,
        })
    }

    /// How many events were dropped because they came faster than they could be written.
    pub fn dropped(&self) -> u64 {
        let dropped = |record: &Record| if let Record::Dropped(count) = record { *count } else { 0 };
        self.records.iter().map(dropped).fold(0, u64::saturating_add)
    }
}

/// Whether all that it is about has addresses.
fn lies_in_memory(record: &Record, page_bytes: u64) -> bool {
    let end = match record {
        Record::Event(event) => event.page.0.checked_add(1),
        Record::Region { first, pages, .. } => first.0.checked_add(*pages),
        Record::WorkingSet { pages, .. } => Some(*pages),
        Record::Dropped(_) => Some(0),
    };
    end.is_some_and(|end| end.checked_mul(page_bytes).is_some())
}

fn record(bytes: &[u8]) -> Option<Record> {
    let (time_ns, page, value) = (word(bytes, 8), word(bytes, 16), word(bytes, 24));
    Some(match bytes[0] {
        REGION => Record::Region { first: PageNo(page), pages: value, name: String::new() },
        WORKING_SET => Record::WorkingSet { time_ns, pages: page, least: value as u32, most: (value >> 32) as u32 },
        DROPPED => Record::Dropped(value),
        code => Record::Event(Event {
            time_ns,
            page: PageNo(page),
            kind: Kind::from_code(code)?,
            access: match bytes[1] {
                0 => None,
                1 => Some(Access::Read),
                _ => Some(Access::Write),
            },
            thread: half(bytes, 4),
        }),
    })
}

#[cfg(test)]
mod tests {
    use selfpage_core::addr::VirtAddr;

    use super::*;
    use crate::Domain;

    /// A trace of one record.
    fn parse(kind: u8, words: [u64; 3]) -> io::Result<Trace> {
        let mut bytes = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0".to_vec();
        bytes.extend_from_slice(&[kind, 0, 0, 0, 0, 0, 0, 0]);
        words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        Trace::parse(&bytes)
    }

    #[test]
    fn what_no_address_belongs_to_is_damaged() {
        let last = (1 << 52) - 1;
        for (kind, page, value) in
            [(1, u64::MAX, 0), (1, last, 0), (REGION, u64::MAX, 1), (REGION, 1, last), (WORKING_SET, last + 1, 0)]
        {
            let why = parse(kind, [0, page, value]).unwrap_err().to_string();
            assert!(why.contains("record 0 is damaged: no address is that high"), "{why}");
        }
        for page_bytes in [0, 1, 2048, 4097, 12288, u32::MAX] {
            let mut bytes = b"SELFPGTR\x01\0\0\0".to_vec();
            bytes.extend_from_slice(&page_bytes.to_le_bytes());
            bytes.extend_from_slice(b"\x20\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0");
            let why = Trace::parse(&bytes).unwrap_err().to_string();
            assert!(why.contains("its header is damaged"), "{page_bytes}: {why}");
        }
        assert!(parse(1, [0, last - 1, 0]).is_ok() && parse(REGION, [0, 1, last - 1]).is_ok());
        assert_eq!(parse(DROPPED, [0, 0, u64::MAX]).unwrap().dropped(), u64::MAX);
    }

    /// A domain may have regions at other addresses all its life.
    #[test]
    fn a_region_that_is_gone_is_forgotten_and_told_anew_where_it_comes_again() {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let to = Destination { path: dir.path().join("trace"), working_set_every: Duration::ZERO };
        let (mut writer, inner) = (Writer::begin(&to).unwrap(), &domain.life().inner);
        let addr = 0x1234_6600_0000;
        for round in 0..2 {
            let region = domain.region(PAGE_BYTES).at(addr).name("it").zero().unwrap();
            let other = domain.region(PAGE_BYTES).zero().unwrap();
            (0..2).for_each(|_| writer.put_regions(inner, round));
            assert_eq!(writer.regions.len(), 2);
            drop((region, other));
            writer.put_regions(inner, round);
            assert_eq!(writer.regions.len(), 0);
        }
        let mut bytes = std::fs::read(&to.path).unwrap();
        bytes.append(&mut writer.bytes);
        let trace = Trace::parse(&bytes).unwrap();
        let told = Record::Region { first: VirtAddr(addr).page(), pages: 1, name: "it".into() };
        assert_eq!(trace.records.iter().filter(|record| **record == told).count(), 2);
        assert_eq!(trace.records.len(), 4);
    }
}
