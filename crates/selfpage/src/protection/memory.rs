//! Memory that rights are about.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::key::Key;

use super::places::Place;
use super::rights::Rights;
use super::table::{self, Record};
use super::{Mechanism, mechanism, thread};
use crate::error::{Error, Kind, Result};
use crate::maps;
use crate::region::{ADDRESS, Region};

/// Memory that rights are about: a region, or memory of the program's. While it or a clone of it lives (a domain with rights on it has
/// one), threads in a protection domain may do with it what that domain may, and threads in none what the mapping allows.
#[derive(Clone)]
pub struct Memory {
    piece: Arc<Piece>,
}

struct Piece {
    id: u64,
    name: String,
    range: Range<usize>,
    /// Kept until the rights are gone.
    region: Option<Arc<Region>>,
}

impl Memory {
    /// A region. Its pages move by copying as long as they have a key.
    ///
    /// # Errors
    /// It, or a part of it, has been given to rights before (clone that `Memory`), it is not mapped with one protection from beginning to end,
    /// or threads in domains leave no key for it. It is tracked, and there are keys. [`Kind::Denied`]: the calling thread is in a protection
    /// domain.
    pub fn of(region: &Arc<Region>) -> Result<Memory> {
        let start = region.as_ptr() as usize;
        if mechanism() == Mechanism::Keys && region.core().trap.is_tracked() {
            let cause = "a page with a key goes by a copy, under the bit that tracking uses: leave `tracked` out";
            return Err(Error::new(Kind::Invalid, "protect", format!("region {}", region.bound.name), cause));
        }
        Memory::add(region.bound.name.clone(), start..start + region.len_bytes(), Some(region.clone()))
    }

    /// Memory of the program's own, in whole pages.
    ///
    /// # Errors
    /// The range is empty, not in whole pages, not mapped with one protection from beginning to end, or a part of it has been
    /// given to rights before; or threads in domains leave no key for it. [`Kind::Denied`]: the calling thread is in a protection domain.
    ///
    /// # Safety
    /// *protected-memory*: the range stays mapped as it is for as long as the value or a clone of it lives, nobody else changes its
    /// protection or key, and neither a thread's stack, nor what a thread in a domain without rights on it needs to run
    /// (the allocator's memory, say), lies there; nor, where there are no keys, what a pager, a store or a policy uses.
    pub unsafe fn plain(name: &str, range: Range<usize>) -> Result<Memory> {
        Memory::add(name.into(), range, None)
    }

    fn add(name: String, range: Range<usize>, region: Option<Arc<Region>>) -> Result<Memory> {
        super::set_up();
        let object =
            || format!("memory {}{:#x}..{:#x}", before_address(&name, region.as_ref()), range.start, range.end);
        let refused = |cause: String| Err(Error::new(Kind::Invalid, "protect", object(), cause));
        if range.is_empty() || !(range.start | range.end).is_multiple_of(PAGE_BYTES) {
            return refused(format!("rights are about whole pages: give it multiples of {PAGE_BYTES} bytes"));
        }
        if thread::with(|here| here.depth()) > 0 {
            let cause = "memory is given to rights outside of all protection domains: leave them first";
            return Err(Error::new(Kind::Denied, "protect", object(), cause));
        }
        let mut table = table::hold();
        let overlaps = |record: &&Record| record.start < range.end && range.start < record.start + record.len_bytes;
        if let Some(other) = table.memory.iter().find(overlaps) {
            let region = other.region.as_ref().and_then(Weak::upgrade);
            return refused(format!(
                "memory {}{:#x} has rights of its own; clone that Memory",
                before_address(&other.name, region.as_ref()),
                other.start
            ));
        }
        // With another domain's rights in force it does not count as memory yet, so it is as the program mapped it.
        let Some(most) = mapped(&range).map_err(|why| why.for_a(object()))? else {
            return refused(
                "it is not mapped with one protection from beginning to end; map it, or give its parts".into(),
            );
        };
        if let Some(region) = &region
            && mechanism() == Mechanism::Keys
        {
            // Before its pages have one.
            region.core().keyed.store(1, Ordering::Relaxed);
        }
        let id = table.next();
        table.memory.push(Record {
            id,
            name: name.clone(),
            start: range.start,
            len_bytes: range.len(),
            most,
            now: most.prot(),
            key: Key::NONE,
            region: region.as_ref().map(Arc::downgrade),
            _place: Place::new(range.clone()),
        });
        if let Err(why) = table.follow() {
            let record = table.memory.pop();
            record.into_iter().for_each(|mut record| record.give_back());
            // What has followed already goes back.
            let _ = table.follow();
            return Err(why);
        }
        drop(table);
        Ok(Memory { piece: Arc::new(Piece { id, name, range, region }) })
    }

    /// The name for messages.
    pub fn name(&self) -> &str {
        &self.piece.name
    }

    /// Where it lies.
    pub fn range(&self) -> Range<usize> {
        self.piece.range.clone()
    }

    /// The region, if it is one.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.piece.region.as_ref()
    }

    pub(super) fn id(&self) -> u64 {
        self.piece.id
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut table = table::hold();
        let Some(at) = table.memory.iter().position(|record| record.id == self.id) else { return };
        let mut record = table.memory.swap_remove(at);
        record.give_back();
        // Fewer domains may be wide now; where threads are in them they stay so. Whoever waits at the memory tries again after this, and
        // goes on.
        let _ = table.follow();
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} at {:#x?})", self.piece.name, self.piece.range)
    }
}

/// What comes before the address of memory of this name: a region that was given none is called by its address already.
fn before_address(name: &str, region: Option<&Arc<Region>>) -> String {
    let given = region.map_or(name, |region| region.bound.given_name());
    if given.is_empty() { ADDRESS.into() } else { format!("{given} {ADDRESS}") }
}

/// What the mappings of a range allow, if they allow the same.
fn mapped(range: &Range<usize>) -> Result<Option<Rights>> {
    let (mut end, mut rights) = (range.start, None);
    for mapping in maps::within(range)? {
        let allowed = maps_rights(&mapping);
        if mapping.range.start > end || rights.is_some_and(|rights| rights != allowed) {
            return Ok(None);
        }
        rights = Some(allowed);
        end = mapping.range.end;
        if end >= range.end {
            return Ok(rights);
        }
    }
    Ok(None)
}

fn maps_rights(mapping: &maps::Mapping) -> Rights {
    let one = |allowed: bool, right: Rights| if allowed { right } else { Rights::NONE };
    one(mapping.readable, Rights::READ)
        | one(mapping.writable, Rights::WRITE)
        | one(mapping.executable, Rights::EXECUTE)
}
