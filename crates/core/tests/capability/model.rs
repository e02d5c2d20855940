//! What the calls ought to do, written down again in the plainest way: capabilities and objects by number, lists for who came of
//! whom, and nothing in memory. It says of each call what it answers and what holds after it.

use std::collections::BTreeMap;

use selfpage_core::capability::{Capability, Derived, Error, Handle, Object as Shape, Progress, Rights, Type};
use selfpage_core::physical::PhysAddr;

use crate::entries::Entry;
use crate::operations::{Operation, Outcome};

/// A capability, for as long as it exists and never again.
pub type CapId = u32;
/// An object: memory of one type. What a capability is a capability of.
pub type ObjectId = u32;
/// A place in a CNode.
pub type Place = (ObjectId, u8);

/// A capability.
pub struct Cap {
    pub object: ObjectId,
    pub rights: Rights,
    /// How many bits a handle needs before it goes on in this CNode, and which.
    pub guard: (u8, u64),
    /// What it was copied or made from.
    pub parent: Option<CapId>,
    pub is_copy: bool,
    /// The eldest first.
    pub children: Vec<CapId>,
    pub place: Place,
    /// Table, first entry, count.
    pub mapped: Option<(ObjectId, u16, u16)>,
    pub being_revoked: bool,
    /// It lies in a CNode that goes, and a revocation has come to it.
    pub is_going: bool,
}

/// An object.
pub struct Object {
    pub kind: Type,
    pub base: u64,
    pub size_bits: u8,
    /// The capability with which it came to be.
    pub first: CapId,
    pub part_of: Option<ObjectId>,
    /// What was made of it and still is.
    pub parts: Vec<ObjectId>,
    pub carved_bytes: u64,
    /// Of a CNode.
    pub places: BTreeMap<u8, CapId>,
    /// Of a page table.
    pub entries: BTreeMap<u16, Entry>,
}

impl Object {
    pub fn len_bytes(&self) -> u64 {
        1 << self.size_bits
    }

    pub fn end(&self) -> u64 {
        self.base + self.len_bytes()
    }
}

/// A holder: the way from the first CNode to its own, and the capability that lay there.
#[derive(Clone)]
pub struct Holder {
    way: Vec<bool>,
    root: CapId,
}

/// All there is.
pub struct Model {
    pub caps: BTreeMap<CapId, Cap>,
    pub objects: BTreeMap<ObjectId, Object>,
    pub holders: Vec<Holder>,
    /// Places that the last call emptied, by physical address.
    pub emptied: Vec<u64>,
    /// Objects that the last call made.
    pub made: Vec<ObjectId>,
    /// Roots of page tables that the last call took away.
    pub lost_roots: Vec<u64>,
    names: u32,
}

/// The bits of a handle, the first first.
fn bits(handle: Handle) -> Vec<bool> {
    (0..handle.len).rev().map(|place| handle.bits >> place & 1 == 1).collect()
}

fn number(bits: &[bool]) -> u64 {
    bits.iter().fold(0, |sum, bit| sum * 2 + u64::from(*bit))
}

/// log2 of what a place needs: eight words.
const PLACE_BYTES: u64 = 64;

pub fn level(kind: Type) -> Option<u8> {
    match kind {
        Type::Pml4 => Some(4),
        Type::Pdpt => Some(3),
        Type::Pd => Some(2),
        Type::Pt => Some(1),
        Type::Ram | Type::Frame | Type::DevFrame | Type::CNode => None,
    }
}

fn becomes(from: Type, to: Type) -> bool {
    match from {
        Type::Ram => to != Type::DevFrame,
        Type::Frame | Type::DevFrame => from == to,
        _ => false,
    }
}

fn fixed_size_bits(kind: Type) -> Option<u8> {
    match kind {
        Type::Ram | Type::Frame | Type::DevFrame => None,
        Type::CNode => Some(12),
        Type::Pml4 | Type::Pdpt | Type::Pd | Type::Pt => Some(13),
    }
}

