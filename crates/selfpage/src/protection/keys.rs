//! Which memory has which key.
//!
//! Memory on which all domains have the same rights shares a key; that on which all have every right needs none. Where 15 keys are
//! not enough for that, only *resident* domains count: so they do for any number of domains. A domain becomes resident when it
//! is entered; where keys run out, the one that was so for longest, with no thread in it, goes. The cost of that is a
//! pkey_mprotect(2) for each mapping whose key changes.
//!
//! A key must not come to memory on which some thread, by a register that it loaded before, would have more rights than its
//! domain has. Registers of other threads cannot be changed: so such a key is passed over until those threads have left. What
//! a register denies too much is put right when the thread meets it (see `fault`).
//!
//! # Source
//! libmpk (Park et al., USENIX ATC 2019) for keys that are used in turn; here they stand for sets of rights, not for mappings.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use selfpage_core::linux::key::{self, Key, Register};

use super::fault::Change;
use super::rights::Rights;
use super::table::{Core, Table};
use super::thread;
use crate::error::{Error, Kind, Result};

/// The bits of all keys that are ours, of each from when every domain's word says what may be done with it.
static OURS: AtomicU32 = AtomicU32::new(0);

/// The bits of the keys that are ours. To be read *before* the word of the domain whose register is loaded: a key that comes in between
/// is none of these, and stays denied as it was. With the key, and a word from before it, the domain would be allowed what lies there.
#[derive(Clone, Copy)]
pub(super) struct Ours(u32);

impl Ours {
    #[inline]
    pub(super) fn now() -> Ours {
        Ours(OURS.load(Ordering::Acquire))
    }

    /// A register in which the bits of our keys are those of `denied`.
    #[inline]
    pub(super) fn set(self, register: u32, denied: u32) -> u32 {
        register & !self.0 | denied
    }
}

/// Gives the calling thread the rights that `denied` leaves it. The program's own keys stay as they are.
#[inline]
pub(super) fn load(register: Register, ours: Ours, denied: u32) {
    register.write(ours.set(register.read(), denied));
}

/// Gives the calling thread the rights of the domain that it is in.
#[inline]
pub(super) fn load_current(register: Register, here: &thread::Here) {
    let ours = Ours::now();
    load(register, ours, super::denied(here.current()));
}

/// The bits by which a register leaves these rights on a key.
fn denial(key: Key, rights: Rights) -> u32 {
    if !rights.contains(Rights::READ) {
        return key.deny_access();
    }
    if rights.contains(Rights::WRITE) { 0 } else { key.deny_writing() }
}

/// A resident domain, while keys are assigned.
struct Resident {
    /// Its place in the table.
    at: usize,
    /// How many times threads are in it, and how many times the calling thread, whose register is loaded afterwards.
    users: u64,
    mine: u64,
}

/// Memory by what each resident domain may do with it.
type Classes = BTreeMap<Vec<u8>, Class>;

struct Class {
    rights: Vec<Rights>,
    members: Vec<usize>,
    key: Option<Key>,
}

impl Table {
    /// Gives the domain's memory keys.
    pub(super) fn make_resident(&mut self, core: *const Core) -> Result<()> {
        if self.entry(core).resident.is_some() {
            return Ok(());
        }
        let now = self.next();
        let entry = self.entry(core);
        (entry.resident, entry.issued) = (Some(now), u32::MAX);
        self.assign_keys(core)
    }

    /// Gives all memory the keys that the rights of the resident domains call for. `wanted` is the domain that became resident for
    /// this, if one did; it is not, where that fails.
    pub(super) fn assign_keys(&mut self, wanted: *const Core) -> Result<()> {
        let outcome = loop {
            let resident: Vec<Resident> = self.hold_residents_back();
            // As long as all domains can be told apart, keys stay where they are, whoever enters what.
            let everybody: Vec<usize> = (0..self.domains.len()).collect();
            let residents: Vec<usize> = resident.iter().map(|one| one.at).collect();
            let classes = self.classes(&resident, &everybody).or_else(|| self.classes(&resident, &residents));
            if let Some(classes) = classes {
                break self.carry_out(&classes, &resident);
            }
            let goes = |one: &&Resident| one.users == 0 && !std::ptr::eq(&*self.domains[one.at].core, wanted);
            match resident.iter().filter(goes).min_by_key(|one| self.domains[one.at].resident) {
                Some(one) => self.domains[one.at].resident = None,
                None => break Err(self.out_of_keys(&resident)),
            }
        };
        if outcome.is_err() {
            // Not opened below: its word denies nothing, or what it denied when its memory had keys before.
            if !wanted.is_null() {
                self.entry(wanted).resident = None;
            }
            for entry in self.domains.iter().filter(|entry| entry.resident.is_some()) {
                entry.core.open(entry.core.word().denied());
            }
        }
        if let Some(register) = super::register() {
            thread::with(|here| load_current(register, here));
        }
        outcome
    }

