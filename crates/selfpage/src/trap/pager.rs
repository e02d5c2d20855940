//! Pager threads.

use std::sync::Arc;

use selfpage_core::fault;

use super::errand;
use crate::domain::Inner;

/// Errands, faults that could not be resolved where they arose, and reading ahead, until the domain ends.
pub(crate) fn serve(inner: &Arc<Inner>) {
    let state = inner.state();
    while let Some(seen) = state.requested.count_unless(|| inner.stopping()) {
        if errand::serve(state, &inner.errands) {
            continue;
        }
        match fault::next_request(state) {
            Some(request) => {
                fault::serve(state, request);
            }
            None => state.requested.wait(state.mmu, seen, 0),
        }
    }
}