impl Model {
    /// What there is at the beginning: a CNode at `first` with itself in place 1, and after that these.
    pub fn new(first: u64, others: &[(Type, u64, u8)]) -> Model {
        let mut model = Model {
            caps: BTreeMap::new(),
            objects: BTreeMap::new(),
            holders: Vec::new(),
            emptied: Vec::new(),
            made: Vec::new(),
            lost_roots: Vec::new(),
            names: 0,
        };
        let node = model.add_object(Type::CNode, first, 12, None);
        let root = model.add_cap(node, Rights::ALL, None, false, (node, 1));
        for (&(kind, base, size_bits), index) in others.iter().zip(2..) {
            let object = model.add_object(kind, base, size_bits, None);
            model.add_cap(object, Rights::ALL, None, false, (node, index));
        }
        model.holders = vec![Holder { way: Vec::new(), root }; 3];
        model
    }

    fn name(&mut self) -> u32 {
        self.names += 1;
        self.names
    }

    fn add_object(&mut self, kind: Type, base: u64, size_bits: u8, part_of: Option<ObjectId>) -> ObjectId {
        let id = self.name();
        let object = Object {
            kind,
            base,
            size_bits,
            first: 0,
            part_of,
            parts: Vec::new(),
            carved_bytes: 0,
            places: BTreeMap::new(),
            entries: BTreeMap::new(),
        };
        self.objects.insert(id, object);
        if let Some(whole) = part_of {
            self.object_mut(whole).parts.push(id);
        }
        id
    }

    fn add_cap(
        &mut self,
        object: ObjectId,
        rights: Rights,
        parent: Option<CapId>,
        is_copy: bool,
        place: Place,
    ) -> CapId {
        let id = self.name();
        let cap = Cap {
            object,
            rights,
            guard: (0, 0),
            parent,
            is_copy,
            children: Vec::new(),
            place,
            mapped: None,
            being_revoked: false,
            is_going: false,
        };
        self.caps.insert(id, cap);
        if !is_copy {
            self.object_mut(object).first = id;
        }
        if let Some(parent) = parent {
            self.cap_mut(parent).children.push(id);
        }
        self.object_mut(place.0).places.insert(place.1, id);
        id
    }

    pub fn cap(&self, id: CapId) -> &Cap {
        &self.caps[&id]
    }

    pub fn cap_mut(&mut self, id: CapId) -> &mut Cap {
        self.caps.get_mut(&id).expect("a capability that exists")
    }

    pub fn object(&self, id: ObjectId) -> &Object {
        &self.objects[&id]
    }

    pub fn object_mut(&mut self, id: ObjectId) -> &mut Object {
        self.objects.get_mut(&id).expect("an object that exists")
    }

    pub fn of(&self, cap: CapId) -> &Object {
        self.object(self.cap(cap).object)
    }

    pub fn kind(&self, cap: CapId) -> Type {
        self.of(cap).kind
    }

    fn at(&self, place: Place) -> Option<CapId> {
        self.object(place.0).places.get(&place.1).copied()
    }

    /// The capability at which a holder's handles begin.
    pub fn root_of(&self, who: usize) -> Result<CapId, Error> {
        let holder = &self.holders[who];
        let first = self.holders[0].root;
        let found = match &holder.way[..] {
            [] => Some(first),
            way => self.follow(first, way).ok().and_then(|(_, place)| self.at(place)),
        };
        if found == Some(holder.root) { Ok(holder.root) } else { Err(Error::NoCapability) }
    }

    /// Whether a holder's handles begin at this place.
    pub fn is_root(&self, place: Place) -> bool {
        self.holders[1..].iter().any(|holder| self.caps.get(&holder.root).is_some_and(|root| root.place == place))
    }

