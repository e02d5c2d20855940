//! How chance chooses calls: most of them likely to succeed, so that states become deep; some wrong on purpose.

use selfpage_core::capability::{Handle, Object as Shape, Rights, Type};
use selfpage_core::tables::{ENTRIES, Entries};

use crate::dice;
use crate::entries::page_bytes;
use crate::model::{Cap, CapId, Model, level};
use crate::operations::Operation;

/// The handles that a holder remembers, by the type of what they named. It may be gone since.
#[derive(Default)]
pub struct Handles([Vec<(Handle, CapId)>; 8]);

/// In the order of their numbers.
const TYPES: [Type; 8] =
    [Type::Ram, Type::Frame, Type::DevFrame, Type::CNode, Type::Pml4, Type::Pdpt, Type::Pd, Type::Pt];
const TABLES: [Type; 4] = [Type::Pml4, Type::Pdpt, Type::Pd, Type::Pt];
const FRAMES: [Type; 3] = [Type::Frame, Type::Frame, Type::DevFrame];

impl Handles {
    /// What a holder reaches from its root, by chance in which order, but not without end.
    pub fn of(model: &Model, who: usize) -> Handles {
        let mut handles = Handles::default();
        let root = model.root_of(who).ok().map(|root| (Handle { bits: 0, len: 0 }, root));
        let mut nodes: Vec<(Handle, CapId)> = root.into_iter().collect();
        let mut left = 400;
        while !nodes.is_empty() && left > 0 {
            let (way, node) = nodes.swap_remove(dice::below(nodes.len() as u64) as usize);
            let cap = model.cap(node);
            if !cap.rights.contain(Rights::READ) && !dice::once_in(16) {
                continue;
            }
            for (index, held) in &model.of(node).places {
                let handle = way.guarded(cap.guard.0, cap.guard.1, *index);
                let kind = model.kind(*held);
                handles.0[kind as usize - 1].push((handle, *held));
                left -= 1;
                if kind == Type::CNode && handle.len <= 52 && *held != node {
                    nodes.push((handle, *held));
                }
            }
        }
        handles
    }
}

/// A holder who chooses.
struct Chooser<'a> {
    model: &'a Model,
    who: usize,
    handles: &'a Handles,
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
pub fn choose(model: &Model, who: usize, handles: &Handles) -> Operation {
    let chooser = Chooser { model, who, handles };
    let mut operation = chooser.likely();
    if dice::once_in(12) {
        chooser.spoil(&mut operation);
    }
    operation
}

impl Chooser<'_> {
    fn likely(&self) -> Operation {
        // Small enough that all of it can be looked at often.
        let is_crowded = self.model.caps.len() > 200;
        match dice::below(100) {
            0..15 if is_crowded => Operation::Delete { handle: self.to_delete() },
            15..18 if is_crowded => Operation::Revoke { handle: self.to_revoke(), most: u64::MAX },
            0..22 => self.retype(),
            22..36 => self.copy(),
            36..39 => self.mint(),
            39..46 => Operation::Delete { handle: self.to_delete() },
            46..49 => Operation::Revoke {
                handle: self.to_revoke(),
                most: one_of(&[0, 1, 3, 20, u64::MAX, u64::MAX, u64::MAX]),
            },
            49..80 => self.map(),
            80..83 => Operation::Unmap { entries: self.in_use() },
            83..88 => Operation::ModifyFlags { entries: self.in_use(), rights: self.some_rights() },
            88..92 => Operation::ClearDirtyBits { entries: self.in_use() },
            92..94 => Operation::Identify { handle: self.pick(&TYPES, |_| true) },
            94..96 => Operation::Derived { handle: self.pick(&TYPES, |cap| !cap.children.is_empty()) },
            96..98 => Operation::RootTable { handle: self.pick(&[Type::Pml4], |_| true) },
            _ => Operation::Enter {
                as_whom: dice::below(2) as usize + 1,
                root: self.pick(&[Type::CNode], |cap| cap.parent.is_some()),
            },
        }
    }

    /// The handle of a capability of one of these types and like this, or of another if there seems to be none.
    fn pick(&self, kinds: &[Type], wanted: impl Fn(&Cap) -> bool) -> Handle {
        let mut handle = Handle::at_root(dice::below(64) as u8);
        for _ in 0..16 {
            let all = &self.handles.0[one_of(kinds) as usize - 1];
            let Some((found, cap)) = all.get(dice::below(all.len().max(1) as u64) as usize) else { continue };
            handle = *found;
            match self.model.caps.get(cap) {
                Some(cap) if wanted(cap) => break,
                Some(_) => {}
                // A handle that led somewhere once.
                None if dice::once_in(16) => break,
                None => {}
            }
        }
        handle
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
        if self.who == 0
            && dice::once_in(8)
            && let Some(lost) = self.model.lost_root()
        {
            return lost;
        }
        let node = self.pick(&[Type::CNode], |cap| {
            cap.rights.contain(Rights::READ | Rights::WRITE) && self.model.object(cap.object).places.len() < 60
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
        let kinds = if dice::once_in(4) { &TYPES[..3] } else { &TYPES[..1] };
        let source = self.pick(kinds, |cap| !cap.being_revoked && cap.rights.contain(Rights::READ | Rights::WRITE));
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
        let source = self.pick(&TYPES, |_| true);
        let (into, at) = self.place(1);
        Operation::Copy { source, into, at, rights: self.some_rights() }
    }

    fn mint(&self) -> Operation {
        let source = self.pick(&[Type::CNode], |_| true);
        let (into, at) = self.place(1);
        let len = one_of(&[0, 1, 3, 6, 7, 20, 52]);
        Operation::Mint { source, into, at, guard: Handle { bits: dice::next() & ((1 << len) - 1), len } }
    }

    fn to_delete(&self) -> Handle {
        if dice::once_in(8) {
            return self.pick(&[Type::CNode], |cap| cap.children.is_empty() && self.model.is_root(cap.place));
        }
        self.pick(&TYPES, |cap| cap.children.is_empty() && cap.parent.is_some())
    }

    fn to_revoke(&self) -> Handle {
        if dice::once_in(2) {
            // One that is not done.
            return self.pick(&TYPES, |cap| cap.being_revoked);
        }
        // Great blocks of RAM seldom: with them goes all that makes a state deep.
        self.pick(&TYPES, |cap| !cap.children.is_empty() && (cap.parent.is_some() || dice::once_in(6)))
    }

    /// Entries that are in use, or next to it.
    fn in_use(&self) -> Entries {
        let table = self.pick(&TABLES, |cap| {
            !self.model.object(cap.object).entries.is_empty() && cap.rights.contain(Rights::READ | Rights::WRITE)
        });
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
        let wanted = one_of(&TABLES);
        let table = self.pick(&[wanted], |cap| cap.rights.contain(Rights::WRITE));
        let table_level =
            self.model.named(self.who, table).ok().and_then(|cap| level(self.model.kind(cap))).unwrap_or(1);
        let prefers_table = table_level == 4 || (table_level > 1 && !dice::once_in(4)) || dice::once_in(8);
        let kinds = match (prefers_table, table_level) {
            (false, _) => &FRAMES[..],
            (true, 1) => &TABLES[..],
            (true, _) => &TABLES[5 - usize::from(table_level)..][..1],
        };
        let from = self.pick(kinds, |cap| {
            let fits = prefers_table || self.model.object(cap.object).len_bytes() >= page_bytes(table_level);
            fits && (cap.mapped.is_none() || dice::once_in(16)) && cap.rights.contain(Rights::READ)
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
        let other = self.pick(&TYPES, |_| true);
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
