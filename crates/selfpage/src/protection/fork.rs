//! Fork: the child's one thread is in the domains that it was in, and nobody else is in any.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use super::table::Core;
use super::{keys, stay, table, thread};

/// How many forks lie between the first process and this one.
static PASSED: AtomicU32 = AtomicU32::new(0);

/// What a fork has from before it until after it: nobody changes rights.
pub(crate) struct Held(table::Held);

/// Waits until nobody changes rights, and keeps it so.
pub(crate) fn hold() -> Held {
    Held(table::hold())
}

/// In a forked child, when regions are back: changes their protections.
pub(crate) fn forked(Held(table): &mut Held) {
    thread::with(|here| {
        // Whoever waits for the end of code on trial is not here.
        here.set_trial(ptr::null());
        for entry in &table.domains {
            entry.core.set_users(times(here, &entry.core));
        }
        table.stay_alone(stay(here.entered()));
    });
    PASSED.fetch_add(1, Ordering::Relaxed);
}

/// To be asked before and after a thread enters or leaves a domain, which counts it and says where it is in two steps. A handler of a signal
/// that forks in between has the child count it as [`forked`] finds it: where that has happened the count is to be taken [`anew`].
#[inline]
pub(super) fn passed() -> u32 {
    PASSED.load(Ordering::Relaxed)
}

/// Counts how many times the calling thread, the only one of a forked child, is in a domain.
#[cold]
pub(super) fn anew(here: &thread::Here, core: &Core) {
    let mut table = table::hold();
    let times = times(here, core);
    core.set_users(times);
    if times > 0 && core.word().is_wide() {
        // It may have become so while the thread did not count, and the whole process have other rights now.
        table.stay_alone(stay(here.entered()));
    }
    if let Some(register) = super::register() {
        // While it did not count, its keys may have come to other memory, and its word says nothing of what they are about now.
        if times > 0
            && let Err(why) = table.make_resident(core)
        {
            crate::die(&format!("a forked child's thread cannot stay in its protection domain: {why}"));
        }
        keys::load_current(register, here);
    }
}

fn times(here: &thread::Here, core: &Core) -> u64 {
    here.entered().filter(|entered| ptr::eq(*entered, core)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::super::{ProtectionDomain, leave_slowly};
    use super::*;
    use crate::child::forked;

    /// As a handler of a signal makes it that has forked in the middle of [`ProtectionDomain::enter`].
    #[test]
    fn a_domain_that_becomes_wide_while_its_thread_is_half_in_is_left_like_others() {
        forked(|| {
            let [domain, other] = ["half in", "other"].map(ProtectionDomain::new);
            let core = &*domain.door.core;
            thread::with(|here| {
                core.begin_use();
                core.set_wide(true);
                let before = here.push(core).unwrap();
                anew(here, core);
                leave_slowly(here, before);
                core.end_use();
            });
            drop(other.enter().unwrap());
            drop(domain.enter().unwrap());
        });
    }
}
