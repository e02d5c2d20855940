//! Threads that run the program's own handlers for worker regions. They are the program's: they have its descriptors, and may touch
//! managed memory, since workers serve them. There is always one more than is at work, so that a handler may fault within a
//! handler.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::thread::Builder;

use selfpage_core::addr::{PageNo, PageRange, VirtAddr};
use selfpage_core::fault::{self, Fault};
use selfpage_core::linux::{memory, signal, thread};
use selfpage_core::mmu::Trap;
use selfpage_core::region::Access;
use selfpage_core::ring::Ring;
use selfpage_core::sync::Event;

use super::ask::{self, Asked};
use super::worker;
use crate::domain::Inner;
use crate::error::{Error, Result};
use crate::handler::{Answer, FaultKind, Protection, Trouble};
use crate::region::Bound;

const MOST_THREADS: usize = 64;
/// How deep handlers may fault within handlers.
const MOST_NESTED: u32 = 8;

/// A thread for handlers: its number while it runs one, and how deep that is in others.
#[derive(Default)]
struct Place {
    thread: AtomicU32,
    depth: AtomicU32,
}

/// The threads for handlers of a domain, and what they are called for.
pub(crate) struct Handlers {
    calls: Ring,
    called: Event,
    places: [Place; MOST_THREADS],
    threads: AtomicU32,
    /// How many are at no handler. Less than none for a moment: the first is at work before it was counted.
    idle: AtomicI32,
}

impl Handlers {
    pub(crate) fn new(calls: Ring) -> Handlers {
        Handlers {
            calls,
            called: Event::default(),
            places: [const { Place { thread: AtomicU32::new(0), depth: AtomicU32::new(0) } }; MOST_THREADS],
            threads: AtomicU32::new(0),
            idle: AtomicI32::new(0),
        }
    }

    /// In a forked child none of the threads is here, nor those that wait for them.
    pub(crate) fn forget_all(&self) {
        self.calls.reset();
        self.threads.store(0, Ordering::SeqCst);
        self.idle.store(0, Ordering::SeqCst);
        self.places.iter().for_each(|place| place.thread.store(0, Ordering::SeqCst));
    }

    /// Has the threads end once the domain is stopping, and waits until they have.
    pub(crate) fn end(&self, inner: &Inner) {
        let own = u32::from(self.depth_of(thread::id()) > 0);
        while self.threads.load(Ordering::SeqCst) > own {
            self.called.signal(inner.state().mmu);
            std::thread::yield_now();
        }
    }

    /// How many handlers the thread is in: 0 for one that is no thread of ours.
    fn depth_of(&self, thread: u32) -> u32 {
        let same = |place: &&Place| place.thread.load(Ordering::Acquire) == thread;
        self.places.iter().find(same).map_or(0, |place| place.depth.load(Ordering::Relaxed) + 1)
    }
}

