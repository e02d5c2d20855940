//! Page tables of our own as the machine under a domain: frames are the pages of one Frame capability, and whatever the
//! domain does with them takes that capability.
//!
//! The machine has one CPU, and whoever takes its faults resolves them: nobody else ever waits for a page.
//!
//! # Source
//! Cichlid §3.4 (demand paging "as in Nemesis", by the library, over the capability invocations).
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::hint::spin_loop;
use core::ptr;

use super::walk::{Translation, translate};
use super::{AddressSpace, PageSize, Range};
use crate::addr::{Frame, PAGE_BYTES, PageBytes, PageNo};
use crate::capability::{Capability, Error, Handle, Kernel, Rights, Space, Type};
use crate::frame::Table;
use crate::mmu::{Mmu, Partial, Refusal, Trap};
use crate::physical::{PhysAddr, PhysMemory};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

const FREE: u32 = 0;
const TAKEN: u32 = 1;

/// The slot of a frame whose contents are nowhere, or at a page.
const EMPTY: u32 = 0;

/// An address space under a domain.
///
/// The kernel is `&mut` in its calls, and a domain calls its machine from wherever it is, so it lies behind a lock of its own
/// that spins: core knows no other, and with one CPU nobody ever finds it taken.
pub struct TableMmu<'m> {
    lock: AtomicU32,
    held: UnsafeCell<Held<'m>>,
    memory: &'m PhysMemory,
    space: Space,
    tables: AddressSpace,
    /// For each frame which pool its contents lie in, [`EMPTY`] for none.
    slots: Table<AtomicU32>,
    spare: Table<AtomicU64>,
    idle: &'m (dyn Fn() + Sync),
    looks: AtomicU64,
}

/// What the lock is for.
struct Held<'m> {
    kernel: Kernel<'m>,
    pool: Pool,
}

/// The Frame whose pages are the frames.
#[derive(Clone, Copy)]
struct Pool {
    frames: Handle,
    /// Which one it is; counted from 1.
    number: u32,
    /// Of the capability, while it is there: another may come to its place, and its memory was never the domain's.
    serial: Option<u64>,
}

impl Pool {
    fn new(kernel: &Kernel<'_>, space: &Space, frames: Handle, number: u32) -> Pool {
        let serial = kernel.find(space, frames).ok().map(|slot| kernel.slots().serial(slot));
        Pool { frames, number, serial }
    }
}

// SAFETY: kernel-locked: `held` is reached under the lock alone; all else is shared by its own type.
unsafe impl Sync for TableMmu<'_> {}

