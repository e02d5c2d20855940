//! The mechanism, its memory and a CPU beside the model, one step at a time.

use std::collections::{BTreeMap, HashMap};

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Kernel, Progress, Rule, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::Invalidation;
use selfpage_core::tables::walk::{Access, WalkFault};

use crate::chooser::{Handles, any_entry, choose};
use crate::dice;
use crate::entries::{needs, page_bytes};
use crate::machine::{Cpu, FIRST};
use crate::model::{Model, Object, ObjectId, level};
use crate::operations::{Operation, Outcome};

/// How much memory the machine has: enough for one page of 2 MiB.
pub const MEMORY_BYTES: usize = 4 << 20;
/// Its devices: base, log2 of the length. The first has room for pages of 1 GiB.
const DEVICES: [(PhysAddr, u8); 2] = [(PhysAddr(1 << 40), 31), (PhysAddr(0xfee0_0000), 12)];
/// Who there is: one who has all, two who have what they are given.
pub const HOLDERS: u64 = 3;

/// How often each call had each answer.
pub type Counts = BTreeMap<(&'static str, String), u64>;

/// All of it.
pub struct World<'m> {
    pub kernel: Kernel<'m>,
    pub memory: &'m PhysMemory,
    pub cpu: &'m Cpu,
    pub model: Model,
    spaces: Vec<Space>,
    handles: Vec<Handles>,
    /// What pages held while they were CNodes or tables: for a holder who has such a page as a frame later, and puts it back.
    once: BTreeMap<u64, Vec<u64>>,
    counts: HashMap<(&'static str, Option<Error>), u64>,
    is_lenient: bool,
}

impl<'m> World<'m> {
    /// A machine whose memory is full of what it held before: `memory` and `cpu` may have been used.
    pub fn new(memory: &'m PhysMemory, cpu: &'m Cpu, waived: Option<Rule>) -> World<'m> {
        cpu.known.borrow_mut().clear();
        cpu.told.take();
        // Anything, but the same for each seed.
        for offset in (0..MEMORY_BYTES as u64).step_by(8) {
            memory.store(FIRST.plus(offset), offset.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        let (mut kernel, space) = Kernel::boot(memory, cpu, &DEVICES).expect("a machine that can be had");
        let mut blocks = Vec::new();
        let mut at = FIRST.0 + 4096;
        while at < FIRST.0 + MEMORY_BYTES as u64 {
            // The first page is the root: from there on each block is as long as what lies before it.
            blocks.push((Type::Ram, at, (at - FIRST.0).ilog2() as u8));
            at += at - FIRST.0;
        }
        blocks.extend(DEVICES.map(|(base, size_bits)| (Type::DevFrame, base.0, size_bits)));
        let modes = [Invalidation::Full, Invalidation::Selective, Invalidation::Adaptive];
        kernel.set_invalidation(modes[dice::below(3) as usize]);
        if let Some(rule) = waived {
            kernel.waive(rule);
        }
        let model = Model::new(FIRST.0, &blocks);
        let spaces = vec![space; HOLDERS as usize];
        let handles = spaces.iter().map(|_| Handles::default()).collect();
        World {
            kernel,
            memory,
            cpu,
            model,
            spaces,
            handles,
            once: BTreeMap::new(),
            counts: HashMap::new(),
            is_lenient: waived.is_some(),
        }
    }

    /// Any step: a call, or an access of the CPU.
    pub fn step(&mut self) -> Result<(), String> {
        if dice::once_in(8) {
            return self.access();
        }
        let who = dice::below(HOLDERS + 3).saturating_sub(3) as usize;
        if dice::once_in(8) {
            self.handles[who] = Handles::of(&self.model, who);
        }
        let operation = choose(&self.model, who, &self.handles[who]);
        let answer = self.call(who, operation)?;
        if operation.removes() && answer.is_ok() || dice::once_in(24) {
            self.check_all().map_err(|what| format!("after {who}: {operation:x?}\n  {what}"))?;
            self.remember_a_page();
        }
        Ok(())
    }

    /// A call, and whether it did what the model says.
    pub fn call(&mut self, who: usize, operation: Operation) -> Result<Result<Outcome, Error>, String> {
        self.cpu.left.borrow_mut().clear();
        let expected = self.model.perform(who, &operation);
        // Seldom all of it: that takes a while.
        let before = match expected {
            Err(_) if dice::once_in(4096) => Some((self.hash_of_all(), true)),
            Err(_) if dice::once_in(16) => Some((self.hash_of_kernel(), false)),
            _ => None,
        };
        let found = self.perform(who, &operation);
        let name = if expected == Ok(Outcome::Revoked(Progress::More)) { "revoke, more" } else { operation.name() };
        *self.counts.entry((name, expected.err())).or_default() += 1;
        // Without a rule a call may be refused for another reason. That is nothing yet.
        let both_refuse = self.is_lenient && found.is_err() && expected.is_err();
        if found != expected && !both_refuse {
            return Err(format!("{who}: {operation:x?}\n  answers {found:x?}\n  and not {expected:x?}"));
        }
        if let Some((hash, whole)) = before
            && hash != (if whole { self.hash_of_all() } else { self.hash_of_kernel() })
        {
            return Err(format!("{who}: {operation:x?}\n  was refused ({found:?}) and changed memory"));
        }
        let context = |what| format!("{who}: {operation:x?}\n  {what}");
        self.check_made().map_err(context)?;
        self.check_left().map_err(context)?;
        if let (Ok(_), Some((into, at))) = (expected, operation.puts())
            && let Ok(node) = self.model.named(who, into)
        {
            // What was put there is what was asked for.
            let guard = self.model.cap(node).guard;
            let handle = into.guarded(guard.0, guard.1, at);
            let _ = self.call(who, Operation::Identify { handle })?;
        }
        Ok(found)
    }

    fn perform(&mut self, who: usize, operation: &Operation) -> Result<Outcome, Error> {
        let (kernel, space) = (&mut self.kernel, self.spaces[who]);
        let done = |()| Outcome::Done;
        match *operation {
            Operation::Retype { source, to, count, into, first } => {
                kernel.retype(&space, source, to, count, into, first).map(done)
            }
            Operation::Copy { source, into, at, rights } => kernel.copy(&space, source, into, at, rights).map(done),
            Operation::Mint { source, into, at, guard } => kernel.mint(&space, source, into, at, guard).map(done),
            Operation::Delete { handle } => kernel.delete(&space, handle).map(done),
            Operation::Revoke { handle, most } => kernel.revoke(&space, handle, most).map(Outcome::Revoked),
            Operation::Map { entries, from, offset_bytes, rights } => {
                kernel.map(&space, entries, from, offset_bytes, rights).map(done)
            }
            Operation::Unmap { entries } => kernel.unmap(&space, entries).map(done),
            Operation::ModifyFlags { entries, rights } => kernel.modify_flags(&space, entries, rights).map(done),
            Operation::ClearDirtyBits { entries } => kernel.clear_dirty_bits(&space, entries).map(Outcome::Dirty),
            Operation::Identify { handle } => kernel.identify(&space, handle).map(Outcome::Capability),
            Operation::Derived { handle } => kernel.derived(&space, handle).map(Outcome::Derived),
            Operation::RootTable { handle } => kernel.root_table(&space, handle).map(Outcome::Root),
            Operation::Enter { as_whom, root } => {
                self.spaces[as_whom] = kernel.space(&space, root)?;
                Ok(Outcome::Done)
            }
        }
    }

    /// The CPU reads, writes or executes at some address of some hierarchy.
    fn access(&mut self) -> Result<(), String> {
        let used = |object: &Object| object.kind == Type::Pml4 && (!object.entries.is_empty() || dice::once_in(8));
        let roots: Vec<ObjectId> =
            self.model.objects.iter().filter(|(_, object)| used(object)).map(|(id, _)| *id).collect();
        let Some(root) = roots.get(dice::below(roots.len().max(1) as u64) as usize) else { return Ok(()) };
        let at = (0..4).map(|_| self.some_address(*root)).find(|at| self.model.way(*root, *at).end.is_some());
        let at = at.unwrap_or_else(|| self.some_address(*root));
        let access = [Access::Read, Access::Write, Access::Write, Access::Execute][dice::below(4) as usize];
        self.access_at(*root, at, access)
    }

    /// Mostly one that is mapped.
    fn some_address(&self, root: ObjectId) -> u64 {
        let mut at = dice::below(1 << 12) & !7;
        let mut table = Some(root);
        for table_level in (1..=4).rev() {
            let entries = table.map(|table| &self.model.object(table).entries).filter(|entries| !entries.is_empty());
            let found = entries.and_then(|entries| entries.iter().nth(dice::below(entries.len() as u64) as usize));
            let index = match found {
                Some((index, entry)) if !dice::once_in(32) => {
                    let to = self.model.cap(entry.from).object;
                    table = level(self.model.object(to).kind).map(|_| to);
                    *index
                }
                _ => {
                    table = None;
                    any_entry()
                }
            };
            at += u64::from(index) * page_bytes(table_level);
        }
        // Bit 47 goes on above.
        if at >= 1 << 47 && !dice::once_in(64) { at | 0xffff << 48 } else { at }
    }

    fn access_at(&mut self, root: ObjectId, at: u64, access: Access) -> Result<(), String> {
        let way = self.model.way(root, at);
        let base = PhysAddr(self.model.object(root).base);
        let code = u32::from(access == Access::Write) << 1 | 1 << 2 | u32::from(access == Access::Execute) << 4;
        let expected = match way.end {
            _ if at >> 47 != 0 && at >> 47 != (1 << 17) - 1 => Err(WalkFault::NotCanonical),
            Some((to, rights)) if rights.contain(needs(access)) => Ok(PhysAddr(to)),
            Some(_) => Err(WalkFault::Page(code | 1)),
            None => Err(WalkFault::Page(code)),
        };
        let known = self.cpu.known.borrow().get(&(base, at as usize >> 12)).copied();
        let is_known = known.is_some_and(|known| known.rights.contain(needs(access)));
        let found = self.cpu.access(self.memory, base, VirtAddr(at as usize), access);
        if found != expected {
            return Err(format!("{access:?} of {at:#x} finds {found:x?} and not {expected:x?}"));
        }
        *self.counts.entry((if found.is_ok() { "access" } else { "access refused" }, None)).or_default() += 1;
        let Ok(to) = found else { return Ok(()) };
        if !is_known {
            self.model.mark(&way, access);
        }
        if access == Access::Write {
            self.check_written(to)?;
            self.write(to);
        }
        Ok(())
    }

    /// A holder writes what may hurt: anything, or what the page held when it was a CNode or a table.
    fn write(&mut self, at: PhysAddr) {
        let page = at.0 & !4095;
        match self.once.get(&page) {
            Some(words) if dice::once_in(2) => {
                for (word, offset) in words.iter().zip((0..).step_by(8)) {
                    self.memory.store(PhysAddr(page + offset), *word);
                }
            }
            _ => self.memory.store(at, dice::next()),
        }
    }

    fn remember_a_page(&mut self) {
        let kept = |object: &&Object| object.kind == Type::CNode || level(object.kind).is_some();
        let all: Vec<u64> = self.model.objects.values().filter(kept).map(|object| object.base).collect();
        if dice::once_in(4) {
            let base = all[dice::below(all.len() as u64) as usize];
            let words = (0..512).map(|word| self.memory.load(PhysAddr(base + word * 8))).collect();
            self.once.insert(base, words);
        }
    }

    /// How often each call had each answer so far.
    pub fn counts(&self) -> Counts {
        let answer = |error: &Option<Error>| error.map_or("done".to_string(), |error| format!("{error:?}"));
        self.counts.iter().map(|((call, error), times)| ((*call, answer(error)), *times)).collect()
    }
}
