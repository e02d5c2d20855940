//! Threads that run the program's own handlers for worker regions. They are the program's: they have its descriptors, and may touch
//! managed memory, since workers serve them. There is always one more than is at work, so that a handler may fault within a
//! handler: where there can be no more of them, the last ones answer only that. They would wait with the others for a lock that the
//! one holds which has faulted.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering, fence};

use selfpage_core::addr::{PageNo, VirtAddr};
use selfpage_core::fault::{Fault, claim};
use selfpage_core::linux::{memory, signal, thread};
use selfpage_core::mmu::Trap;
use selfpage_core::region::{Access, Region};
use selfpage_core::ring::Ring;
use selfpage_core::sync::Event;

use super::ask::{self, Asked};
use super::handler_place::{At, Left, Place};
use super::{thread as own_thread, worker};
use crate::domain::Inner;
use crate::error::{Error, Result};
use crate::handler::{Answer, FaultKind, Protection, Trouble};
use crate::patience::Patience;
use crate::protection;
use crate::pthread::{self, LOOK_EVERY, PROGRAM_STACK_BYTES};

const MOST_THREADS: usize = 64;
/// How deep handlers may fault within handlers.
const MOST_NESTED: u32 = 8;
/// With so many at work, only what handlers meet is answered.
const MOST_OUTERMOST: i32 = MOST_THREADS as i32 - MOST_NESTED as i32;

/// How often they look, and whoever waits for their end, whether those still are there who are at work: a filter of system calls may end one
/// without a word, and a handler by a bare exit(2).
const LOOK_EVERY_US: u32 = LOOK_EVERY.as_micros() as u32;

/// The threads for handlers of a domain, and what they are called for.
pub(crate) struct Handlers {
    calls: Ring,
    /// Of handlers themselves, each with a thread that is counted as at work already.
    nested: Ring,
    /// Pages that handlers wait for, until it is known whether there is one more thread.
    late: Ring,
    called: Event,
    /// A thread has begun, or ends.
    told: Event,
    places: [Place; MOST_THREADS],
    /// Somebody looks who has ended. Nobody else does meanwhile: a thread's name is good only until it is left to itself.
    looking: AtomicBool,
    threads: AtomicU32,
    /// How many are at no handler and fetch no page. Less than none for a moment: the first is at work before it was counted.
    idle: AtomicI32,
    /// How many fetch a page that their handler has passed. A pager of the program's own may have them wait for whoever waits for a handler,
    /// so they are not idle; but what handlers meet is left to them, where there are no more threads.
    fetching: AtomicI32,
    /// Nested calls for which an idle thread is counted as at work, and has not yet tried to start the next one.
    starting: AtomicU32,
    /// How often one has tried. Whoever found none looks whether it is another number now.
    tried: AtomicU32,
    ending: AtomicBool,
}

/// Who answers what a handler meets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answerer {
    Idle,
    /// Nobody but one that fetches a page, when it has that.
    Fetching,
    /// One that is just being started, perhaps.
    Soon,
    None,
}

impl Handlers {
    pub(crate) fn new(calls: Ring, nested: Ring, late: Ring) -> Handlers {
        Handlers {
            calls,
            nested,
            late,
            called: Event::default(),
            told: Event::default(),
            places: [const { Place::new() }; MOST_THREADS],
            looking: AtomicBool::new(false),
            threads: AtomicU32::new(0),
            idle: AtomicI32::new(0),
            fetching: AtomicI32::new(0),
            starting: AtomicU32::new(0),
            tried: AtomicU32::new(0),
            ending: AtomicBool::new(false),
        }
    }

    /// In a forked child none of the threads is here, nor those that wait for them; but one whose handler forks goes on.
    pub(crate) fn forget_all(&self) {
        self.calls.reset();
        self.nested.reset();
        self.late.reset();
        self.idle.store(0, Ordering::SeqCst);
        self.fetching.store(0, Ordering::SeqCst);
        self.starting.store(0, Ordering::SeqCst);
        self.looking.store(false, Ordering::SeqCst);
        let here = self.places.iter().filter(|place| place.stays_in_child()).count();
        self.threads.store(here as u32, Ordering::SeqCst);
    }