/// Starts the first thread, or one more where none is idle. Only for threads of the program's: it has their descriptors and CPUs.
///
/// # Errors
/// The system has no thread to give.
pub(crate) fn start_one(inner: &Arc<Inner>) -> Result<()> {
    let handlers = &inner.handlers;
    let full = handlers.threads.load(Ordering::SeqCst) >= MOST_THREADS as u32;
    if full || handlers.idle.load(Ordering::SeqCst) > 0 {
        return Ok(());
    }
    start(inner).map_err(|cause| Error::system("start", "a thread for handlers", cause))?;
    handlers.idle.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Starts a thread, which the caller counts as idle.
fn start(inner: &Arc<Inner>) -> io::Result<()> {
    let handlers = &inner.handlers;
    if handlers.threads.fetch_add(1, Ordering::SeqCst) >= MOST_THREADS as u32 {
        handlers.threads.fetch_sub(1, Ordering::SeqCst);
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    let own = inner.clone();
    let mask = signal::block_all();
    let started = Builder::new().name("selfpage-handler".into()).spawn(move || {
        signal::block_others_for_good();
        serve(&own);
        let handlers = &own.handlers;
        handlers.threads.fetch_sub(1, Ordering::SeqCst);
    });
    signal::restore(mask);
    started.map(drop).inspect_err(|_| {
        handlers.threads.fetch_sub(1, Ordering::SeqCst);
    })
}

/// The calling thread is idle no longer. The last one starts another first, which takes its place in the count: that is nought only
/// where the system had no thread to give.
fn leave_idle(inner: &Arc<Inner>) {
    let idle = &inner.handlers.idle;
    loop {
        let seen = idle.load(Ordering::SeqCst);
        if seen <= 1 && start(inner).is_ok() {
            return;
        }
        if idle.compare_exchange(seen, seen - 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return;
        }
    }
}

/// Has a thread for handlers answer a fault of `thread`'s, which is stopped on it.
///
/// # Context
/// PagerThread, on a worker.
pub(super) fn call(inner: &Arc<Inner>, fault: Fault, kind: FaultKind, thread: u32) {
    let page = fault.addr.page();
    let Some(asked) = Asked::about(inner, page) else { return wake(inner, page) };
    let handlers = &inner.handlers;
    if asked.bound.handler().is_none() {
        return refuse(inner, &asked.bound, fault, kind);
    }
    let depth = handlers.depth_of(thread);
    if depth > MOST_NESTED {
        asked.bound.complain(fault.addr.0, Trouble::Nested);
        return refuse(inner, &asked.bound, fault, kind);
    }
    // A handler that faults would wait for its own thread. No worker starts one: it would have the descriptors and the CPU of a worker.
    if depth > 0 && handlers.idle.load(Ordering::SeqCst) <= 0 {
        asked.bound.complain(fault.addr.0, Trouble::NoThread);
        return refuse(inner, &asked.bound, fault, kind);
    }
    let what = Call { write: fault.access == Access::Write, missing: kind == FaultKind::Missing, depth, thread };
    if handlers.calls.push(fault.addr.0 as u64, what.packed()) {
        handlers.called.signal(inner.state().mmu);
    } else {
        // There are more faults than places for them: this one comes again.
        wake(inner, page);
    }
}

/// A fault in one word.
struct Call {
    write: bool,
    missing: bool,
    depth: u32,
    thread: u32,
}

impl Call {
    fn packed(&self) -> u64 {
        u64::from(self.thread) << 32 | u64::from(self.depth) << 2 | u64::from(self.missing) << 1 | u64::from(self.write)
    }

    fn of(packed: u64) -> Call {
        let (write, missing) = (packed & 1 != 0, packed & 2 != 0);
        Call { write, missing, depth: packed as u32 >> 2, thread: (packed >> 32) as u32 }
    }
}

/// Runs handlers until the domain ends.
fn serve(inner: &Arc<Inner>) {
    let handlers = &inner.handlers;
    let me = thread::id();
    let free = |place: &&Place| place.thread.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    while let Some(seen) = handlers.called.count_unless(|| inner.stopping()) {
        let Some((addr, what)) = handlers.calls.pop() else {
            handlers.called.wait(inner.state().mmu, seen, 0);
            continue;
        };
        leave_idle(inner);
        let call = Call::of(what);
        let place = handlers.places.iter().find(free);
        if let Some(place) = place {
            place.depth.store(call.depth, Ordering::Relaxed);
        }
        answer(inner, addr as usize, &call);
        if let Some(place) = place {
            place.thread.store(0, Ordering::Release);
        }
        handlers.idle.fetch_add(1, Ordering::SeqCst);
    }
    handlers.idle.fetch_sub(1, Ordering::SeqCst);
}

fn answer(inner: &Arc<Inner>, addr: usize, call: &Call) {
    let access = if call.write { Access::Write } else { Access::Read };
    let kind = if call.missing { FaultKind::Missing } else { FaultKind::Protection };
    let fault = Fault { addr: VirtAddr(addr), access, thread: call.thread };
    let page = fault.addr.page();
    let Some(asked) = Asked::about(inner, page) else { return wake(inner, page) };
    // Another thread's fault on the same page may have been answered since.
    if fault::still_asked(inner.state(), fault).and_then(ask::kind) != Some(kind) {
        return wake(inner, page);
    }
    match asked.answer(fault, kind, Some(call.thread), None) {
        Answer::Handled if ask::goes_on(&asked.bound, call.thread as usize, page) => wake(inner, page),
        Answer::Handled => {
            asked.bound.complain(addr, Trouble::Repeated);
            refuse(inner, &asked.bound, fault, kind);
        }
        Answer::Pass => inner.on_pager_thread(|| worker::fetch(inner, fault)),
        Answer::Refuse => refuse(inner, &asked.bound, fault, kind),
    }
}

/// Has the threads that are stopped on the page try their access again.
fn wake(inner: &Inner, page: PageNo) {
    inner.state().wake_stopped(Trap::Worker, PageRange { first: page, count: 1 });
}

/// The access is the program's own fault. Only the kernel can send the stopped thread its `SIGSEGV`: the mapping itself forbids
/// the access, until the page is protected otherwise, and the thread tries again.
fn refuse(inner: &Inner, bound: &Bound, fault: Fault, kind: FaultKind) {
    let page = fault.addr.page();
    let access = match (kind, bound.protection_of(inner, page)) {
        (FaultKind::Protection, Protection::Read) => memory::Access::Read,
        _ => memory::Access::None,
    };
    let still = || fault::still_asked(inner.state(), fault).and_then(ask::kind) == Some(kind);
    match bound.refuse(inner, page, access, still) {
        Ok(()) => wake(inner, page),
        Err(_) => inner.guard(page),
    }
}
