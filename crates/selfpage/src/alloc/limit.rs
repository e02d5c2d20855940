//! The limit of the process's control groups, heeded without a thread: what is kept goes before blocks, what is kept and the object heap
//! together reach it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use selfpage_core::addr::PAGE_BYTES;

use super::block::{self, PAGES, Patience};
use super::cgroup::{self, Unknown};
use super::file::File;
use super::frames;
use super::medium;
use super::pages::MAPPINGS;
use super::rounds::Rounds;
use super::stats::NOTED;

/// This part of a limit is left alone.
const LEFT: usize = 16;

/// So often who maps memory looks for a moment at which nobody has the allocator.
const MOST_LOOKS: u32 = 200;

/// After so much more a process looks again that had no descriptor left: by then it may have one.
const AGAIN_BYTES: u64 = 16 << 20;

static LOOKED: AtomicBool = AtomicBool::new(false);
/// Once it had none: what the process will have taken when that is tried again.
static NOT_BEFORE_BYTES: AtomicU64 = AtomicU64::new(0);

/// What is left alone of a limit.
pub(super) fn left_bytes(limit_bytes: usize) -> usize {
    limit_bytes / LEFT
}

/// Whether it is time for [`look`]: the process has taken some MiB, something is to be kept ([`super::set_retention`]), and nobody has
/// looked.
pub fn is_due() -> bool {
    !LOOKED.load(Ordering::Relaxed)
        && NOTED.is_worth_a_look.load(Ordering::Relaxed)
        && NOTED.cold_bytes.load(Ordering::Relaxed) >= NOT_BEFORE_BYTES.load(Ordering::Relaxed)
}

/// Looks for the limit, unless somebody did. From now on blocks and what is kept stay below it, by a sixteenth of it and by what the
/// object heap has ([`share`]): what is kept goes first.
///
/// A limit that comes later, or changes, is found by the [keeper](super::keeper). A forked child looks for its own, and stays below its
/// parent's until then; for good, where it sees no groups (`chroot(2)`), or never has a descriptor left.
///
/// # Context
/// May allocate: not for use underneath an allocator's lock. No point of cancellation.
pub fn look() {
    if LOOKED.swap(true, Ordering::Relaxed) {
        return;
    }
    // All that is read is read without the lock, which others wait for.
    frames::overcommits();
    let (limit, huge_pages) = (cgroup::limit(), medium::huge_pages_may_come());
    let most_mappings = frames::number(c"/proc/sys/vm/max_map_count");
    let mut pages = PAGES.take();
    if let Err(Unknown::NoMemory | Unknown::NoDescriptor) = limit {
        // Another time.
        if limit == Err(Unknown::NoDescriptor) {
            // Not with each block: they may be taken for good.
            NOT_BEFORE_BYTES.store(pages.counts.cold_bytes.saturating_add(AGAIN_BYTES), Ordering::Relaxed);
        }
        return LOOKED.store(false, Ordering::Relaxed);
    }
    if let Ok(limit) = limit {
        // A forked child may have come out of its parent's group.
        pages.retention.limit_bytes = limit.unwrap_or(usize::MAX);
    }
    pages.huge_pages.get_or_insert(huge_pages);
    pages.most_mappings = most_mappings.unwrap_or(MAPPINGS);
    block::settle(pages);
}

/// The object heap over this allocator may have `heap_bytes` in all from now on: what is kept makes room for them, at once.
///
/// # Context
/// As for [`super::allocate`].
pub fn share(heap_bytes: usize) {
    let mut pages = PAGES.take();
    pages.retention.heap_bytes = pages.retention.heap_bytes.max(heap_bytes);
    block::settle(pages);
}

/// Whether the process would come too near its limit with `bytes` more in blocks, where the object heap over this allocator has
/// `heap_bytes` in memory: what is free there is to go back first.
///
/// # Context
/// As for [`super::allocate`].
pub fn would_pass(heap_bytes: usize, bytes: usize) -> bool {
    if NOTED.limit_bytes.load(Ordering::Relaxed) == usize::MAX {
        return false;
    }
    let retention = &PAGES.take().retention;
    let limit_bytes = retention.limit_bytes;
    let all_bytes = retention.framed_bytes.saturating_add(heap_bytes).saturating_add(bytes);
    limit_bytes != usize::MAX && all_bytes > limit_bytes - left_bytes(limit_bytes)
}

/// The process is about to take `bytes` past this allocator and its heap: where they and what it has in memory would pass the limit, what is
/// kept makes room, at once. What other processes of the group have is not seen.
///
/// # Context
/// Any but a trap's, with nothing allocated: a handler of a signal may map memory. In one that has interrupted this allocator nothing is
/// done, nor where somebody else is at it for longer than some milliseconds.
pub fn make_room(bytes: usize) {
    while let Some(Seen { limit_bytes, kept_bytes, counted_bytes }) = look_soon() {
        if limit_bytes == usize::MAX || kept_bytes == 0 {
            return;
        }
        // Where files cannot be opened or read, as where memory is used up, it counts as if all were there that it may touch.
        let taken_bytes = anonymous_bytes().unwrap_or(counted_bytes);
        let excess = taken_bytes.saturating_add(bytes).saturating_sub(limit_bytes - left_bytes(limit_bytes));
        // Not all that counts as kept has frames: then more of it has to go.
        let keep_bytes = kept_bytes.saturating_sub(excess);
        if excess == 0 || block::give_back(keep_bytes, frames::drop_frames, Patience::Leaves) == 0 {
            return;
        }
    }
}