    /// Where the root of a holder was that has none any more, as the first holder calls it, if no guard is on the way: the CNode,
    /// and the place in it.
    pub fn lost_root(&self) -> Option<(Handle, u8)> {
        let lost = (1..self.holders.len()).find(|who| self.root_of(*who).is_err())?;
        let (node, place) = self.holders[lost].way.split_at_checked(self.holders[lost].way.len() - 6)?;
        let node = match node {
            [] => Handle::at_root(1),
            way => Handle { bits: number(way), len: way.len() as u8 },
        };
        Some((node, number(place) as u8))
    }

    /// The last CNode on the way, and the place in it.
    fn follow(&self, node: CapId, way: &[bool]) -> Result<(CapId, Place), Error> {
        let cap = self.cap(node);
        if !cap.rights.contain(Rights::READ) {
            return Err(Error::NoRight);
        }
        let (guard_len, guard) = cap.guard;
        if way.len() < usize::from(guard_len) + 6 {
            return Err(Error::DepthOverflow);
        }
        let (guard_bits, way) = way.split_at(usize::from(guard_len));
        let (index_bits, rest) = way.split_at(6);
        let index = number(index_bits) as u8;
        if number(guard_bits) != guard || index == 0 {
            return Err(Error::NoCapability);
        }
        let place = (cap.object, index);
        if rest.is_empty() {
            return Ok((node, place));
        }
        let below = self.at(place).ok_or(Error::NoCapability)?;
        if self.kind(below) != Type::CNode {
            return Err(Error::DepthOverflow);
        }
        self.follow(below, rest)
    }

    fn find(&self, who: usize, handle: Handle) -> Result<(CapId, Place), Error> {
        let root = self.root_of(who)?;
        if handle.len > 64 {
            return Err(Error::DepthOverflow);
        }
        self.follow(root, &bits(handle))
    }

    /// The capability that a handle names.
    pub fn named(&self, who: usize, handle: Handle) -> Result<CapId, Error> {
        let (_, place) = self.find(who, handle)?;
        self.at(place).ok_or(Error::NoCapability)
    }

    /// The same, in a CNode that the holder may change.
    fn named_to_change(&self, who: usize, handle: Handle) -> Result<CapId, Error> {
        let (node, place) = self.find(who, handle)?;
        if !self.cap(node).rights.contain(Rights::WRITE) {
            return Err(Error::NoRight);
        }
        self.at(place).ok_or(Error::NoCapability)
    }

    /// The CNode into which a holder may put so many capabilities.
    fn room(&self, who: usize, node: Handle, first: u8, count: u8) -> Result<ObjectId, Error> {
        let cap = self.named(who, node)?;
        if self.kind(cap) != Type::CNode {
            return Err(Error::WrongType);
        }
        if !self.cap(cap).rights.contain(Rights::WRITE) {
            return Err(Error::NoRight);
        }
        let places = u32::from(first)..u32::from(first) + u32::from(count);
        if places.start == 0 || places.end > 64 {
            return Err(Error::OutOfRange);
        }
        let node = self.cap(cap).object;
        if places.into_iter().any(|index| self.at((node, index as u8)).is_some()) {
            return Err(Error::SlotTaken);
        }
        if self.is_condemned(cap) { Err(Error::RevokeInProgress) } else { Ok(node) }
    }

    pub fn is_condemned(&self, cap: CapId) -> bool {
        let cap = self.cap(cap);
        cap.being_revoked || cap.is_going || cap.parent.is_some_and(|parent| self.is_condemned(parent))
    }

