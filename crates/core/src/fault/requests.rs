//! Work for pager threads: faults that could not be resolved where they arose, and wakes; and advice, pages to be read ahead, which
//! waits as long as there is any of those.

use super::fill::{self, Tripwire};
use super::handover::Place;
use super::inherit::inherit_ahead;
use super::{Fault, Outcome, Step, resolve_further, soft_fault, take_back};
use crate::addr::{PageNo, PageRange};
use crate::domain::{DomainState, MOST_AHEAD};
use crate::mmu::Trap;
use crate::page::State;
use crate::pager::Context;
use crate::region::{Access, Serial};
use crate::shortage::FrameWait;
use crate::stream::Chunk;
use crate::tracer::Kind;

/// Work that a thread hands to the pager threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Resolve a fault on this page, which arose in this region, and answer the thread that waits there.
    Fault(PageNo, Serial, Access, Place),
    /// Wake the threads that are stopped on so many pages, from this one on, of a worker region.
    Wake(PageNo, u32),
    /// Read ahead, from this page on, in the region that had it then.
    Ahead(PageNo, Serial, Chunk),
    /// Bring in so many pages, from this one on, which the program will want, in the region that had them then.
    Prefetch(PageNo, Serial, u32),
}

/// In the lower half, where a fault has nothing.
const WAKE: u32 = 1;
/// In a page's word, above any number of a page: the region's [`Serial`].
const SERIAL_AT: u32 = 48;

/// Hands work to the pager threads. `false`: they have more than enough.
///
/// # Context
/// Trap.
pub fn request(domain: &DomainState, request: Request) -> bool {
    let pushed = match request {
        Request::Fault(page, of, access, at) => {
            let write = u64::from(access == Access::Write) << 63;
            domain.requests.push(place(page, of), u64::from(at.0) << 32 | write)
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

const fn placed(word: u64) -> (PageNo, Serial) {
    (PageNo(word & !(!0 << SERIAL_AT)), Serial((word >> SERIAL_AT) as u16))
}

/// The next piece of work, if there is one. Somebody waits for the end of a fault or a wake; nobody waits for advice.
///
/// # Context
/// PagerThread.
pub fn next_request(domain: &DomainState) -> Option<Request> {
    if let Some((word, what)) = domain.requests.pop() {
        let (page, of) = placed(word);
        if what as u32 == WAKE {
            return Some(Request::Wake(page, (what >> 32) as u32));
        }
        let access = if what >> 63 == 1 { Access::Write } else { Access::Read };
        return Some(Request::Fault(page, of, access, Place((what << 1 >> 33) as u32)));
    }
    let (word, what) = domain.advice.pop()?;
    let ((page, of), count) = (placed(word), what as u32);
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
        Request::Fault(page, of, access, place) => {
            let fault = Fault { addr: page.addr(), access, thread: 0 };
            let outcome = resolve_further(domain, Context::PagerThread, fault, of);
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
            if let Some(region) = domain.regions.find_same(page, of)
                && let Some(pager) = region.pager()
            {
                fill::read_ahead(domain, region, pager, page, chunk, Tripwire::Set);
            }
            Outcome::Resolved
        }
        Request::Prefetch(page, of, count) => {
            bring_in(domain, PageRange { first: page, count: u64::from(count) }, of);
            Outcome::Resolved
        }
    }
}

/// Brings in the first piece of what the program will want, as frames can be had. The rest is advice again, for whichever pager thread
/// has nothing better to do.
///
/// # Context
/// PagerThread, outside the gate.
fn bring_in(domain: &DomainState, range: PageRange, of: Serial) {
    // No more than is likely to be ready at a time.
    let most = u64::from((domain.stack.budget() / 32).clamp(1, MOST_AHEAD));
    let (mut at, mut end) = (range.first, range.end());
    if range.count > most && request(domain, Request::Prefetch(at.plus(most), of, (range.count - most) as u32)) {
        end = at.plus(most);
    }
    let mut frame_wait = FrameWait::default();
    while at < end {
        let seen = domain.stack.demand.available.count();
        let inside = domain.gate.enter(domain.mmu);
        let Some(region) = domain.regions.find_same(at, of) else { return };
        let Some(pager) = region.pager() else { return };
        let piece = most.min(end.0 - at.0);
        let mut lacks_frame = false;
        for page in (PageRange { first: at, count: piece }).pages() {
            // Whoever needs a page that cannot be mapped meets that again.
            let step = match region.word(page).map(|word| word.load()) {
                Some(seen) if seen.wishes().unmapped() => continue,
                Some(seen) if seen.state() == State::Standby => soft_fault(domain, region, pager, page, seen),
                Some(seen) if seen.state() == State::Aside => {
                    take_back(domain, Context::PagerThread, region, pager, page, seen)
                }
                Some(seen) if seen.state() == State::Absent && region.sets.inherited.contains(region.index(page)) => {
                    inherit_ahead(domain, Context::PagerThread, region, page)
                }
                _ => continue,
            };
            match step {
                Step::Brought(_) => domain.trace(page, Kind::Ahead),
                step => lacks_frame |= matches!(step, Step::AwaitFrame(_)),
            }
        }
        let chunk = Chunk { first: 0, count: piece as u32, stride: 1 };
        let ahead = fill::read_ahead(domain, region, pager, at, chunk, Tripwire::None);
        let short = if lacks_frame { Some(at) } else { ahead };
        drop(inside);
        match short {
            None => at = at.plus(piece),
            Some(_) if frame_wait.sleep(&domain.stack.demand, domain.mmu, seen).is_err() => return,
            Some(next) => at = next,
        }
    }
}
