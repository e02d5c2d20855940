//! Protection domains: who may do what with which memory, switched by each thread for itself.
//!
//! A [`ProtectionDomain`] has a name and, for [`Memory`], [`Rights`] to read, write and execute it, and to change rights and
//! mappings (`meta`). A thread outside of all domains may do what the mappings allow. A thread that
//! [enters](ProtectionDomain::enter) a domain may do with all such memory what the domain may, which is nothing where it was given
//! no right; other memory of the process it uses as before.
//!
//! [`mechanism`] says how it is done here. By protection keys, a switch is a write to a register of the thread's. Without them
//! a switch is a call of mprotect(2) for each mapping that changes, for the whole process: **one domain at a time** can be entered
//! then, another is refused, and threads outside wait when they touch what the domain that is entered may not.
//!
//! # Source
//! Nemesis §6.1. There a switch is one of tables that the kernel consults; here the CPU's own register, or the page tables.
//! Nemesis gives each thread a domain; here a thread begins outside of all, which is the domain with every right.
//!
//! # Examples
//! ```no_run
//! # fn main() -> selfpage::Result<()> {
//! use selfpage::protection::{Memory, ProtectionDomain, Rights};
//! use std::sync::Arc;
//! let domain = selfpage::Domain::with_frames(16 << 20).build()?;
//! let ledger = Memory::of(&Arc::new(domain.region(1 << 20).name("ledger").zero()?))?;
//! let readers = ProtectionDomain::new("readers");
//! readers.set(&ledger, Rights::READ)?;
//! {
//!     let _entered = readers.enter()?;
//!     // Here this thread can read the ledger, and not write it.
//! }
//! # Ok(()) }
//! ```
#![allow(unsafe_code)]

mod fault;
pub(crate) mod fork;
mod keys;
mod memory;
mod places;
mod rights;
mod sandbox;
#[cfg(all(test, target_arch = "x86_64"))]
mod steps;
mod table;
mod thread;
mod wide;

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use selfpage_core::linux::key::{Key, Register};

use crate::error::{Error, Kind, Result};
use crate::fork::Once;
pub use fault::Access;
use keys::Ours;
pub(crate) use keys::allow_everything;
pub use memory::Memory;
pub use rights::Rights;
pub use sandbox::{Ended, Violation};
use table::{Core, Entry, Table};
use thread::Before;
use wide::{Stay, Switch};

/// How rights are enforced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Mechanism {
    /// By protection keys: for each thread by itself, and as fast as a register is written.
    Keys,
    /// By the page tables, with mprotect(2): for the whole process, so one domain at a time.
    PageTables,
}

/// How rights are enforced on this machine: by keys where the CPU and the kernel have them and one could be had, when this was
/// first asked.
pub fn mechanism() -> Mechanism {
    if register().is_some() { Mechanism::Keys } else { Mechanism::PageTables }
}

static REGISTER: Once<Option<Register>> = Once::new();

/// Whether there ever was a domain.
static IS_IN_USE: AtomicBool = AtomicBool::new(false);

/// The register of keys, if rights are enforced by it.
fn register() -> Option<Register> {
    *REGISTER.get_or_make(|| {
        let register = Register::of_this_machine()?;
        Key::allocate().ok()?.release();
        Some(register)
    })
}

/// Has the calling thread's rights be those of the domain that it is in, or of none, at once. An access of the program's does that by
/// itself; a system call on memory with a key fails with `EFAULT` instead, on a thread that is older than the key and in a handler
/// of a signal. Such a thread calls this first.
///
/// # Context
/// Any.
pub fn refresh() {
    // Where nobody has asked for it yet, nothing has a key.
    if let Some(register) = REGISTER.get().copied().flatten() {
        thread::with(|here| keys::load_current(register, here));
    }
}

/// What must stand before there are rights.
fn set_up() {
    crate::fork::attend();
    fault::install();
}

/// A named set of memory with rights, which threads enter and leave.
pub struct ProtectionDomain {
    door: Door,
}

