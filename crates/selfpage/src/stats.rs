//! What a domain has counted, for people and machines.

use std::sync::atomic::Ordering;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::trace::Counts;

use crate::domain::Inner;

/// One reading of a domain's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Counts since the domain began.
    pub counts: Counts,
    /// Bytes of frames that the contract allows.
    pub frames_bytes: u64,
    /// Bytes of frames that had memory at most.
    pub resident_bytes_max: u64,
    /// Half of the faults that no handler of the program was asked of took less, in nanoseconds.
    pub fault_ns_p50: u64,
    /// 99 of 100 of them took less, in nanoseconds.
    pub fault_ns_p99: u64,
    /// Frames nobody uses.
    pub frames_free: u32,
    /// Frames on standby.
    pub frames_standby: u32,
}

impl Stats {
    pub(crate) fn read(inner: &Inner) -> Stats {
        let state = inner.state();
        let counters = &state.counters;
        Stats {
            counts: counters.read(),
            frames_bytes: u64::from(state.stack.budget()) * PAGE_BYTES as u64,
            resident_bytes_max: counters.frames_held_max.load(Ordering::Relaxed) * PAGE_BYTES as u64,
            fault_ns_p50: counters.fault_ns.quantile(500),
            fault_ns_p99: counters.fault_ns.quantile(990),
            frames_free: state.stack.free.count(),
            frames_standby: state.stack.on_standby(),
        }
    }
}
