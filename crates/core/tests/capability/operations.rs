//! Calls, and how chance chooses them: most of them likely to succeed, so that states become deep; some wrong on purpose.

use selfpage_core::capability::{Capability, Derived, Handle, Object as Shape, Progress, Rights, Type};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::{ENTRIES, Entries};

use crate::dice;
use crate::entries::page_bytes;
use crate::model::{Cap, CapId, Model, level};

/// A call.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    Retype {
        source: Handle,
        to: Shape,
        count: u8,
        into: Handle,
        first: u8,
    },
    Copy {
        source: Handle,
        into: Handle,
        at: u8,
        rights: Rights,
    },
    Mint {
        source: Handle,
        into: Handle,
        at: u8,
        guard: Handle,
    },
    Delete {
        handle: Handle,
    },
    Revoke {
        handle: Handle,
        most: u64,
    },
    Map {
        entries: Entries,
        from: Handle,
        offset_bytes: u64,
        rights: Rights,
    },
    Unmap {
        entries: Entries,
    },
    ModifyFlags {
        entries: Entries,
        rights: Rights,
    },
    ClearDirtyBits {
        entries: Entries,
    },
    Identify {
        handle: Handle,
    },
    Derived {
        handle: Handle,
    },
    RootTable {
        handle: Handle,
    },
    /// The CNode that a handle names becomes the root of another holder.
    Enter {
        as_whom: usize,
        root: Handle,
    },
}

/// What a call answers that is not refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    Revoked(Progress),
    Dirty(u32),
    Capability(Capability),
    Derived(Derived),
    Root(PhysAddr),
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Retype { .. } => "retype",
            Operation::Copy { .. } => "copy",
            Operation::Mint { .. } => "mint",
            Operation::Delete { .. } => "delete",
            Operation::Revoke { .. } => "revoke",
            Operation::Map { .. } => "map",
            Operation::Unmap { .. } => "unmap",
            Operation::ModifyFlags { .. } => "modify_flags",
            Operation::ClearDirtyBits { .. } => "clear_dirty_bits",
            Operation::Identify { .. } => "identify",
            Operation::Derived { .. } => "derived",
            Operation::RootTable { .. } => "root_table",
            Operation::Enter { .. } => "space",
        }
    }

    /// Whether it may take away what somebody could reach.
    pub fn removes(&self) -> bool {
        matches!(
            self,
            Operation::Delete { .. }
                | Operation::Revoke { .. }
                | Operation::Unmap { .. }
                | Operation::ModifyFlags { .. }
                | Operation::ClearDirtyBits { .. }
        )
    }

    /// The place into which it puts a capability.
    pub fn puts(&self) -> Option<(Handle, u8)> {
        match *self {
            Operation::Retype { into, first, count: 1.., .. } => Some((into, first)),
            Operation::Copy { into, at, .. } | Operation::Mint { into, at, .. } => Some((into, at)),
            _ => None,
        }
    }
}

/// A holder who chooses.
struct Chooser<'a> {
    model: &'a Model,
    who: usize,
}

/// One of some.
fn one_of<T: Copy>(all: &[T]) -> T {
    all[dice::below(all.len() as u64) as usize]
}

pub fn any_rights() -> Rights {
    let each = [Rights::READ, Rights::WRITE, Rights::EXECUTE];
    each.into_iter().filter(|_| dice::once_in(2)).fold(Rights::NONE, Rights::with)
}

/// An entry: few different ones, so that they meet.
pub fn any_entry() -> u16 {
    one_of(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 255, 256, 509, 510, 511])
}

/// What a holder does next.
pub fn choose(model: &Model, who: usize) -> Operation {
    let chooser = Chooser { model, who };
    let mut operation = chooser.likely();
    if dice::once_in(12) {
        chooser.spoil(&mut operation);
    }
    operation
}

