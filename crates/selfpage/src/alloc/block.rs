//! Blocks: allocated, freed, resized, asked about.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use selfpage_core::addr::PAGE_BYTES;

use super::culprit::Culprit;
use super::frames;
use super::lock::{Held, Lock};
use super::pages::{Given, Pages, Sweep};
use super::reservation::{LEAST_ROOM, may_contain};
use super::rounds::Rounds;
use super::run::Run;
use super::stats::{NOTED, Stats};
use super::workers::WORKERS;

/// All of the allocator.
pub(super) static PAGES: Lock<Pages> = Lock::new(Pages::new());

/// Blocks up to this length get their frames in one go when there are none for them, instead of a fault for each page.
const POPULATED_BYTES: usize = 4 * LEAST_ROOM;

/// Every machine has so much: no shorter block is worth the question.
const UNASKED_BYTES: usize = 1 << 30;

/// The longest block.
const MOST_BYTES: usize = isize::MAX as usize - PAGE_BYTES;

/// Whole pages for `len_bytes`, at least one.
fn whole_pages(len_bytes: usize) -> Option<usize> {
    (len_bytes <= MOST_BYTES).then(|| len_bytes.max(1).next_multiple_of(PAGE_BYTES))
}

/// Whether a block may be so long on this machine.
#[inline]
fn may_ever_be(len_bytes: usize) -> bool {
    len_bytes <= UNASKED_BYTES || frames::machine_has(len_bytes)
}

/// Allocates at least `len_bytes`, rounded up to whole pages, at a multiple of `align_bytes` (a power of two, at most 1 GiB) and
/// of the page size. The contents are anything: what an earlier block held, or zeros.
///
/// `None`: no memory, or a length or an alignment that cannot be.
///
/// # Context
/// Any but a trap's. Allocates nothing elsewhere, so an allocator may stand on it; may be called before main and after exit.
#[inline]
pub fn allocate(len_bytes: usize, align_bytes: usize) -> Option<NonNull<u8>> {
    let given = allocate_given(len_bytes, align_bytes)?;
    NonNull::new(given.addr as *mut u8)
}

/// As [`allocate`], and all of it holds zeros: cleared, where it is not known to.
///
/// # Context
/// As for [`allocate`].
pub fn allocate_zeroed(len_bytes: usize, align_bytes: usize) -> Option<NonNull<u8>> {
    let given = allocate_given(len_bytes, align_bytes)?;
    let block = NonNull::new(given.addr as *mut u8)?;
    let dirty_bytes = given.dirty_bytes.min(whole_pages(len_bytes)?);
    // SAFETY: slot-held: a new block, longer than this, which nobody else knows of.
    unsafe { frames::clear(given.addr, dirty_bytes) };
    Some(block)
}

#[inline]
pub(super) fn allocate_given(len_bytes: usize, align_bytes: usize) -> Option<Given> {
    let len_bytes = whole_pages(len_bytes)?;
    if !align_bytes.is_power_of_two() || !may_ever_be(len_bytes) {
        return None;
    }
    let mut pages = PAGES.take();
    let given = pages.allocate(len_bytes, align_bytes)?;
    settle(pages);
    if given.absent_bytes > 0 && len_bytes <= POPULATED_BYTES {
        frames::populate(given.absent, given.absent_bytes);
        if given.absent + given.absent_bytes > given.addr + len_bytes {
            PAGES.take().drop_again(given.absent, given.absent_bytes);
        }
    }
    Some(given)
}

/// Notes what others ask for, drops what is too many, without the lock, and gives the lock back.
#[inline]
pub(super) fn settle(pages: Held<'static, Pages>) {
    NOTED.note(&pages);
    let excess = pages.retention.excess_bytes();
    if excess != 0 {
        drop_excess(pages);
    }
}

#[cold]
fn drop_excess(mut pages: Held<'static, Pages>) {
    loop {
        let excess = pages.retention.excess_bytes();
        if pages.give_tail(excess, frames::drop_frames).is_some() {
            drop(pages);
            pages = PAGES.take();
            continue;
        }
        let Some(surplus) = pages.surplus(excess) else { return };
        drop(pages);
        // SAFETY: slot-held: the end of a free slot, which is ours until `dropped`.
        let gone = unsafe { frames::drop_frames(surplus.addr, surplus.len_bytes) };
        pages = PAGES.take();
        pages.dropped(surplus, gone);
    }
}

