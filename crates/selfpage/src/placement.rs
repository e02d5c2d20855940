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
        Placement::Anywhere => reserve_anywhere(len_bytes).map_err(|errno| Error::system("reserve", object, errno)),
        Placement::At(addr) => reserve_at(addr, len_bytes, object),
        Placement::FarFromAll => reserve_far(len_bytes, object),
    }
}

/// The same where the kernel likes. What we registered in a region would be taken for that region's own, and go with it.
///
/// # Errors
/// There is no other place than in such regions.
pub(crate) fn reserve_anywhere(len_bytes: usize) -> std::result::Result<usize, Errno> {
    // Access comes later: where the program has all new mappings locked (mlockall(2)), the kernel would fill this one.
    // SAFETY: owned-range: a fresh mapping.
    let map = |len_bytes| unsafe { memory::map_anonymous(Place::Anywhere, len_bytes, Access::None) };
    let region_bytes = |start| taken::region_at(&(start..start + len_bytes)).map(|region| region.addresses.len());
    let found = map(len_bytes)?;
    let Some(mut more_bytes) = region_bytes(found) else { return Ok(found) };
    // One that is longer by that region reaches out of it, at one of its ends; there may be another region.
    loop {
        let longer = map(len_bytes.saturating_add(more_bytes));
        let Ok(start) = longer else {
            unmap(found, found + len_bytes);
            return longer;
        };
        let end = start + len_bytes + more_bytes;
        if let Some(place) = [start, end - len_bytes].into_iter().find(|place| region_bytes(*place).is_none()) {
            unmap(found, found + len_bytes);
            unmap(start, place);
            unmap(place + len_bytes, end);
            return Ok(place);
        }
        unmap(start, end);
        more_bytes = more_bytes.saturating_mul(2);
    }
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
    let all = maps::of_this_process().map_err(|why| why.for_a(object))?;
    let mut taken: Vec<_> = all.into_iter().map(|mapping| mapping.range).collect();
    taken.extend(taken::all());
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
