//! What the program lends to a pager of its own: files that it has, and goes on having.

use std::collections::BTreeSet;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Kind, Result, unless_it_panics};
use crate::pager::UserPager;
use crate::store::Numbered;

/// A pager of the program's own, and what it has last said that it uses.
pub(super) struct Lent {
    pager: Arc<dyn UserPager>,
    files: Mutex<Vec<Numbered>>,
}

impl Lent {
    /// What the program has at the numbers that the pager names.
    pub(super) fn to(pager: Arc<dyn UserPager>) -> Result<Lent> {
        let file = |number: RawFd| {
            Numbered::of(number).map_err(|why| {
                let cause = format!("{why}; UserPager::descriptors is to name those that are open");
                Error::new(Kind::Invalid, "lend", format!("descriptor {number}"), cause)
            })
        };
        let files = each_once(pager.descriptors()).map(file).collect::<Result<_>>()?;
        Ok(Lent { pager, files: Mutex::new(files) })
    }

    pub(super) fn files(&self) -> Vec<Numbered> {
        self.held().clone()
    }

    fn held(&self) -> MutexGuard<'_, Vec<Numbered>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the calling thread has at their numbers.
    pub(super) fn now(&self) -> Vec<Option<Numbered>> {
        self.held().iter().map(|file| Numbered::of(file.number).ok()).collect()
    }

    /// In a forked child, which has what the forking thread had: asks again, after pagers have been told and may have opened files of the
    /// child's own. `before` is what there was until then. Returns those of its numbers that are no file of the parent's any more.
    pub(super) fn over_fork(&self, before: &[Option<Numbered>]) -> Vec<RawFd> {
        let parents = self.files();
        let mut childs = Vec::new();
        let numbers = unless_it_panics(|| self.pager.descriptors()).unwrap_or_default();
        *self.held() = each_once(numbers)
            .filter_map(|number| {
                let now = Numbered::of(number).ok();
                let of_parent =
                    parents.iter().zip(before).find(|(file, before)| file.number == number && **before == now);
                // What the program has closed, or has another file in place of, pager threads have had all the same.
                of_parent.map(|(file, _)| file.clone()).or_else(|| now.inspect(|_| childs.push(number)))
            })
            .collect();
        childs
    }
}

fn each_once(numbers: Vec<RawFd>) -> impl Iterator<Item = RawFd> {
    BTreeSet::from_iter(numbers).into_iter()
}
