//! The simulated machine: physical pages that move between slots and a page table, threads that stop on what is absent,
//! and refusals by chance.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use selfpage_core::addr::{Frame, PAGE_BYTES, PageBytes, PageNo};
use selfpage_core::mmu::{Mmu, Partial, Refusal, Trap, Writing};
use selfpage_core::region::Access;

use crate::dice;
use crate::scheduler::{self, Role, State};
use crate::weather::Weather;

/// 64-bit words in half a page. A half holds one value, in all its words.
const HALF_WORDS: usize = PAGE_BYTES / 16;
/// What is read where no memory is; nobody may write it.
const VOID: u64 = 0xdead_dead_dead_dead;

/// The contents of a page: the value of either half.
pub type Halves = [u64; 2];

/// What a page holds.
pub fn halves(bytes: &PageBytes) -> Halves {
    let (words, _) = bytes.as_chunks::<8>();
    [0, 1].map(|half| {
        let words = &words[half * HALF_WORDS..][..HALF_WORDS];
        assert!(words.iter().all(|word| *word == words[0]), "a torn half");
        u64::from_ne_bytes(words[0])
    })
}

/// Writes one half of a page.
pub fn set_half(bytes: &mut PageBytes, half: usize, value: u64) {
    let (words, _) = bytes.as_chunks_mut::<8>();
    words[half * HALF_WORDS..][..HALF_WORDS].fill(value.to_ne_bytes());
}

/// A thread that is stopped on a fault.
#[derive(Clone)]
struct Faulter {
    thread: usize,
    page: PageNo,
    access: Access,
    reported: bool,
}

/// All that the machine holds.
#[derive(Clone)]
pub struct Physical {
    memory: Box<[PageBytes]>,
    spare: Vec<u32>,
    /// Which physical page is in the slot of each frame.
    slots: Box<[Option<u32>]>,
    /// Which physical page is mapped at each page of the world.
    table: Box<[Option<u32>]>,
    poisoned: Box<[bool]>,
    /// Which mapped pages may only be read.
    protected: Box<[bool]>,
    /// Which mapped pages nobody has written since [`SimMmu::written`] looked.
    clean: Box<[bool]>,
    faulters: Vec<Faulter>,
    /// Threads that are to be told that what they stopped on is refused.
    refused: Vec<usize>,
    /// Wakes that a thread without descriptors could not make: somebody else is to make each of them.
    owed_wakes: Vec<(PageNo, u32)>,
    void: Box<PageBytes>,
}

