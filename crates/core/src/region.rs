//! Regions: ranges of virtual addresses, each bound to the pager that backs it, and the map that finds them.
//!
//! # Source
//! Nemesis §6.1 (a stretch: addresses only, no resources) and §6.6 (bound to a stretch driver before it can be used).
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ptr;

use crate::addr::{PageNo, PageRange};
use crate::cut::PageSets;
use crate::frame::Table;
use crate::mmu::Trap;
use crate::page::{PageWord, State};
use crate::pager::Pager;
use crate::pageset::PageSet;
use crate::stream::Streams;
use crate::sync::{AtomicPtr, AtomicU8, AtomicU64, Ordering, fence};

/// What the program may do with a region's pages, whichever protection domain it is in: those have rights of their own
/// (`selfpage::protection::Rights`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rights {
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// In [`Region::arm`]'s table: the page is as it was when it was armed, but for writes that the machine has noted.
const ARMED: u8 = 1;
/// It has left its frame since, or was discarded: it counts as written.
const LEFT: u8 = 2;

/// What tells a region from one that has its addresses soon after: a map has as many, and begins anew.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Serial(pub u16);

/// A kind of access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
}

/// A range of virtual addresses that one pager backs.
pub struct Region {
    /// Its pages.
    pub range: PageRange,
    /// How its faults arrive.
    pub trap: Trap,
    /// What the program may do with it.
    pub rights: Rights,
    /// The patterns in which it is read.
    pub streams: Streams,
    /// How many of its pages were brought in because somebody used them, since it was made.
    pub fetched: AtomicU64,
    /// Its standing with policies that look at it: frames of a lower one go first.
    pub priority: AtomicU8,
    /// Pages from this number on are not fetched before they are asked for: nobody may use them yet.
    pub reach: AtomicU64,
    /// 1: the program's own handler is asked before an absent page is brought in.
    pub asks_first: AtomicU8,
    /// 1: its mapping has a protection key, so its pages go by copying.
    pub keyed: AtomicU8,
    /// Since it is in its map: what tells it from a region that has its addresses later.
    serial: AtomicU64,
    /// What the library keeps with the region; core never looks at it.
    pub keeper: AtomicPtr<()>,
    /// What its pages are to snapshots.
    pub sets: PageSets,
    /// Absent pages in whose place the kernel keeps a guard, which fails every access: nothing is brought in over one.
    pub guarded: PageSet,
    /// Those among them whose contents the library gave up to refuse an access: unlike the program's own guards they go nowhere.
    pub given_up: PageSet,
    /// The clone that has its pages' contents from here, and the region that a clone has them from; null: none.
    heir: AtomicPtr<Region>,
    source: AtomicPtr<Region>,
    words: Table<PageWord>,
    residency: Table<AtomicU8>,
    /// Of a tracked region: what became of a page since it was armed; 0: nobody has armed it.
    armed: Table<AtomicU8>,
    /// `&&dyn Pager`, so that it fits one pointer; null while unbound.
    pager: AtomicPtr<&'static dyn Pager>,
}

