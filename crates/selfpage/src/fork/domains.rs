//! All domains of the process: what forks take care of.

use std::sync::{Arc, Mutex, Weak};

use selfpage_core::addr::PageNo;

use crate::domain::Inner;
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

/// Whether a page is in no region of any domain; no for one of which that cannot be told without waiting, as in the handlers of a fork.
///
/// # Context
/// Normal, with signals blocked: a handler that forked would wait for its own thread.
pub(crate) fn is_in_no_region(page: PageNo) -> bool {
    let Ok(domains) = DOMAINS.try_lock() else { return false };
    domains.iter().filter_map(Weak::upgrade).all(|domain| domain.has_not(page))
}
