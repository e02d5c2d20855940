//! The worker trap: pager threads read faults from the userfaultfd and resolve them. System calls on absent pages work.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::slice;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, epoll, eventfd};
use selfpage_core::addr::{PageNo, VirtAddr};
use selfpage_core::fault::{self, Failure, Fault, Outcome, copy_first, protect, save};
use selfpage_core::linux::thread::{self as this_thread, CpuSet};
use selfpage_core::linux::uffd::{Message, Uffd};
use selfpage_core::linux::{Errno, memory};
use selfpage_core::mmu::Trap;
use selfpage_core::pager::Context;
use selfpage_core::region::{Access, Serial};

use super::{ask, handlers, thread};
use crate::domain::{Inner, threads};
use crate::error::{Error, Result, SystemError};
use crate::handler::given_up::always;
use crate::pthread::Pthread;
use crate::store::{Alone, borrow_number};
use crate::task;

/// Every so many faults a worker looks where the faulting thread runs, and goes there: the hand-over is twice as fast on
/// one CPU.
const FOLLOW_EVERY: u32 = 64;

/// The faults that wait to be read, one worker woken for each. Readers of a userfaultfd itself all wake at every fault, and a
/// CPU that wakes in vain costs more than the fault.
pub(crate) struct Queue {
    /// Of regions, and of tracked regions.
    uffds: [Uffd; 2],
    epoll: Alone,
    /// Can be read from once the domain ends, and nobody does.
    end: Alone,
    turns: Mutex<Turns>,
}

/// Who is at work, where a worker may run code of the program's own. That may touch managed memory, by mistake, and wait for it: a worker
/// is left to read of that, and ends the process.
#[derive(Default)]
struct Turns {
    at_work: u32,
    /// What those at work do next.
    left: VecDeque<Fault>,
    /// One worker more than was asked for.
    more: Option<Pthread>,
}