impl Chooser<'_> {
    fn likely(&self) -> Operation {
        match dice::below(100) {
            0..22 => self.retype(),
            22..37 => self.copy(),
            37..41 => self.mint(),
            41..48 => Operation::Delete { handle: self.pick(|_, cap| cap.children.is_empty() && cap.parent.is_some()) },
            48..51 => {
                Operation::Revoke { handle: self.to_revoke(), most: one_of(&[0, 1, 1, 2, 5, 20, u64::MAX, u64::MAX]) }
            }
            51..77 => self.map(),
            77..81 => Operation::Unmap { entries: self.in_use() },
            81..86 => Operation::ModifyFlags { entries: self.in_use(), rights: self.some_rights() },
            86..91 => Operation::ClearDirtyBits { entries: self.in_use() },
            91..94 => Operation::Identify { handle: self.pick(|_, _| true) },
            94..96 => Operation::Derived { handle: self.pick(|_, cap| !cap.children.is_empty()) },
            96..98 => Operation::RootTable { handle: self.pick(|kind, _| kind == Type::Pml4) },
            _ => Operation::Enter {
                as_whom: dice::below(2) as usize + 1,
                root: self.pick(|kind, cap| kind == Type::CNode && cap.parent.is_some()),
            },
        }
    }

    /// The handle of a capability like this, or of another if there seems to be none.
    fn pick(&self, wanted: impl Fn(Type, &Cap) -> bool) -> Handle {
        let mut handle = Handle::at_root(dice::below(64) as u8);
        for _ in 0..12 {
            let Some((found, cap)) = self.wander() else { continue };
            handle = found;
            if wanted(self.model.kind(cap), self.model.cap(cap)) {
                break;
            }
        }
        handle
    }

    /// From the root to anywhere.
    fn wander(&self) -> Option<(Handle, CapId)> {
        let mut node = self.model.root_of(self.who).ok()?;
        let mut handle = Handle { bits: 0, len: 0 };
        loop {
            let places = &self.model.of(node).places;
            let (index, next) = places.iter().nth(dice::below(places.len().max(1) as u64) as usize)?;
            let guard = self.model.cap(node).guard;
            handle = handle.guarded(guard.0, guard.1, *index);
            let goes_on = self.model.kind(*next) == Type::CNode && !self.model.of(*next).places.is_empty();
            if !goes_on || handle.len > 52 || dice::once_in(6) {
                return Some((handle, *next));
            }
            node = *next;
        }
    }

    fn some_rights(&self) -> Rights {
        match dice::below(10) {
            0..6 => Rights::ALL,
            6..9 => any_rights() | Rights::READ,
            _ => any_rights(),
        }
    }

    /// A CNode and, most of the time, a free place in it.
    fn place(&self, count: u8) -> (Handle, u8) {
        let node = self.pick(|kind, cap| {
            kind == Type::CNode
                && cap.rights.contain(Rights::READ | Rights::WRITE)
                && self.model.object(cap.object).places.len() < 60
        });
        let Ok(cap) = self.model.named(self.who, node) else { return (node, 1) };
        let places = &self.model.of(cap).places;
        let mut first = 0;
        for _ in 0..8 {
            // The lower ones more often, so that a place is used again soon.
            first = dice::below(1 + dice::below(63)) as u8 + 1;
            if (first..first + count).all(|index| !places.contains_key(&index)) {
                break;
            }
        }
        (node, first)
    }

    fn retype(&self) -> Operation {
        let source = self.pick(|kind, cap| match kind {
            Type::Ram => !self.model.is_condemned(self.model.object(cap.object).first) || dice::once_in(8),
            Type::Frame | Type::DevFrame => dice::once_in(4),
            _ => false,
        });
        let from = self.model.named(self.who, source).ok().map(|cap| self.model.of(cap));
        let kind = match from.map(|from| from.kind) {
            Some(kind @ (Type::Frame | Type::DevFrame)) if !dice::once_in(16) => kind,
            _ => one_of(&[
                Type::Ram,
                Type::Frame,
                Type::Frame,
                Type::Frame,
                Type::CNode,
                Type::CNode,
                Type::Pml4,
                Type::Pdpt,
                Type::Pd,
                Type::Pd,
                Type::Pt,
                Type::Pt,
            ]),
        };
        let most_bits = from.map_or(12, |from| from.size_bits);
        let own = match kind {
            Type::Frame | Type::DevFrame => one_of(&[12, 12, 13, 14, 21, 22, 30]),
            _ => one_of(&[13, 14, 16, 18]),
        };
        let size_bits = Shape::of(kind).size_bits.max(own.min(most_bits));
        let size_bits = if kind.size_bits().is_some() { Shape::of(kind).size_bits } else { size_bits };
        let count = one_of(&[1, 1, 1, 1, 2, 3, 0]);
        let (into, first) = self.place(count);
        Operation::Retype { source, to: Shape { kind, size_bits }, count, into, first }
    }

    fn copy(&self) -> Operation {
        let source = self.pick(|kind, _| kind != Type::Ram || dice::once_in(4));
        let (into, at) = self.place(1);
        Operation::Copy { source, into, at, rights: self.some_rights() }
    }

    fn mint(&self) -> Operation {
        let source = self.pick(|kind, _| kind == Type::CNode);
        let (into, at) = self.place(1);
        let len = one_of(&[0, 1, 3, 6, 7, 20, 52]);
        Operation::Mint { source, into, at, guard: Handle { bits: dice::next() & ((1 << len) - 1), len } }
    }

    fn to_revoke(&self) -> Handle {
        // Great blocks of RAM seldom: with them goes all that makes a state deep.
        self.pick(|_, cap| !cap.children.is_empty() && (cap.parent.is_some() || dice::once_in(6)))
    }

    /// Entries that are in use, or next to it.
    fn in_use(&self) -> Entries {
        let table = self.pick(|kind, cap| level(kind).is_some() && !self.model.object(cap.object).entries.is_empty());
        let mut entries = Entries { table, first: any_entry(), count: one_of(&[1, 1, 2, 4, 0]) };
        if let Ok(cap) = self.model.named(self.who, table)
            && let used = &self.model.of(cap).entries
            && let Some((index, entry)) = used.iter().nth(dice::below(used.len().max(1) as u64) as usize)
            && let Some((_, first, count)) = self.model.cap(entry.from).mapped
            && !dice::once_in(16)
        {
            (entries.first, entries.count) = if dice::once_in(4) { (*index, 1) } else { (first, count) };
        }
        entries
    }

    fn map(&self) -> Operation {
        let wanted = dice::below(4) as u8 + 1;
        let table = self.pick(|kind, cap| level(kind) == Some(wanted) && cap.rights.contain(Rights::WRITE));
        let table_level =
            self.model.named(self.who, table).ok().and_then(|cap| level(self.model.kind(cap))).unwrap_or(1);
        let prefers_table = table_level == 4 || (table_level > 1 && !dice::once_in(4)) || dice::once_in(8);
        let from = self.pick(|kind, cap| {
            (cap.mapped.is_none() || dice::once_in(16))
                && match (kind, level(kind)) {
                    (_, Some(below)) => prefers_table && (below + 1 == table_level || table_level == 1),
                    (Type::Frame | Type::DevFrame, None) => {
                        let object = self.model.object(cap.object);
                        !prefers_table && object.len_bytes() >= page_bytes(table_level)
                    }
                    _ => false,
                }
        });
        let (mut offset_bytes, mut rights, mut count) = (0, self.some_rights(), 1);
        if let Ok(cap) = self.model.named(self.who, from) {
            let object = self.model.of(cap);
            let pages = (object.len_bytes() / page_bytes(table_level)).max(1);
            if level(object.kind).is_none() {
                let skipped = dice::below(pages);
                offset_bytes = skipped * page_bytes(table_level);
                count = 1 + dice::below((pages - skipped).min(6)) as u16;
            } else if table_level == 1 && !dice::once_in(4) {
                rights = Rights::READ;
            }
            if !dice::once_in(6) {
                rights = rights & self.model.cap(cap).rights;
            }
        }
        let entries = Entries { table, first: any_entry().min(ENTRIES - count), count };
        Operation::Map { entries, from, offset_bytes, rights }
    }

    /// Makes it wrong in one way.
    fn spoil(&self, operation: &mut Operation) {
        let other = self.pick(|_, _| true);
        let twist = |handle: &mut Handle| {
            *handle = match dice::below(8) {
                0 => Handle { len: handle.len.wrapping_sub(1), ..*handle },
                1 => Handle { len: handle.len.saturating_add(6), ..*handle },
                2 => Handle { bits: handle.bits ^ 1 << dice::below(u64::from(handle.len).clamp(1, 64)), ..*handle },
                3 => handle.then(dice::below(64) as u8),
                4 => Handle { bits: dice::next(), len: dice::below(80) as u8 },
                _ => other,
            }
        };
        match operation {
            Operation::Retype { source, to, count, into, first } => match dice::below(6) {
                0 => twist(source),
                1 => to.kind = one_of(&[Type::Ram, Type::Frame, Type::DevFrame, Type::CNode, Type::Pml4, Type::Pt]),
                2 => to.size_bits = one_of(&[0, 11, 12, 13, 14, 35, 36, 64, 255]),
                3 => *count = one_of(&[0, 62, 63, 64, 255]),
                4 => twist(into),
                _ => *first = one_of(&[0, 1, 2, 3, 63, 64, 255]),
            },
            Operation::Copy { source, into, at, .. } | Operation::Mint { source, into, at, guard: Handle { .. } }
                if !dice::once_in(4) =>
            {
                match dice::below(3) {
                    0 => twist(source),
                    1 => twist(into),
                    _ => *at = one_of(&[0, 1, 2, 3, 63, 64, 255]),
                }
            }
            Operation::Copy { rights, .. } => *rights = any_rights(),
            Operation::Mint { guard, .. } => {
                *guard = Handle { bits: dice::next() >> 40, len: one_of(&[3, 30, 52, 53, 64, 255]) }
            }
            Operation::Delete { handle }
            | Operation::Identify { handle }
            | Operation::Derived { handle }
            | Operation::RootTable { handle }
            | Operation::Enter { root: handle, .. }
            | Operation::Revoke { handle, .. } => twist(handle),
            Operation::Map { entries, from, offset_bytes, rights } => match dice::below(5) {
                0 => spoil_entries(entries, twist),
                1 => twist(from),
                2 => {
                    *offset_bytes = one_of(&[1, 4095, 4096, 8192, 1 << 21, 1 << 30, 1 << 62, u64::MAX, u64::MAX << 12])
                }
                3 => *rights = any_rights(),
                _ => entries.count = one_of(&[0, 2, 3, 5, 512]),
            },
            Operation::Unmap { entries } | Operation::ClearDirtyBits { entries } => spoil_entries(entries, twist),
            Operation::ModifyFlags { entries, rights } => match dice::below(2) {
                0 => spoil_entries(entries, twist),
                _ => *rights = any_rights(),
            },
        }
    }
}

fn spoil_entries(entries: &mut Entries, twist: impl Fn(&mut Handle)) {
    match dice::below(3) {
        0 => twist(&mut entries.table),
        1 => entries.first = one_of(&[0, 510, 511, 512, 513, 600, u16::MAX]),
        _ => entries.count = one_of(&[0, 2, 3, 512, 513, u16::MAX]),
    }
}