/// What a thread needs to enter a domain.
#[derive(Clone)]
struct Door {
    core: Arc<Core>,
    register: Option<Register>,
}

impl ProtectionDomain {
    /// A domain without any right.
    pub fn new(name: &str) -> ProtectionDomain {
        set_up();
        IS_IN_USE.store(true, Ordering::Relaxed);
        let core = Arc::new(Core::new(name));
        let mut table = table::hold();
        table.domains.push(Entry { core: core.clone(), rights: HashMap::new(), issued: u32::MAX, resident: None });
        let wide = table.is_wide(Arc::as_ptr(&core));
        core.set_wide(wide);
        ProtectionDomain { door: Door { core, register: register() } }
    }

    /// The name for messages.
    pub fn name(&self) -> &str {
        &self.door.core.name
    }

    /// Makes `rights` what threads in the domain may do with `memory`, those that are in it now included.
    ///
    /// # Context
    /// Normal. In a handler that interrupted a thread in the domain it takes nothing from what was interrupted: the kernel gives that its
    /// register back as it was.
    ///
    /// # Errors
    /// [`Kind::Denied`]: the calling thread is in a domain without the right [`Rights::META`] on it. [`Kind::Invalid`]: no
    /// machine can tell the rights apart (to write and not to read), or the mapping does not allow them to anybody.
    /// [`Kind::Held`]: the threads in domains leave no key for it.
    pub fn set(&self, memory: &Memory, rights: Rights) -> Result<()> {
        let object = || format!("the rights of protection domain {} on memory {}", self.name(), memory.name());
        let refused = |kind, cause: String| Err(Error::new(kind, "set", object(), cause));
        if rights.contains(Rights::WRITE) && !rights.contains(Rights::READ) {
            return refused(Kind::Invalid, "no machine lets memory be written and not read: add Rights::READ".into());
        }
        // Dropped when the table is not held any more.
        let _before;
        let mut table = table::hold();
        table.may_change(memory.id(), "set the rights on", memory.name())?;
        let most =
            table.memory.iter().find(|record| record.id == memory.id()).map_or(Rights::NONE, |record| record.most);
        if !(most | Rights::META).contains(rights) {
            let cause =
                format!("{rights} was asked for, and its mapping allows {most}; map it with that, or ask for less");
            return refused(Kind::Invalid, cause);
        }
        let core = Arc::as_ptr(&self.door.core);
        _before = table.entry(core).rights.insert(memory.id(), (memory.clone(), rights));
        let followed = table.follow();
        if followed.is_err() {
            let entry = table.entry(core);
            match &_before {
                Some(before) => drop(entry.rights.insert(memory.id(), before.clone())),
                None => drop(entry.rights.remove(&memory.id())),
            }
            // What has followed already goes back.
            let _ = table.follow();
        }
        followed
    }

    /// What threads in the domain may do with `memory`.
    pub fn rights(&self, memory: &Memory) -> Rights {
        table::hold().rights(Arc::as_ptr(&self.door.core), memory.id())
    }

    /// Has the calling thread be in this domain until the guard is dropped. Then it is where it was before: in none, or in
    /// another domain, whose rights this one's replace meanwhile. Guards are dropped in the reverse order of their making.
    ///
    /// # Context
    /// Normal. Where the domain has been entered before and its keys were not needed elsewhere, by keys: any.
    ///
    /// # Errors
    /// [`Kind::Held`]: by page tables, threads are in another domain; by keys, there are not enough for all domains that
    /// threads are in. [`Kind::OutOfSpace`]: the thread is in 16 domains already.
    ///
    /// # Panics
    /// The guard does, where it is not the innermost.
    #[inline]
    pub fn enter(&self) -> Result<Entered<'_>> {
        self.door.enter()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        let core = Arc::as_ptr(&self.door.core);
        let mut table = table::hold();
        if self.door.core.word().users() > 0 {
            // A guard was forgotten: the thread stays in the domain, and the domain with it.
            std::mem::forget(self.door.core.clone());
            return;
        }
        let at = table.domains.iter().position(|entry| std::ptr::eq(&*entry.core, core));
        // Its memory may go with it, which needs the table.
        let entry = at.map(|at| table.domains.swap_remove(at));
        drop(table);
        drop(entry);
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProtectionDomain({})", self.name())
    }
}

