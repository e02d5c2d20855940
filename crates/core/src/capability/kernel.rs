//! Capabilities are made, handed on, and taken back.

use super::derivation::{Contents, Descent};
use super::rule::Rule;
use super::slot::{CNODE_BYTES, Carved, Copied, RADIX_BITS, Relation, Slot, Slots, Stage};
use super::{Capability, Error, Handle, Rights, Space, Type};
use crate::physical::{PhysAddr, PhysMemory};
use crate::tables::{Invalidation, Stale, Tlb};

/// The smallest object: a page.
const LEAST_BITS: u8 = 12;
/// The largest, 32 GiB: a place counts the pages of an object in 24 bits, one more than it has.
const MOST_BITS: u8 = 35;

/// An object to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Object {
    /// What the memory becomes.
    pub kind: Type,
    /// log2 of its length in bytes.
    pub size_bits: u8,
}

impl Object {
    /// An object of a type that knows its size; of the others, a page.
    pub const fn of(kind: Type) -> Object {
        let size_bits = match kind.size_bits() {
            Some(bits) => bits,
            None => LEAST_BITS,
        };
        Object { kind, size_bits }
    }
}

/// How far a revocation came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Nothing that came of the capability is left.
    Done,
    /// Call again. Until it is done, nothing can be made of the capability or of what came of it, nor put into a CNode among that.
    More,
}

/// The mechanism over one physical memory: all that is privileged.
///
/// Every call names a holder's [`Space`], and reaches what that holder has handles for and nothing else. A call that is refused
/// has changed nothing.
pub struct Kernel<'m> {
    memory: &'m PhysMemory,
    pub(crate) tlb: &'m dyn Tlb,
    pub(crate) invalidation: Invalidation,
    pub(crate) stale: Stale,
    serials: u64,
    #[cfg(feature = "sim")]
    pub(super) waived: Option<Rule>,
}