impl Region {
    /// A region over zeroed tables of one entry a page, not bound yet.
    pub fn new(
        range: PageRange,
        trap: Trap,
        rights: Rights,
        words: Table<PageWord>,
        residency: Table<AtomicU8>,
    ) -> Region {
        Region {
            range,
            trap,
            rights,
            streams: Streams::new(),
            fetched: AtomicU64::new(0),
            priority: AtomicU8::new(0),
            reach: AtomicU64::new(u64::MAX),
            asks_first: AtomicU8::new(0),
            keyed: AtomicU8::new(0),
            serial: AtomicU64::new(0),
            keeper: AtomicPtr::new(ptr::null_mut()),
            sets: PageSets::none(),
            guarded: PageSet::none(),
            given_up: PageSet::none(),
            heir: AtomicPtr::new(ptr::null_mut()),
            source: AtomicPtr::new(ptr::null_mut()),
            words,
            residency,
            armed: Table::empty(),
            pager: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The region with a zeroed table of one entry a page, to know which pages were written although they moved.
    pub fn track(self, armed: Table<AtomicU8>) -> Region {
        Region { armed, ..self }
    }

    /// Binds the region to its pager. `false`: it is bound already.
    ///
    /// # Safety
    /// *pager-outlives*: `pager` and what it points to stay valid until the region has been removed from its map and the
    /// gate was closed once after that.
    #[must_use]
    pub unsafe fn bind(&self, pager: *const &'static dyn Pager) -> bool {
        self.pager.compare_exchange(ptr::null_mut(), pager.cast_mut(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The pager, if the region is bound.
    pub fn pager(&self) -> Option<&dyn Pager> {
        // SAFETY: pager-outlives: `bind`'s caller keeps it for as long as the region can be found.
        unsafe { self.pager.load(Ordering::Acquire).as_ref() }.map(|pager| *pager as &dyn Pager)
    }

    /// Makes it a clone of `source` before it is in the map: it lacks every page, and whoever asks for one waits for the cut, which
    /// [links](Region::link) the two. At its addresses a region may have been whose faults somebody is at still.
    ///
    /// # Context
    /// Normal.
    ///
    /// # Safety
    /// *region-in-map*: `source` is in the map, and does not leave it before the two have [parted](Region::part).
    pub unsafe fn clone_of(&self, source: &Region) {
        self.sets.inherited.fill(self.range.count);
        self.source.store(ptr::from_ref(source).cast_mut(), Ordering::Release);
    }

    /// Has it, which is in the map, have what its source has now, which has no other clone.
    ///
    /// # Context
    /// In a [cut](crate::fault::copy_first::cut) of its source.
    pub fn link(&self) {
        if let Some(source) = self.source() {
            source.heir.store(ptr::from_ref(self).cast_mut(), Ordering::Release);
        }
    }

    /// Whether it is a clone, and the cut was made that it is of.
    ///
    /// # Context
    /// Any.
    pub fn is_linked(&self) -> bool {
        self.source().is_some_and(|source| ptr::eq(source.heir.load(Ordering::Acquire), self))
    }

    /// Ends what it is to a clone, or as one.
    ///
    /// # Context
    /// Normal, with the gate closed; it need not be for one that has not been linked, and has no clone, nor where neither it nor its clone
    /// lacks a page: nobody has to have one from the other then.
    pub fn part(&self) {
        if let Some(source) = self.source()
            && self.is_linked()
        {
            source.heir.store(ptr::null_mut(), Ordering::Release);
        }
        if let Some(heir) = self.heir() {
            heir.source.store(ptr::null_mut(), Ordering::Release);
        }
        self.source.store(ptr::null_mut(), Ordering::Release);
        self.heir.store(ptr::null_mut(), Ordering::Release);
    }

    /// Its clone.
    pub fn heir(&self) -> Option<&Region> {
        // SAFETY: region-in-map: linked regions part, at the latest where the gate is closed for one of them to leave the map.
        unsafe { self.heir.load(Ordering::Acquire).as_ref() }
    }

    /// What it is a clone of.
    pub fn source(&self) -> Option<&Region> {
        // SAFETY: region-in-map: as above.
        unsafe { self.source.load(Ordering::Acquire).as_ref() }
    }

    /// The word of `page`, if it is in the region.
    pub fn word(&self, page: PageNo) -> Option<&PageWord> {
        self.words.get(page.0.wrapping_sub(self.range.first.0) as usize)
    }

    /// The number of `page` in the region.
    pub const fn index(&self, page: PageNo) -> u64 {
        page.0.wrapping_sub(self.range.first.0)
    }

    /// Its number in the map that it is in.
    pub fn serial(&self) -> Serial {
        Serial(self.serial.load(Ordering::Relaxed) as u16)
    }

    /// Whether `page` may be fetched before it is asked for.
    pub fn reaches(&self, page: PageNo) -> bool {
        self.index(page) < self.reach.load(Ordering::Relaxed)
    }

    /// Whether each page is in core: 1 or 0, a byte a page, readable at any time without a call. 1 from just before the page is mapped
    /// until just after it is unmapped: whoever can use a page finds it in core.
    pub const fn residency(&self) -> &Table<AtomicU8> {
        &self.residency
    }

    /// Says whether `page` is in core.
    pub(crate) fn set_resident(&self, page: PageNo, resident: u8) {
        if let Some(byte) = self.residency.get(self.index(page) as usize) {
            if resident == 0 && byte.load(Ordering::Relaxed) != 0 {
                // What the machine had noted of the page went with its translation.
                self.disarm(page);
            }
            byte.store(resident, Ordering::Release);
        }
    }

    /// Whether the machine must protect `page` against writes where it maps it.
    pub fn write_protected(&self, page: PageNo) -> bool {
        self.rights == Rights::Read || self.word(page).is_some_and(|word| word.load().wishes().write_protected())
    }

    /// Begins to note whether `page` leaves its frame. Whether that was noted up to now, and it did not.
    pub fn arm(&self, page: PageNo) -> bool {
        let Some(byte) = self.armed.get(self.index(page) as usize) else { return false };
        // Where it leaves its frame just now, that is found: it counts as written this time.
        let was = byte.load(Ordering::Acquire) == ARMED;
        if !was {
            byte.store(ARMED, Ordering::Release);
        }
        was
    }

    /// Whether `page` is as it was when it was armed, but for writes that the machine has noted.
    pub fn is_armed(&self, page: PageNo) -> bool {
        // Whoever moves it has claimed it, and says so here before the claim ends.
        let (Some(word), Some(byte)) = (self.word(page), self.armed.get(self.index(page) as usize)) else {
            return false;
        };
        word.load().state() != State::Busy && byte.load(Ordering::Acquire) == ARMED
    }

    /// Counts `page` as written, where it was armed.
    pub fn disarm(&self, page: PageNo) {
        // One that is zero is not written to: the table takes memory where that is done.
        if let Some(byte) = self.armed.get(self.index(page) as usize)
            && byte.load(Ordering::Relaxed) == ARMED
        {
            let _ = byte.compare_exchange(ARMED, LEFT, Ordering::Release, Ordering::Relaxed);
        }
    }

    /// Whether somebody has armed `page` and not let it go, wherever it has been since.
    pub fn is_watched(&self, page: PageNo) -> bool {
        self.armed.get(self.index(page) as usize).is_some_and(|byte| byte.load(Ordering::SeqCst) != 0)
    }

    /// Ends what [`Region::arm`] began: `page` counts as written, and nobody asks.
    pub fn let_go(&self, page: PageNo) {
        // One that is zero stays as it is: the table takes memory where it is written to.
        if let Some(byte) = self.armed.get(self.index(page) as usize)
            && byte.load(Ordering::Relaxed) != 0
        {
            byte.store(0, Ordering::Release);
        }
    }

    /// Ends it for every page.
    pub fn let_all_go(&self) {
        self.armed.iter().for_each(|byte| byte.store(0, Ordering::Release));
    }

    /// Whether the program may make this access.
    pub fn allows(&self, access: Access) -> bool {
        self.rights == Rights::ReadWrite || access == Access::Read
    }
}

/// One line of a region map. Zeroed memory is an empty line.
#[derive(Default)]
pub struct Line {
    first: AtomicU64,
    end: AtomicU64,
    region: AtomicPtr<Region>,
}

/// Finds the region of an address without locks: two copies of a sorted array. A writer changes the copy that is not in
/// use and then says so; a reader that was overtaken looks again. A reader never waits for a writer, so a trap that
/// interrupts a writer on its own thread still finds its region.
pub struct RegionMap {
    copies: [Table<Line>; 2],
    /// Odd: the second copy is in use. One more for each change.
    version: AtomicU64,
    len: [AtomicU64; 2],
    regions: PhantomData<Region>,
}

impl RegionMap {
    /// An empty map; both tables zeroed and of the same length.
    pub fn new(copies: [Table<Line>; 2]) -> RegionMap {
        RegionMap {
            copies,
            version: AtomicU64::new(0),
            len: [AtomicU64::new(0), AtomicU64::new(0)],
            regions: PhantomData,
        }
    }

    /// The region that `page` is in.
    ///
    /// # Context
    /// Trap, inside the gate: the region stays valid until the gate is left.
    pub fn find(&self, page: PageNo) -> Option<&Region> {
        loop {
            let version = self.version.load(Ordering::Acquire);
            let found = self.search(version, page);
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == version {
                // SAFETY: region-in-map: `insert`'s caller keeps a region valid while it is in the map and, after its
                // removal, until the gate has been closed once.
                return unsafe { found.as_ref() };
            }
        }
    }

    /// The region with this number, if `page` is in it still: what came to its addresses since is another.
    ///
    /// # Context
    /// As for [`RegionMap::find`].
    pub(crate) fn find_same(&self, page: PageNo, of: Serial) -> Option<&Region> {
        self.find(page).filter(|region| region.serial() == of)
    }

    fn half(&self, version: u64) -> Option<(&Table<Line>, &AtomicU64)> {
        let which = (version & 1) as usize;
        Some((self.copies.get(which)?, self.len.get(which)?))
    }

    fn search(&self, version: u64, page: PageNo) -> *const Region {
        let Some((lines, len)) = self.half(version) else {
            return ptr::null();
        };
        let (mut low, mut high) = (0, (len.load(Ordering::Relaxed) as usize).min(lines.len()));
        while low < high {
            let middle = low + (high - low) / 2;
            let Some(line) = lines.get(middle) else {
                return ptr::null();
            };
            if line.end.load(Ordering::Relaxed) <= page.0 {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        match lines.get(low) {
            Some(line)
                if low < len.load(Ordering::Relaxed) as usize && line.first.load(Ordering::Relaxed) <= page.0 =>
            {
                line.region.load(Ordering::Relaxed)
            }
            _ => ptr::null(),
        }
    }

    /// Adds a region. `false`: the map is full, or the range meets another region's.
    ///
    /// # Context
    /// Normal; writers take turns (the caller holds the domain's writer lock).
    ///
    /// # Safety
    /// *region-in-map*: `region` stays valid until [`RegionMap::remove`] and one closing of the gate after it.
    #[must_use]
    pub unsafe fn insert(&self, region: *const Region) -> bool {
        // SAFETY: region-in-map: passed on from our caller.
        let (range, serial) = unsafe { ((*region).range, &(*region).serial) };
        serial.store(self.version.load(Ordering::Relaxed), Ordering::Relaxed);
        self.rewrite(|old, new, len| {
            let mut at = 0;
            let mut put = false;
            for index in 0..len {
                let line = old.get(index)?;
                let (first, end) = (line.first.load(Ordering::Relaxed), line.end.load(Ordering::Relaxed));
                if first < range.end().0 && end > range.first.0 {
                    return None;
                }
                if !put && first >= range.end().0 {
                    write(new, &mut at, range.first.0, range.end().0, region.cast_mut())?;
                    put = true;
                }
                write(new, &mut at, first, end, line.region.load(Ordering::Relaxed))?;
            }
            if !put {
                write(new, &mut at, range.first.0, range.end().0, region.cast_mut())?;
            }
            Some(at)
        })
    }

    /// Takes a region out. `false`: it is not in the map.
    ///
    /// # Context
    /// Normal; writers take turns.
    #[must_use]
    pub fn remove(&self, region: *const Region) -> bool {
        self.rewrite(|old, new, len| {
            let mut at = 0;
            for index in 0..len {
                let line = old.get(index)?;
                let held = line.region.load(Ordering::Relaxed);
                if !ptr::eq(held, region) {
                    let (first, end) = (line.first.load(Ordering::Relaxed), line.end.load(Ordering::Relaxed));
                    write(new, &mut at, first, end, held)?;
                }
            }
            (at < len).then_some(at)
        })
    }

    fn rewrite(&self, change: impl FnOnce(&Table<Line>, &Table<Line>, usize) -> Option<usize>) -> bool {
        let version = self.version.load(Ordering::Relaxed);
        let (Some((old, old_len)), Some((new, new_len))) = (self.half(version), self.half(version + 1)) else {
            return false;
        };
        // Readers that see any of the writes below must also see that the version they started from has passed.
        fence(Ordering::Release);
        match change(old, new, old_len.load(Ordering::Relaxed) as usize) {
            Some(len) => {
                new_len.store(len as u64, Ordering::Relaxed);
                self.version.store(version + 1, Ordering::Release);
                true
            }
            None => false,
        }
    }

    /// Calls `visit` for each region, in order; for all of them again where one came meanwhile.
    ///
    /// # Context
    /// Inside the gate, or with it closed.
    pub fn each(&self, mut visit: impl FnMut(&Region)) {
        loop {
            let version = self.version.load(Ordering::Acquire);
            let Some((lines, len)) = self.half(version) else { return };
            for line in lines.iter().take(len.load(Ordering::Relaxed) as usize) {
                // SAFETY: region-in-map: as in `find`; none goes, so whatever a writer puts into a line is in the map.
                if let Some(region) = unsafe { line.region.load(Ordering::Relaxed).as_ref() } {
                    visit(region);
                }
            }
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == version {
                return;
            }
        }
    }
}

fn write(lines: &Table<Line>, at: &mut usize, first: u64, end: u64, region: *mut Region) -> Option<()> {
    let line = lines.get(*at)?;
    line.first.store(first, Ordering::Relaxed);
    line.end.store(end, Ordering::Relaxed);
    line.region.store(region, Ordering::Relaxed);
    *at += 1;
    Some(())
}
