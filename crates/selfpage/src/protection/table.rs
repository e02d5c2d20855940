//! All memory that rights are about, all protection domains, and who has which key: one table, behind one lock.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use selfpage_core::linux::key::Key;
use selfpage_core::linux::{Errno, key};

use super::memory::Memory;
use super::places::Place;
use super::rights::Rights;
use super::wide::Wide;
use crate::region::Region;
use crate::undisturbed::{self, Locked};

static TABLE: Mutex<Table> = Mutex::new(Table::new());

/// What a switch reads and writes, in one word: how many times threads are in the domain, what it may do at once, and what its
/// register of keys denies.
pub(super) struct Core {
    pub(super) name: String,
    word: AtomicU64,
}

const USERS: u64 = (1 << 24) - 1;
/// The domain may be entered without the table: its memory has keys.
const OPEN: u64 = 1 << 24;
/// Entering and leaving it changes protections of the whole process.
const WIDE: u64 = 1 << 25;

/// A [`Core`]'s word as it was.
#[derive(Clone, Copy)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn is_quick(self) -> bool {
        self.0 & (OPEN | WIDE) == OPEN
    }

    pub(super) fn is_wide(self) -> bool {
        self.0 & WIDE != 0
    }

    pub(super) fn denied(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(super) fn users(self) -> u64 {
        self.0 & USERS
    }
}

impl Core {
    pub(super) fn new(name: &str) -> Core {
        Core { name: name.into(), word: AtomicU64::new(0) }
    }

    /// One more is in the domain.
    #[inline]
    pub(super) fn begin_use(&self) -> Word {
        Word(self.word.fetch_add(1, Ordering::AcqRel))
    }

    /// One fewer, if one is: where a handler of a signal has forked since, the child has counted it no more.
    #[inline]
    pub(super) fn end_use(&self) {
        self.update(|word| if word & USERS == 0 { word } else { word - 1 });
    }

    #[inline]
    pub(super) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    #[inline]
    fn update(&self, change: impl Fn(u64) -> u64) -> Word {
        let before = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| Some(change(word)));
        Word(before.unwrap_or_else(|word| word))
    }

    /// In a forked child, where one thread is left.
    pub(super) fn set_users(&self, users: u64) {
        self.update(|word| word & !USERS | users);
    }

    pub(super) fn set_wide(&self, wide: bool) {
        self.update(|word| if wide { word | WIDE } else { word & !WIDE });
    }

    /// Nobody enters it without the table, if at most the calling thread is in it now, `mine` times. How many times threads are.
    pub(super) fn hold_back(&self, mine: u64) -> u64 {
        self.update(|word| if word & USERS <= mine { word & !OPEN } else { word }).users()
    }

    /// It is entered with this register from now on.
    pub(super) fn open(&self, denied: u32) -> Word {
        self.update(|word| word & (USERS | WIDE) | OPEN | u64::from(denied) << 32)
    }
}

/// Memory that rights are about.
pub(super) struct Record {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) start: usize,
    pub(super) len_bytes: usize,
    /// What the mapping allows outside of all domains.
    pub(super) most: Rights,
    /// What it allows now.
    pub(super) now: u32,
    pub(super) key: Key,
    pub(super) region: Option<Weak<Region>>,
    /// For who meets it in a handler of a signal.
    pub(super) _place: Place,
}

impl Record {
    /// Sets protection and key, as they are to be from now on; where the kernel refuses, they are as before.
    pub(super) fn protect(&mut self, prot: u32, key: Key) -> Result<(), Errno> {
        let all = self.start..self.start + self.len_bytes;
        let key_to_set = (key != self.key).then_some(key);
        let set = move |parts: &[Range<usize>], prot: u32, key: Option<Key>| {
            parts.iter().try_for_each(|part| {
                // SAFETY: protected-memory: the mapping is there as long as the record; what threads may do there is what their
                // domains have rights to.
                unsafe { key::protect(part.start, part.len(), prot, key) }
            })
        };
        let (now, own_key) = (self.now, key_to_set.map(|_| self.key));
        let change = move |parts: &[Range<usize>]| {
            set(parts, prot, key_to_set).inspect_err(|_| {
                // What lies before the part that the kernel refused is changed. Here it stops at the same part.
                let _ = set(parts, now, own_key);
            })
        };
        let same_access = prot == self.now;
        match self.region.as_ref().and_then(Weak::upgrade) {
            // A page that moves must find one protection from beginning to end; and nobody opens one again meanwhile.
            Some(region) if !same_access => {
                let bound = &*region.bound;
                region.while_parts_are_still(move |parts| change(parts).inspect(|()| bound.leave_access(prot)))?;
            }
            Some(region) => change(&region.parts())?,
            None => change(std::slice::from_ref(&all))?,
        }
        (self.now, self.key) = (prot, key);
        Ok(())
    }