/// The machine.
pub struct SimMmu {
    first: PageNo,
    physical: Mutex<Physical>,
    weather: &'static Weather,
    /// The call that the machine refused last, of each thread.
    refused_last: Mutex<HashMap<Option<usize>, &'static str>>,
    /// What may run on a thread whose sleep is over, before it goes on: a signal handler.
    pub handler: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl SimMmu {
    pub fn new(first: PageNo, pages: usize, frames: usize, weather: &'static Weather) -> SimMmu {
        let mut void = Box::new([0; PAGE_BYTES]);
        set_half(&mut void, 0, VOID);
        set_half(&mut void, 1, VOID);
        SimMmu {
            first,
            weather,
            refused_last: Mutex::default(),
            handler: OnceLock::new(),
            physical: Mutex::new(Physical {
                memory: vec![[0; PAGE_BYTES]; frames].into(),
                spare: (0..frames as u32).collect(),
                slots: vec![None; frames].into(),
                table: vec![None; pages].into(),
                poisoned: vec![false; pages].into(),
                protected: vec![false; pages].into(),
                clean: vec![false; pages].into(),
                faulters: Vec::new(),
                refused: Vec::new(),
                owed_wakes: Vec::new(),
                void,
            }),
        }
    }

    /// Never held across a yield, and so never waited for.
    fn with<R>(&self, work: impl FnOnce(&mut Physical) -> R) -> R {
        work(&mut self.physical.try_lock().expect("one thread at a time"))
    }

    /// Becomes the machine of a forked child: with what is mapped, and without the slots, the protections and the stopped threads.
    /// What it was.
    pub fn fork(&self) -> Physical {
        self.with(|p| {
            let parent = p.clone();
            p.spare.extend(p.slots.iter_mut().filter_map(Option::take));
            p.protected.fill(false);
            p.faulters.clear();
            p.refused.clear();
            parent
        })
    }

    /// Is as it was before a fork.
    pub fn go_on(&self, parent: Physical) {
        self.with(|p| *p = parent);
    }

    fn index(&self, page: PageNo) -> usize {
        (page.0 - self.first.0) as usize
    }

    /// What the program reads in a page, if it is mapped.
    pub fn read(&self, page: PageNo) -> Option<Halves> {
        let index = self.index(page);
        self.with(|p| p.table[index].map(|at| halves(&p.memory[at as usize])))
    }

    /// The program writes half a page. `false`: it is not mapped, or protected.
    pub fn write(&self, page: PageNo, half: usize, value: u64) -> bool {
        let index = self.index(page);
        self.with(|p| match p.table[index] {
            Some(at) if !p.protected[index] => {
                set_half(&mut p.memory[at as usize], half, value);
                p.clean[index] = false;
                true
            }
            _ => false,
        })
    }

    /// Whether the page is mapped and may only be read.
    pub fn protected(&self, page: PageNo) -> bool {
        let index = self.index(page);
        self.with(|p| p.table[index].is_some() && p.protected[index])
    }

    /// Whether the page is mapped and was written since this was last asked. As the kernel does, it notes that with the translation, so a
    /// hole was not.
    pub fn written(&self, page: PageNo) -> bool {
        let index = self.index(page);
        self.with(|p| p.table[index].is_some() && !std::mem::replace(&mut p.clean[index], true))
    }

    /// The kernel gives an absent page memory that core does not hear of, and the program writes there.
    pub fn put(&self, page: PageNo, value: u64) {
        let index = self.index(page);
        self.with(|p| {
            let at = p.spare.pop().expect("not all frames have memory yet");
            (0..2).for_each(|half| set_half(&mut p.memory[at as usize], half, value));
            assert_eq!(p.table[index].replace(at), None, "the page is absent");
        });
    }

    /// The program drops a page behind core's back. Whether it was mapped.
    pub fn advise_away(&self, page: PageNo) -> bool {
        let index = self.index(page);
        self.with(|p| p.drop_mapped(index))
    }

    /// Whether every access to the page fails.
    pub fn poisoned(&self, page: PageNo) -> bool {
        self.with(|p| p.poisoned[self.index(page)])
    }

    /// The contents of a frame's slot, if it has memory.
    pub fn in_slot(&self, frame: Frame) -> Option<Halves> {
        self.with(|p| p.slots[frame.0 as usize].map(|at| halves(&p.memory[at as usize])))
    }

    /// Checks that nobody wrote where no memory is, and that no memory is lost.
    pub fn check(&self) {
        self.with(|p| {
            assert_eq!(halves(&p.void), [VOID; 2], "written through a slot without memory");
            let used = p.slots.iter().chain(p.table.iter()).flatten().count();
            assert_eq!(used + p.spare.len(), p.memory.len(), "memory is lost or used twice");
        });
    }

    /// Checks that somebody has made each wake that a thread could not make. Snapshots wake everybody all the time, so that few threads
    /// would be missed for long.
    pub fn check_wakes(&self) {
        self.with(|p| assert_eq!(p.owed_wakes.first(), None, "nobody woke the threads there"));
    }

    /// A thread stops on a fault at a page of a worker region, until it is woken. A signal may call it away early. Whether it was told
    /// meanwhile that the access is refused.
    pub fn fault(&self, page: PageNo, access: Access, signal_after: Option<u64>) -> bool {
        let thread = scheduler::current().expect("a simulated thread");
        self.with(|p| p.faulters.push(Faulter { thread, page, access, reported: false }));
        scheduler::wake(u32::MAX, |_, state| state == State::Reading);
        match signal_after {
            None => scheduler::block(State::Faulting { page: page.0 }),
            Some(yields) => (0..yields).for_each(|_| scheduler::step_aside("fault")),
        }
        self.with(|p| {
            p.faulters.retain(|faulter| faulter.thread != thread);
            let told = p.refused.iter().position(|refused| *refused == thread);
            told.map(|at| p.refused.swap_remove(at)).is_some()
        })
    }

    /// Tells those who stopped on a page that the access is refused: it cannot be poisoned, since what it holds is right.
    pub fn refuse(&self, page: PageNo) {
        self.with(|p| {
            let stopped = p.faulters.iter().filter(|faulter| faulter.page == page).map(|faulter| faulter.thread);
            p.refused.extend(stopped.collect::<Vec<_>>());
        });
        self.wake_faulters(Trap::Worker, page, 1);
    }

    /// The next fault that has not been reported yet.
    pub fn next_fault(&self) -> Option<(PageNo, Access)> {
        self.with(|p| {
            let faulter = p.faulters.iter_mut().find(|faulter| !faulter.reported)?;
            faulter.reported = true;
            Some((faulter.page, faulter.access))
        })
    }

    fn wake(&self, page: PageNo, count: u32) {
        let woken: Vec<usize> = self.with(|p| {
            let mut woken = Vec::new();
            p.faulters.retain(|faulter| {
                let wakes = (page.0..page.0 + u64::from(count)).contains(&faulter.page.0);
                if wakes {
                    woken.push(faulter.thread);
                }
                !wakes
            });
            woken
        });
        for thread in woken {
            scheduler::wake(1, |id, state| id == thread && matches!(state, State::Faulting { .. }));
        }
    }

    /// Whether the program has closed the descriptors that the running thread has.
    fn descriptors_gone(&self) -> bool {
        self.weather.closed.get() && scheduler::role() == Role::Trap
    }

    /// The call of the running thread that the machine refused last.
    pub fn refused_last(&self) -> Option<&'static str> {
        self.refused_last.try_lock().expect("one thread at a time").get(&scheduler::current()).copied()
    }

