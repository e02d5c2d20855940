//! What must hold in the memory of the machine, whatever was called.

use std::collections::{BTreeMap, BTreeSet};

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Rights, Type};
use selfpage_core::physical::PhysAddr;
use selfpage_core::sync::{AtomicU64, Ordering};
use selfpage_core::tables::walk::translate;

use crate::entries::page_bytes;
use crate::machine::FIRST;
use crate::model::{Object, ObjectId, level};
use crate::world::{MEMORY_BYTES, World};

/// A page of the machine's memory, counted from its first.
fn page(at: u64) -> Option<usize> {
    let page = at.checked_sub(FIRST.0)? / 4096;
    (page < MEMORY_BYTES as u64 / 4096).then_some(page as usize)
}

/// Whether only the mechanism may write this memory.
fn is_kept(object: &Object) -> bool {
    object.kind == Type::CNode || level(object.kind).is_some()
}

/// The bits of an entry that decide.
struct Word(u64);

impl Word {
    fn to(&self) -> u64 {
        self.0 & 0x000f_ffff_ffff_f000
    }

    fn rights(&self) -> Rights {
        let write = if self.0 & 2 != 0 { Rights::WRITE } else { Rights::NONE };
        let execute = if self.0 >> 63 == 0 { Rights::EXECUTE } else { Rights::NONE };
        Rights::READ | write | execute
    }
}

impl World<'_> {
    /// The words of memory, which lie one after the other. One by one they would be too slow to be looked at so often.
    fn words(&self, from: u64, to: u64) -> &[AtomicU64] {
        let (first, last) = (self.memory.word(PhysAddr(from)), self.memory.word(PhysAddr(to - 8)));
        let (Some(first), Some(_)) = (first, last) else { panic!("no memory at {from:#x}") };
        // SAFETY: both lie in the one table that the memory is.
        unsafe { std::slice::from_raw_parts(first, ((to - from) / 8) as usize) }
    }

    fn table_at(&self, base: u64) -> impl Iterator<Item = (u16, u64)> + Clone {
        let words = self.words(base, base + 4096).iter();
        (0..).zip(words.map(|word| word.load(Ordering::Relaxed)))
    }

    /// All of it.
    pub fn check_all(&self) -> Result<(), String> {
        self.check_emptied()?;
        self.check_nodes()?;
        self.check_tables()?;
        self.check_disjoint()?;
        self.check_reach()?;
        self.check_cpu()
    }

    /// What was made begins empty.
    pub fn check_made(&self) -> Result<(), String> {
        for object in self.model.made.iter().map(|id| self.model.object(*id)).filter(|object| is_kept(object)) {
            if let Some(at) = (object.base..object.end()).step_by(8).find(|at| self.memory.load(PhysAddr(*at)) != 0) {
                return Err(format!("a new {:?} holds something at {at:#x}", object.kind));
            }
        }
        Ok(())
    }

    /// The CPU was told to leave the roots that are gone.
    pub fn check_left(&self) -> Result<(), String> {
        let left = self.cpu.left.borrow();
        match self.model.lost_roots.iter().find(|root| !left.contains(&PhysAddr(**root))) {
            Some(root) => Err(format!("the CPU goes on to translate by {root:#x}")),
            None => Ok(()),
        }
    }

    /// Before a write to memory: it is a frame's, and no CNode's or table's.
    pub fn check_written(&self, at: PhysAddr) -> Result<(), String> {
        let inside = |object: &Object| object.base <= at.0 && at.0 < object.end();
        match self.model.objects.values().find(|object| is_kept(object) && inside(object)) {
            Some(object) => Err(format!("somebody writes into a {:?}, at {at:?}", object.kind)),
            None => Ok(()),
        }
    }

    /// Places whose capability is gone are empty.
    pub fn check_emptied(&self) -> Result<(), String> {
        match self.model.emptied.iter().find(|place| self.memory.load(PhysAddr(**place)) != 0) {
            Some(place) => Err(format!("a capability stayed behind at {place:#x}")),
            None => Ok(()),
        }
    }

    /// CNodes hold what they should, as far as their own words say.
    pub fn check_nodes(&self) -> Result<(), String> {
        for node in self.model.objects.values().filter(|object| object.kind == Type::CNode) {
            if self.memory.load(PhysAddr(node.base)) != node.places.len() as u64 {
                return Err(format!("the CNode at {:#x} has counted wrongly", node.base));
            }
            let heads =
                self.words(node.base, node.base + 4096).iter().step_by(8).map(|head| head.load(Ordering::Relaxed));
            for (index, head) in (0..).zip(heads).skip(1) {
                let is_taken = head != 0;
                if is_taken != node.places.contains_key(&index) {
                    return Err(format!("place {index} of the CNode at {:#x}: taken is {is_taken}", node.base));
                }
            }
        }
        Ok(())
    }

    /// Each entry of each table is, to the bit, what the model says.
    pub fn check_tables(&self) -> Result<(), String> {
        for table in self.model.objects.values() {
            let Some(table_level) = level(table.kind) else { continue };
            let found = self.table_at(table.base).filter(|(_, word)| *word != 0);
            let expected = table.entries.iter().map(|(index, entry)| (*index, self.model.word(table_level, entry)));
            if !found.clone().eq(expected.clone()) {
                let (found, expected): (Vec<_>, Vec<_>) = (found.collect(), expected.collect());
                let what = format!("the {:?} at {:#x}", table.kind, table.base);
                return Err(format!("{what} holds {found:x?}\n  and not {expected:x?}"));
            }
        }
        Ok(())
    }

    /// Objects of which nothing was made share no byte, and parts lie in the whole.
    pub fn check_disjoint(&self) -> Result<(), String> {
        let mut whole: Vec<(u64, u64)> = Vec::new();
        for object in self.model.objects.values() {
            if object.parts.is_empty() {
                whole.push((object.base, object.end()));
            }
            if let Some(of) = object.part_of.map(|of| self.model.object(of))
                && (object.base < of.base || object.end() > of.end())
            {
                return Err(format!("a {:?} at {:#x} sticks out", object.kind, object.base));
            }
        }
        whole.sort_unstable();
        match whole.windows(2).find(|two| two[0].1 > two[1].0) {
            Some(two) => Err(format!("two objects share memory: {two:x?}")),
            None => Ok(()),
        }
    }

    /// Whatever ring 3 can reach is covered by a capability, and none of it is the mechanism's own but to be read.
    pub fn check_reach(&self) -> Result<(), String> {
        let mut kept = vec![false; MEMORY_BYTES / 4096];
        for object in self.model.objects.values().filter(|object| is_kept(object)) {
            (object.base..object.end()).step_by(4096).filter_map(page).for_each(|page| kept[page] = true);
        }
        let objects = self.model.objects.iter();
        let tables = objects.filter_map(|(id, object)| Some((object.base, (*id, level(object.kind)?)))).collect();
        let mut walk = Walk { world: self, kept, tables, seen: BTreeSet::new() };
        let roots = self.model.objects.iter().filter(|(_, object)| object.kind == Type::Pml4);
        roots.into_iter().try_for_each(|(_, root)| walk.table(root.base, 4))
    }

    /// The CPU remembers nothing that the tables do not say.
    pub fn check_cpu(&self) -> Result<(), String> {
        let roots: BTreeSet<u64> =
            self.model.objects.values().filter(|object| object.kind == Type::Pml4).map(|root| root.base).collect();
        for ((root, page), known) in self.cpu.known.borrow().iter() {
            let at = VirtAddr(page << 12);
            if !roots.contains(&root.0) {
                return Err(format!("the CPU remembers {at:?} of a hierarchy that is gone"));
            }
            let now = translate(self.memory, *root, at);
            let holds =
                now.is_some_and(|now| now.at.0 & !4095 == known.at.0 & !4095 && now.rights.contain(known.rights));
            if !holds {
                return Err(format!("the CPU remembers {at:?} as {known:?}, and the tables say {now:?}"));
            }
        }
        Ok(())
    }

    /// Of all memory.
    pub fn hash_of_all(&self) -> u64 {
        self.hash(FIRST.0, FIRST.0 + MEMORY_BYTES as u64)
    }

    /// Of CNodes and tables.
    pub fn hash_of_kernel(&self) -> u64 {
        let kept = self.model.objects.values().filter(|object| is_kept(object));
        kept.fold(0, |sum, object| sum.rotate_left(7) ^ self.hash(object.base, object.end()))
    }

    fn hash(&self, from: u64, to: u64) -> u64 {
        let words = self.words(from, to).iter().map(|word| word.load(Ordering::Relaxed));
        // Odd factors: no single word changes without the sum.
        (1u64..).step_by(2).zip(words).fold(0, |sum, (factor, word)| sum.wrapping_add(word.wrapping_mul(factor)))
    }
}