impl<'m> TableMmu<'m> {
    /// A machine that maps at will what `frames`, a capability of `space`, stands for: frame n is its page n. There are as many
    /// frames as `slots`, which is zeroed; the capability may be of fewer pages, and what is beyond cannot be populated. `spare`,
    /// as long as all frames together, is where a frame's contents go that has no memory: nobody ever sees it mapped. Where
    /// others would sleep, `idle` is called: it evicts and saves.
    ///
    /// # Safety
    /// *kernel-locked*: the CPU that `kernel` tells may be told on any thread that uses the Mmu.
    pub unsafe fn new(
        kernel: Kernel<'m>,
        space: Space,
        tables: AddressSpace,
        frames: Handle,
        slots: Table<AtomicU32>,
        spare: Table<AtomicU64>,
        idle: &'m (dyn Fn() + Sync),
    ) -> TableMmu<'m> {
        let memory = kernel.memory();
        let held = UnsafeCell::new(Held { pool: Pool::new(&kernel, &space, frames, 1), kernel });
        let (lock, looks) = (AtomicU32::new(FREE), AtomicU64::new(0));
        TableMmu { lock, held, memory, space, tables, slots, spare, idle, looks }
    }

    /// Works on the kernel beside the domain. Whatever is revoked is gone at once, and the domain finds that out.
    ///
    /// # Context
    /// Normal. The work must not use the Mmu.
    pub fn with_kernel<R>(&self, work: impl FnOnce(&mut Kernel<'m>) -> R) -> R {
        self.with(|held| work(&mut held.kernel))
    }

    /// From now on frames are the pages of `frames`. What the domain had in frames is gone: clean pages come back from their
    /// pager, the others as it makes them. So it is with what was on its way to a store.
    ///
    /// # Context
    /// Normal.
    pub fn replace_frames(&self, frames: Handle) {
        self.with(|held| {
            let number = held.pool.number.wrapping_add(1).max(1);
            held.pool = Pool::new(&held.kernel, &self.space, frames, number);
        });
    }

    fn with<R>(&self, work: impl FnOnce(&mut Held<'m>) -> R) -> R {
        while self.lock.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            spin_loop();
        }
        // SAFETY: kernel-locked: the lock is ours.
        let result = work(unsafe { &mut *self.held.get() });
        self.lock.store(FREE, Ordering::Release);
        result
    }

    /// What is behind the frames, unless it was taken away.
    fn pool(&self, held: &Held<'_>) -> Option<Capability> {
        let slot = held.kernel.find(&self.space, held.pool.frames).ok()?;
        let is_it = Some(held.kernel.slots().serial(slot)) == held.pool.serial;
        held.kernel.held(slot).ok().filter(|pool| is_it && pool.kind == Type::Frame)
    }

    /// Where a frame is, if it has memory.
    fn at(&self, held: &Held<'_>, frame: Frame) -> Option<PhysAddr> {
        let offset_bytes = offset(frame);
        let pool = self.pool(held).filter(|pool| offset_bytes < pool.len_bytes())?;
        Some(pool.base.plus(offset_bytes))
    }

    fn found(&self, held: &Held<'_>, page: PageNo) -> Option<Translation> {
        let root = held.kernel.root_table(&self.space, self.tables.pml4()).ok()?;
        translate(self.memory, root, page.addr())
    }

    /// Where the contents of a frame lie, if they are in its slot.
    fn in_slot(&self, held: &Held<'_>, frame: Frame) -> Option<PhysAddr> {
        let slot = self.slots.get(frame.0 as usize)?.load(Ordering::Relaxed);
        self.at(held, frame).filter(|_| slot == held.pool.number)
    }

    fn set_slot(&self, frame: Frame, pool: u32) {
        if let Some(slot) = self.slots.get(frame.0 as usize) {
            slot.store(pool, Ordering::Relaxed);
        }
    }

    fn give_memory(&self, held: &Held<'_>, frame: Frame) -> Result<(), Refusal> {
        let at = self.at(held, frame).ok_or(Refusal::NoMemory)?;
        if self.in_slot(held, frame).is_none() {
            self.memory.clear(at, PAGE_BYTES as u64);
            self.set_slot(frame, held.pool.number);
        }
        Ok(())
    }

    fn map_one(&self, held: &mut Held<'m>, page: PageNo, frame: Frame, rights: Rights) -> Result<(), Refusal> {
        self.pool(held).ok_or(Refusal::Denied)?;
        if self.in_slot(held, frame).is_none() {
            // Nothing is in it but it can be filled from now on.
            self.give_memory(held, frame)?;
            return Err(Refusal::Hole);
        }
        self.tables
            .map(&mut held.kernel, one(page), held.pool.frames, offset(frame), rights)
            .map_err(|stopped| refusal(stopped.why))?;
        self.set_slot(frame, EMPTY);
        Ok(())
    }

    /// The entry that goes knows whether the page was written to: whoever wants that in place of what [`crate::pager::Pager::changed`]
    /// compares has `unmap` say so of each page, and asks it in `fault::evict`.
    fn unmap_one(&self, held: &mut Held<'m>, page: PageNo, frame: Frame) -> Result<(), Refusal> {
        let found = self.found(held, page).ok_or(Refusal::Hole)?;
        if self.at(held, frame) != Some(found.at) {
            return Err(Refusal::Foreign);
        }
        self.take_out(held, page).map_err(refusal)?;
        self.set_slot(frame, held.pool.number);
        Ok(())
    }

    fn take_out(&self, held: &mut Held<'m>, page: PageNo) -> Result<(), Error> {
        self.tables.unmap(&mut held.kernel, one(page)).map_err(|stopped| stopped.why)
    }

    fn map_all(&self, page: PageNo, frame: Frame, count: u32, rights: Rights) -> Result<(), Partial> {
        // One by one, since they go one by one: what is mapped by one call is unmapped by one.
        each(count, |at| self.with(|held| self.map_one(held, page.plus(at.into()), frame.plus(at), rights)))
    }
}