    /// Has the threads end, and waits until they have. A handler that is at work may need all other threads of the domain.
    pub(crate) fn end(&self, inner: &Inner) {
        while !self.end_soon(inner) {}
    }

    /// The same, and not for ever: a handler may wait for a lock of the caller's. Whether they have ended.
    pub(crate) fn end_soon(&self, inner: &Inner) -> bool {
        let mmu = inner.state().mmu;
        self.ending.store(true, Ordering::SeqCst);
        self.called.signal(mmu);
        let mut patience = Patience::with_handlers();
        while patience.lasts() {
            let seen = self.told.count();
            miss(inner);
            // In a forked child the caller may be in the handler that has forked.
            if self.places.iter().all(|place| place.is_free() || place.is_own()) {
                return true;
            }
            self.told.wait(mmu, seen, LOOK_EVERY_US);
        }
        false
    }

    /// How many handlers the thread is in: 0 for one that is no thread of ours.
    fn depth_of(&self, thread: u32) -> u32 {
        let within = |place: &&Place| place.is_in_handler(thread);
        self.places.iter().find(within).map_or(0, |place| Call::of(place.what()).depth + 1)
    }

    /// A place for one more thread. There is one: the thread is counted, and whoever is counted has one at most.
    fn place(&self) -> &Place {
        loop {
            // One that was passed may be free by now.
            if let Some(place) = self.places.iter().find(|place| place.begin()) {
                return place;
            }
        }
    }