/// A walk through all that hierarchies reach, by the words in memory alone.
struct Walk<'a, 'm> {
    world: &'a World<'m>,
    /// Pages of CNodes and tables.
    kept: Vec<bool>,
    /// By address, with their levels.
    tables: BTreeMap<u64, (ObjectId, u8)>,
    /// Those that it has been to, and as what.
    seen: BTreeSet<(u64, u8)>,
}

impl Walk<'_, '_> {
    fn table(&mut self, base: u64, table_level: u8) -> Result<(), String> {
        if !self.seen.insert((base, table_level)) {
            return Ok(());
        }
        let Some((table, _)) = self.tables.get(&base).copied().filter(|(_, level)| *level == table_level) else {
            return Err(format!("a walk comes to {base:#x}, which is no table of level {table_level}"));
        };
        for (index, word) in self.world.table_at(base).filter(|(_, word)| word & 1 != 0) {
            let word = Word(word);
            if table_level > 1 && word.0 >> 7 & 1 == 0 {
                self.table(word.to(), table_level - 1)?;
            } else {
                self.leaf(table, index, &word, page_bytes(table_level))
                    .map_err(|what| format!("entry {index} of the table at {base:#x}, {:#x}: {what}", word.0))?;
            }
        }
        Ok(())
    }

    fn leaf(&self, table: ObjectId, index: u16, word: &Word, len_bytes: u64) -> Result<(), String> {
        let (from, to) = (word.to(), word.to() + len_bytes);
        // Of a device, which may be large, no page is in this memory.
        let within = from.max(FIRST.0)..to.min(FIRST.0 + MEMORY_BYTES as u64);
        let is_kept = within.step_by(4096).filter_map(page).any(|page| self.kept[page]);
        if is_kept && word.rights() != Rights::READ {
            return Err("the mechanism's own memory is more than readable".into());
        }
        let model = &self.world.model;
        let cap = model.object(table).entries.get(&index).and_then(|entry| model.caps.get(&entry.from));
        let cap = cap.ok_or("it comes of no capability")?;
        let object = model.object(cap.object);
        let covers = match object.kind {
            Type::Frame | Type::DevFrame => object.base <= from && to <= object.end(),
            kind => level(kind).is_some() && (from, to) == (object.base, object.base + 4096),
        };
        if covers && cap.rights.contain(word.rights()) {
            Ok(())
        } else {
            Err("its capability does not allow that".into())
        }
    }
}