/// Frees a block. Its frames are kept for the next, within the bound.
///
/// A pointer that is no block ends the process, with a line that says what it is.
///
/// # Context
/// As for [`allocate`].
///
/// # Safety
/// *slot-held*: `block` came from this allocator and nobody uses it any more.
#[inline]
pub unsafe fn free(block: NonNull<u8>) {
    let addr = block.as_ptr() as usize;
    let mut pages = PAGES.take();
    match pages.block(addr) {
        Ok(id) => pages.free(id),
        Err(culprit) => return free_item(pages, culprit, addr),
    }
    settle(pages);
}

/// What is no block may be an item of a batch.
#[cold]
fn free_item(pages: Held<'static, Pages>, culprit: Culprit, addr: usize) {
    match pages.run(addr) {
        Some(run) => {
            drop(pages);
            Run::at(run).free(&[NonNull::new(addr as *mut u8)]);
        }
        None => blame(pages, culprit, "free", addr),
    }
}

/// Swaps what two blocks of one length (in whole pages) hold, by their frames wherever they are large. False: they are not of
/// one length, or there is no memory; then nothing has changed.
///
/// # Context
/// As for [`allocate`].
///
/// # Safety
/// *slot-held*: both blocks are the caller's, and nobody uses them meanwhile.
pub unsafe fn exchange(a: NonNull<u8>, b: NonNull<u8>) -> bool {
    let mut pages = PAGES.take();
    let mut blocks = [a, b].map(|block| pages.block(block.as_ptr() as usize).map_err(|culprit| (culprit, block)));
    for block in &mut blocks {
        if let Err((culprit, block)) = *block {
            blame(pages, culprit, "exchange", block.as_ptr() as usize);
        }
    }
    let [Ok(a), Ok(b)] = blocks else { return false };
    a == b || (pages.len_bytes(a) == pages.len_bytes(b) && pages.exchange(a, b))
}

#[cold]
pub(super) fn blame(pages: Held<'static, Pages>, culprit: Culprit, call: &str, addr: usize) -> ! {
    drop(pages);
    culprit.die(call, addr)
}

/// Makes a block `len_bytes` long, where it is or elsewhere, and returns where it is now. Its contents stay as far as the
/// shorter of the two lengths; what is new holds anything. Where it has to move, its frames do, and no bytes, if it was longer than 4 MiB;
/// shorter ones may be copied.
///
/// `None`: no memory, and the block is as it was.
///
/// # Context
/// As for [`allocate`].
///
/// # Safety
/// *slot-held*: as for [`free`], where the block moves.
pub unsafe fn resize(block: NonNull<u8>, len_bytes: usize) -> Option<NonNull<u8>> {
    let len_bytes = whole_pages(len_bytes)?;
    let addr = block.as_ptr() as usize;
    let may_be = may_ever_be(len_bytes);
    let mut pages = PAGES.take();
    let id = match pages.block(addr) {
        Ok(id) => id,
        Err(culprit) => blame(pages, culprit, "realloc", addr),
    };
    if !may_be {
        return None;
    }
    let now = pages.resize(id, len_bytes)?;
    settle(pages);
    NonNull::new(now as *mut u8)
}

/// As [`resize`], but only where the block is. False: it is as it was.
///
/// # Context
/// As for [`allocate`].
///
/// # Safety
/// *slot-held*: the block is the caller's, and nobody uses what is cut off.
pub unsafe fn resize_in_place(block: NonNull<u8>, len_bytes: usize) -> bool {
    let Some(len_bytes) = whole_pages(len_bytes) else { return false };
    let addr = block.as_ptr() as usize;
    let may_be = may_ever_be(len_bytes);
    let mut pages = PAGES.take();
    let id = match pages.block(addr) {
        Ok(id) => id,
        Err(culprit) => blame(pages, culprit, "realloc", addr),
    };
    let done = may_be && (pages.resize_in_place(id, len_bytes) || pages.resize_among_closed(id, len_bytes));
    settle(pages);
    done
}