    fn refuses(&self, call: &'static str) {
        self.refused_last.try_lock().expect("one thread at a time").insert(scheduler::current(), call);
    }

    /// Why the machine refuses this call just now, if it does.
    fn refusal(&self, call: &'static str) -> Option<Refusal> {
        let why = self.refusal_by_weather();
        if why.is_some() {
            self.refuses(call);
        }
        why
    }

    fn refusal_by_weather(&self) -> Option<Refusal> {
        let weather = self.weather;
        if self.descriptors_gone() {
            Some(Refusal::NoDescriptor)
        } else if dice::once_in(weather.pinned_once_in.get()) {
            Some(Refusal::Pinned)
        } else if dice::once_in(weather.no_memory_once_in.get() * 2) {
            // Never all the time: a page whose only copy waits to be mapped again has nowhere to go.
            Some(Refusal::NoMemory)
        } else {
            None
        }
    }
}

impl Physical {
    fn drop_mapped(&mut self, index: usize) -> bool {
        self.poisoned[index] = false;
        let dropped = self.table[index].take();
        self.spare.extend(dropped);
        dropped.is_some()
    }
}

impl SimMmu {
    fn map_and(&self, page: PageNo, frame: Frame, count: u32, writing: Writing) -> Result<(), Partial> {
        scheduler::step_aside("map");
        let mut result = Ok(());
        for at in 0..count {
            let (index, slot) = (self.index(page.plus(at.into())), frame.plus(at).0 as usize);
            if let Some(why) = self.refusal("map") {
                result = Err(Partial { done: at, why });
                break;
            }
            self.with(|p| {
                assert!(p.table[index].is_none() && !p.poisoned[index], "{page:?} + {at} is mapped twice");
                p.table[index] = p.slots[slot].take();
                assert!(p.table[index].is_some(), "{frame:?} + {at} is mapped without memory");
                p.protected[index] = writing == Writing::Protected;
                p.clean[index] = false;
            });
            scheduler::step_aside("map");
        }
        // As the kernel does: it wakes once, at the end.
        self.wake(page, result.map_or_else(|partial: Partial| partial.done, |()| count));
        scheduler::step_aside("map");
        result
    }
}

impl Mmu for SimMmu {
    fn map(&self, _trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        self.map_and(page, frame, count, Writing::Allowed)
    }

    fn map_to_read(&self, _trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        self.map_and(page, frame, count, Writing::Protected)
    }

    fn set_writing(&self, _trap: Trap, page: PageNo, count: u32, writing: Writing) -> Result<(), Partial> {
        scheduler::step_aside("set_writing");
        if self.descriptors_gone() {
            return Err(Partial { done: 0, why: Refusal::NoDescriptor });
        }
        let refused = dice::once_in(self.weather.no_memory_once_in.get() * 2);
        let done = if refused { dice::below(u64::from(count)) as u32 } else { count };
        for at in 0..u64::from(done) {
            let index = self.index(page.plus(at));
            self.with(|p| p.protected[index] = writing == Writing::Protected);
        }
        if writing == Writing::Allowed {
            self.wake(page, done);
        }
        scheduler::step_aside("set_writing");
        if !refused {
            return Ok(());
        }
        self.refuses("set_writing");
        Err(Partial { done, why: Refusal::NoMemory })
    }

