//! Simulated threads on one real one: coroutines that run one at a time, and at each yield point the seed says who is next.
//! Time passes only here.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::Write;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use crate::dice;

const STACK_BYTES: usize = 512 << 10;
/// More yields than any run needs: whoever gets here turns in circles. Most take some thousands; a few, in which most saves fail while
/// snapshots want frames, five million.
const MOST_YIELDS: u64 = 40_000_000;
/// What a yield costs in simulated time.
const YIELD_NS: u64 = 50;

/// Why a thread does not run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum State {
    Runnable,
    /// In `Mmu::sleep` on the word at this address.
    Asleep {
        word: usize,
        deadline_ns: u64,
    },
    /// Stopped on a fault at this page.
    Faulting {
        page: u64,
    },
    /// Waits for a fault to be reported.
    Reading,
    /// Waits for somebody to look at a page's word, in [`run_by_looks`].
    Watching,
    Ended,
}

/// What a thread runs, and so whose descriptors it has.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Role {
    /// The program, or a call of it, which is run where the domain's descriptors are.
    Program,
    /// The handler of a fault, on the program's own thread with the program's descriptors.
    Trap,
    /// A thread of the domain.
    Domain,
}

/// How the next thread is chosen.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Each as likely as any.
    Even,
    /// Whoever runs goes on for some time.
    Sticky(u64),
    /// The first in a ranking, which changes now and then.
    Ranked,
    /// Not by chance: the last one that was spawned.
    Last,
}

type Routine = Coroutine<(), (), (), DefaultStack>;

struct Thread {
    name: &'static str,
    role: Role,
    state: State,
    doing: &'static str,
    rank: u64,
    yielder: *const Yielder<(), ()>,
    routine: Option<Routine>,
}