/// What [`make_room`] goes by.
#[derive(Clone, Copy, Debug)]
struct Seen {
    limit_bytes: usize,
    kept_bytes: usize,
    /// Of blocks, what is kept of them, and the object heap.
    counted_bytes: usize,
}

/// `None`: this thread has the allocator, or somebody who may not be there at all, in the child of a bare clone.
fn look_soon() -> Option<Seen> {
    let mut rounds = Rounds::new();
    for _ in 0..MOST_LOOKS {
        if PAGES.is_own() {
            break;
        }
        if let Some(pages) = PAGES.try_take() {
            let retention = &pages.retention;
            return Some(Seen {
                limit_bytes: retention.limit_bytes,
                kept_bytes: retention.framed_bytes - retention.live_bytes,
                counted_bytes: retention.framed_bytes.saturating_add(retention.heap_bytes),
            });
        }
        rounds.pass();
    }
    None
}

/// What the process has in memory that is no file's. `None`: nobody says.
fn anonymous_bytes() -> Option<usize> {
    let mut text = [0; 128];
    File::open(c"/proc/thread-self/statm").and_then(|file| file.read(&mut text)).ok()?;
    let mut pages =
        text.split(|byte| *byte == b' ').skip(1).map(|word| str::from_utf8(word).ok()?.parse::<usize>().ok());
    let [resident, of_files] = [pages.next()??, pages.next()??];
    Some(resident.saturating_sub(of_files) * PAGE_BYTES)
}

/// The child of a fork may come to be in another group.
pub(super) fn forget() {
    NOT_BEFORE_BYTES.store(0, Ordering::Relaxed);
    LOOKED.store(false, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::alloc::fork;
    use crate::child;

    #[test]
    fn who_can_open_nothing_stays_below_the_limit_that_was_found_last() {
        fork::register();
        child::forked(|| {
            PAGES.take().retention.limit_bytes = 1 << 40;
            child::opens_nothing();
            look();
            assert_eq!(PAGES.take().retention.limit_bytes, 1 << 40);
        });
    }

    /// How many descriptors this process may have, from now on. Returns how many that were.
    fn set_descriptors(count: libc::rlim_t) -> libc::rlim_t {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: test: the limit outlives the calls.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
            let before = std::mem::replace(&mut limit.rlim_cur, count);
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
            before
        }
    }

    #[test]
    fn who_has_no_descriptor_left_looks_again_later() {
        fork::register();
        child::forked(|| {
            let takes = |bytes| block::allocate(bytes, 1).unwrap();
            forget();
            takes(8 << 20);
            assert!(is_due());
            let before = set_descriptors(0);
            look();
            assert!(!is_due(), "each block would look");
            takes(64 << 20);
            assert!(is_due(), "nobody looks again");
            // Tests that run beside this may have had all of fewer.
            set_descriptors(before);
            look();
            takes(64 << 20);
            assert!(!is_due());
        });
    }

    #[test]
    fn who_cannot_see_what_it_has_in_memory_makes_room_by_what_it_counts() {
        const BYTES: usize = 64 << 20;
        fork::register();
        child::forked(|| {
            let block = block::allocate(BYTES, 1).unwrap();
            // SAFETY: slot-held: ours, and gone afterwards.
            unsafe { block::free(block) };
            PAGES.take().retention.limit_bytes = 2 * BYTES;
            child::opens_nothing();
            make_room(BYTES);
            let kept_bytes = block::stats().retained_bytes - block::stats().live_bytes;
            assert!(kept_bytes < BYTES, "all of it is kept");
        });
    }

    #[test]
    fn more_than_there_are_addresses_gives_back_all_that_is_kept() {
        fork::register();
        child::forked(|| {
            let block = block::allocate(8 << 20, 1).unwrap();
            // SAFETY: slot-held: ours, and gone afterwards.
            unsafe { block::free(block) };
            PAGES.take().retention.limit_bytes = 1 << 40;
            assert!(block::stats().retained_bytes > block::stats().live_bytes);
            make_room(usize::MAX);
            assert_eq!(block::stats().retained_bytes, block::stats().live_bytes);
        });
    }

    #[test]
    fn who_maps_memory_does_not_wait_for_one_who_never_comes_back() {
        let (tells, told) = mpsc::channel();
        let held = PAGES.take();
        std::thread::spawn(move || {
            make_room(1 << 20);
            tells.send(()).unwrap();
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(()));
        drop(held);
    }
}
