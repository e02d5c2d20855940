//! Where regions lie: where the kernel likes, at an address of the program's choice, or at a random one far from all others.
//!
//! # Source
//! AVM §2.1: in an address space that is sparse enough, memory at a random address is isolated from code that does not know it.
#![allow(unsafe_code)]

pub(crate) mod taken;

use std::ops::Range;

use rustix::rand::{GetRandomFlags, getrandom};
use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::Errno;
use selfpage_core::linux::memory::{self, Access, Place};

use crate::error::{Error, Kind, Result};
use crate::maps;
use crate::region::Builder;

/// Addresses that every x86-64 machine gives to programs.
const SPACE: Range<usize> = 0x1_0000..0x7fff_ffff_f000;
/// How much lies free on both sides of a region that is far from all others.
const MARGIN_BYTES: usize = 64 << 30;
/// Each try misses with the share of the space that is not free with margins, which is well below one half.
const TRIES: u32 = 256;

/// Where a region is to lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Placement {
    Anywhere,
    At(usize),
    FarFromAll,
}

impl Builder<'_> {
    /// At this address, the first of a page. The region is not made where something is there already, or the place is another region's, of
    /// which the program has unmapped that part.
    pub fn at(mut self, addr: usize) -> Self {
        self.placement = Placement::At(addr);
        self
    }

    /// At a random address with nothing within 64 GiB of it now. A write to a random address of the program's 2^47 bytes hits a
    /// region of `n` bytes with odds of `n` in 2^47 (1 GiB: 1 in 131,072), and one that goes astray by less than 64 GiB from
    /// memory that was there cannot. What is mapped later may come nearer.
    pub fn far_from_all(mut self) -> Self {
        self.placement = Placement::FarFromAll;
        self
    }
}

/// Reserves fresh anonymous memory there, in no region of any domain of which the program has unmapped a part. Returns its address.
pub(crate) fn reserve(placement: Placement, len_bytes: usize, object: &str) -> Result<usize> {
    match placement {
        Placement::Anywhere => reserve_anywhere(len_bytes, object),
        Placement::At(addr) => reserve_at(addr, len_bytes, object),
        Placement::FarFromAll => reserve_far(len_bytes, object),
    }
}

/// The same where the kernel likes. What we registered in a region would be taken for that region's own, and go with it.
pub(crate) fn reserve_anywhere(len_bytes: usize, object: &str) -> Result<usize> {
    let refused = |errno| Error::system("reserve", object, errno);
    // SAFETY: owned-range: nothing that exists is replaced.
    let map = |place| unsafe { memory::map_anonymous(place, len_bytes, Access::None) };
    let region_at = |start| taken::region_at(&(start..start + len_bytes));
    // Access comes later: where the program has all new mappings locked (mlockall(2)), the kernel would fill this one.
    let found = map(Place::Anywhere).map_err(refused)?;
    let Some(region) = region_at(found) else { return Ok(found) };
    // The kernel would have it there again.
    unmap(found, found + len_bytes);
    let (taken, unknown) = match not_free(object) {
        Ok(taken) => (taken, None),
        // Of a place beside a region the kernel says itself whether something is there.
        Err(why) => (taken::all(), Some(why)),
    };
    for start in places(len_bytes, region.addresses.start, taken) {
        match map(Place::Free(start)) {
            Ok(start) if region_at(start).is_none() => return Ok(start),
            // Another thread has just made a region there, or mapped something.
            Ok(start) => unmap(start, start + len_bytes),
            // So low that programs may not use it.
            Err(Errno::EXIST | Errno::PERM) => {}
            Err(errno) => return Err(refused(errno)),
        }
    }
    if let Some(why) = unknown {
        return Err(why);
    }
    let cause = format!(
        "there is room for it in region {} alone, of which the program has unmapped a part: drop that region first, or make it smaller",
        region.name
    );
    Err(Error::new(Kind::OutOfSpace, "reserve", object, cause))
}

/// What is mapped, and what is a region's.
fn not_free(object: &str) -> Result<Vec<Range<usize>>> {
    let all = maps::of_this_process().map_err(|why| why.for_a(object))?;
    Ok(all.into_iter().map(|mapping| mapping.range).chain(taken::all()).collect())
}

/// Where there is room beside what is `taken`: the next places below an address, as the kernel would go, and then above.
fn places(len_bytes: usize, near: usize, mut taken: Vec<Range<usize>>) -> impl Iterator<Item = usize> {
    taken.push(SPACE.end..SPACE.end);
    taken.sort_unstable_by_key(|range| range.start);
    let mut end = SPACE.start;
    let mut gaps: Vec<Range<usize>> = Vec::new();
    for range in taken {
        if end < range.start.min(SPACE.end) {
            gaps.push(end..range.start.min(SPACE.end));
        }
        end = end.max(range.end);
    }
    gaps.retain(|gap| gap.len() >= len_bytes);
    let above = gaps.split_off(gaps.partition_point(|gap| gap.start < near));
    gaps.into_iter().rev().map(move |gap| gap.end - len_bytes).chain(above.into_iter().map(|gap| gap.start))
}

fn unmap(from: usize, to: usize) {
    // SAFETY: owned-range: of a mapping that was just made, and that nobody has.
    let _ = unsafe { memory::unmap(from, to - from) };
}