struct Scheduler {
    threads: RefCell<Vec<Thread>>,
    runnable: RefCell<Vec<usize>>,
    current: Cell<Option<usize>>,
    next: Cell<Option<usize>>,
    now_ns: Cell<u64>,
    alarm_ns: Cell<u64>,
    yields: Cell<u64>,
    order: Cell<Order>,
    quiet: Cell<bool>,
    /// The last yields: when, who, where. Kept only where somebody wants to see one run.
    last: RefCell<VecDeque<(u64, usize, &'static str)>>,
    keeps: Cell<usize>,
    stacks: RefCell<Vec<DefaultStack>>,
}

thread_local! {
    static SCHEDULER: Scheduler = const {
        Scheduler {
            threads: RefCell::new(Vec::new()),
            runnable: RefCell::new(Vec::new()),
            current: Cell::new(None),
            next: Cell::new(None),
            now_ns: Cell::new(1),
            alarm_ns: Cell::new(u64::MAX),
            yields: Cell::new(0),
            order: Cell::new(Order::Even),
            quiet: Cell::new(false),
            last: RefCell::new(VecDeque::new()),
            keeps: Cell::new(0),
            stacks: RefCell::new(Vec::new()),
        }
    };
}

/// Forgets all threads, and takes the order from the seed.
pub fn reset() {
    SCHEDULER.with(|s| {
        for mut thread in s.threads.borrow_mut().drain(..) {
            match thread.routine.take() {
                Some(routine) if routine.done() => s.stacks.borrow_mut().push(routine.into_stack()),
                // After a failure: its stack refers to a world that is kept as it is.
                routine => std::mem::forget(routine),
            }
        }
        s.runnable.borrow_mut().clear();
        s.current.set(None);
        s.next.set(None);
        s.quiet.set(false);
        s.now_ns.set(1);
        s.alarm_ns.set(u64::MAX);
        s.yields.set(0);
        s.order.set(match dice::below(4) {
            0 | 1 => Order::Even,
            2 => Order::Sticky(2 + dice::below(12)),
            _ => Order::Ranked,
        });
    });
}

/// Starts a thread.
pub fn spawn(name: &'static str, role: Role, body: impl FnOnce() + 'static) {
    SCHEDULER.with(|s| {
        let id = s.threads.borrow().len();
        let stack = s.stacks.borrow_mut().pop();
        let stack = stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a stack"));
        let routine = Routine::with_stack(stack, move |yielder, ()| {
            SCHEDULER.with(|s| s.threads.borrow_mut()[id].yielder = yielder);
            body();
        });
        s.threads.borrow_mut().push(Thread {
            name,
            role,
            state: State::Runnable,
            doing: "",
            rank: dice::next(),
            yielder: std::ptr::null(),
            routine: Some(routine),
        });
        s.runnable.borrow_mut().push(id);
    });
}

/// Runs all threads to their ends.
///
/// # Errors
/// A report of who waits for what, if nobody can run any more or they turn in circles.
pub fn run() -> Result<(), String> {
    SCHEDULER.with(|s| {
        while let Some(id) = s.next.take().or_else(|| s.choose()) {
            if s.yields.get() > MOST_YIELDS {
                return Err(format!("threads turn in circles\n{}", report()));
            }
            s.current.set(Some(id));
            let mut routine = s.threads.borrow_mut()[id].routine.take().expect("it is not running");
            let result = routine.resume(());
            s.current.set(None);
            let thread = &mut s.threads.borrow_mut()[id];
            thread.routine = Some(routine);
            if let CoroutineResult::Return(()) = result {
                thread.state = State::Ended;
                s.runnable.borrow_mut().retain(|other| *other != id);
            }
        }
        match s.threads.borrow().iter().all(|thread| thread.state == State::Ended) {
            true => Ok(()),
            false => Err(format!("nobody can run\n{}", report())),
        }
    })
}

/// The same, not by chance: at every look at a page's word whoever watches for one goes first, until it waits.
pub fn run_by_looks() -> Result<(), String> {
    SCHEDULER.with(|s| s.order.set(Order::Last));
    run()
}

impl Scheduler {
    /// Who runs next. Lets time pass until somebody can.
    fn choose(&self) -> Option<usize> {
        while self.now_ns.get() >= self.alarm_ns.get() || self.runnable.borrow().is_empty() {
            if self.alarm_ns.get() == u64::MAX {
                return None;
            }
            self.now_ns.set(self.now_ns.get().max(self.alarm_ns.get()));
            self.ring();
        }
        let runnable = self.runnable.borrow();
        let current = self.current.get().filter(|id| runnable.contains(id));
        match (self.order.get(), current) {
            (Order::Sticky(times), Some(id)) if !dice::once_in(times) => Some(id),
            (Order::Ranked, _) => {
                let threads = &mut *self.threads.borrow_mut();
                if let (Some(id), true) = (current, dice::once_in(48)) {
                    threads[id].rank = dice::next() >> 1;
                }
                runnable.iter().copied().max_by_key(|id| threads[*id].rank)
            }
            (Order::Last, _) => runnable.iter().copied().max(),
            _ => Some(runnable[dice::below(runnable.len() as u64) as usize]),
        }
    }

    /// Wakes those whose time is over.
    fn ring(&self) {
        let now_ns = self.now_ns.get();
        let mut next_ns = u64::MAX;
        for (id, thread) in self.threads.borrow_mut().iter_mut().enumerate() {
            if let State::Asleep { deadline_ns, .. } = thread.state {
                if deadline_ns <= now_ns {
                    thread.state = State::Runnable;
                    self.runnable.borrow_mut().push(id);
                } else {
                    next_ns = next_ns.min(deadline_ns);
                }
            }
        }
        self.alarm_ns.set(next_ns);
    }

    fn note(&self, doing: &'static str) {
        let (last, keeps) = (&mut *self.last.borrow_mut(), self.keeps.get());
        if keeps > 0 {
            last.push_back((self.now_ns.get(), self.current.get().unwrap_or_default(), doing));
            last.drain(..last.len().saturating_sub(keeps));
        }
    }