/// The pages, for a question about an address that may be theirs. `None`: it lies elsewhere, and no lock is taken.
fn pages_of(addr: usize) -> Option<Held<'static, Pages>> {
    may_contain(addr).then(|| PAGES.take())
}

/// How long a block is, in whole pages, or an item of a batch. `None`: `block` is none, or was freed.
pub fn usable_bytes(block: NonNull<u8>) -> Option<usize> {
    let addr = block.as_ptr() as usize;
    let pages = pages_of(addr)?;
    match pages.block(addr) {
        Ok(id) => Some(pages.len_bytes(id)),
        Err(_) => {
            let run = Run::at(pages.run(addr)?);
            run.culprit(addr).is_none().then(|| run.item_bytes())
        }
    }
}

/// What a pointer is that no block begins at, nor an item of a batch. `None`: one does.
pub fn culprit(addr: usize) -> Option<Culprit> {
    let Some(pages) = pages_of(addr) else { return Some(Culprit::Foreign) };
    let culprit = pages.block(addr).err()?;
    pages.run(addr).map_or(Some(culprit), |run| Run::at(run).culprit(addr))
}

/// Whether `addr` is of this allocator's addresses, in use or not. No lock is taken.
#[inline]
pub fn owns(addr: usize) -> bool {
    may_contain(addr)
}

/// Whether a block of `len_bytes` that cannot be had is not to be looked for elsewhere: there is no memory for it. Else it may be addresses that lack,
/// which are reserved if there was no block yet, or mappings.
///
/// # Context
/// As for [`allocate`].
pub fn lacks_memory_alone(len_bytes: usize) -> bool {
    !may_ever_be(len_bytes) || !lacked_mappings() && PAGES.take().has_all_addresses()
}

/// Whether there was a block that found no mappings left. No lock is taken.
pub fn lacked_mappings() -> bool {
    NOTED.lacked_mappings.load(Ordering::Relaxed)
}

/// Where the block begins that `addr` is in, and how long it is. `None`: it is in no block.
pub fn block_around(addr: usize) -> Option<(NonNull<u8>, usize)> {
    let (start, len_bytes) = pages_of(addr)?.around(addr)?;
    Some((NonNull::new(start as *mut u8)?, len_bytes))
}

/// What the allocator has, and what it has done.
pub fn stats() -> Stats {
    let pages = PAGES.take();
    let retention = &pages.retention;
    Stats {
        live_bytes: retention.live_bytes,
        retained_bytes: retention.framed_bytes,
        peak_bytes: retention.peak_bytes,
        most_live_bytes: retention.most_live_bytes(),
        counts: pages.counts,
    }
}

/// Keeps at most `bytes` of frames beside those of blocks, from now on; `None`: as many as have, with those of blocks, 1.25 times what was
/// live at most lately. Gives back what is too many.
///
/// With `Some(0)` blocks are allocated, resized and freed by calls for memory alone (`mmap`, `munmap`, `mprotect`, `mremap`, `madvise`), which a
/// program has that filters its calls; threads that wait for each other call `futex`.
pub fn set_retention(bytes: Option<usize>) {
    frames::ask_for_limits(bytes != Some(0));
    let mut pages = PAGES.take();
    pages.retention.keep_bytes = bytes;
    settle(pages);
}

/// From now on nobody can touch a block that was freed, or the place that one moved from: who does is stopped by `SIGSEGV`, on the spot.
/// Its addresses are not used again until 4096 further blocks were freed, or none are left. The frames go back to the kernel at
/// once, so that blocks cost what they cost without this allocator, and more.
///
/// # Context
/// As for [`allocate`].
pub fn trap_on_use_after_free() {
    PAGES.take().begin_quarantine();
}

/// Gives back frames to the kernel until at most `keep_bytes` are kept beside those of blocks, all that it was left before and has
/// not taken, and the mappings of slots that have no frames. Returns how many bytes went that were kept.
pub fn trim(keep_bytes: usize) -> usize {
    let went = give_back(keep_bytes, frames::drop_frames, Patience::Waits);
    let sweep = PAGES.take().begin_sweep();
    if let Some(mut sweep) = sweep {
        while PAGES.take().sweep(&mut sweep) {}
    }
    let mut bare = Sweep::default();
    while PAGES.take().close_bare(&mut bare) {}
    went
}