/// A thread in a protection domain.
#[must_use = "the domain is left when this is dropped"]
pub struct Entered<'a> {
    door: &'a Door,
    depth: usize,
    before: Before,
    /// It is this thread that is in the domain.
    _here: PhantomData<*const ()>,
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entered({})", self.door.core.name)
    }
}

impl Door {
    #[inline]
    fn enter(&self) -> Result<Entered<'_>> {
        thread::with(|here| {
            let (forks, ours) = (fork::passed(), Ours::now());
            // From here on the domain keeps its keys.
            let word = self.core.begin_use();
            let quick = self.register.filter(|_| word.is_quick() && !is_wide(here.current()));
            let pushed = quick.and_then(|register| Some((register, here.push(Arc::as_ptr(&self.core))?)));
            let before = match pushed {
                Some((register, before)) => {
                    keys::load(register, ours, word.denied());
                    Ok(before)
                }
                None => self.enter_slowly(here).inspect_err(|_| self.core.end_use()),
            };
            if fork::passed() != forks {
                fork::anew(here, &self.core);
            }
            Ok(Entered { door: self, depth: here.depth(), before: before?, _here: PhantomData })
        })
    }

    #[cold]
    fn enter_slowly(&self, here: &thread::Here) -> Result<Before> {
        let core = Arc::as_ptr(&self.core);
        let too_deep = || {
            let cause = format!("this thread is in {} domains, one within the other; leave some", thread::MOST_NESTED);
            Error::new(Kind::OutOfSpace, "enter", format!("protection domain {}", self.core.name), cause)
        };
        if here.depth() == thread::MOST_NESTED {
            return Err(too_deep());
        }
        let mut table = table::hold();
        if self.register.is_some() {
            table.make_resident(core)?;
        }
        let from = stay(here.entered());
        let times = if from.core == core { from.times + 1 } else { 1 };
        let to = if self.core.word().is_wide() { Stay { core, times } } else { Stay::OUTSIDE };
        if let Switch::Busy(other) = table.switch_wide(from, to)? {
            return Err(wide::busy(&self.core.name, &other));
        }
        let before = here.push(core).ok_or_else(too_deep)?;
        if let Some(register) = self.register {
            keys::load_current(register, here);
        }
        Ok(before)
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        thread::with(|here| {
            assert!(here.depth() == self.depth, "protection domain {} is not the innermost", self.door.core.name);
            let (forks, core) = (fork::passed(), &*self.door.core);
            if core.word().is_wide() || here.depth() > 1 {
                leave_slowly(here, self.before);
            } else {
                here.pop(self.before);
            }
            if let Some(register) = self.door.register {
                keys::load_current(register, here);
            }
            core.end_use();
            if fork::passed() != forks {
                fork::anew(here, core);
            }
        });
    }
}

