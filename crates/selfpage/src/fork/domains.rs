//! All domains of the process: what forks take care of.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use selfpage_core::addr::PageNo;
use selfpage_core::linux::signal;

use crate::domain::Inner;
use crate::region::Bound;
use crate::undisturbed;

pub(super) static DOMAINS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Has forks take care of the domain.
pub(crate) fn enlist(inner: &Arc<Inner>) {
    let mut domains = undisturbed::lock(&DOMAINS);
    domains.retain(|domain| domain.strong_count() > 0);
    domains.push(Arc::downgrade(inner));
}

/// Ends that.
pub(crate) fn delist(inner: &Arc<Inner>) {
    let mut domains = undisturbed::lock(&DOMAINS);
    domains.retain(|domain| !std::ptr::eq(domain.as_ptr(), Arc::as_ptr(inner)));
}

/// Calls `work` with all of them, and the list free: whoever holds a domain's regions may wait for a disk, or for code of the program's, and
/// others make domains meanwhile.
fn with_all<T>(work: impl FnOnce(&[Arc<Inner>]) -> T) -> T {
    // The last handle of one may be ours: a handler that forked would leave its child in the middle of the domain's end.
    let _quiet = signal::Quiet::begin();
    let all: Vec<_> = undisturbed::lock(&DOMAINS).iter().filter_map(Weak::upgrade).collect();
    work(&all)
}

/// The tracked region that a range has a page in.
pub(crate) fn find_tracked(range: &Range<usize>) -> Option<Arc<Bound>> {
    with_all(|all| all.iter().find_map(|domain| domain.find_tracked(range)))
}

/// Calls `each` with all regions of all domains.
pub(crate) fn each_region(mut each: impl FnMut(&Bound)) {
    with_all(|all| all.iter().for_each(|domain| domain.regions().values().for_each(|bound| each(bound))));
}

/// Whether a page is in no region of any domain; no for one of which that cannot be told without waiting, as in the handlers of a fork.
///
/// # Context
/// Normal, with signals blocked: a handler that forked would wait for its own thread.
pub(crate) fn is_in_no_region(page: PageNo) -> bool {
    let Ok(domains) = DOMAINS.try_lock() else { return false };
    domains.iter().filter_map(Weak::upgrade).all(|domain| domain.has_not(page))
}
