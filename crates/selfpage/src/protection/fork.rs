//! Fork: the child's one thread is in the domains that it was in, and nobody else is in any.

use std::ptr;

use super::{stay, table, thread};

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
            entry.core.set_users(here.entered().filter(|core| std::ptr::eq(*core, &*entry.core)).count() as u64);
        }
        table.stay_alone(stay(here.entered()));
    });
}
