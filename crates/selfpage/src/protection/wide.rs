//! What keys cannot do: protections of the whole process, changed with mprotect(2) when a domain is entered and left.
//!
//! Where there are no keys that is every domain; where there are, a domain that may not execute what others may. One such
//! domain at a time: another is refused as long as threads are in the first. A thread outside of it that touches what the domain
//! has no right to waits in the handler of its `SIGSEGV` until the domain is left.

use super::fault::Change;
use super::rights::Rights;
use super::table::{Core, Record, Table};
use super::{Mechanism, mechanism};
use crate::error::{Error, Kind, Result};

/// The domain whose rights the whole process has.
pub(super) struct Wide {
    core: *const Core,
    /// How many times threads are in it.
    users: u32,
}

// SAFETY: protection-domain: the pointer is compared only.
unsafe impl Send for Wide {}

/// What came of a switch.
#[derive(PartialEq, Eq)]
pub(super) enum Switch {
    Done,
    /// Other threads are in the domain with this name.
    Busy(String),
}

/// Where a thread is, or is to be: a domain that is wide, and how many times in a row.
#[derive(Clone, Copy)]
pub(super) struct Stay {
    pub(super) core: *const Core,
    pub(super) times: u32,
}

impl Stay {
    pub(super) const OUTSIDE: Stay = Stay { core: std::ptr::null(), times: 0 };
}

impl Table {
    /// Whether the domain changes the whole process's protections.
    pub(super) fn is_wide(&mut self, core: *const Core) -> bool {
        if mechanism() == Mechanism::PageTables {
            return true;
        }
        let Table { memory, domains, .. } = self;
        let entry = domains.iter().find(|entry| std::ptr::eq(&*entry.core, core));
        memory
            .iter()
            .filter(|record| record.most.contains(Rights::EXECUTE))
            .any(|record| entry.is_some_and(|entry| !entry.rights_on(record.id).contains(Rights::EXECUTE)))
    }

    /// Takes a thread from one stay to another.
    pub(super) fn switch_wide(&mut self, from: Stay, to: Stay) -> Result<Switch> {
        if from.core == to.core {
            if let Some(wide) = self.wide.as_mut().filter(|wide| wide.core == to.core) {
                wide.users = wide.users + to.times - from.times;
            }
            return Ok(Switch::Done);
        }
        let others = self.wide.as_ref().map_or(0, |wide| wide.users) - from.times;
        let core = self.wide.as_ref().map_or(std::ptr::null(), |wide| wide.core);
        if others == 0 {
            let change = Change::begin();
            self.apply(to.core, &change)?;
            self.wide = (!to.core.is_null()).then_some(Wide { core: to.core, users: to.times });
            change.set_wide(to.core);
            return Ok(Switch::Done);
        }
        if let Some(wide) = &mut self.wide {
            if wide.core == to.core {
                wide.users += to.times;
                return Ok(Switch::Done);
            }
            if to.core.is_null() {
                wide.users = others;
                return Ok(Switch::Done);
            }
        }
        Ok(Switch::Busy(self.entry(core).core.name.clone()))
    }

    /// The whole process's protections again, after rights or memory have changed.
    pub(super) fn reapply(&mut self) -> Result<()> {
        match &self.wide {
            Some(wide) => self.apply(wide.core, &Change::begin()),
            None => Ok(()),
        }
    }

    /// In a forked child, whose one thread is where `stay` says.
    pub(super) fn stay_alone(&mut self, stay: Stay) {
        let change = Change::begin();
        let outcome = self.apply(stay.core, &change);
        if outcome.is_err() {
            crate::die("a forked child cannot take over the rights of its protection domain");
        }
        self.wide = (!stay.core.is_null()).then_some(Wide { core: stay.core, users: stay.times });
        change.set_wide(stay.core);
    }

    /// Gives the whole process the rights of a domain; null: those outside of all.
    fn apply(&mut self, core: *const Core, _change: &Change) -> Result<()> {
        let rights: Vec<Rights> = self.memory.iter().map(|record| self.process_wide(core, record)).collect();
        if self.memory.iter().zip(&rights).all(|(record, rights)| record.now == rights.prot()) {
            return Ok(());
        }
        let before: Vec<u32> = self.memory.iter().map(|record| record.now).collect();
        let refused =
            self.memory.iter_mut().zip(&rights).filter(|(record, rights)| record.now != rights.prot()).find_map(
                |(record, rights)| {
                    let why = record.protect(rights.prot(), record.key).err()?;
                    Some(Error::system("protect", format!("memory {}", record.name), why))
                },
            );
        let Some(why) = refused else { return Ok(()) };
        for (record, before) in self.memory.iter_mut().zip(&before).filter(|(record, before)| record.now != **before) {
            if record.protect(*before, record.key).is_err() {
                crate::die("memory cannot be given back the protection that it had");
            }
        }
        Err(why)
    }

    fn process_wide(&self, core: *const Core, record: &Record) -> Rights {
        if core.is_null() {
            return record.most;
        }
        let rights = self.rights(core, record.id);
        match mechanism() {
            Mechanism::PageTables => record.most.and(rights),
            Mechanism::Keys => record.most.and(rights | Rights::READ | Rights::WRITE),
        }
    }
}

/// Says that a domain cannot be entered.
pub(super) fn busy(name: &str, other: &str) -> Error {
    let cause = format!(
        "threads are in protection domain {other}; by page tables, rights are the whole process's, so one domain at a time \
         can be entered: wait until they have left it, or use a machine with protection keys"
    );
    Error::new(Kind::Held, "enter", format!("protection domain {name}"), cause)
}