    fn unmap(&self, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        for at in 0..count {
            scheduler::step_aside("unmap");
            let (index, slot) = (self.index(page.plus(at.into())), frame.plus(at).0 as usize);
            if let Some(why) = self.refusal("unmap") {
                // What would not move may not be copied either, some of it: by no dice, for seeds to stay what they were.
                let denied = why == Refusal::Pinned && index % 2 == 1;
                return Err(Partial { done: at, why: if denied { Refusal::Denied } else { why } });
            }
            self.with(|p| {
                assert!(p.slots[slot].is_none(), "{frame:?} + {at} has memory twice");
                p.slots[slot] = p.table[index].take();
                p.slots[slot].ok_or(Partial { done: at, why: Refusal::Hole })
            })?;
        }
        scheduler::step_aside("unmap");
        Ok(())
    }

    fn copy_out(&self, page: PageNo, frame: Frame) -> Result<(), Refusal> {
        scheduler::step_aside("copy_out");
        if self.descriptors_gone() {
            return Err(Refusal::NoDescriptor);
        }
        let index = self.index(page);
        let result = self.with(|p| {
            let from = p.table[index].ok_or(Refusal::Hole)?;
            let to = p.slots[frame.0 as usize].expect("the slot must be populated");
            p.memory[to as usize] = p.memory[from as usize];
            Ok(())
        });
        scheduler::step_aside("copy_out");
        result
    }

    fn present(&self, page: PageNo) -> bool {
        scheduler::step_aside("present");
        self.with(|p| p.table[self.index(page)].is_some())
    }

    fn drop_pages(&self, page: PageNo, count: u32) {
        for at in 0..u64::from(count) {
            scheduler::step_aside("drop_pages");
            self.with(|p| p.drop_mapped(self.index(page.plus(at))));
        }
    }

    fn wake_faulters(&self, trap: Trap, page: PageNo, count: u32) -> bool {
        scheduler::step_aside("wake_faulters");
        if self.descriptors_gone() {
            // Threads stop at the pages of worker regions only.
            if trap.is_read() {
                self.with(|p| p.owed_wakes.push((page, count)));
            }
            return false;
        }
        self.with(|p| p.owed_wakes.retain(|owed| *owed != (page, count)));
        self.wake(page, count);
        true
    }

    fn poison(&self, _trap: Trap, page: PageNo) -> bool {
        scheduler::step_aside("poison");
        self.with(|p| {
            p.drop_mapped(self.index(page));
            p.poisoned[self.index(page)] = true;
        });
        self.wake(page, 1);
        scheduler::step_aside("poison");
        true
    }

    fn populate(&self, frame: Frame, count: u32) -> Result<(), Partial> {
        scheduler::step_aside("populate");
        let refused = dice::once_in(self.weather.no_memory_once_in.get());
        let done = if refused { dice::below(u64::from(count)) as u32 } else { count };
        self.with(|p| {
            for frame in frame.0..frame.0 + done {
                if p.slots[frame as usize].is_none() {
                    let at = p.spare.pop().expect("no more memory is used than was promised");
                    p.memory[at as usize].fill(0);
                    p.slots[frame as usize] = Some(at);
                }
            }
        });
        if refused { Err(Partial { done, why: Refusal::NoMemory }) } else { Ok(()) }
    }

    fn release(&self, frame: Frame, count: u32) {
        self.with(|p| {
            for frame in frame.0..frame.0 + count {
                let dropped = p.slots[frame as usize].take();
                p.spare.extend(dropped);
            }
        });
    }

    fn bytes(&self, frame: Frame) -> *mut PageBytes {
        self.with(|p| match p.slots.get(frame.0 as usize).copied().flatten() {
            Some(at) => &raw mut p.memory[at as usize],
            None => &raw mut *p.void,
        })
    }

    fn sleep(&self, word: &AtomicU32, expected: u32, timeout_us: u32) {
        scheduler::step_aside("sleep");
        if word.load(Ordering::SeqCst) == expected && !dice::once_in(64) {
            let deadline_ns = match timeout_us {
                0 => u64::MAX,
                limit => scheduler::now_ns() + u64::from(limit) * 1000,
            };
            scheduler::block(State::Asleep { word: word.as_ptr().addr(), deadline_ns });
        }
        if let Some(handler) = self.handler.get() {
            handler();
        }
    }

    fn rouse(&self, word: &AtomicU32, count: u32) {
        scheduler::step_aside("rouse");
        let address = word.as_ptr().addr();
        scheduler::wake(count, |_, state| matches!(state, State::Asleep { word, .. } if word == address));
    }

    fn now_ns(&self) -> u64 {
        scheduler::now_ns()
    }
}