impl Queue {
    /// A queue in the calling thread's descriptor table, for threads that share it.
    ///
    /// # Errors
    /// A call is refused, which the error names.
    pub(crate) fn over(uffds: [Uffd; 2]) -> Result<Queue> {
        let refused = |call| move |why| Error::no_threads(call, why);
        // What code of the program's writes at a low number must not come here: it would end the workers.
        let epoll = Alone::raised(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(refused("epoll_create1"))?);
        let end = Alone::raised(eventfd(0, EventfdFlags::CLOEXEC).map_err(refused("eventfd2"))?);
        let queue = Queue { uffds, epoll, end, turns: Mutex::default() };
        let add = |of: BorrowedFd<'_>, index, events| {
            epoll::add(&queue.epoll, of, Queue::data(index), events).map_err(refused("epoll_ctl"))
        };
        // Not edge-triggered: every worker is told.
        add(queue.end.as_fd(), uffds.len(), epoll::EventFlags::IN)?;
        for (index, uffd) in uffds.iter().enumerate() {
            add(borrow_number(uffd.0.raw()), index, Queue::EVENTS)?;
        }
        Ok(queue)
    }

    /// Edge-triggered: a fault wakes the worker that has slept shortest, whose caches and CPU are the likeliest to fit.
    const EVENTS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

    /// Which of them an event is of.
    fn data(index: usize) -> epoll::EventData {
        epoll::EventData::new_u64(index as u64)
    }

    /// Has every worker end, and waits for the one that a worker started.
    pub(crate) fn end(&self) {
        if rustix::io::write(&self.end, &1u64.to_ne_bytes()).is_err() {
            crate::die("the workers of a domain cannot be told to end");
        }
        let more = self.turns().more.take();
        more.into_iter().for_each(Pthread::join);
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fault, for the caller to resolve now; `None`: it is left to those that are at work, since nobody else would read the next one.
    fn begin(self: &Arc<Self>, inner: &Arc<Inner>, fault: Fault) -> Option<Fault> {
        let mut turns = self.turns();
        let is_last = |turns: &Turns| turns.at_work + 1 >= inner.config.workers + u32::from(turns.more.is_some());
        if is_last(&turns) && turns.more.is_none() && !inner.stopping() {
            let queue = self.clone();
            turns.more = threads::start(inner, c"selfpage-worker", move |inner| serve(inner, &queue)).ok();
        }
        // Where the system had no thread to give, and there is but one worker, nobody is at work.
        if is_last(&turns) && turns.at_work > 0 {
            turns.left.push_back(fault);
            return None;
        }
        turns.at_work += 1;
        Some(fault)
    }

    /// What whoever was at work does next.
    fn go_on(&self) -> Option<Fault> {
        let mut turns = self.turns();
        let next = turns.left.pop_front();
        turns.at_work -= u32::from(next.is_none());
        next
    }

    /// The next fault. Where more wait, the next worker is woken before this returns. `None`: the domain ends.
    fn next(&self) -> io::Result<Option<Message>> {
        let mut event = [MaybeUninit::uninit(); 1];
        let mut message = Message::EMPTY;
        loop {
            let index = match epoll::wait(&self.epoll, &mut event, None) {
                Ok((events, _)) => events.first().map_or(0, |event| event.data.u64() as usize),
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            let Some(uffd) = self.uffds.get(index) else { return Ok(None) };
            // Of a fault that is not read now the queue tells nobody again.
            let read = loop {
                match uffd.read(slice::from_mut(&mut message)) {
                    Err(Errno::INTR) => {}
                    read => break read,
                }
            };
            match read {
                Ok(_) => {
                    epoll::modify(&self.epoll, borrow_number(uffd.0.raw()), Queue::data(index), Queue::EVENTS)?;
                    return Ok(Some(message));
                }
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(SystemError::into_io(errno)),
            }
        }
    }
}

/// Reads and resolves faults until the domain ends.
pub(crate) fn serve(inner: &Arc<Inner>, queue: &Arc<Queue>) {
    let mut follow = Follow::begin();
    let next = || queue.next().unwrap_or_else(|_| crate::die("a worker cannot read its userfaultfd"));
    while let Some(message) = next() {
        let Some(fault) = message.fault() else { continue };
        if thread::is_pager_thread(fault.thread) {
            crate::die("a pager thread touched managed memory");
        }
        // What a pager of the program's starts would have this thread's CPU, and no other.
        if inner.runs_own_code.load(Ordering::Relaxed) {
            follow.no_more();
        } else {
            follow.thread(fault.thread);
        }
        let access = if fault.write { Access::Write } else { Access::Read };
        let own = Fault { addr: VirtAddr(fault.addr), access, thread: fault.thread };
        if !inner.runs_own_code.load(Ordering::Relaxed) {
            resolve(inner, own);
            continue;
        }
        let mut next = queue.begin(inner, own);
        while let Some(fault) = next {
            resolve(inner, fault);
            next = queue.go_on();
        }
    }
}

fn resolve(inner: &Arc<Inner>, fault: Fault) {
    let outcome = fault::resolve_asking(inner.state(), Context::PagerThread, fault);
    match ask::kind(outcome) {
        Some(kind) => handlers::call(inner, fault, kind, fault.thread),
        None => answer(inner, fault, outcome),
    }
}

/// Fetches a page whose handler has nothing to say, in the region with this number.
///
/// # Context
/// PagerThread.
pub(super) fn fetch(inner: &Inner, fault: Fault, of: Serial) {
    answer(inner, fault, fault::resolve_further(inner.state(), Context::PagerThread, fault, of));
}

/// Every fault ends in a map, a wake, or a wake by whoever is at the page.
fn answer(inner: &Inner, fault: Fault, outcome: Outcome) {
    let state = inner.state();
    let page = fault.addr.page();
    let outcome = match outcome {
        Outcome::Failed(failure) if stays(inner, fault, failure) => {
            fault::resolve_again(state, Context::PagerThread, fault)
        }
        outcome => outcome,
    };
    match outcome {
        Outcome::Resolved | Outcome::Retry | Outcome::Busy => {}
        // It has been protected since, or another region is there: its access meets that.
        Outcome::Protected | Outcome::Missing => wake(inner, Trap::Worker, page),
        Outcome::NotOurs => wake_any(inner, page),
        Outcome::Violation => violation(inner, page),
        Outcome::Failed(failure) if is_owed(inner, fault) => {
            inner.report("SIGSEGV", page, failure);
            refuse(inner, page, memory::Access::Read, || copy_first::is_owed(state, page));
        }
        Outcome::Failed(failure @ Failure::Writing(_)) => {
            inner.report("SIGSEGV", page, failure);
            refuse(inner, page, memory::Access::Read, || protect::traps_writes(state, page));
        }
        Outcome::Failed(failure @ Failure::Machine(_)) if save::is_in_frame_only(state, page) => {
            inner.report("SIGSEGV", page, failure);
            refuse(inner, page, memory::Access::None, || save::is_in_frame_only(state, page));
        }
        Outcome::Failed(failure) => {
            inner.report("SIGBUS", page, failure);
            if !inner.starved.poison(state, page, failure) {
                die_unwoken();
            }
        }
    }
}

/// Whether a page keeps its contents now that an access to failed. It may have been absent as that failed, and another thread has brought it in
/// since: so the access is refused only where it fails once more.
fn stays(inner: &Inner, fault: Fault, failure: Failure) -> bool {
    let by_machine = matches!(failure, Failure::Machine(_));
    is_owed(inner, fault) || by_machine && save::is_in_frame_only(inner.state(), fault.addr.page())
}

fn is_owed(inner: &Inner, fault: Fault) -> bool {
    fault.access == Access::Write && copy_first::is_owed(inner.state(), fault.addr.page())
}

/// The program's own fault: only writing can be against its rights. The kernel itself refuses the write when it is tried again; what is
/// in the page, or comes into it, can be read on.
fn violation(inner: &Inner, page: PageNo) {
    if let Some(asked) = ask::Asked::about(inner, page)
        && let Err(why) = asked.bound.refuse_writes(inner, page)
    {
        asked.bound.give_up(inner, page, why, always);
    }
    wake(inner, Trap::Worker, page);
}

/// A clone cannot have the page before it is written to, or the machine would not let it be written to, or would not map what is in its
/// frame. Its contents stay, so it cannot be poisoned: its mapping allows so much and no more, as long as that is `right`, or until somebody
/// asks for the page by name.
fn refuse(inner: &Inner, page: PageNo, access: memory::Access, right: impl Fn() -> bool) {
    let Some(asked) = ask::Asked::about(inner, page) else { return wake_any(inner, page) };
    // Where there are as many mappings as there can be, the access is tried again.
    let _ = asked.bound.refuse(inner, page, access, right);
    let trap = asked.bound.core().trap;
    drop(asked);
    wake(inner, trap, page);
}

/// The region went while the thread waited: its access meets whatever is there now.
fn wake_any(inner: &Inner, page: PageNo) {
    for trap in [Trap::Worker, Trap::TrackedWorker] {
        wake(inner, trap, page);
    }
}

/// Has the threads that are stopped on the page try their access again.
///
/// # Context
/// PagerThread.
pub(super) fn wake(inner: &Inner, trap: Trap, page: PageNo) {
    if !inner.state().mmu.wake_faulters(trap, page, 1) {
        die_unwoken();
    }
}

/// A signal in place of the wake would not do: a thread may have it blocked or be in a system call, and others may be stopped there too.
fn die_unwoken() -> ! {
    crate::die(
        "threads wait for a page that they cannot have, and cannot be told so: a filter on system calls (seccomp) forbids \
         ioctl(UFFDIO_WAKE); allow it, or set the filter before the domain is built",
    )
}

/// Keeps a worker on the CPU of the threads that it serves.
struct Follow {
    count: u32,
    cpu: Option<u32>,
    /// Where it could run as it began.
    began: Option<CpuSet>,
}

impl Follow {
    fn begin() -> Follow {
        Follow { count: 0, cpu: None, began: CpuSet::of(this_thread::id()).ok() }
    }

    fn no_more(&mut self) {
        if self.cpu.take().is_some()
            && let Some(began) = self.began
        {
            let _ = began.bind(this_thread::id());
        }
    }

    fn thread(&mut self, thread: u32) {
        let looks = self.count.is_multiple_of(FOLLOW_EVERY);
        self.count = self.count.wrapping_add(1);
        if !looks {
            return;
        }
        let Some(cpu) = last_cpu(thread) else { return self.no_more() };
        if self.cpu != Some(cpu) && CpuSet::only(cpu).bind(this_thread::id()).is_ok() {
            self.cpu = Some(cpu);
        }
    }
}

/// The CPU that a thread of this process ran on last. `None`: nobody says, or it is a real-time thread, which keeps its CPU from a worker for as
/// long as it runs, while others wait for that.
fn last_cpu(thread: u32) -> Option<u32> {
    const REAL_TIME: [libc::c_int; 3] = [libc::SCHED_FIFO, libc::SCHED_RR, libc::SCHED_DEADLINE];
    let stat = task::text(&task::folder_at_hand(thread)?.join("stat")).ok()?;
    // The name is in brackets and may hold anything; field 39 is the 37th after it, and 41 the policy.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(36);
    let (cpu, policy) = (fields.next()?.parse().ok()?, fields.nth(1)?.parse().ok()?);
    (!REAL_TIME.contains(&policy)).then_some(cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CPUs that this thread may run on.
    fn allowed() -> Vec<u32> {
        let set = CpuSet::of(0).unwrap();
        (0..1024).filter(|cpu| set.contains(*cpu)).collect()
    }

    #[test]
    fn a_worker_goes_to_the_cpu_of_the_thread_that_it_serves() {
        for cpu in allowed() {
            let (tell, told) = std::sync::mpsc::channel();
            let (end, ends) = std::sync::mpsc::channel::<()>();
            // A name may hold whatever the kernel's line is divided by.
            let faulting = std::thread::Builder::new().name("a) R (b 1 2".into());
            let faulting = faulting.spawn(move || {
                CpuSet::only(cpu).bind(0).unwrap();
                tell.send(this_thread::id()).unwrap();
                let _ = ends.recv();
            });
            let thread = told.recv().unwrap();
            assert_eq!(last_cpu(thread), Some(cpu));
            std::thread::spawn(move || {
                Follow::begin().thread(thread);
                assert_eq!(CpuSet::of(0), Ok(CpuSet::only(cpu)));
            })
            .join()
            .unwrap();
            drop(end);
            faulting.unwrap().join().unwrap();
        }
        assert_eq!(last_cpu(u32::MAX), None);
    }

    /// It would not run there before that one waits for it.
    #[test]
    fn a_worker_goes_to_no_cpu_that_a_real_time_thread_keeps() {
        let before = CpuSet::of(0).unwrap();
        let follows = |policy| {
            std::thread::spawn(move || {
                let priority = libc::sched_param { sched_priority: i32::from(policy != libc::SCHED_OTHER) };
                // SAFETY: test: the number outlives the call.
                if unsafe { libc::sched_setscheduler(0, policy, &raw const priority) } != 0 {
                    return None;
                }
                let faulting = this_thread::id();
                // A thread that is started has its starter's policy, which says nothing of a worker's.
                let worker = move || {
                    let mut follow = Follow::begin();
                    follow.thread(faulting);
                    (follow.cpu.is_some(), CpuSet::of(0) == Ok(before))
                };
                std::thread::spawn(worker).join().ok()
            })
            .join()
            .unwrap()
        };
        assert!(follows(libc::SCHED_OTHER).is_some_and(|(follows, _)| follows));
        for policy in [libc::SCHED_FIFO, libc::SCHED_RR] {
            let Some(found) = follows(policy) else {
                return crate::skip::skip("fifo", "SCHED_FIFO is refused: be root, or raise ulimit -r");
            };
            assert_eq!(found, (false, true), "policy {policy}");
        }
    }

    #[test]
    fn a_worker_looks_where_to_go_only_now_and_then() {
        let me = this_thread::id();
        std::thread::spawn(move || {
            let before = CpuSet::of(0).unwrap();
            let mut follow = Follow { count: 1, ..Follow::begin() };
            (1..FOLLOW_EVERY).for_each(|_| follow.thread(me));
            assert_eq!(CpuSet::of(0), Ok(before));
            follow.thread(me);
            assert!(follow.cpu.is_some_and(|cpu| CpuSet::of(0) == Ok(CpuSet::only(cpu))));
            follow.no_more();
            assert_eq!(CpuSet::of(0), Ok(before));
        })
        .join()
        .unwrap();
    }
}
