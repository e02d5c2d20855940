//! The derivation tree: which capability came of which.
//!
//! A capability's children are its copies and the objects that were made from its memory. A child is always younger than its
//! parent, and whatever lies in a CNode is younger than the CNode: so every way down, through children and through what CNodes
//! hold, ends.
//!
//! # Source
//! Cichlid §3.1 ("a capability derivation tree … enables efficient queries for descendants and copies").

use super::kernel::Kernel;
use super::lookup::{Handle, Space};
use super::slot::{RADIX_BITS, Relation, Slot, Slots};
use super::{Error, Type};

/// What came of a capability.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Derived {
    /// Capabilities of the same object.
    pub copies: u64,
    /// Capabilities of objects that were made from its memory, copies of those included.
    pub objects: u64,
}

impl Kernel<'_> {
    /// What came of a capability: what [`Kernel::revoke`] would delete, but for what CNodes among it hold.
    ///
    /// # Errors
    /// [`Error::NoCapability`].
    pub fn derived(&self, space: &Space, handle: Handle) -> Result<Derived, Error> {
        let slot = self.find(space, handle)?;
        self.held(slot)?;
        let slots = self.slots();
        let object = slots.origin(slot);
        let mut derived = Derived::default();
        for slot in slots.descendants(slot) {
            if slots.origin(slot) == object {
                derived.copies += 1;
            } else {
                derived.objects += 1;
            }
        }
        Ok(derived)
    }
}

/// The way to what came of a capability, last things first.
pub(super) struct Descent<'m> {
    slots: Slots<'m>,
    of: Slot,
    contents: Contents,
    at: Slot,
    /// How many of the last steps down to `at` went to a child: so many can be taken back to a parent, and the one before them to
    /// the CNode that `at` is in, which knows the way on. So a call goes each way down once.
    steps: u64,
}

impl<'m> Descent<'m> {
    pub(super) const fn new(slots: Slots<'m>, of: Slot, contents: Contents) -> Descent<'m> {
        Descent { slots, of, contents, at: of, steps: 0 }
    }

    /// A capability that nothing depends on any more: it has no children, and if it is the origin of a CNode, that is empty. It
    /// is to be destroyed before the next is asked for.
    pub(super) fn leaf(&mut self) -> Option<Slot> {
        loop {
            let held = || self.slots.held_by(self.at).filter(|_| self.contents == Contents::Go && self.at != self.of);
            if let Some(child) = self.slots.relation(self.at, Relation::Child) {
                self.at = child;
                self.steps += 1;
            } else if let Some(held) = held() {
                self.slots.set_way_back(held.node(), self.at, self.steps);
                self.slots.mark_going(held);
                self.at = held;
                self.steps = 0;
            } else {
                break;
            }
        }
        let leaf = self.at;
        if leaf == self.of {
            return None;
        }
        (self.at, self.steps) = match self.steps.checked_sub(1) {
            Some(fewer) => (self.slots.relation(leaf, Relation::Parent).unwrap_or(self.of), fewer),
            None => self.slots.way_back(leaf.node()),
        };
        Some(leaf)
    }
}

/// What becomes of the capabilities in a CNode that goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    Go,
    /// They stay behind: only a test that takes the rule away wants that.
    Stay,
}

impl<'m> Slots<'m> {
    /// Makes `child`, which has no relations, the youngest child of `parent`.
    pub(super) fn adopt(self, parent: Slot, child: Slot) {
        let elder = self.relation(parent, Relation::Child);
        self.relate(child, Relation::Parent, Some(parent));
        self.relate(child, Relation::Next, elder);
        if let Some(elder) = elder {
            self.relate(elder, Relation::Previous, Some(child));
        }
        self.relate(parent, Relation::Child, Some(child));
    }

    /// Takes a capability without children out of the tree.
    pub(super) fn part(self, slot: Slot) {
        let (previous, next) = (self.relation(slot, Relation::Previous), self.relation(slot, Relation::Next));
        match (previous, self.relation(slot, Relation::Parent)) {
            (Some(previous), _) => self.relate(previous, Relation::Next, next),
            (None, Some(parent)) => self.relate(parent, Relation::Child, next),
            (None, None) => {}
        }
        if let Some(next) = next {
            self.relate(next, Relation::Previous, previous);
        }
    }

    pub(crate) fn has_children(self, slot: Slot) -> bool {
        self.relation(slot, Relation::Child).is_some()
    }

    /// The capability with which the object came to be: what this one is a copy of, or a copy of a copy.
    pub(crate) fn origin(self, mut slot: Slot) -> Slot {
        while self.is_copy(slot)
            && let Some(parent) = self.relation(slot, Relation::Parent)
        {
            slot = parent;
        }
        slot
    }

    /// Whether this capability, or one that it came of, is being revoked or has been come to by a revocation. While nothing is, that
    /// takes one look, however long the line is that it came of.
    pub(crate) fn is_condemned(self, slot: Slot) -> bool {
        let mut at = Some(slot).filter(|_| self.any_marked());
        while let Some(slot) = at {
            if self.is_marked(slot) {
                return true;
            }
            at = self.relation(slot, Relation::Parent);
        }
        false
    }

    /// What came of a capability, each before what came of it in turn.
    pub(crate) fn descendants(self, of: Slot) -> impl Iterator<Item = Slot> + use<'m> {
        let mut at = Some(of);
        core::iter::from_fn(move || {
            at = self.after(at?, of);
            at
        })
    }

    fn after(self, slot: Slot, within: Slot) -> Option<Slot> {
        let mut at = slot;
        if let Some(child) = self.relation(at, Relation::Child) {
            return Some(child);
        }
        while at != within {
            if let Some(next) = self.relation(at, Relation::Next) {
                return Some(next);
            }
            at = self.relation(at, Relation::Parent)?;
        }
        None
    }

    /// A capability in the CNode whose origin this is.
    fn held_by(self, slot: Slot) -> Option<Slot> {
        let node = self.capability(slot).filter(|node| node.kind == Type::CNode && !self.is_copy(slot))?;
        if self.taken(node.base) == 0 {
            return None;
        }
        (1..1 << RADIX_BITS)
            .filter_map(|index| Slot::in_node(node.base, index))
            .find(|held| self.capability(*held).is_some())
    }
}