    /// What one of those has left that have ended.
    fn next_left(&self) -> Option<Left> {
        if self.looking.swap(true, Ordering::AcqRel) {
            return None;
        }
        let left = self.places.iter().find_map(Place::vacate_if_over);
        self.looking.store(false, Ordering::Release);
        left
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
    let started = start(inner).map_err(|cause| Error::system("start", "a thread for handlers", cause));
    if started.is_ok() {
        handlers.idle.fetch_add(1, Ordering::SeqCst);
        handlers.tried.fetch_add(1, Ordering::SeqCst);
    }
    // While it was not counted, another may have kept itself back.
    handlers.called.signal(inner.state().mmu);
    started
}

/// What a thread begins with, and says then. It waits for nobody before that: neither is in memory that a handler might be asked about, unless
/// whoever starts it is a thread of the program's, beside which there is an idle one.
struct Beginning {
    inner: Arc<Inner>,
    /// The place that it has taken, once it has begun.
    place: AtomicPtr<Place>,
}

/// Starts a thread, which the caller counts as idle. When this returns it is there: a filter of system calls may end it as it begins.
fn start(inner: &Arc<Inner>) -> io::Result<()> {
    let handlers = &inner.handlers;
    if handlers.threads.fetch_add(1, Ordering::SeqCst) >= MOST_THREADS as u32 {
        handlers.threads.fetch_sub(1, Ordering::SeqCst);
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    let beginning = Beginning { inner: inner.clone(), place: AtomicPtr::default() };
    let mask = signal::block_all();
    let started = pthread::has_room(PROGRAM_STACK_BYTES).and_then(|()| {
        let given = (&raw const beginning).cast_mut().cast();
        // SAFETY: thread-owns-share: what it begins with stays until the thread has said that it has begun, or has ended.
        let thread = unsafe { pthread::create(PROGRAM_STACK_BYTES, begin, given) }?;
        thread.hear(|limit| {
            let seen = handlers.told.count();
            // SAFETY: thread-owns-share: null, or one of the domain's, which has its places as long as it is there.
            let place = || unsafe { beginning.place.load(Ordering::Acquire).as_ref() };
            place().or_else(|| {
                handlers.told.wait(inner.state().mmu, seen, limit.as_micros() as u32);
                place()
            })
        })
    });
    // Not before: from now on whoever sees that it has ended leaves it to itself. Nor later: a filter may end the caller at its next call.
    let started = started.map(|(thread, place)| place.keep(thread));
    if started.is_err() {
        handlers.threads.fetch_sub(1, Ordering::SeqCst);
    }
    signal::restore(mask);
    started
}

extern "C" fn begin(given: *mut c_void) -> *mut c_void {
    signal::block_others_for_good();
    let _ = rustix::thread::set_name(c"selfpage-handler");
    own_thread::is_now_a_domains();
    // SAFETY: thread-owns-share: `start` waits until this has been said.
    let beginning = unsafe { &*given.cast::<Beginning>() };
    let inner = beginning.inner.clone();
    let handlers = &inner.handlers;
    let place = handlers.place();
    // From the taking of a place to this it calls nothing that a filter could end it at.
    beginning.place.store(ptr::from_ref(place).cast_mut(), Ordering::Release);
    handlers.told.signal(inner.state().mmu);
    serve(&inner, place);
    handlers.threads.fetch_sub(1, Ordering::SeqCst);
    place.say_end();
    handlers.told.signal(inner.state().mmu);
    null_mut()
}

/// Sees to what those have left that have ended. The access that is stopped on one's answer is refused: what its handler was to do is half done. If
/// that had passed the page, the access comes again: the page may not have been fetched. The counts of region and domain that the thread held stay,
/// with its stack: others may refer to what is there, and to the handler (a scope's threads).
fn miss(inner: &Inner) {
    let handlers = &inner.handlers;
    while let Some(Left { thread, has_said, at, call: (addr, what) }) = handlers.next_left() {
        // Not joined: that would give back the stack of one that has not said that it ends.
        drop(thread);
        if has_said {
            continue;
        }
        handlers.threads.fetch_sub(1, Ordering::SeqCst);
        match at {
            At::Nothing => drop(handlers.idle.fetch_sub(1, Ordering::SeqCst)),
            At::Passing => drop(handlers.fetching.fetch_sub(1, Ordering::SeqCst)),
            At::Handler => {}
        }
        if addr == 0 {
            continue;
        }
        let call = Call::of(what);
        if call.starts {
            handlers.tried.fetch_add(1, Ordering::SeqCst);
            starts_none(inner);
        }
        let fault = call.fault(addr);
        let asked = if at == At::Passing { None } else { Asked::about(inner, fault.addr.page()) };
        match asked {
            Some(asked) => {
                asked.bound.complain(fault.addr.0, Trouble::Ended);
                refuse(inner, asked, fault, call.kind());
            }
            None => wake(inner, fault.addr.page()),
        }
    }
}

/// What the calling thread does next. It is idle no longer then.
fn next_call(inner: &Arc<Inner>, place: &Place) -> Option<(u64, u64)> {
    let handlers = &inner.handlers;
    if let Some((addr, what)) = handlers.nested.pop() {
        // First: a filter may end it as it starts another.
        place.take((addr, what));
        // What was left to threads that fetch made it less than none.
        while handlers.idle.load(Ordering::SeqCst) <= 0 && start(inner).is_ok() {
            handlers.idle.fetch_add(1, Ordering::SeqCst);
        }
        let call = Call::of(what);
        if call.starts {
            place.amend(Call { starts: false, ..call }.packed());
            handlers.tried.fetch_add(1, Ordering::SeqCst);
            starts_none(inner);
        }
        return Some((addr, what));
    }
    if handlers.calls.is_empty() || !leave_idle(inner) {
        return None;
    }
    let call = handlers.calls.pop();
    match call {
        Some(call) => place.take(call),
        None => drop(handlers.idle.fetch_add(1, Ordering::SeqCst)),
    }
    call
}

/// Keeps a thread for what a handler meets, which would wait for its own. None is started here, on a worker, whose descriptors and CPU it
/// would have: the idle one that takes the call starts the next one first.
fn keep_one(inner: &Inner) -> Answerer {
    let handlers = &inner.handlers;
    let before = handlers.tried.load(Ordering::SeqCst);
    // First: whoever finds none from now on sees that one more may come.
    handlers.starting.fetch_add(1, Ordering::SeqCst);
    let has_one = |idle: i32| (idle + handlers.fetching.load(Ordering::SeqCst) > 0).then_some(idle - 1);
    let kept = handlers.idle.fetch_update(Ordering::SeqCst, Ordering::SeqCst, has_one);
    if matches!(kept, Ok(1..)) {
        return Answerer::Idle;
    }
    let others = starts_none(inner);
    match kept {
        Ok(_) => Answerer::Fetching,
        Err(_) if others || handlers.tried.load(Ordering::SeqCst) != before => Answerer::Soon,
        Err(_) => Answerer::None,
    }
}

/// The caller has tried to start a thread, or does not: who came meanwhile tries again. Whether others have yet to try.
fn starts_none(inner: &Inner) -> bool {
    let others = inner.handlers.starting.fetch_sub(1, Ordering::SeqCst) > 1;
    try_again(inner);
    others
}

fn try_again(inner: &Inner) {
    // Either sees the other: who has tried, and who has come late.
    fence(Ordering::SeqCst);
    while let Some((page, _)) = inner.handlers.late.pop() {
        wake(inner, PageNo(page));
    }
}

/// Has a handler that waits for `page` try again when it is known whether there is one more thread.
fn come_again(inner: &Inner, page: PageNo) {
    let handlers = &inner.handlers;
    if !handlers.late.push(page.0, 0) {
        return wake(inner, page);
    }
    fence(Ordering::SeqCst);
    if handlers.starting.load(Ordering::SeqCst) == 0 {
        try_again(inner);
    }
}

/// The calling thread is idle no longer. The last one starts another first, which takes its place in the count; where there are to be no
/// more it stays (`false`), unless there is no other whose handler could fault.
fn leave_idle(inner: &Arc<Inner>) -> bool {
    let handlers = &inner.handlers;
    loop {
        let (seen, threads) = (handlers.idle.load(Ordering::SeqCst), handlers.threads.load(Ordering::SeqCst));
        if threads.cast_signed() - seen >= MOST_OUTERMOST {
            return false;
        }
        if seen <= 1 && start(inner).is_ok() {
            return true;
        }
        if seen + handlers.fetching.load(Ordering::SeqCst) <= 1 && threads > 1 {
            return false;
        }
        if handlers.idle.compare_exchange(seen, seen - 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return true;
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
        return refuse(inner, asked, fault, kind);
    }
    let depth = handlers.depth_of(thread);
    if depth > MOST_NESTED {
        asked.bound.complain(fault.addr.0, Trouble::Nested);
        return refuse(inner, asked, fault, kind);
    }
    let answerer = (depth > 0).then(|| keep_one(inner));
    if answerer == Some(Answerer::None) {
        asked.bound.complain(fault.addr.0, Trouble::NoThread);
        return refuse(inner, asked, fault, kind);
    }
    drop(asked);
    if answerer == Some(Answerer::Soon) {
        return come_again(inner, page);
    }
    let starts = answerer == Some(Answerer::Idle);
    let what =
        Call { write: fault.access == Access::Write, missing: kind == FaultKind::Missing, starts, depth, thread };
    let calls = if depth > 0 { &handlers.nested } else { &handlers.calls };
    let told = calls.push(fault.addr.0 as u64, what.packed());
    if !told && depth > 0 {
        handlers.idle.fetch_add(1, Ordering::SeqCst);
        if starts {
            starts_none(inner);
        }
    }
    handlers.called.signal(inner.state().mmu);
    if !told {
        // There are more faults than places for them: this one comes again.
        wake(inner, page);
    }
}

/// A fault in one word.
struct Call {
    write: bool,
    missing: bool,
    /// Its thread was idle, and starts the next one.
    starts: bool,
    depth: u32,
    thread: u32,
}

impl Call {
    fn packed(&self) -> u64 {
        let bits = u64::from(self.starts) << 2 | u64::from(self.missing) << 1 | u64::from(self.write);
        u64::from(self.thread) << 32 | u64::from(self.depth) << 3 | bits
    }

    fn of(packed: u64) -> Call {
        let (write, missing, starts) = (packed & 1 != 0, packed & 2 != 0, packed & 4 != 0);
        Call { write, missing, starts, depth: packed as u32 >> 3, thread: (packed >> 32) as u32 }
    }

    fn access(&self) -> Access {
        if self.write { Access::Write } else { Access::Read }
    }

    fn fault(&self, addr: u64) -> Fault {
        Fault { addr: VirtAddr(addr as usize), access: self.access(), thread: self.thread }
    }

    fn kind(&self) -> FaultKind {
        if self.missing { FaultKind::Missing } else { FaultKind::Protection }
    }
}

/// Runs handlers until the domain ends.
fn serve(inner: &Arc<Inner>, place: &Place) {
    let handlers = &inner.handlers;
    while let Some(seen) = handlers.called.count_unless(|| handlers.ending.load(Ordering::SeqCst)) {
        let Some((addr, what)) = next_call(inner, place) else {
            // Whoever has taken a call was idle no longer before it was gone from the ring.
            let at_work = handlers.threads.load(Ordering::SeqCst).cast_signed() > handlers.idle.load(Ordering::SeqCst);
            handlers.called.wait(inner.state().mmu, seen, if at_work { LOOK_EVERY_US } else { 0 });
            if at_work {
                miss(inner);
            }
            continue;
        };
        let call = Call::of(what);
        let own = call.fault(addr);
        let answered = ask(inner, own, call.kind());
        let passes = matches!(answered, Some((_, Answer::Pass)));
        // Before the other goes on: it may let another handler fault at once, for which this thread is there again.
        if passes {
            place.pass();
            handlers.fetching.fetch_add(1, Ordering::SeqCst);
            // Another may have kept itself back for what this one's handler would meet.
            handlers.called.signal(inner.state().mmu);
        } else {
            place.leave_handler();
            handlers.idle.fetch_add(1, Ordering::SeqCst);
        }
        match answered {
            Some((asked, answer)) => follow(inner, asked, own, call.kind(), answer),
            None => wake(inner, own.addr.page()),
        }
        place.done();
        if passes {
            // In this order: at no moment is it missing.
            handlers.idle.fetch_add(1, Ordering::SeqCst);
            handlers.fetching.fetch_sub(1, Ordering::SeqCst);
        }
    }
    handlers.idle.fetch_sub(1, Ordering::SeqCst);
}

/// Runs the handler. `None`: there is nothing to ask any more.
fn ask(inner: &Inner, fault: Fault, kind: FaultKind) -> Option<(Asked, Answer)> {
    let asked = Asked::about(inner, fault.addr.page())?;
    // Another thread's fault on the same page may have been answered since.
    if !asked.is_still(fault, kind) {
        return None;
    }
    // A system call of the handler's on memory with a key would fail: the key may be younger than this thread, or kept from whoever started it.
    protection::refresh();
    let answer = asked.answer(fault, kind, Some(fault.thread), None).unwrap_or_else(|trouble| {
        asked.bound.complain(fault.addr.0, trouble);
        Answer::Refuse
    });
    Some((asked, answer))
}

/// Does what the handler has said.
fn follow(inner: &Inner, asked: Asked, fault: Fault, kind: FaultKind, answer: Answer) {
    let page = fault.addr.page();
    match answer {
        Answer::Handled if ask::goes_on(&asked, fault, kind, fault.thread as usize) => {
            drop(asked);
            wake(inner, page);
        }
        Answer::Handled => {
            asked.bound.complain(fault.addr.0, Trouble::Repeated);
            refuse(inner, asked, fault, kind);
        }
        Answer::Pass => {
            let of = asked.bound.core().serial();
            drop(asked);
            inner.on_pager_thread(move || worker::fetch(inner, fault, of));
        }
        Answer::Refuse => refuse(inner, asked, fault, kind),
    }
}

/// Has the threads that are stopped on the page try their access again. The program may have closed a thread's descriptors, but no worker's.
fn wake(inner: &Inner, page: PageNo) {
    if own_thread::is_pager_thread(thread::id()) {
        worker::wake(inner, Trap::Worker, page);
    } else if !inner.state().mmu.wake_faulters(Trap::Worker, page, 1) {
        inner.on_pager_thread(move || worker::wake(inner, Trap::Worker, page));
    }
}

/// The access is the program's own fault. Only the kernel can send the stopped thread its `SIGSEGV`: the mapping itself forbids
/// the access, until the page is protected otherwise, and the thread tries again.
fn refuse(inner: &Inner, asked: Asked, fault: Fault, kind: FaultKind) {
    let page = fault.addr.page();
    let access = match (kind, asked.bound.protection_of(inner, page)) {
        (FaultKind::Protection, Protection::Read) => memory::Access::Read,
        _ => memory::Access::None,
    };
    let still = || asked.is_still(fault, kind);
    if let Err(why) = asked.bound.refuse(inner, page, access, still) {
        // It takes its time, and the program may have made it wrong meanwhile.
        let still =
            |region: &Region, seen| claim::still_asked(region, seen, fault.access).and_then(ask::kind) == Some(kind);
        asked.bound.give_up(inner, page, why, still);
    }
    drop(asked);
    wake(inner, page);
}
