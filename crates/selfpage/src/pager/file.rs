//! A file as memory, within the domain's frames.

use std::io::IoSliceMut;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU16};
use std::sync::{Mutex, PoisonError};

use arrayvec::ArrayVec;
use rustix::io::{Errno, ReadWriteFlags, preadv, preadv2};
use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::frame::Table;
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};
use selfpage_core::pageset::PageSet;
use selfpage_core::sync::Ordering;

use super::Noted;
use super::apart::Apart;
use crate::FileAccess;
use crate::store::page_cache::ReadLock;
use crate::store::{Alone, Blok, Descriptor, IoChoice, LOCKED, WriteBlok, forget_engines, page_cache};
use crate::trap::thread;

mod opened;

pub(crate) use opened::Opened;

const PAGE: u64 = PAGE_BYTES as u64;
/// Where the last page that a [`Blok`] can name ends.
const END_BYTES: u64 = 1 << 44;
/// Pages in one request, at most (IOV_MAX is 1024).
const MOST: usize = 512;
const MOST_IN_TRAP: usize = 16;

/// A part of a file as memory: a memory map with a budget and a policy.
///
/// Reads go past the kernel's page cache where the file system allows (`O_DIRECT`), and do not wait for the file's lock: a
/// program that writes to the file from absent pages of this very region would otherwise wait for itself. A page that does
/// not read back as it was filled has been written to, and is saved in place.
///
/// # Source
/// Nemesis §6.6: a stretch driver over a file system in place of the USBS.
pub struct File {
    /// Past the page cache, if the file system has that.
    direct: Option<Descriptor>,
    /// Through the page cache: the last part of a page, and whenever the other must not wait.
    buffered: Descriptor,
    /// Which reads would.
    read_lock: ReadLock,
    /// Page 0 of the region is this page of the file.
    first: u64,
    access: FileAccess,
    io: IoChoice,
    /// Of a page that was given, nothing; of none where the program may not write.
    noted: Noted,
    /// How many bytes at the end of each page lay behind the end of the file when it was filled or given: a zeroed table of an entry a page,
    /// empty where the program may not write.
    tails: Table<AtomicU16>,
    /// In a forked child, where the file is the parent's to write: what is changed there.
    apart: Apart,
    /// Whether a thread was sent to write in the ordinary way once, see [`File::open_way`].
    way_opened: AtomicBool,
    /// Why the disk did not take what the page cache had; 0: it took all. The kernel says so once, and keeps those pages as if it had: no
    /// sync after that says anything of them.
    lost: AtomicI32,
    /// Who asks for that, of a page that does not read as it was saved. Never a thread in a trap, nor a forked child.
    asking: Mutex<()>,
}

impl File {
    pub(crate) fn new(opened: Opened, noted: Noted, tails: Table<AtomicU16>, apart: PageSet) -> File {
        let Opened { direct, buffered, read_lock, first, access, .. } = opened;
        File {
            direct,
            buffered,
            read_lock,
            first,
            access,
            // What makes no sense there is what a store complains of.
            io: IoChoice::from_env().unwrap_or(IoChoice::Auto),
            noted,
            tails,
            apart: Apart::new(apart),
            way_opened: false.into(),
            lost: 0.into(),
            asking: Mutex::new(()),
        }
    }

    fn tail_len(&self, index: u64) -> u64 {
        self.tails.get(index as usize).map_or(0, |tail| tail.load(Ordering::Relaxed).into())
    }

    fn set_tail_len(&self, index: u64, len: u64) {
        // Most pages have none: their part of the table is never written to, and takes no memory.
        if let Some(tail) = self.tails.get(index as usize).filter(|_| self.tail_len(index) != len) {
            tail.store(len as u16, Ordering::Relaxed);
        }
    }

    /// The length of the file now. It may have changed since.
    fn file_len(&self, context: Context) -> std::result::Result<u64, PagerError> {
        let stat = match context {
            Context::Trap => self.buffered.stat().ok_or(PagerError::WrongContext)?,
            _ => rustix::fs::fstat(self.buffered.borrow()).map_err(|errno| PagerError::Io(errno.raw_os_error()))?,
        };
        Ok(stat.st_size as u64)
    }

