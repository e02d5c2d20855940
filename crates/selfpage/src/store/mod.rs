//! Where saved pages live.
//!
//! A store never overwrites a blok that is in use: what is saved goes to bloks claimed for it, and the bloks it had before
//! are released. So a page saved before a fork can belong to parent and child without a copy.
//!
//! # Source
//! Nemesis §6.7 (the user-safe backing store; extents and bloks).

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::{Context, PagerError};

mod bloks;
mod engine;
mod file;
mod linux;
mod memory;
pub(crate) mod private;
mod refusal;
mod zeros;

pub use engine::IoChoice;
pub(crate) use engine::{LOCKED, forget_engines, has_no_room, with_engines};
pub use file::FileStore;
pub(crate) use file::free_bytes;
pub(crate) use linux::descriptor::over_fork::{OwnFiles, Reserved};
pub(crate) use linux::descriptor::{
    Alone, Descriptor, Nowhere, Numbered, borrow_number, copied_descriptor, forget_numbers, move_descriptor,
    place_descriptor, raised, release_number,
};
pub(crate) use linux::mapping::{Mapping, Sharing};
pub(crate) use linux::page_cache;
pub use memory::MemoryStore;
pub(crate) use zeros::holds_nothing;

/// A place for one page in a store: its number. The byte offset is the number times the page size. Blok 0 is never given
/// out, so that 0 may stand for "none".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Blok(pub u32);

/// One page to read.
#[derive(Debug)]
pub struct ReadBlok<'a> {
    /// Where it is in the store.
    pub blok: Blok,
    /// Where it goes; page-aligned.
    pub bytes: &'a mut PageBytes,
}

/// One page to write.
#[derive(Debug)]
pub struct WriteBlok<'a> {
    /// Where it goes in the store.
    pub blok: Blok,
    /// What; page-aligned.
    pub bytes: &'a PageBytes,
    /// Set by the store.
    pub outcome: Result<(), PagerError>,
}

/// Holds pages by blok.
///
/// # Fork
/// A store that goes on in a forked child wants these calls, in this order:
/// 1. The domain comes to rest: no call on the store is under way, and no pager thread starts before step 3.
/// 2. [`before_fork`](BackingStore::before_fork) on the thread that is about to fork.
/// 3. After the fork, whether it worked or not, [`after_fork_in_parent`](BackingStore::after_fork_in_parent) on that thread;
///    and [`after_fork_in_child`](BackingStore::after_fork_in_child) in the child, before it uses the store and before it
///    starts pager threads: they copy its descriptor table.
///
/// Where the child is to have no region of the store after all, `after_fork_in_parent` comes before the fork, and
/// [`let_go_in_child`](BackingStore::let_go_in_child) is the child's only call.
///
/// A child without them (`vfork`, `posix_spawn`, a bare `clone`) must leave the store alone, and needs none of them.
pub trait BackingStore: Send + Sync {
    /// Claims up to `want` free bloks with neighbouring numbers, fewer where no such run is found quickly, and one at least. Never blok 0: to
    /// a region that, or none at all, is an error like [`PagerError::Full`].
    ///
    /// # Context
    /// PagerThread or Normal.
    ///
    /// # Errors
    /// [`PagerError::Full`].
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError>;

    /// Gives `count` bloks from `first` on back.
    ///
    /// # Context
    /// PagerThread or Normal.
    fn release(&self, first: Blok, count: u32);

    /// Whether `read` may run in a trap: it neither allocates nor locks.
    fn reads_in_trap(&self) -> bool;

    /// Reads every blok, runs of neighbouring bloks in one request, separate runs in parallel on a pager thread.
    ///
    /// # Context
    /// Trap where `reads_in_trap`, else PagerThread.
    ///
    /// # Errors
    /// None of the pages counts as read. [`PagerError::WrongContext`] in a trap says only that a trap cannot tell: the
    /// program may have closed our descriptor, or opened another file at its number. A pager thread, whose descriptors are
    /// its own, gets the right answer.
    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError>;