    /// What a call answers. If it is not refused, what it does is done.
    pub fn perform(&mut self, who: usize, operation: &Operation) -> Result<Outcome, Error> {
        self.emptied.clear();
        self.made.clear();
        self.lost_roots.clear();
        match *operation {
            Operation::Retype { source, to, count, into, first } => self.retype(who, source, to, count, into, first),
            Operation::Copy { source, into, at, rights } => {
                let original = self.named(who, source)?;
                let cap = self.cap(original);
                let (rights, guard) = (cap.rights & rights, cap.guard);
                self.derive(who, original, rights, guard, into, at)
            }
            Operation::Mint { source, into, at, guard } => {
                let original = self.named(who, source)?;
                if self.kind(original) != Type::CNode {
                    return Err(Error::WrongType);
                }
                // A handle needs six bits for a place of this CNode, and six for the place where it was found.
                if guard.len > 64 - 12 || guard.bits >= 1 << guard.len {
                    return Err(Error::OutOfRange);
                }
                let rights = self.cap(original).rights;
                self.derive(who, original, rights, (guard.len, guard.bits), into, at)
            }
            Operation::Delete { handle } => self.delete(who, handle),
            Operation::Revoke { handle, most } => self.revoke(who, handle, most),
            Operation::Map { entries, from, offset_bytes, rights } => {
                self.map(who, entries, from, offset_bytes, rights)
            }
            Operation::Unmap { entries } => self.unmap(who, entries),
            Operation::ModifyFlags { entries, rights } => self.modify_flags(who, entries, rights),
            Operation::ClearDirtyBits { entries } => self.clear_dirty_bits(who, entries),
            Operation::Identify { handle } => {
                let cap = self.named(who, handle)?;
                let (Cap { rights, guard, .. }, object) = (self.cap(cap), self.of(cap));
                Ok(Outcome::Capability(Capability {
                    kind: object.kind,
                    rights: *rights,
                    base: PhysAddr(object.base),
                    size_bits: object.size_bits,
                    guard_bits: guard.0,
                    guard: guard.1,
                }))
            }
            Operation::Derived { handle } => {
                let cap = self.named(who, handle)?;
                let mut derived = Derived::default();
                self.count_derived(cap, self.cap(cap).object, &mut derived);
                Ok(Outcome::Derived(derived))
            }
            Operation::RootTable { handle } => {
                let object = self.of(self.named(who, handle)?);
                match object.kind {
                    Type::Pml4 => Ok(Outcome::Root(PhysAddr(object.base))),
                    _ => Err(Error::WrongType),
                }
            }
            Operation::Enter { as_whom, root } => {
                let cap = self.named(who, root)?;
                if self.kind(cap) != Type::CNode {
                    return Err(Error::WrongType);
                }
                let way = [&self.holders[who].way[..], &bits(root)].concat();
                if way.len() > 64 {
                    return Err(Error::DepthOverflow);
                }
                self.holders[as_whom] = Holder { way, root: cap };
                Ok(Outcome::Done)
            }
        }
    }

    fn retype(
        &mut self,
        who: usize,
        source: Handle,
        to: Shape,
        count: u8,
        into: Handle,
        first: u8,
    ) -> Result<Outcome, Error> {
        let from = self.named(who, source)?;
        let (kind, rights, whole) = (self.kind(from), self.cap(from).rights, self.cap(from).object);
        if !becomes(kind, to.kind) {
            return Err(Error::WrongType);
        }
        if kind == Type::Ram && !rights.contain(Rights::WRITE) {
            return Err(Error::NoRight);
        }
        if fixed_size_bits(to.kind).is_some_and(|fixed| fixed != to.size_bits) || !(12..=35).contains(&to.size_bits) {
            return Err(Error::BadSize);
        }
        let node = self.room(who, into, first, count)?;
        if self.is_condemned(from) {
            return Err(Error::RevokeInProgress);
        }
        let part_bytes = 1u64 << to.size_bits;
        let begin = self.object(whole).carved_bytes.div_ceil(part_bytes) * part_bytes;
        let end = begin + part_bytes * u64::from(count);
        if end > self.object(whole).len_bytes() {
            return Err(Error::OutOfMemory);
        }
        for step in 0..count {
            let base = self.object(whole).base + begin + u64::from(step) * part_bytes;
            let object = self.add_object(to.kind, base, to.size_bits, Some(whole));
            self.add_cap(object, rights, Some(from), false, (node, first + step));
            self.made.push(object);
        }
        if count > 0 {
            self.object_mut(whole).carved_bytes = end;
        }
        Ok(Outcome::Done)
    }