    /// Rights are not about it any more.
    pub(super) fn give_back(&mut self) {
        if self.protect(self.most.prot(), Key::NONE).is_err() {
            crate::die("memory cannot be given back the protection that it had");
        }
        // Now that its pages have no key.
        if let Some(region) = self.region.as_ref().and_then(Weak::upgrade) {
            region.core().keyed.store(0, Ordering::Relaxed);
        }
    }
}

/// A protection domain.
pub(super) struct Entry {
    pub(super) core: Arc<Core>,
    pub(super) rights: HashMap<u64, (Memory, Rights)>,
    /// What no thread in it was ever allowed by its register since the last time that nobody was.
    pub(super) issued: u32,
    /// Since when its memory has keys, in order.
    pub(super) resident: Option<u64>,
}

impl Entry {
    pub(super) fn rights_on(&self, memory: u64) -> Rights {
        self.rights.get(&memory).map_or(Rights::NONE, |(_, rights)| *rights)
    }
}

pub(super) struct Table {
    pub(super) memory: Vec<Record>,
    pub(super) domains: Vec<Entry>,
    /// Keys that are ours.
    pub(super) keys: Vec<Key>,
    pub(super) wide: Option<Wide>,
    pub(super) counter: u64,
}

/// The table, held. A handler of a signal may enter a domain.
pub(super) type Held = Locked<'static, Table>;

pub(super) fn hold() -> Held {
    undisturbed::lock(&TABLE)
}

impl Table {
    const fn new() -> Table {
        Table { memory: Vec::new(), domains: Vec::new(), keys: Vec::new(), wide: None, counter: 0 }
    }

    /// A number that was never given before.
    pub(super) fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// The domain of `core`, which is in the table as long as it has a handle.
    pub(super) fn entry(&mut self, core: *const Core) -> &mut Entry {
        let found = self.domains.iter_mut().find(|entry| std::ptr::eq(&*entry.core, core));
        found.unwrap_or_else(|| crate::die("a protection domain that is not in the table"))
    }

    /// What the domain may do with the memory; everything for those outside of all.
    pub(super) fn rights(&self, core: *const Core, memory: u64) -> Rights {
        let entry = self.domains.iter().find(|entry| std::ptr::eq(&*entry.core, core));
        entry.map_or(Rights::META, |entry| entry.rights_on(memory))
    }

    /// The memory at an address.
    pub(super) fn memory_at(&self, addr: usize) -> Option<&Record> {
        self.memory.iter().find(|record| addr.wrapping_sub(record.start) < record.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use selfpage_core::addr::PAGE_BYTES;
    use selfpage_core::linux::descriptor::Descriptor;
    use selfpage_core::linux::memory::{self, Access, Advice, Place, Sharing};

    use super::super::places;
    use super::*;

    #[test]
    fn a_use_that_a_fork_has_ended_already_is_ended_once() {
        let core = Core::new("left");
        core.open(0);
        let steps = || {
            core.begin_use();
            // What a child does that a handler of a signal forks here: nobody is in the domain.
            core.set_users(0);
            core.end_use();
            core.set_users(0);
        };
        steps();
        assert!(core.word().is_quick());
        core.hold_back(0);
        core.set_wide(true);
        steps();
        assert!(core.word().is_wide());
    }

    #[test]
    fn memory_that_cannot_be_changed_as_a_whole_is_not_changed_in_part() {
        let len_bytes = 2 * PAGE_BYTES;
        // SAFETY: owned-range: a fresh mapping.
        let start = unsafe { memory::map_anonymous(Place::Anywhere, len_bytes, Access::Read) }.unwrap();
        // Opened to be read: nobody may write to a shared mapping of it.
        let file = File::open("/proc/self/exe").unwrap();
        let (second, file) = (Place::Over(start + PAGE_BYTES), Descriptor::from_raw(file.as_raw_fd()));
        // SAFETY: owned-range: the second page of what was just mapped; its contents are never looked at.
        unsafe { memory::map_file(second, PAGE_BYTES, Access::Read, Sharing::Shared, file, 0) }.unwrap();
        let (most, now) = (Rights::READ, Rights::READ.prot());
        let _table = hold();
        let place = places::Place::new(start..start + len_bytes);
        let mut record = Record {
            id: 1,
            name: String::new(),
            start,
            len_bytes,
            most,
            now,
            key: Key::NONE,
            region: None,
            _place: place,
        };
        assert_eq!(record.protect((Rights::READ | Rights::WRITE).prot(), Key::NONE), Err(Errno::ACCESS));
        assert_eq!((record.now, record.key), (now, Key::NONE));
        // SAFETY: owned-range: the first page.
        let written = unsafe { memory::advise(start, PAGE_BYTES, Advice::PopulateWrite) };
        assert!(written.is_err(), "the first page may be written to");
        // SAFETY: owned-range: mapped above.
        unsafe { memory::unmap(start, len_bytes) }.unwrap();
    }
}
