//! A page-grain trace: what happened to which page, in a bounded queue that another thread empties. Where nobody traces there
//! is no queue, and an event costs a look at that.

use crate::addr::PageNo;
use crate::region::Access;
use crate::ring::Ring;
use crate::sync::{AtomicU64, Ordering};

/// What happened to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// A fault on a page without contents of its own yet.
    First = 1,
    /// A fault on a page that came from a store, file or pager.
    Fill = 2,
    /// A fault on a page whose contents a frame still had: on standby, or unmapped for the program's sake. No I/O.
    Soft = 3,
    /// A fault on a page that was unmapped to see whether it is used.
    Referenced = 4,
    /// A fault on a page that was being saved, which got a copy.
    CopyBack = 5,
    /// Brought in with or ahead of a fault on another page, come from another page with its contents, given them by the program's
    /// handler, or put back where it could not be saved.
    Ahead = 6,
    /// Unmapped to make room.
    Evict = 7,
    /// Saved.
    Save = 8,
    /// Dropped, contents and all, or gone to another page with them.
    Discard = 9,
    /// Unmapped to see whether it is used.
    Sample = 10,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 10] = [
        Kind::First,
        Kind::Fill,
        Kind::Soft,
        Kind::Referenced,
        Kind::CopyBack,
        Kind::Ahead,
        Kind::Evict,
        Kind::Save,
        Kind::Discard,
        Kind::Sample,
    ];

    /// Back from `self as u8`.
    pub fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Whether a thread was stopped on the page.
    pub const fn is_fault(self) -> bool {
        (self as u8) < Kind::Ahead as u8
    }
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// Nanoseconds since the trace began.
    pub time_ns: u64,
    /// The page.
    pub page: PageNo,
    /// What happened.
    pub kind: Kind,
    /// Of a fault: the access, where it is known.
    pub access: Option<Access>,
    /// Of a fault: the kernel's number of the thread; 0 where it is not known.
    pub thread: u32,
}

/// Where events go.
pub struct Tracer {
    ring: Option<Ring>,
    began_ns: AtomicU64,
    dropped: AtomicU64,
}

const TIME_LOW: u32 = 42;
const TIME_HIGH: u32 = 13;
const THREAD: u32 = 22;
const ACCESS: u32 = 2;
const KIND: u32 = 4;

const fn low(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

impl Tracer {
    /// Nobody traces.
    pub fn off() -> Tracer {
        Tracer { ring: None, began_ns: AtomicU64::new(0), dropped: AtomicU64::new(0) }
    }

    /// A trace that begins at `began_ns` and may be as far behind as `ring` has places.
    pub fn over(ring: Ring, began_ns: u64) -> Tracer {
        Tracer { ring: Some(ring), began_ns: AtomicU64::new(began_ns), dropped: AtomicU64::new(0) }
    }

    /// Whether somebody traces.
    pub const fn is_on(&self) -> bool {
        self.ring.is_some()
    }

    /// The machine's clock when the trace began.
    pub fn began_ns(&self) -> u64 {
        self.began_ns.load(Ordering::Relaxed)
    }

    /// Begins anew: in a forked child, where nobody else uses it.
    pub fn restart(&self, began_ns: u64) {
        if let Some(ring) = &self.ring {
            ring.reset();
        }
        self.began_ns.store(began_ns, Ordering::Relaxed);
        self.dropped.store(0, Ordering::Relaxed);
    }

    /// Queues an event whose time is the machine's clock. Without room it is dropped, and counted.
    ///
    /// # Context
    /// Trap.
    pub fn note(&self, event: Event) {
        let Some(ring) = &self.ring else { return };
        let time_ns = event.time_ns.saturating_sub(self.began_ns.load(Ordering::Relaxed));
        let access = match event.access {
            None => 0,
            Some(Access::Read) => 1,
            Some(Access::Write) => 2,
        };
        let what = low(event.kind as u64, KIND) << ACCESS | access;
        let a = (event.page.0 << (KIND + ACCESS) | what) << TIME_HIGH | low(time_ns >> TIME_LOW, TIME_HIGH);
        let b = low(time_ns, TIME_LOW) << THREAD | low(u64::from(event.thread), THREAD);
        if !ring.push(a, b) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many events are queued, with those that their threads are still putting down: what was noted before the call is among them.
    ///
    /// # Context
    /// PagerThread.
    pub fn queued(&self) -> usize {
        self.ring.as_ref().map_or(0, Ring::len)
    }

    /// The oldest event. `None`: there is none, or its thread is still putting it down.
    ///
    /// # Context
    /// PagerThread.
    pub fn next(&self) -> Option<Event> {
        let (a, b) = self.ring.as_ref()?.pop()?;
        let what = a >> TIME_HIGH;
        Some(Event {
            time_ns: low(a, TIME_HIGH) << TIME_LOW | b >> THREAD,
            page: PageNo(what >> (KIND + ACCESS)),
            kind: Kind::from_code(low(what >> ACCESS, KIND) as u8)?,
            access: match low(what, ACCESS) {
                0 => None,
                1 => Some(Access::Read),
                _ => Some(Access::Write),
            },
            thread: low(b, THREAD) as u32,
        })
    }

    /// How many events were dropped since this was asked last.
    pub fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::table;

    #[test]
    fn events_come_back_as_they_were_and_lost_ones_are_counted() {
        let tracer = Tracer::over(Ring::new(table(16)), 1000);
        for (at, kind) in Kind::ALL.into_iter().enumerate() {
            let time_ns = 1000 + (1 << 54) - at as u64;
            let page = PageNo((1 << 45) - 1 - at as u64);
            let access = [None, Some(Access::Read), Some(Access::Write)][at % 3];
            let event = Event { time_ns, page, kind, access, thread: (1 << 22) - 1 };
            tracer.note(event);
            assert_eq!(tracer.next(), Some(Event { time_ns: time_ns - 1000, ..event }));
        }
        let event = Event { time_ns: 1000, page: PageNo(1), kind: Kind::First, access: None, thread: 0 };
        (0..20).for_each(|_| tracer.note(event));
        assert_eq!((tracer.queued(), tracer.take_dropped(), tracer.take_dropped()), (16, 4, 0));
        tracer.restart(0);
        assert_eq!(tracer.next(), None);
        assert!(!Tracer::off().is_on());
    }
}