    fn derive(
        &mut self,
        who: usize,
        original: CapId,
        rights: Rights,
        guard: (u8, u64),
        into: Handle,
        at: u8,
    ) -> Result<Outcome, Error> {
        let node = self.room(who, into, at, 1)?;
        if self.is_condemned(original) {
            return Err(Error::RevokeInProgress);
        }
        let object = self.cap(original).object;
        let copy = self.add_cap(object, rights, Some(original), true, (node, at));
        self.cap_mut(copy).guard = guard;
        Ok(Outcome::Done)
    }

    fn delete(&mut self, who: usize, handle: Handle) -> Result<Outcome, Error> {
        let cap = self.named_to_change(who, handle)?;
        let object = self.of(cap);
        let is_full = !self.cap(cap).is_copy && (!object.places.is_empty() || !object.entries.is_empty());
        if is_full || !self.cap(cap).children.is_empty() {
            return Err(Error::InUse);
        }
        self.destroy(cap);
        Ok(Outcome::Done)
    }

    fn revoke(&mut self, who: usize, handle: Handle, most: u64) -> Result<Outcome, Error> {
        let cap = self.named_to_change(who, handle)?;
        self.cap_mut(cap).being_revoked = true;
        let mut left = most;
        while let Some(leaf) = self.leaf_below(cap) {
            if left == 0 {
                return Ok(Outcome::Revoked(Progress::More));
            }
            left -= 1;
            self.destroy(leaf);
        }
        self.cap_mut(cap).being_revoked = false;
        Ok(Outcome::Revoked(Progress::Done))
    }

    /// The next that a revocation deletes: the youngest child's youngest child, and what lies in a CNode before the CNode.
    fn leaf_below(&mut self, of: CapId) -> Option<CapId> {
        let mut at = *self.cap(of).children.last()?;
        loop {
            let cap = self.cap(at);
            let held = if cap.is_copy { None } else { self.object(cap.object).places.values().next() };
            at = match (cap.children.last(), held) {
                (Some(child), _) => *child,
                (None, Some(held)) => {
                    let held = *held;
                    self.cap_mut(held).is_going = true;
                    held
                }
                (None, None) => return Some(at),
            }
        }
    }

    fn destroy(&mut self, id: CapId) {
        self.take_entries_of(id);
        let cap = self.caps.remove(&id).expect("a capability that exists");
        assert!(cap.children.is_empty(), "a capability goes after what came of it");
        if let Some(parent) = cap.parent {
            self.cap_mut(parent).children.retain(|child| *child != id);
        }
        let node = self.object_mut(cap.place.0);
        node.places.remove(&cap.place.1);
        let place = node.base + u64::from(cap.place.1) * PLACE_BYTES;
        self.emptied.push(place);
        if cap.is_copy {
            return;
        }
        let entries: Vec<CapId> = self.object(cap.object).entries.values().map(|entry| entry.from).collect();
        entries.into_iter().for_each(|from| self.take_entries_of(from));
        let object = self.objects.remove(&cap.object).expect("an object that exists");
        if object.kind == Type::Pml4 {
            self.lost_roots.push(object.base);
        }
        assert!(object.places.is_empty(), "a CNode goes after what it holds");
        if let Some(whole) = object.part_of {
            let whole = self.object_mut(whole);
            whole.parts.retain(|part| *part != cap.object);
            if whole.parts.is_empty() {
                whole.carved_bytes = 0;
            }
        }
    }

    fn count_derived(&self, cap: CapId, object: ObjectId, derived: &mut Derived) {
        for child in &self.cap(cap).children {
            if self.cap(*child).object == object {
                derived.copies += 1;
            } else {
                derived.objects += 1;
            }
            self.count_derived(*child, object, derived);
        }
    }
}