    /// Writes every blok and sets each outcome, runs of neighbouring bloks in one request, separate runs in parallel.
    ///
    /// # Context
    /// PagerThread.
    fn write(&self, bloks: &mut [WriteBlok<'_>]);

    /// What tells it from other stores, however many regions have it and by whatever handles: it is told of a fork once. A store that is
    /// only a handle to another says what that says.
    fn identity(&self) -> usize {
        (&raw const *self).addr()
    }

    /// The descriptors that a thread's table must hold, at these numbers, for the thread to use the store. Pager threads have no others of the
    /// program's but its standard streams.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// That `found`, which a thread of the program's has at `number`, one of [`descriptors`](BackingStore::descriptors), is the store's: the
    /// program may have closed that, and opened a file of its own, which nobody else would keep from being written to or closed. A forked
    /// child asks as well, after [`after_fork_in_child`](BackingStore::after_fork_in_child), and ends where it is something else.
    ///
    /// # Context
    /// PagerThread or Normal.
    ///
    /// # Errors
    /// It is something else, or nothing. A store that cannot tell has none.
    fn check_descriptor(&self, number: RawFd, found: BorrowedFd<'_>) -> Result<(), StoreError> {
        let _ = (number, found);
        Ok(())
    }

    /// Tries what [`before_fork`](BackingStore::before_fork) will do, and leaves all as it is. `table_of` is as there; no other thread
    /// forks meanwhile.
    ///
    /// # Context
    /// Normal.
    ///
    /// # Errors
    /// As for that.
    fn check_fork(&self, table_of: i32) -> Result<(), StoreError> {
        let _ = table_of;
        Ok(())
    }

    /// Gets ready for a fork. `table_of` is a thread that has [`descriptors`](BackingStore::descriptors): the caller itself,
    /// or a pager thread where the program may have closed the caller's.
    ///
    /// # Context
    /// Normal.
    ///
    /// # Errors
    /// A child of this fork cannot have the store: the process has too many children that have, or the file cannot be
    /// opened again.
    fn before_fork(&self, table_of: i32) -> Result<(), StoreError> {
        let _ = table_of;
        Ok(())
    }

    /// Lets go of what belongs to the child.
    ///
    /// # Context
    /// Normal.
    fn after_fork_in_parent(&self) {}

    /// Makes the store the child's own.
    ///
    /// # Context
    /// Normal.
    fn after_fork_in_child(&self) {}

    /// Lets go of what the child has of its parent, and would hold as long as it lives.
    ///
    /// # Context
    /// Normal.
    fn let_go_in_child(&self) {}
}

/// A store that the program has a handle to as well, or that several regions use.
impl<S: BackingStore + ?Sized> BackingStore for Arc<S> {
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        (**self).claim(want)
    }

    fn release(&self, first: Blok, count: u32) {
        (**self).release(first, count);
    }

    fn reads_in_trap(&self) -> bool {
        (**self).reads_in_trap()
    }

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        (**self).read(context, bloks)
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        (**self).write(bloks);
    }

    fn identity(&self) -> usize {
        (**self).identity()
    }

    fn descriptors(&self) -> Vec<RawFd> {
        (**self).descriptors()
    }

    fn check_descriptor(&self, number: RawFd, found: BorrowedFd<'_>) -> Result<(), StoreError> {
        (**self).check_descriptor(number, found)
    }

    fn check_fork(&self, table_of: i32) -> Result<(), StoreError> {
        (**self).check_fork(table_of)
    }

    fn before_fork(&self, table_of: i32) -> Result<(), StoreError> {
        (**self).before_fork(table_of)
    }

    fn after_fork_in_parent(&self) {
        (**self).after_fork_in_parent();
    }

    fn after_fork_in_child(&self) {
        (**self).after_fork_in_child();
    }

    fn let_go_in_child(&self) {
        (**self).let_go_in_child();
    }
}

/// Why there is no store, or none for a child.
#[derive(Debug)]
pub struct StoreError {
    /// Which store.
    pub object: String,
    /// What the system or we have against it.
    pub cause: io::Error,
    /// What helps.
    pub remedy: &'static str,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {}: {}; {}", self.object, self.cause, self.remedy)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}

/// The most that a store can hold: with blok 0, as many as a number can tell apart.
const MOST_PAGES: u64 = u32::MAX as u64 - 1;

/// How many bloks a store of this size has, blok 0 included.
fn blok_count(object: &str, capacity_bytes: u64) -> Result<u32, StoreError> {
    let wrong = |cause: &str, remedy| StoreError {
        object: object.to_owned(),
        cause: io::Error::new(io::ErrorKind::InvalidInput, format!("a capacity of {capacity_bytes} bytes {cause}")),
        remedy,
    };
    match capacity_bytes / PAGE_BYTES as u64 {
        0 => Err(wrong("holds no page", "ask for at least 4 KiB")),
        pages => u32::try_from(pages + 1).map_err(|_| wrong("is too large", "ask for 16 TiB - 8 KiB at most")),
    }
}
