//! Work for pager threads: faults that could not be resolved where they arose, and wakes; and advice, pages to be read ahead, which
//! waits as long as there is any of those.

use super::fill::{self, Tripwire};
use super::handover::Place;
use super::{Fault, Outcome, range, resolve_further};
use crate::addr::{PageNo, PageRange};
use crate::domain::DomainState;
use crate::mmu::Trap;
use crate::pager::Context;
use crate::region::{Access, Region, Serial};
use crate::stream::Chunk;

/// Work that a thread hands to the pager threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Resolve a fault on this page, and answer the thread that waits there.
    Fault(PageNo, Access, Place),
    /// Wake the threads that are stopped on so many pages, from this one on, of a worker region.
    Wake(PageNo, u32),
    /// Read ahead, from this page on, in the region that had it then.
    Ahead(PageNo, Serial, Chunk),
    /// Bring in so many pages, from this one on, which the program will want, in the region that had them then.
    Prefetch(PageNo, Serial, u32),
}

/// In the lower half, where a fault has nothing.
const WAKE: u32 = 1;
/// In a page's word of advice, above any number of a page: the region's [`Serial`].
const SERIAL_AT: u32 = 48;

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
        Request::Ahead(page, of, chunk) => {
            domain.advice.push(place(page, of), u64::from(chunk.count) | (chunk.stride as u64) << 32)
        }
        // As a chunk that goes nowhere.
        Request::Prefetch(page, of, count) => domain.advice.push(place(page, of), u64::from(count)),
    };
    domain.requested.signal(domain.mmu);
    pushed
}

const fn place(page: PageNo, of: Serial) -> u64 {
    page.0 | (of.0 as u64) << SERIAL_AT
}

/// The region that advice is about, unless it has gone: what came to its addresses since has nothing to do with it.
///
/// # Context
/// Any, inside the gate.
pub(super) fn advised(domain: &DomainState, page: PageNo, of: Serial) -> Option<&Region> {
    domain.regions.find(page).filter(|region| region.serial() == of)
}

/// The next piece of work, if there is one. Somebody waits for the end of a fault or a wake; nobody waits for advice.
///
/// # Context
/// PagerThread.
pub fn next_request(domain: &DomainState) -> Option<Request> {
    if let Some((page, what)) = domain.requests.pop() {
        let page = PageNo(page);
        if what as u32 == WAKE {
            return Some(Request::Wake(page, (what >> 32) as u32));
        }
        let access = if what >> 63 == 1 { Access::Write } else { Access::Read };
        return Some(Request::Fault(page, access, Place((what << 1 >> 33) as u32)));
    }
    let (place, what) = domain.advice.pop()?;
    let (page, of, count) = (PageNo(place & !(!0 << SERIAL_AT)), Serial((place >> SERIAL_AT) as u16), what as u32);
    Some(match (what as i64) >> 32 {
        0 => Request::Prefetch(page, of, count),
        stride => Request::Ahead(page, of, Chunk { first: 0, count, stride }),
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
            let outcome = resolve_further(domain, Context::PagerThread, fault);
            domain.handovers.answer(domain.mmu, place, outcome);
            outcome
        }
        Request::Wake(page, count) => {
            for trap in [Trap::Worker, Trap::TrackedWorker] {
                domain.mmu.wake_faulters(trap, page, count);
            }
            Outcome::Resolved
        }
        Request::Ahead(page, of, chunk) => {
            let _inside = domain.gate.enter(domain.mmu);
            if let Some(region) = advised(domain, page, of)
                && let Some(pager) = region.pager()
            {
                fill::read_ahead(domain, region, pager, page, chunk, Tripwire::Set);
            }
            Outcome::Resolved
        }
        Request::Prefetch(page, of, count) => {
            range::bring_in(domain, PageRange { first: page, count: u64::from(count) }, of);
            Outcome::Resolved
        }
    }
}