    fn hold_residents_back(&self) -> Vec<Resident> {
        let residents = self.domains.iter().enumerate().filter(|(_, entry)| entry.resident.is_some());
        thread::with(|here| {
            residents
                .map(|(at, entry)| {
                    let mine = here.entered().filter(|core| std::ptr::eq(*core, &*entry.core)).count() as u64;
                    Resident { at, mine, users: entry.core.hold_back(mine) }
                })
                .collect()
        })
    }

    fn out_of_keys(&self, resident: &[Resident]) -> Error {
        let within: Vec<_> = resident.iter().map(|one| self.domains[one.at].core.name.as_str()).collect();
        let cause = format!(
            "{} keys are not enough for what the domains that threads are in ({}) may do; leave one of them first, or give \
             them the same rights on more of the memory",
            self.keys.len(),
            within.join(", ")
        );
        Error::new(Kind::Held, "enter", "a protection domain", cause)
    }

    /// Memory with its keys to be, as the `telling` domains tell it apart; `None`: there are not enough.
    fn classes(&mut self, resident: &[Resident], telling: &[usize]) -> Option<Classes> {
        let mut classes = Classes::new();
        for (at, record) in self.memory.iter().enumerate() {
            let of = |at: usize| self.domains[at].rights_on(record.id).keyed();
            let told: Vec<Rights> = telling.iter().map(|at| of(*at)).collect();
            let no_key = told.iter().all(|rights| rights.contains(record.most.keyed())).then_some(Key::NONE);
            let name = told.iter().map(|rights| rights.prot() as u8).chain([no_key.is_some().into()]).collect();
            let rights = resident.iter().map(|one| of(one.at)).collect();
            classes.entry(name).or_insert(Class { rights, members: Vec::new(), key: no_key }).members.push(at);
        }
        let mut taken = vec![Key::NONE];
        // A class stays with a key that one of its members has.
        for class in classes.values_mut().filter(|class| class.key.is_none()) {
            let kept = class.members.iter().map(|at| self.memory[*at].key);
            class.key = kept.filter(|key| !taken.contains(key)).find(|key| self.fits(*key, &class.rights, resident));
            taken.extend(class.key);
        }
        for class in classes.values_mut().filter(|class| class.key.is_none()) {
            let ours = self.keys.iter().copied().filter(|key| !taken.contains(key));
            let free = ours.into_iter().find(|key| self.fits(*key, &class.rights, resident));
            let key = match free {
                Some(key) => key,
                None => {
                    let key = Key::allocate().ok()?;
                    self.keys.push(key);
                    key
                }
            };
            class.key = Some(key);
            taken.push(key);
        }
        Some(classes)
    }

    /// Whether no thread has a register that would leave it more than `rights` on memory with the key.
    fn fits(&self, key: Key, rights: &[Rights], resident: &[Resident]) -> bool {
        resident.iter().zip(rights).all(|(one, rights)| {
            let denial = denial(key, *rights);
            one.users <= one.mine || self.domains[one.at].issued & denial == denial
        })
    }

    fn carry_out(&mut self, classes: &Classes, resident: &[Resident]) -> Result<()> {
        let _change = Change::begin();
        let mut changed: Vec<(usize, Key)> = Vec::new();
        for class in classes.values() {
            let key = class.key.unwrap_or(Key::NONE);
            for at in &class.members {
                let record = &mut self.memory[*at];
                let before = record.key;
                if before == key {
                    continue;
                }
                if let Err(errno) = record.protect(record.now, key) {
                    let why = Error::system("give a key to", format!("memory {}", record.name), errno);
                    for (at, before) in changed {
                        let record = &mut self.memory[at];
                        if record.protect(record.now, before).is_err() {
                            crate::die("memory cannot be given back the protection key that it had");
                        }
                    }
                    return Err(why);
                }
                changed.push((*at, before));
            }
        }
        let all = self.keys.iter().fold(0, |denied, key| denied | key.deny_access());
        for (place, one) in resident.iter().enumerate() {
            let denied = classes.values().fold(all, |denied, class| {
                let key = class.key.unwrap_or(Key::NONE);
                if key == Key::NONE { denied } else { denied & !key.deny_access() | denial(key, class.rights[place]) }
            });
            let entry = &mut self.domains[one.at];
            let nobody_else = entry.core.open(denied).users() <= one.mine;
            entry.issued = if nobody_else { denied } else { entry.issued & denied };
        }
        OURS.store(all, Ordering::Release);
        Ok(())
    }
}

/// Lets the calling thread use memory with any key.
pub(crate) fn allow_everything() {
    if let Some(register) = Register::of_this_machine() {
        register.write(key::EVERYTHING);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_comes_while_a_thread_enters_stays_denied() {
        let core = Core::new("entered");
        core.open(0);
        let ours = Ours::now();
        let word = core.begin_use();
        // What `carry_out` does in another thread now.
        let key = 0b11 << 30;
        core.open(key);
        OURS.fetch_or(key, Ordering::Release);
        assert_eq!(ours.set(u32::MAX, word.denied()) & key, key);
        assert_eq!(Ours::now().set(u32::MAX, 0) & key, 0, "outside of all domains it is allowed from now on");
        OURS.fetch_and(!key, Ordering::Release);
    }
}
