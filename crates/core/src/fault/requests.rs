//! Work for pager threads: faults that could not be resolved where they arose, wakes, and pages to be read ahead.

use super::fill::{self, Tripwire};
use super::handover::Place;
use super::{Fault, Outcome, range, resolve};
use crate::addr::{PageNo, PageRange};
use crate::domain::DomainState;
use crate::mmu::Trap;
use crate::pager::Context;
use crate::region::Access;
use crate::stream::Chunk;

/// Work that a thread hands to the pager threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Resolve a fault on this page, and answer the thread that waits there.
    Fault(PageNo, Access, Place),
    /// Wake the threads that are stopped on so many pages, from this one on, of a worker region.
    Wake(PageNo, u32),
    /// Read ahead, from this page on.
    Ahead(PageNo, Chunk),
    /// Bring in so many pages, from this one on, which the program will want.
    Prefetch(PageNo, u32),
}

/// In the place of the number of pages to read ahead.
const WAKE: u32 = u32::MAX;

/// Hands work to the pager threads. `false`: they have more than enough.
///
/// # Context
/// Trap.
pub fn request(domain: &DomainState, request: Request) -> bool {
    let pushed = match request {
        Request::Fault(page, access, place) => {
            let write = u64::from(access == Access::Write) << 63;
            domain.requests.push(page.0, u64::from(place.0) << 32 | write)
        }
        Request::Wake(page, count) => domain.requests.push(page.0, u64::from(count) << 32 | u64::from(WAKE)),
        Request::Ahead(page, chunk) => {
            domain.requests.push(page.0, u64::from(chunk.count) | (chunk.stride as u64) << 32)
        }
        // As a chunk that goes nowhere.
        Request::Prefetch(page, count) => domain.requests.push(page.0, u64::from(count)),
    };
    domain.requested.signal(domain.mmu);
    pushed
}

/// The next piece of work, if there is one.
///
/// # Context
/// PagerThread.
pub fn next_request(domain: &DomainState) -> Option<Request> {
    let (page, what) = domain.requests.pop()?;
    let page = PageNo(page);
    Some(match what as u32 {
        0 => {
            let access = if what >> 63 == 1 { Access::Write } else { Access::Read };
            Request::Fault(page, access, Place((what << 1 >> 33) as u32))
        }
        WAKE => Request::Wake(page, (what >> 32) as u32),
        count if what >> 32 == 0 => Request::Prefetch(page, count),
        count => Request::Ahead(page, Chunk { first: 0, count, stride: (what as i64) >> 32 }),
    })
}

/// Does one piece of work.
///
/// # Context
/// PagerThread, outside the gate.
pub fn serve(domain: &DomainState, request: Request) -> Outcome {
    match request {
        Request::Fault(page, access, place) => {
            let fault = Fault { addr: page.addr(), access, thread: 0 };
            let outcome = resolve(domain, Context::PagerThread, fault);
            domain.handovers.answer(domain.mmu, place, outcome);
            outcome
        }
        Request::Wake(page, count) => {
            for trap in [Trap::Worker, Trap::TrackedWorker] {
                domain.mmu.wake_faulters(trap, page, count);
            }
            Outcome::Resolved
        }
        Request::Ahead(page, chunk) => {
            let _inside = domain.gate.enter(domain.mmu);
            if let Some(region) = domain.regions.find(page)
                && let Some(pager) = region.pager()
            {
                fill::read_ahead(domain, region, pager, page, chunk, Tripwire::Set);
            }
            Outcome::Resolved
        }
        Request::Prefetch(page, count) => {
            range::bring_in(domain, PageRange { first: page, count: u64::from(count) });
            Outcome::Resolved
        }
    }
}