fn reserve_at(addr: usize, len_bytes: usize, object: &str) -> Result<usize> {
    let object = || format!("{object} at {addr:#x}");
    if !addr.is_multiple_of(PAGE_BYTES) {
        let cause = format!("a region begins with a page: choose a multiple of {PAGE_BYTES}");
        return Err(Error::new(Kind::Invalid, "reserve", object(), cause));
    }
    if addr < SPACE.start || addr.checked_add(len_bytes).is_none_or(|end| end > SPACE.end) {
        let cause = format!("it would not lie in {:#x}..{:#x}, which programs may use", SPACE.start, SPACE.end);
        return Err(Error::new(Kind::Invalid, "reserve", object(), cause));
    }
    // SAFETY: owned-range: nothing that exists is replaced.
    match unsafe { memory::map_anonymous(Place::Free(addr), len_bytes, Access::None) } {
        Ok(start) => {
            let end = start + len_bytes;
            let Some(other) = taken::region_at(&(start..end)) else { return Ok(start) };
            unmap(start, end);
            let cause = format!(
                "it would lie in region {}, of which the program has unmapped that part: drop that region first, or choose another \
                 address",
                other.name
            );
            Err(Error::new(Kind::Invalid, "reserve", object(), cause))
        }
        Err(Errno::EXIST) => Err(Error::new(Kind::Invalid, "reserve", object(), occupied(addr, len_bytes))),
        Err(errno) => Err(Error::system("reserve", object(), errno)),
    }
}

fn occupied(addr: usize, len_bytes: usize) -> String {
    let end = addr.saturating_add(len_bytes);
    let there = maps::within(&(addr..end)).unwrap_or_default().into_iter().next();
    let there = there.map_or("something".into(), |mapping| {
        let name = if mapping.name.is_empty() { "anonymous memory" } else { &mapping.name };
        format!("{name} at {:#x}..{:#x}", mapping.range.start, mapping.range.end)
    });
    format!("{there} is there; choose another address, or unmap that first")
}

fn reserve_far(len_bytes: usize, object: &str) -> Result<usize> {
    let taken = not_free(object)?;
    for _ in 0..TRIES {
        let Some(start) = choose(len_bytes, &taken, random()?) else { continue };
        // SAFETY: owned-range: nothing that exists is replaced.
        match unsafe { memory::map_anonymous(Place::Free(start), len_bytes, Access::None) } {
            Ok(start) => return Ok(start),
            Err(Errno::EXIST) => {} // Another thread has just mapped there.
            Err(errno) => return Err(Error::system("reserve", object, errno)),
        }
    }
    let cause = format!(
        "no place was found with {} GiB free on both sides; make it smaller, or place it with at()",
        MARGIN_BYTES >> 30
    );
    Err(Error::new(Kind::OutOfSpace, "reserve", object, cause))
}

fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    // Few bytes come whole, once the machine has any.
    getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|errno| Error::system("choose", "a random address", errno).if_filtered("getrandom"))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// The place that a random number stands for, all being as likely, if it is far from what is `taken`.
fn choose(len_bytes: usize, taken: &[Range<usize>], random: u64) -> Option<usize> {
    let around = len_bytes.checked_add(2 * MARGIN_BYTES)?;
    let pages = (SPACE.len().checked_sub(around)? / PAGE_BYTES) as u64;
    let from = SPACE.start + (random % pages.max(1)) as usize * PAGE_BYTES;
    let free = !taken.iter().any(|range| range.start < from + around && from < range.end);
    free.then_some(from + MARGIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_below_and_then_above_in_what_is_nobodys() {
        let (low, high) = (SPACE.start + 0x9000, SPACE.end - 0x9000);
        // Out of order, and one within another.
        let taken = vec![high..SPACE.end, SPACE.end + 0x9000..SPACE.end + 0xa000, low..0x40_0000, 0x20_0000..0x30_0000];
        let taken = [taken, vec![0x40_3000..0x50_0000, 0x50_8000..0x60_0000]].concat();
        let found = |len_bytes| places(len_bytes, 0x40_3000, taken.clone()).collect::<Vec<_>>();
        assert_eq!(found(0x1000), [0x40_2000, low - 0x1000, 0x50_0000, 0x60_0000]);
        assert_eq!(found(0x8000), [low - 0x8000, 0x50_0000, 0x60_0000]);
        assert_eq!(found(1 << 30), [0x60_0000]);
        assert_eq!(places(0x1000, 0, vec![SPACE]).next(), None);
    }

    #[test]
    fn what_is_chosen_is_far_from_all_that_is_taken() {
        let taken = 0x5000_0000_0000..0x5000_1000_0000;
        let all = std::slice::from_ref(&taken);
        let chosen: Vec<_> = (0..1000).filter_map(|seed: u64| choose(1 << 30, all, seed << 36 | seed)).collect();
        assert!(chosen.len() > 900, "{}", chosen.len());
        for start in chosen {
            assert!(start.is_multiple_of(PAGE_BYTES) && start + (1 << 30) + MARGIN_BYTES <= SPACE.end);
            let far = start + (1 << 30) + MARGIN_BYTES <= taken.start || start >= taken.end + MARGIN_BYTES;
            assert!(far, "{start:#x}");
        }
        assert_eq!(choose(1 << 30, std::slice::from_ref(&SPACE), 7), None);
        assert_eq!(choose(usize::MAX, &[], 7), None);
    }
}