    /// Fills `N` pages at a time. Never a part of its caller: a trap's stack has no room for the many of a pager thread.
    #[inline(never)]
    fn fill_up_to<const N: usize>(
        &self,
        context: Context,
        pages: &mut [FillPage<'_>],
    ) -> std::result::Result<u64, PagerError> {
        let bytes = (pages.len() * PAGE_BYTES) as u64;
        let len = self.file_len(context)?;
        let mut rest = pages;
        while let Some(first) = rest.first_mut() {
            if self.apart.fill(first, &self.noted) {
                rest = &mut rest[1..];
                continue;
            }
            let first = first.index;
            let in_file = |(page, index): &(&FillPage<'_>, u64)| page.index == *index && !self.keeps(*index);
            let run = rest.iter().zip(first..).take(N).take_while(in_file).count();
            let (now, later) = rest.split_at_mut(run);
            self.read_run::<N>(context, first, now, len)?;
            rest = later;
        }
        Ok(bytes)
    }

    /// Reads neighbouring pages in one request.
    fn read_run<const N: usize>(
        &self,
        context: Context,
        index: u64,
        pages: &mut [FillPage<'_>],
        file_len: u64,
    ) -> std::result::Result<(), PagerError> {
        let offset = (self.first + index) * PAGE;
        let wanted = pages.len() as u64 * PAGE;
        let there = file_len.saturating_sub(offset).min(wanted);
        if there + PAGE <= wanted {
            // A whole page lies behind the end.
            return Err(PagerError::Truncated);
        }
        let mut slices: ArrayVec<IoSliceMut<'_>, N> =
            pages.iter_mut().map(|page| IoSliceMut::new(page.bytes.get_mut())).collect();
        let read = self.read_vectors(context, &mut slices, offset, there)?;
        drop(slices);
        if (read as u64) < there {
            return Err(PagerError::Truncated);
        }
        if let Some(last) = pages.last_mut()
            && there < wanted
        {
            last.bytes.get_mut()[(there % PAGE) as usize..].fill(0);
        }
        if self.access == FileAccess::ReadWrite {
            for (page, start) in pages.iter().zip((0..).step_by(PAGE_BYTES)) {
                let hash = self.noted.hash_of(page.bytes.get());
                if self.noted.has_others(page.index, hash) {
                    self.check_taken(context, page.index)?;
                }
                self.noted.note_hash(page.index, hash);
                self.set_tail_len(page.index, PAGE.saturating_sub(there - start));
            }
        }
        Ok(())
    }

    /// Reads past the page cache unless that would have to wait for the file's lock, which a thread may hold that waits for
    /// this page. Where a read through the cache may take it too, it does not wait either; then that is left to a mapping of the file, and in a
    /// trap to a pager thread. Only where there can be no mapping does it wait. `there`: how much of it the file has.
    fn read_vectors(
        &self,
        context: Context,
        slices: &mut [IoSliceMut<'_>],
        offset: u64,
        there: u64,
    ) -> std::result::Result<usize, PagerError> {
        let whole: usize = slices.iter().map(|slice| slice.len()).sum();
        // Looked at after the read: before it, the number could become another file's in between.
        let is_of = |file: &Descriptor| context != Context::Trap || file.is_ours();
        if let Some(direct) = &self.direct
            && self.read_lock != ReadLock::DirectAlways
            && let Ok(read) = preadv2(direct.borrow(), slices, offset, ReadWriteFlags::NOWAIT)
            && read == whole
            && is_of(direct)
        {
            return Ok(read);
        }
        if self.read_lock == ReadLock::All {
            match preadv2(self.buffered.borrow(), slices, offset, ReadWriteFlags::NOWAIT) {
                Ok(read) if read as u64 >= there && is_of(&self.buffered) => return Ok(read),
                _ if context == Context::Trap => return Err(PagerError::WrongContext),
                _ => {}
            }
            match page_cache::read(self.buffered.borrow(), offset, slices) {
                // What is left waits for the lock, and hardly anybody has that.
                Err(error) if page_cache::is_refusal(error) => {}
                read => return read,
            }
        }
        loop {
            match preadv(self.buffered.borrow(), slices, offset) {
                Ok(_) if !is_of(&self.buffered) => return Err(PagerError::WrongContext),
                Ok(read) => return Ok(read),
                Err(Errno::INTR) => {}
                Err(Errno::BADF) if context == Context::Trap => return Err(PagerError::WrongContext),
                Err(errno) => return Err(PagerError::Io(errno.raw_os_error())),
            }
        }
    }

    /// Whether what was saved to a page that reads otherwise now was somebody else's to change: a page that the page cache had, and the disk
    /// did not take, is dropped as if it had, and the file then has what it had before. Only the kernel tells the two apart, and of no single
    /// page. (While a flush is being told that, this may hear nothing: whoever flushes learns of it.)
    fn check_taken(&self, context: Context, index: u64) -> std::result::Result<(), PagerError> {
        if context == Context::Trap {
            // It may wait, and the descriptor may be another file's.
            return Err(PagerError::WrongContext);
        }
        if self.apart.has_begun() {
            // The kernel tells each error once: that is for its parent.
            return Ok(());
        }
        // And tells it to one thread: the next one is to find it noted.
        let _turn = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let errno = match self.lost.load(Ordering::Relaxed) {
            0 => page_cache::write_error(self.buffered.borrow(), (self.first + index) * PAGE),
            errno => errno,
        };
        if says_lost(errno) {
            self.lost.store(errno, Ordering::Relaxed);
            return Err(PagerError::Corrupt);
        }
        Ok(())
    }

    /// Has a thread of its own ask for room that the file has already, at `page`, which is being saved.
    ///
    /// As long as nobody has written to a file since the kernel brought its inode in, ext4 takes the lock for every write, to see
    /// whether the set-user bit must go (`S_NOSEC`), and refuses all that cannot wait. Whoever asks in this way waits for the
    /// lock, which a pager thread must not.
    fn open_way(&self, page: &SavePage<'_>) {
        if self.way_opened.swap(true, Ordering::Relaxed) {
            return;
        }
        // Of its own: the region may go while it waits.
        let Ok(file) = rustix::io::fcntl_dupfd_cloexec(self.buffered.borrow(), 0) else { return };
        // At a low number it would be in the way of what the program lends, for as long as the lock is held.
        let file = Alone::raised(file);
        let offset = (self.first + page.index) * PAGE;
        let _ = thread::start(c"selfpage-way", move || {
            let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, offset, 1);
        });
    }

    /// Writes those of the pages that must not wait for the file's lock, neighbours together, by way of the page cache. That needs no lock:
    /// a program that writes to the file from absent pages of this very region holds it, and waits for a frame that only this save may
    /// free. Pages that the file has no blocks for come here too.
    fn save_locked(&self, pages: &mut [SavePage<'_>]) {
        let mut rest = pages;
        while let Some(at) = rest.iter().position(|page| page.outcome == Err(LOCKED)) {
            let found = &mut rest[at..];
            let first = found[0].index;
            let alike = |(page, index): &(&SavePage<'_>, u64)| page.index == *index && page.outcome == Err(LOCKED);
            let run = found.iter().zip(first..).take(page_cache::MOST).take_while(alike).count();
            self.open_way(&found[0]);
            let bytes = found.iter().take(run).map(|page| page.bytes);
            let written = page_cache::write_pages(self.buffered.borrow(), (self.first + first) * PAGE, bytes);
            let done = written.map_or_else(|(done, _)| done, |()| run);
            found[..done].iter_mut().for_each(|page| page.outcome = Ok(()));
            if let Err((_, why)) = written {
                // Those behind it may have what it lacks.
                found[done].outcome = Err(why);
            }
            rest = &mut found[(done + 1).min(run)..];
        }
    }

    /// Writes what is the file's of a page, of which it has `there` bytes now, by way of the page cache, as
    /// [`File::save_locked`] does.
    ///
    /// Where the file has grown since the page was filled, the page holds zeros in place of what was appended: behind the old
    /// end only what is not zero was written by the program.
    fn save_past_the_lock(&self, page: &SavePage<'_>, there: u64) -> std::result::Result<(), PagerError> {
        let offset = (self.first + page.index) * PAGE;
        let there = there as usize;
        let filled = there.min((PAGE - self.tail_len(page.index)) as usize);
        let bytes = page.bytes;
        let parts = iter::once(0..filled).chain(not_zero(bytes, filled..there));
        page_cache::write(self.buffered.borrow(), offset, bytes, parts)
    }
}

impl Pager for File {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn reads_ahead(&self) -> bool {
        true
    }

    fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> std::result::Result<u64, PagerError> {
        match context {
            Context::Trap => self.fill_up_to::<MOST_IN_TRAP>(context, pages),
            _ => self.fill_up_to::<MOST>(context, pages),
        }
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        if self.access == FileAccess::Read {
            return Verdict::Clean;
        }
        if self.noted.is_as_noted(index, bytes) {
            Verdict::Clean
        } else if self.apart.has_no_room() {
            Verdict::Stays
        } else {
            Verdict::Changed
        }
    }

    fn given(&self, index: u64) {
        self.noted.forget(index);
        // Where the length is not to be had, what was behind the end when the page was filled counts.
        if self.access == FileAccess::ReadWrite
            && let Ok(len) = self.file_len(Context::Trap)
        {
            let there = len.saturating_sub((self.first + index) * PAGE).min(PAGE);
            self.set_tail_len(index, PAGE - there);
        }
    }

    fn forked(&self) {
        // A child's own child has a copy of it.
        self.apart.begin(self.tails.len());
        forget_engines();
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        if self.apart.has_begun() {
            return self.apart.save(pages, &self.noted);
        }
        let len = match self.file_len(Context::PagerThread) {
            Ok(len) => len,
            Err(error) => return pages.iter_mut().for_each(|page| page.outcome = Err(error)),
        };
        let there = |page: &SavePage<'_>| len.saturating_sub((self.first + page.index) * PAGE).min(PAGE);
        let whole = |page: &SavePage<'_>| there(page) == PAGE && self.tail_len(page.index) == 0;
        for part in pages.chunks_mut(MOST) {
            let mut writes = ArrayVec::<WriteBlok<'_>, MOST>::new();
            for page in part.iter().filter(|page| whole(page)) {
                let blok = Blok((self.first + page.index) as u32);
                writes.push(WriteBlok { blok, bytes: page.bytes, outcome: Err(PagerError::NoStore) });
            }
            let file = self.direct.as_ref().unwrap_or(&self.buffered).number();
            self.io.write_unless_locked(file, &mut writes);
            let outcomes: ArrayVec<_, MOST> = writes.iter().map(|write| write.outcome).collect();
            drop(writes);
            for (page, outcome) in part.iter_mut().filter(|page| whole(page)).zip(outcomes) {
                page.outcome = outcome;
            }
            self.save_locked(part);
            for page in part.iter_mut().filter(|page| !whole(page)) {
                page.outcome = match there(page) {
                    // The file was cut short under us; what is behind its end has nowhere to go.
                    0 => Err(PagerError::Truncated),
                    there => self.save_past_the_lock(page, there),
                };
            }
            for page in part.iter_mut() {
                if page.outcome == Err(PagerError::Full) {
                    // There is no store: it is the disk that has no room.
                    page.outcome = Err(PagerError::Io(libc::ENOSPC));
                }
                match page.outcome {
                    Ok(()) => self.noted.note(page.index, page.bytes),
                    // A part of it may have been written: what the file has is not what it had.
                    Err(_) => self.noted.forget(page.index),
                }
            }
        }
    }

    fn sync(&self) -> std::result::Result<(), PagerError> {
        // Nobody else is at it, who could be told of the error in place of this thread (`syncs_over_forks`).
        let errno = match self.lost.load(Ordering::Relaxed) {
            // The file has nothing of what a forked child changes.
            0 if self.apart.has_any() => return Err(PagerError::NoStore),
            // Nor has such a child written anything to it, and the kernel tells each error once: that is for its parent.
            0 if self.apart.has_begun() => 0,
            0 => rustix::fs::fdatasync(self.buffered.borrow()).err().map_or(0, Errno::raw_os_error),
            errno => errno,
        };
        if says_lost(errno) {
            self.lost.store(errno, Ordering::Relaxed);
        }
        if errno == 0 { Ok(()) } else { Err(PagerError::Io(errno)) }
    }

    /// A disk may take seconds, and a child syncs nothing.
    fn syncs_over_forks(&self) -> bool {
        true
    }

    fn keeps_untouched(&self) -> bool {
        false
    }

    fn keeps(&self, index: u64) -> bool {
        self.apart.has(index)
    }

    /// What the program discards is dropped from memory; the file keeps what was saved last.
    fn forget(&self, index: u64, count: u64) {
        self.apart.forget(index, count);
    }
}

/// Whether the kernel may mean pages that the disk did not take where it says so: it hands on whatever the driver said of them, a medium error
/// as `ENODATA`, a timeout as `ETIMEDOUT`.
const fn says_lost(errno: i32) -> bool {
    !matches!(errno, 0 | libc::EBADF | libc::EINTR)
}

/// The stretches of `range` that are not zero.
fn not_zero(bytes: &PageBytes, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut end = range.start;
    let alike = bytes[range].chunk_by(|one, next| (*one == 0) == (*next == 0));
    alike.filter_map(move |stretch| {
        let start = end;
        end += stretch.len();
        (stretch[0] != 0).then_some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::domain::Domain;
    use crate::pager::PageHash;

    /// A file that the disk takes until the test has seen enough.
    struct Slow {
        file: File,
        taken: Arc<AtomicBool>,
    }

    impl Pager for Slow {
        fn fills_in(&self) -> Context {
            self.file.fills_in()
        }
        fn extent(&self, index: u64, want: u32) -> u32 {
            self.file.extent(index, want)
        }
        fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> std::result::Result<u64, PagerError> {
            self.file.fill(context, pages)
        }
        fn sync(&self) -> std::result::Result<(), PagerError> {
            while !self.taken.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
        fn syncs_over_forks(&self) -> bool {
            self.file.syncs_over_forks()
        }
        fn forget(&self, _index: u64, _count: u64) {}
    }

    fn file() -> File {
        let named = tempfile::NamedTempFile::new().unwrap();
        named.as_file().set_len(PAGE).unwrap();
        let opened = Opened::new(named.path(), 0, FileAccess::Read).unwrap();
        let noted = Noted::new(Arc::new(PageHash::new().unwrap()), Table::empty());
        File::new(opened, noted, Table::empty(), PageSet::none())
    }

    #[test]
    fn a_region_ends_while_the_disk_takes_a_file() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let taken = Arc::new(AtomicBool::new(false));
        let region = domain.region(PAGE_BYTES).pager(Box::new(Slow { file: file(), taken: taken.clone() })).unwrap();
        let other = domain.region(PAGE_BYTES).zero().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| region.flush(0, PAGE_BYTES).unwrap());
            std::thread::sleep(Duration::from_millis(300));
            let (tell, told) = channel();
            scope.spawn(move || {
                drop(other);
                tell.send(()).unwrap();
            });
            let ended = told.recv_timeout(Duration::from_secs(10));
            taken.store(true, Ordering::SeqCst);
            assert_eq!(ended, Ok(()));
        });
    }

    #[test]
    fn what_the_disk_did_not_take_is_lost_for_good_whatever_it_said() {
        assert!(
            [libc::EIO, libc::ENOSPC, libc::ENODATA, libc::EREMOTEIO, libc::ETIMEDOUT, libc::EILSEQ]
                .into_iter()
                .all(says_lost)
        );
        assert!(![0, libc::EBADF, libc::EINTR].into_iter().any(says_lost));
    }
}