/// Leaves the innermost domain of a thread, where one of those that it is in may be wide.
#[cold]
fn leave_slowly(here: &thread::Here, before: Before) {
    let from = stay(here.entered());
    let to = stay(here.entered().take(here.depth() - 1));
    if from.core.is_null() && to.core.is_null() {
        return here.pop(before);
    }
    loop {
        // Not while it sleeps: whoever is to leave first takes it.
        let mut table = table::hold();
        match table.switch_wide(from, to) {
            // With no handler of a signal in between, for which the table and the thread would disagree.
            Ok(Switch::Done) => return here.pop(before),
            // Others are in a domain that this thread would leave for another. Until then it is in it.
            Ok(Switch::Busy(_)) => drop(table),
            Err(why) => crate::die(&format!("a protection domain cannot be left: {why}")),
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

/// Has it that a thread which has ended, or is stopped for good, is in none of the domains that it was in.
fn leave_all(entered: impl FnOnce() -> Vec<*const Core>) {
    let mut table = table::hold();
    let entered = entered();
    if let Err(why) = table.switch_wide(stay(entered.iter().copied()), Stay::OUTSIDE) {
        crate::die(&format!("a protection domain cannot be left: {why}"));
    }
    for core in entered {
        // SAFETY: protection-domain: a domain that a thread is in stays.
        unsafe { &*core }.end_use();
    }
}

fn is_wide(core: *const Core) -> bool {
    // SAFETY: protection-domain: a domain that a thread is in stays.
    unsafe { core.as_ref() }.is_some_and(|core| core.word().is_wide())
}

fn denied(core: *const Core) -> u32 {
    // SAFETY: protection-domain: a domain that a thread is in stays.
    unsafe { core.as_ref() }.map_or(0, |core| core.word().denied())
}

/// How far a thread that is in these domains, the outermost first, has the whole process's protections changed.
fn stay(entered: impl Iterator<Item = *const Core>) -> Stay {
    entered.filter(|core| !core.is_null()).fold(Stay::OUTSIDE, |stay, core| match is_wide(core) {
        true if stay.core == core => Stay { core, times: stay.times + 1 },
        true => Stay { core, times: 1 },
        false => Stay::OUTSIDE,
    })
}

/// Whether the calling thread may change rights and mappings of a region that begins at `start`.
///
/// # Errors
/// It is in a protection domain without that right.
pub(crate) fn may_change(start: usize, operation: &'static str, name: &str) -> Result<()> {
    if IS_IN_USE.load(Ordering::Relaxed) { may_change_within(start, operation, name) } else { Ok(()) }
}

/// An allocator may ask in the midst of what the loader does for a thread's own variables: where they are is not looked up before it has to be.
#[inline(never)]
fn may_change_within(start: usize, operation: &'static str, name: &str) -> Result<()> {
    if thread::with(|here| here.depth()) == 0 {
        return Ok(());
    }
    let table = table::hold();
    table.memory_at(start).map_or(Ok(()), |record| table.may_change(record.id, operation, name))
}

impl Table {
    fn may_change(&self, memory: u64, operation: &'static str, name: &str) -> Result<()> {
        let core = thread::with(thread::Here::current);
        if core.is_null() || self.rights(core, memory).contains(Rights::META) {
            return Ok(());
        }
        // SAFETY: protection-domain: a domain that a thread is in stays.
        let domain = unsafe { &(*core).name };
        let cause = format!(
            "this thread is in protection domain {domain}, which has no right Rights::META on it; give it that right, or \
             leave the domain first"
        );
        Err(Error::new(Kind::Denied, operation, format!("memory {name}"), cause))
    }

    /// Brings machine and process after rights or memory that have changed.
    fn follow(&mut self) -> Result<()> {
        if mechanism() == Mechanism::Keys {
            self.follow_wide()?;
            if self.domains.iter().any(|entry| entry.resident.is_some()) {
                self.assign_keys(std::ptr::null())?;
            }
        }
        self.reapply()
    }

    /// Says anew which domains are wide.
    fn follow_wide(&mut self) -> Result<()> {
        for at in 0..self.domains.len() {
            let core = self.domains[at].core.clone();
            let wide = self.is_wide(Arc::as_ptr(&core));
            if wide == core.word().is_wide() {
                continue;
            }
            if core.hold_back(0) > 0 {
                if !wide {
                    // It stays so for the threads in it, which is the stricter, and follows when rights change after they have left.
                    continue;
                }
                let cause = "threads are in it, and its rights to execute are the whole process's: leave it first";
                let object = format!("memory for protection domain {}", core.name);
                return Err(Error::new(Kind::Held, "set the rights on", object, cause));
            }
            core.set_wide(wide);
        }
        Ok(())
    }
}