    fn suspend(&self, id: usize) {
        let yielder = self.threads.borrow()[id].yielder;
        // SAFETY: yielder-lives: a coroutine's yielder lives as long as the coroutine, which is the caller.
        unsafe { (*yielder).suspend(()) };
    }
}

/// Lets others run, maybe. Does nothing outside a simulated thread.
pub fn step_aside(doing: &'static str) {
    SCHEDULER.with(|s| {
        let Some(id) = s.current.get().filter(|_| !s.quiet.get()) else { return };
        s.yields.set(s.yields.get() + 1);
        s.now_ns.set(s.now_ns.get() + YIELD_NS);
        s.threads.borrow_mut()[id].doing = doing;
        s.note(doing);
        let next = s.choose();
        if next != Some(id) || s.yields.get() > MOST_YIELDS {
            s.next.set(next);
            s.suspend(id);
        }
    });
}

/// Somebody has looked at a page's word.
pub fn look() {
    if SCHEDULER.with(|s| matches!(s.order.get(), Order::Last)) {
        wake(1, |_, state| state == State::Watching);
    }
    step_aside("a race");
}

/// Does `work` in one go, whatever it calls: nobody else runs, is woken, or could wake it.
pub fn at_once<R>(work: impl FnOnce() -> R) -> R {
    SCHEDULER.with(|s| {
        let before = s.quiet.replace(true);
        let result = work();
        s.quiet.set(before);
        result
    })
}

/// Stops the calling thread until [`wake`] or, asleep, its deadline.
pub fn block(state: State) {
    SCHEDULER.with(|s| {
        let id = s.current.get().filter(|_| !s.quiet.get()).expect("nobody is there to wake what waits alone");
        s.threads.borrow_mut()[id].state = state;
        s.runnable.borrow_mut().retain(|other| *other != id);
        if let State::Asleep { deadline_ns, .. } = state {
            s.alarm_ns.set(s.alarm_ns.get().min(deadline_ns));
        }
        s.suspend(id);
    });
}

/// Lets up to `count` of the threads run again that wait for what `which` says.
pub fn wake(count: u32, which: impl Fn(usize, State) -> bool) {
    SCHEDULER.with(|s| {
        let mut left = if s.quiet.get() { 0 } else { count };
        for (id, thread) in s.threads.borrow_mut().iter_mut().enumerate() {
            let waits = !matches!(thread.state, State::Runnable | State::Ended);
            if left > 0 && waits && which(id, thread.state) {
                thread.state = State::Runnable;
                s.runnable.borrow_mut().push(id);
                left -= 1;
            }
        }
    });
}

/// The running thread. `None` outside the simulation.
pub fn current() -> Option<usize> {
    SCHEDULER.with(|s| s.current.get())
}

/// Does `work` in another role.
pub fn in_role<R>(role: Role, work: impl FnOnce() -> R) -> R {
    let set = |role| {
        SCHEDULER.with(|s| {
            let id = s.current.get().expect("a simulated thread");
            std::mem::replace(&mut s.threads.borrow_mut()[id].role, role)
        })
    };
    let before = set(role);
    let result = work();
    set(before);
    result
}

/// What the running thread runs.
pub fn role() -> Role {
    SCHEDULER.with(|s| s.current.get().map_or(Role::Domain, |id| s.threads.borrow()[id].role))
}

/// The time.
pub fn now_ns() -> u64 {
    SCHEDULER.with(|s| s.now_ns.get())
}

/// How often anybody has yielded since the start.
pub fn yields() -> u64 {
    SCHEDULER.with(|s| s.yields.get())
}

/// Keeps the last `count` yields for [`report`].
pub fn keep_last(count: usize) {
    SCHEDULER.with(|s| s.keeps.set(count));
}

/// What each thread does or waits for.
pub fn report() -> String {
    SCHEDULER.with(|s| {
        let mut lines = String::new();
        for (now_ns, id, doing) in s.last.borrow().iter() {
            let _ = writeln!(lines, "  {now_ns} {:<10} {doing}", s.threads.borrow()[*id].name);
        }
        for thread in s.threads.borrow().iter() {
            let _ = writeln!(lines, "  {:<10} {:?}, last in {}", thread.name, thread.state, thread.doing);
        }
        lines
    })
}
