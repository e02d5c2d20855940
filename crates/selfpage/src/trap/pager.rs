//! Pager threads.

use std::sync::Arc;

use selfpage_core::fault;

use super::errand;
use crate::domain::Inner;

/// Errands, faults that could not be resolved where they arose, and reading ahead, until the domain ends.
pub(crate) fn serve(inner: &Arc<Inner>) {
    let state = inner.state();
    while let Some(seen) = state.requested.count_unless(|| inner.stopping()) {
        // In turn: threads that send one errand after the other leave none of the rest waiting.
        let did_errand = errand::serve(state, &inner.errands);
        match fault::next_request(state) {
            Some(request) => {
                fault::serve(state, request);
            }
            None if did_errand => {}
            None => state.requested.wait(state.mmu, seen, 0),
        }
    }
}
