//! A holder's capabilities, by the names that it has for them: a guarded radix tree of CNodes.
//!
//! # Source
//! Cichlid §3.1: "a radix tree in the kernel which functions as a guarded page table. The nodes of the tree are also
//! capabilities, and are allocated by the application."

use super::kernel::Kernel;
use super::slot::{RADIX_BITS, Slot};
use super::{Capability, Error, Rights, Rule, Type};

/// A holder's name for one of its capabilities: for each CNode on the way from its root, the guard and six bits for a place.
/// It says nothing outside of the holder's own space, so there is nothing to forge.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Handle {
    /// The bits, the last in the lowest place.
    pub bits: u64,
    /// How many there are.
    pub len: u8,
}

impl Handle {
    /// Place `index` of the root, if that has no guard.
    pub const fn at_root(index: u8) -> Handle {
        Handle { bits: index as u64, len: RADIX_BITS as u8 }
    }

    /// Place `index` of the CNode that this names, if that has no guard.
    pub const fn then(self, index: u8) -> Handle {
        self.guarded(0, 0, index)
    }

    /// Place `index` of the CNode that this names, past its guard.
    pub const fn guarded(self, guard_bits: u8, guard: u64, index: u8) -> Handle {
        let way = guard << RADIX_BITS | (index as u64 & 63);
        let len = guard_bits.saturating_add(RADIX_BITS as u8);
        // One that is too long names nothing, whatever its bits are.
        let above = if len < 64 { self.bits << len } else { 0 };
        Handle { bits: above | way, len: self.len.saturating_add(len) }
    }

    /// What `further`, a handle in the space whose root this names, is called in the space of this one.
    fn followed_by(self, further: Handle) -> Result<Handle, Error> {
        let len = self.len.checked_add(further.len).filter(|len| u32::from(*len) <= u64::BITS);
        let own = u64::MAX.checked_shr(u64::BITS - u32::from(further.len)).unwrap_or(0);
        let above = self.bits.checked_shl(u32::from(further.len)).unwrap_or(0);
        Ok(Handle { bits: above | further.bits & own, len: len.ok_or(Error::DepthOverflow)? })
    }
}

/// A holder's space: the way from the first CNode of all to the one at which its handles begin. It is worth nothing once another
/// capability is there, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    way: Handle,
    serial: u64,
}

impl Space {
    /// The first of all.
    pub(super) const fn first(serial: u64) -> Space {
        Space { way: Handle { bits: 0, len: 0 }, serial }
    }
}

impl Kernel<'_> {
    /// The space whose root is the CNode that a handle names: what its owner gives to another holder as its own.
    ///
    /// # Errors
    /// It leads to no CNode. [`Error::DepthOverflow`]: the way to it from the first CNode of all has more than 64 bits.
    pub fn space(&self, space: &Space, root: Handle) -> Result<Space, Error> {
        let slot = self.find(space, root)?;
        match self.held(slot)?.kind {
            Type::CNode => Ok(Space { way: space.way.followed_by(root)?, serial: self.slots().serial(slot) }),
            _ => Err(Error::WrongType),
        }
    }

    /// What a handle names.
    ///
    /// # Errors
    /// It leads to no capability.
    pub fn identify(&self, space: &Space, handle: Handle) -> Result<Capability, Error> {
        self.held(self.find(space, handle)?)
    }

    pub(crate) fn held(&self, slot: Slot) -> Result<Capability, Error> {
        self.slots().capability(slot).ok_or(Error::NoCapability)
    }

    /// The place that a handle names, which may be empty.
    pub(crate) fn find(&self, space: &Space, handle: Handle) -> Result<Slot, Error> {
        self.reach(space, handle).map(|(_, slot)| slot)
    }

    /// The same, for a call that takes something out of it.
    pub(super) fn find_to_remove(&self, space: &Space, handle: Handle) -> Result<Slot, Error> {
        let (node, slot) = self.reach(space, handle)?;
        self.demand(Rule::RemovingTakesWrite, node.rights.contain(Rights::WRITE))?;
        Ok(slot)
    }

    /// The last CNode on the way, and the place in it.
    fn reach(&self, space: &Space, handle: Handle) -> Result<(Capability, Slot), Error> {
        self.follow(self.root(space)?, handle)
    }

    fn follow(&self, mut node: Capability, handle: Handle) -> Result<(Capability, Slot), Error> {
        if u32::from(handle.len) > u64::BITS {
            return Err(Error::DepthOverflow);
        }
        let mut left = u32::from(handle.len);
        loop {
            self.demand(Rule::LookupTakesRead, node.rights.contain(Rights::READ))?;
            let guard_bits = u32::from(node.guard_bits);
            left = left.checked_sub(guard_bits + RADIX_BITS).ok_or(Error::DepthOverflow)?;
            let way = handle.bits.checked_shr(left).unwrap_or(0);
            self.demand(Rule::GuardMatches, (way >> RADIX_BITS) & low_bits(guard_bits) == node.guard)?;
            let slot = Slot::in_node(node.base, way & low_bits(RADIX_BITS)).ok_or(Error::NoCapability)?;
            if left == 0 {
                return Ok((node, slot));
            }
            node = self.held(slot)?;
            if node.kind != Type::CNode {
                return Err(Error::DepthOverflow);
            }
        }
    }

    /// Places `first` to `first + count` of a CNode, which must all be empty, and stay when a revocation is done.
    pub(super) fn places(
        &self,
        space: &Space,
        node: Handle,
        first: u8,
        count: u8,
    ) -> Result<impl Iterator<Item = Slot> + use<>, Error> {
        let slot = self.find(space, node)?;
        let node = self.held(slot)?;
        if node.kind != Type::CNode {
            return Err(Error::WrongType);
        }
        self.demand(Rule::PlacingTakesWrite, node.rights.contain(Rights::WRITE))?;
        if first == 0 || u32::from(first) + u32::from(count) > 1 << RADIX_BITS {
            return Err(Error::OutOfRange);
        }
        let places = move || (first..first + count).filter_map(move |index| Slot::in_node(node.base, u64::from(index)));
        self.demand(Rule::PlaceIsFree, places().all(|place| self.slots().capability(place).is_none()))?;
        self.demand(Rule::NotCondemned, !self.slots().is_condemned(slot))?;
        Ok(places())
    }

    /// Looked up again each time: the memory where it lay may be a frame by now, and say anything.
    fn root(&self, space: &Space) -> Result<Capability, Error> {
        let mut slot = Slot::in_node(self.memory().first(), 1).ok_or(Error::NoCapability)?;
        if space.way.len > 0 {
            let way = self.follow(self.held(slot)?, space.way);
            slot = way.map_err(|_| Error::NoCapability)?.1;
        }
        let root = self.held(slot)?;
        // The place may have been given to another since.
        self.demand(Rule::RootIsTheSame, self.slots().serial(slot) == space.serial)?;
        Ok(root)
    }
}

const fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}