/// What becomes of frames that cannot be given back because a fork waits for those who are at it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    /// They go when it has gone on.
    Waits,
    /// They stay: a handler may have interrupted one of those.
    Leaves,
}

/// By `give`, which says whether the range reads as zeros afterwards.
pub(super) fn give_back(keep_bytes: usize, give: unsafe fn(usize, usize) -> bool, patience: Patience) -> usize {
    let (mut went, mut rounds) = (0, Rounds::new());
    loop {
        let mut pages = PAGES.take();
        let kept = pages.retention.framed_bytes - pages.retention.live_bytes;
        let excess = kept.saturating_sub(keep_bytes);
        if let Some(bytes) = pages.give_tail(excess, give) {
            went += bytes;
            continue;
        }
        let Some(surplus) = pages.surplus(excess) else {
            // A handler of a fork of this thread's, which others wait for, is not to wait for theirs.
            if excess == 0 || patience == Patience::Leaves || !WORKERS.is_awaited() || pages.is_lent() {
                return went;
            }
            drop(pages);
            rounds.pass();
            continue;
        };
        drop(pages);
        // SAFETY: slot-held: the end of a free slot, which is ours until `dropped`.
        let gone = unsafe { give(surplus.addr, surplus.len_bytes) };
        PAGES.take().dropped(surplus, gone);
        went += surplus.len_bytes;
    }
}

/// How short memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Severity {
    /// Some wait for it.
    Some,
    /// It has been short for a while.
    Full,
}

/// Gives back frames because memory is short: half of those kept, which the kernel takes when it likes; or all of them, now, with what
/// it was left before. Returns how many bytes.
pub fn relieve(severity: Severity) -> usize {
    let kept = stats();
    let kept = kept.retained_bytes - kept.live_bytes;
    match severity {
        Severity::Some => give_back(kept / 2, frames::free_frames, Patience::Waits),
        Severity::Full => trim(0),
    }
}

/// Forgets an eighth of how far the most that was live lies above what is, and gives back what is too many then. For whoever comes
/// by once a second.
pub fn decay() {
    let mut pages = PAGES.take();
    pages.retention.decay();
    settle(pages);
}