impl Mmu for TableMmu<'_> {
    fn map(&self, _trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        self.map_all(page, frame, count, Rights::READ | Rights::WRITE)
    }

    fn map_to_read(&self, _trap: Trap, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        self.map_all(page, frame, count, Rights::READ)
    }

    fn unmap(&self, page: PageNo, frame: Frame, count: u32) -> Result<(), Partial> {
        each(count, |at| self.with(|held| self.unmap_one(held, page.plus(at.into()), frame.plus(at))))
    }

    fn copy_out(&self, page: PageNo, frame: Frame) -> Result<(), Refusal> {
        self.with(|held| {
            let from = self.found(held, page).ok_or(Refusal::Hole)?.at;
            // Populated, perhaps, with memory of frames that were replaced.
            self.give_memory(held, frame)?;
            let to = self.in_slot(held, frame).ok_or(Refusal::Denied)?;
            for offset in (0..PAGE_BYTES as u64).step_by(8) {
                self.memory.store(to.plus(offset), self.memory.load(from.plus(offset)));
            }
            Ok(())
        })
    }

    fn present(&self, page: PageNo) -> bool {
        self.with(|held| self.found(held, page).is_some())
    }

    fn drop_pages(&self, page: PageNo, count: u32) {
        for at in 0..u64::from(count) {
            // Where nothing is mapped there is nothing to drop.
            let _ = self.with(|held| self.take_out(held, page.plus(at)));
        }
    }

    /// Nobody is stopped but the one who asks.
    fn wake_faulters(&self, _trap: Trap, _page: PageNo, _count: u32) -> bool {
        true
    }

    /// Whoever takes the faults is told of the failure, and a page without translation fails every access by itself.
    fn poison(&self, _trap: Trap, page: PageNo) -> bool {
        self.drop_pages(page, 1);
        true
    }

    fn populate(&self, frame: Frame, count: u32) -> Result<(), Partial> {
        each(count, |at| self.with(|held| self.give_memory(held, frame.plus(at))))
    }

    fn release(&self, frame: Frame, count: u32) {
        for at in 0..count {
            self.set_slot(frame.plus(at), EMPTY);
        }
    }

    fn holds(&self, frame: Frame) -> bool {
        self.with(|held| self.in_slot(held, frame)).is_some()
    }

    fn bytes(&self, frame: Frame) -> *mut PageBytes {
        let at = self.with(|held| self.in_slot(held, frame)).and_then(|at| self.memory.page(at));
        let words = PAGE_BYTES / 8;
        at.or_else(|| self.spare.place(frame.0 as usize * words, words).map(|spare| spare.cast()))
            .map_or(ptr::null_mut(), |at| at.as_ptr())
    }

    /// Nobody else is there to end the wait: whoever sleeps does what is to be done meanwhile, and looks again.
    fn sleep(&self, word: &AtomicU32, expected: u32, _timeout_us: u32) {
        if word.load(Ordering::SeqCst) == expected {
            (self.idle)();
        }
    }

    fn rouse(&self, _word: &AtomicU32, _count: u32) {}

    /// No clock: it is later at each look.
    fn now_ns(&self) -> u64 {
        self.looks.fetch_add(1, Ordering::Relaxed)
    }
}

fn each(count: u32, work: impl Fn(u32) -> Result<(), Refusal>) -> Result<(), Partial> {
    (0..count).try_for_each(|at| work(at).map_err(|why| Partial { done: at, why }))
}

const fn offset(frame: Frame) -> u64 {
    frame.0 as u64 * PAGE_BYTES as u64
}

const fn one(page: PageNo) -> Range {
    Range { at: page.addr(), len_bytes: PAGE_BYTES as u64, pages: PageSize::Small4KiB }
}

/// What a rule that was not kept means to a domain.
const fn refusal(error: Error) -> Refusal {
    match error {
        Error::EntryTaken => Refusal::Occupied,
        Error::NotMapped => Refusal::Hole,
        Error::PartOfMapping | Error::NotCanonical => Refusal::Foreign,
        Error::OutOfMemory => Refusal::NoMemory,
        // It has no capability for that, or too small a one.
        _ => Refusal::Denied,
    }
}