impl<'m> Kernel<'m> {
    /// Takes possession of a memory, and of `devices`, each a base and log2 of a length. All of it goes to the space that is
    /// returned: a root CNode with itself in place 1, the RAM in blocks as large as alignment allows from place 2 on, after
    /// that the devices.
    ///
    /// # Errors
    /// The root has too few places, or a device no size or alignment that a capability can have.
    pub fn boot(
        memory: &'m PhysMemory,
        tlb: &'m dyn Tlb,
        devices: &[(PhysAddr, u8)],
    ) -> Result<(Kernel<'m>, Space), Error> {
        let mut kernel = Kernel {
            memory,
            tlb,
            invalidation: Invalidation::Adaptive,
            stale: Stale::Nothing,
            serials: 0,
            #[cfg(feature = "sim")]
            waived: None,
        };
        let root = memory.first();
        memory.clear(root, CNODE_BYTES);
        let whole =
            |kind, base, size_bits| Capability { kind, rights: Rights::ALL, base, size_bits, guard_bits: 0, guard: 0 };
        let mut places = (1..1 << RADIX_BITS).filter_map(|index| Slot::in_node(root, index));
        let mut own = |kernel: &mut Kernel<'m>, capability| {
            let place = places.next().ok_or(Error::OutOfRange)?;
            kernel.put(place, capability, Copied::No);
            Ok(place)
        };
        let first = own(&mut kernel, whole(Type::CNode, root, LEAST_BITS))?;
        let end = root.plus(memory.len_bytes());
        let mut at = root.plus(CNODE_BYTES);
        while at < end {
            let fits = (end.0 - at.0).ilog2().min(at.0.trailing_zeros()).min(u32::from(MOST_BITS)) as u8;
            if fits < LEAST_BITS {
                break;
            }
            own(&mut kernel, whole(Type::Ram, at, fits))?;
            at = at.plus(1 << fits);
        }
        for &(base, size_bits) in devices {
            if !(LEAST_BITS..=MOST_BITS).contains(&size_bits) {
                return Err(Error::BadSize);
            }
            if !base.is_aligned(size_bits) {
                return Err(Error::Misaligned);
            }
            own(&mut kernel, whole(Type::DevFrame, base, size_bits))?;
        }
        let serial = kernel.slots().serial(first);
        Ok((kernel, Space::first(serial)))
    }

    /// The memory.
    pub const fn memory(&self) -> &'m PhysMemory {
        self.memory
    }

    pub(crate) const fn slots(&self) -> Slots<'m> {
        Slots(self.memory)
    }

    fn put(&mut self, place: Slot, capability: Capability, copied: Copied) {
        self.serials += 1;
        self.slots().put(place, capability, copied, self.serials);
    }

    /// Makes `count` objects from the memory of a capability, the next that was not made into anything yet, and puts their
    /// capabilities into places `first` and on of the CNode `into`. CNodes and page tables begin empty; frames hold
    /// whatever was there.
    ///
    /// # Errors
    /// [`Error::WrongType`]: a capability of this type does not become that. [`Error::BadSize`]; [`Error::OutOfMemory`]: too
    /// little is left of it. [`Error::NoRight`], [`Error::SlotTaken`], [`Error::OutOfRange`], [`Error::RevokeInProgress`].
    pub fn retype(
        &mut self,
        space: &Space,
        source: Handle,
        to: Object,
        count: u8,
        into: Handle,
        first: u8,
    ) -> Result<(), Error> {
        let slots = self.slots();
        let parent = self.find(space, source)?;
        let from = self.held(parent)?;
        self.demand(Rule::TypesDescend, from.kind.becomes(to.kind))?;
        self.demand(Rule::RetypeTakesWrite, from.kind != Type::Ram || from.rights.contain(Rights::WRITE))?;
        let fits = to.size_bits == to.kind.size_bits().unwrap_or(to.size_bits);
        self.demand(Rule::SizesFit, fits)?;
        if !(LEAST_BITS..=MOST_BITS).contains(&to.size_bits) {
            return Err(Error::BadSize);
        }
        let places = self.places(space, into, first, count)?;
        self.demand(Rule::NotCondemned, !slots.is_condemned(parent))?;
        let origin = slots.origin(parent);
        let carved = slots.carved(origin);
        let pages = 1u64 << (to.size_bits - LEAST_BITS);
        let begin = if self.keeps(Rule::CarvedOnce) { carved.pages.next_multiple_of(pages) } else { 0 };
        let end = begin + pages * u64::from(count);
        self.demand(Rule::CarvedWithin, end <= from.len_bytes() >> LEAST_BITS)?;
        for (step, place) in places.enumerate() {
            let base = from.base.plus((begin + step as u64 * pages) << LEAST_BITS);
            if to.kind.size_bits().is_some() && self.keeps(Rule::BeginsEmpty) {
                self.memory.clear(base, 1 << to.size_bits);
            }
            let made = Capability { kind: to.kind, size_bits: to.size_bits, base, ..from };
            self.put(place, made, Copied::No);
            slots.adopt(parent, place);
        }
        if count > 0 {
            slots.set_carved(origin, Carved { pages: end, objects: carved.objects + u64::from(count) });
        }
        Ok(())
    }

    /// Copies a capability into place `at` of the CNode `into`, with those of its rights that are among `rights`. What is done
    /// with the copy ends when the original is revoked.
    ///
    /// # Errors
    /// [`Error::NoCapability`], [`Error::SlotTaken`], [`Error::RevokeInProgress`], …
    pub fn copy(&mut self, space: &Space, source: Handle, into: Handle, at: u8, rights: Rights) -> Result<(), Error> {
        let original = self.find(space, source)?;
        let capability = self.held(original)?;
        let rights = if self.keeps(Rule::CopiesHaveLess) { capability.rights & rights } else { rights };
        self.derive(space, original, Capability { rights, ..capability }, into, at)
    }

    /// As [`Kernel::copy`], of a CNode: handles that go through the copy must have these bits next before a place of it is chosen.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]: the guard has more bits than it says, or more than a handle has room for. As for
    /// [`Kernel::copy`].
    pub fn mint(&mut self, space: &Space, source: Handle, into: Handle, at: u8, guard: Handle) -> Result<(), Error> {
        let original = self.find(space, source)?;
        let capability = self.held(original)?;
        if capability.kind != Type::CNode {
            return Err(Error::WrongType);
        }
        if u32::from(guard.len) > u64::BITS - 2 * RADIX_BITS || guard.bits >> guard.len != 0 {
            return Err(Error::OutOfRange);
        }
        let guarded = Capability { guard_bits: guard.len, guard: guard.bits, ..capability };
        self.derive(space, original, guarded, into, at)
    }

    fn derive(&mut self, space: &Space, original: Slot, copy: Capability, into: Handle, at: u8) -> Result<(), Error> {
        let place = self.places(space, into, at, 1)?.next().ok_or(Error::OutOfRange)?;
        self.demand(Rule::NotCondemned, !self.slots().is_condemned(original))?;
        self.put(place, copy, Copied::Yes);
        self.slots().adopt(original, place);
        Ok(())
    }

    /// Deletes a capability. Where it was mapped, it is no longer. With the last one of an object the object goes.
    ///
    /// # Errors
    /// [`Error::InUse`]: it has copies, or objects were made from it (revoke them first); or it is the last of a CNode that
    /// holds capabilities, or of a table with entries. [`Error::NoRight`]: the CNode that it is in may not be written.
    pub fn delete(&mut self, space: &Space, handle: Handle) -> Result<(), Error> {
        let slots = self.slots();
        let slot = self.find_to_remove(space, handle)?;
        let capability = self.held(slot)?;
        let holds = match capability.kind {
            _ if slots.is_copy(slot) => false,
            Type::CNode => slots.taken(capability.base) > 0,
            kind => kind.level().is_some() && self.has_entries(capability.base),
        };
        self.demand(Rule::EmptyWhenDeleted, !holds)?;
        self.demand(Rule::ChildlessWhenDeleted, !slots.has_children(slot))?;
        self.destroy(slot, capability);
        self.invalidate();
        Ok(())
    }

    /// Deletes what came of a capability, at most `most` capabilities of it in this call: copies, objects made from the memory,
    /// what CNodes among them hold, and what came of all that; with every mapping. The capability itself stays. A call takes as
    /// long as what it deletes is much, and the way down to it, which each call goes anew.
    ///
    /// # Errors
    /// [`Error::NoCapability`]; [`Error::NoRight`]: the CNode that it is in may not be written.
    pub fn revoke(&mut self, space: &Space, handle: Handle, most: u64) -> Result<Progress, Error> {
        let slots = self.slots();
        let slot = self.find_to_remove(space, handle)?;
        self.held(slot)?;
        slots.mark_revocation(slot, Stage::Begun);
        let contents = if self.keeps(Rule::ContentsGo) { Contents::Go } else { Contents::Stay };
        let mut descent = Descent::new(slots, slot, contents);
        let mut left = most;
        let progress = loop {
            let Some(leaf) = descent.leaf() else {
                slots.mark_revocation(slot, Stage::Ended);
                break Progress::Done;
            };
            let Some(fewer) = left.checked_sub(1) else { break Progress::More };
            left = fewer;
            if let Some(capability) = slots.capability(leaf) {
                self.destroy(leaf, capability);
            }
        };
        self.invalidate();
        Ok(progress)
    }

    /// Deletes a capability that nothing depends on but entries of its table.
    fn destroy(&mut self, slot: Slot, capability: Capability) {
        let slots = self.slots();
        if capability.kind != Type::CNode && slots.mapping(slot).is_some() && self.keeps(Rule::EntriesGo) {
            self.take_entries_of(slot);
        }
        if !slots.is_copy(slot) {
            if capability.kind.level().is_some() && self.keeps(Rule::TableEntriesGo) {
                self.take_entries_in(slot, capability.base);
            }
            if capability.kind == Type::Pml4 && self.keeps(Rule::LostRootIsLeft) {
                self.tlb.leave(capability.base);
            }
            if let Some(parent) = slots.relation(slot, Relation::Parent) {
                let source = slots.origin(parent);
                let Carved { pages, objects } = slots.carved(source);
                let objects = objects.saturating_sub(1);
                slots.set_carved(source, Carved { pages: if objects == 0 { 0 } else { pages }, objects });
            }
        }
        slots.part(slot);
        slots.empty(slot);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::VirtAddr;
    use crate::frame::table;

    /// No CPU translates here.
    struct NoCpu;

    impl Tlb for NoCpu {
        fn forget_all(&self) {}
        fn forget(&self, _: VirtAddr) {}
        fn leave(&self, _: PhysAddr) {}
    }

    #[test]
    fn serial_numbers_do_not_come_round_while_anybody_remembers_one() {
        let memory = PhysMemory::new(PhysAddr(0x4000_0000), table(8 << 9));
        let (mut kernel, space) = Kernel::boot(&memory, &NoCpu, &[]).unwrap();
        let [root, ram, node, inside] = [1, 2, 40, 1].map(Handle::at_root);
        let make = |kernel: &mut Kernel<'_>, serial: u64| {
            kernel.serials = serial - 1;
            kernel.retype(&space, ram, Object::of(Type::CNode), 1, root, 40).unwrap();
            kernel.copy(&space, root, node, 1, Rights::READ).unwrap();
            (kernel.space(&space, node).unwrap(), kernel.identify(&space, node).unwrap())
        };
        let (first, made) = make(&mut kernel, 100);
        kernel.identify(&first, inside).unwrap();
        // Days later at 200,000 a second, and a working life.
        for bits in [37u32, 48] {
            assert_eq!(kernel.revoke(&space, ram, u64::MAX), Ok(Progress::Done));
            let (later, again) = make(&mut kernel, 100 + (1 << bits));
            assert_eq!(again, made, "after 2^{bits} capabilities");
            assert_eq!(kernel.identify(&first, inside), Err(Error::NoCapability), "after 2^{bits} capabilities");
            kernel.identify(&later, inside).unwrap();
        }
    }
}