/// Lets blocks and what is kept have at most `most_bytes`, though never less than what is live; and the process as much as its control groups
/// may have, if they have a limit.
pub(super) fn stay_below(limit_bytes: Option<usize>, most_bytes: usize) {
    let mut pages = PAGES.take();
    pages.retention.limit_bytes = limit_bytes.unwrap_or(usize::MAX);
    pages.retention.most_bytes = most_bytes;
    settle(pages);
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, CString, OsStr};
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::alloc::{fork, keeper, limit};
    use crate::child;

    /// Objects that lie beside the heap's range are asked about at every `free`.
    #[test]
    fn who_asks_about_an_address_elsewhere_waits_for_nobody() {
        let block = allocate(1 << 20, 1).unwrap();
        let addr = block.as_ptr() as usize;
        let (tells, told) = mpsc::channel();
        let held = PAGES.take();
        std::thread::spawn(move || {
            let other = NonNull::from(&0u64).cast();
            let addr = other.as_ptr() as usize;
            tells.send((usable_bytes(other), owns(addr), block_around(addr).is_some())).unwrap();
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((None, false, false)));
        drop(held);
        assert_eq!(
            (usable_bytes(block), owns(addr), block_around(addr + 1)),
            (Some(1 << 20), true, Some((block, 1 << 20)))
        );
        // SAFETY: our block, which nobody uses any more.
        unsafe { free(block) };
    }

    /// What the object heap asks around each block. Frames move under the lock, which may take its time.
    #[test]
    fn who_asks_what_a_block_has_made_due_waits_for_nobody() {
        fork::register();
        // Alone: other blocks count as well, and nobody is to have looked.
        child::forked(|| {
            set_retention(None);
            let block = allocate(256 << 20, 1).unwrap();
            let addr = block.as_ptr() as usize;
            let (tells, told) = mpsc::channel();
            let held = PAGES.take();
            std::thread::spawn(move || {
                let passes = limit::would_pass(usize::MAX, 1);
                tells.send((limit::is_due(), keeper::pays(), passes, owns(addr))).unwrap();
            });
            assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((true, true, false, true)));
            drop(held);
            // And what has changed is known when it is.
            stay_below(Some(1 << 30), usize::MAX);
            assert!(limit::would_pass(1 << 30, 1));
            set_retention(Some(0));
            assert!(!limit::is_due() && keeper::pays());
        });
    }

    /// Each has up to 2 MiB more in its last page table, which is a large part of what so short ones may have.
    #[test]
    fn blocks_that_grow_side_by_side_count_what_they_grow_by() {
        const STEP: usize = 64 << 10;
        const FIRST: usize = (1 << 20) + STEP;
        const LAST: usize = 4 << 20;
        fork::register();
        child::forked(|| {
            set_retention(None);
            let mut blocks = [(); 20].map(|()| allocate(FIRST, 1).unwrap());
            let before = stats().counts;
            for len_bytes in (FIRST..=LAST).step_by(STEP).skip(1) {
                // SAFETY: slot-held: ours, and only the result is used afterwards.
                blocks = blocks.map(|block| unsafe { resize(block, len_bytes) }.unwrap());
            }
            let counts = stats().counts;
            let grown = (blocks.len() * (LAST - FIRST)) as u64;
            let [cold, dropped] = [counts.cold_bytes - before.cold_bytes, counts.dropped_bytes - before.dropped_bytes];
            assert!(cold <= grown * 3 / 2 && dropped <= grown / 8, "{cold} came and {dropped} went for {grown}");
        });
    }

    /// Where this is opened, whoever opens `file` waits; where it is written, they read that. `None`: there can be no mounts for it.
    fn cover(file: &CStr, directory: &Path) -> Option<CString> {
        let fifo = CString::new(directory.join("fifo").as_os_str().as_bytes()).unwrap();
        let none = std::ptr::null();
        // SAFETY: texts that outlive the calls. Only this process sees the mounts.
        let covers = unsafe {
            assert_eq!(libc::mkfifo(fifo.as_ptr(), 0o600), 0);
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) == 0
                && libc::mount(fifo.as_ptr(), file.as_ptr(), none, libc::MS_BIND, none.cast()) == 0
        };
        covers.then_some(fifo)
    }

    /// A file that somebody has begun to read.
    fn reader_of(fifo: &CStr) -> File {
        let begin = Instant::now();
        loop {
            let mut options = File::options();
            let path = Path::new(OsStr::from_bytes(fifo.to_bytes()));
            match options.write(true).custom_flags(libc::O_NONBLOCK).open(path) {
                Ok(file) => return file,
                Err(error) => assert!(begin.elapsed() < Duration::from_secs(60), "nobody reads it: {error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn who_reads_what_the_machine_allows_keeps_nobody_waiting() {
        let ask_for_huge_pages = || {
            allocate(8 << 20, 1).unwrap();
            limit::look();
        };
        // Before Linux 6.8 sizes have no settings of their own.
        let settings = [
            c"/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled",
            c"/sys/kernel/mm/transparent_hugepage/enabled",
        ];
        let is_there = |file: &&CStr| Path::new(OsStr::from_bytes(file.to_bytes())).exists();
        let Some(setting) = settings.into_iter().find(is_there) else {
            return crate::skip::skip("thp", "boot a kernel built with CONFIG_TRANSPARENT_HUGEPAGE=y");
        };
        let ask_for_more_than_there_is = || assert_eq!(allocate(1 << 46, 1), None);
        fork::register();
        for (file, text, ask) in [
            (setting, "always [madvise]", ask_for_huge_pages as fn()),
            (frames::OVERCOMMIT, "0", ask_for_more_than_there_is),
        ] {
            child::forked(|| {
                set_retention(None);
                // Nobody has asked yet.
                *PAGES.take() = Pages::new();
                let directory = tempfile::tempdir().unwrap();
                let Some(fifo) = cover(file, directory.path()) else {
                    return crate::skip::skip("mount", "no mounts of its own: be root, outside of a container");
                };
                let asks = std::thread::spawn(ask);
                let mut reader = reader_of(&fifo);
                let (tells, told) = mpsc::channel();
                std::thread::spawn(move || tells.send(allocate(1 << 20, 1).is_some()));
                assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(true));
                reader.write_all(text.as_bytes()).unwrap();
                drop(reader);
                asks.join().unwrap();
            });
        }
    }
}
