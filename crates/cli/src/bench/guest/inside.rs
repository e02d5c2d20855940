//! The one place of this bench with `unsafe`: a closure in a guest, the memory that it finds there, and its page tables.
#![allow(unsafe_code)]

use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use selfpage_core::addr::{PageNo, PageRange, VirtAddr};
use selfpage_core::capability::{self, Handle, Object, Rights, Type};
use selfpage_core::fault::{Fault, Outcome};
use selfpage_core::tables::{Entry, Invalidation, PageSize, Range, Unfinished};
use selfpage_guest::{
    Call, Counts, Guest, Handler, Kind, Machine, Parts, Statistics, Stepped, TableView, answer, clear_dirty_bits,
    host_call, protect,
};

use super::super::error::Error;
use super::super::raw::{Memory, PAGE_BYTES};
use super::extent::Watch;

/// Where no process has anything: the pages, and the tables for them.
const MEMORY: usize = 0x1234_4000_0000;
const VIEW: usize = 0x2345_4000_0000;
const FIRST: PageNo = PageNo((MEMORY / PAGE_BYTES) as u64);
/// What is told from within: what counts begins, its time begins, and it ends.
const BEGIN: u64 = 1;
const TIME: u64 = 2;
const END: u64 = 3;
/// The program and its libraries take tables, too.
const LEAST_RAM_BYTES: u64 = 32 << 20;
const PRIVATE_BYTES: usize = 1 << 20;

pub const READ_WRITE: Rights = Rights::READ.with(Rights::WRITE);

/// What a closure has to work on.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Its memory, a power of two.
    pub len_bytes: u64,
    /// The size of its pages.
    pub pages: PageSize,
    /// What its handler does.
    pub on_fault: OnFault,
    /// Whether instructions of ring 3 are counted between the marks.
    pub watch: Watch,
    /// How much the rules tell the CPU to forget.
    pub invalidation: Invalidation,
}

/// What the handler does about a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnFault {
    /// Maps the page: none is mapped before it was touched. Otherwise all are mapped from the beginning.
    Map,
    /// Lets the page be written.
    Unprotect,
    /// The same, and keeps the page from being written that it did this for before.
    UnprotectAndProtectLast,
    /// Nothing, but that it lets the page be written at every so many faults.
    Count(u64),
}

/// What a closure finds in there. It is made in the guest and does not leave it.
pub struct Scene {
    view: Option<TableView>,
    len_bytes: u64,
}

/// What came of a closure, and what was counted between its marks.
pub struct Ran<R> {
    pub result: R,
    /// Without those of the marks.
    pub exits: u64,
    pub faults: u64,
    pub calls: u64,
    /// Entries of pages that were written under the rules.
    pub entries: u64,
    /// How often the rules told the CPU to forget all translations, and how many single pages.
    pub forgotten_whole: u64,
    pub forgotten_pages: u64,
    /// Instructions of ring 3, the marks' own few included; none if nobody watched.
    pub stepped: Stepped,
    /// What KVM counts itself, the marks' own included: exits from the CPU's guest mode, and instructions that it carried out for it.
    pub kvm: Option<Kvm>,
    pub took: Duration,
}

/// What KVM counts itself.
#[derive(Clone, Copy, Debug)]
pub struct Kvm {
    pub exits: u64,
    pub emulated: u64,
}

impl Kvm {
    fn read(statistics: &Statistics) -> Option<Kvm> {
        Some(Kvm { exits: statistics.read("exits")?, emulated: statistics.read("insn_emulation")? })
    }

    const fn since(self, before: Kvm) -> Kvm {
        Kvm { exits: self.exits - before.exits, emulated: self.emulated - before.emulated }
    }
}

impl Scene {
    /// Its memory.
    pub fn memory(&self) -> Memory {
        // SAFETY: guest-scene: the handler answers there, and we are the closure, which alone touches it.
        unsafe { Memory::new(with_exposed_provenance_mut(MEMORY), self.len_bytes as usize) }
    }

    /// The entry of a page of 4 KiB, by its index, as the CPU has it now.
    pub fn entry(&self, page: u64) -> Entry {
        // SAFETY: guest-view, guest-scene: we are in the guest whose tables these are.
        self.view.and_then(|view| unsafe { view.entry(FIRST.plus(page)) }).unwrap_or(Entry::EMPTY)
    }

    /// Has the rights of pages changed. How many were.
    pub fn protect(&self, first: u64, count: u64, rights: Rights) -> u64 {
        // SAFETY: guest-host-call, guest-scene: we are a closure in a guest.
        unsafe { protect(PageRange { first: FIRST.plus(first), count }, rights) }
    }

    /// Has the dirty bits of all pages cleared. How many were set.
    pub fn clear_dirty_bits(&self) -> u64 {
        let all = PageRange { first: FIRST, count: self.len_bytes / PAGE_BYTES as u64 };
        // SAFETY: guest-host-call, guest-scene: we are a closure in a guest.
        unsafe { clear_dirty_bits(all) }
    }

    /// What follows counts, and so does its time.
    pub fn begin(&self) {
        self.mark(BEGIN);
    }

    /// The time begins only now.
    pub fn begin_time(&self) {
        self.mark(TIME);
    }

    /// What follows does not count.
    pub fn end(&self) {
        self.mark(END);
    }

    fn mark(&self, mark: u64) {
        // SAFETY: guest-host-call, guest-scene: we are a closure in a guest.
        unsafe { host_call(mark, [0; 3]) };
    }
}

/// Runs a closure in a machine of its own.
///
/// # Errors
/// There is no KVM, or the closure was stopped.
pub fn run<R: 'static>(plan: Plan, work: impl FnOnce(&Scene) -> R + 'static) -> Result<Ran<R>, Error> {
    let ram_bytes = (4 * plan.len_bytes).max(LEAST_RAM_BYTES);
    // The process ends with the case: nothing is given back.
    let machine = Box::leak(Box::new(Machine::new(ram_bytes as usize, PRIVATE_BYTES).map_err(error)?));
    let (guest, parts) = Guest::new(machine).map_err(error)?;
    let (counts, statistics, steps) = (guest.counts(), guest.statistics(), guest.steps());
    let entries: &'static AtomicU64 = parts.private.keep(AtomicU64::new(0)).map_err(error)?;
    let mut rules = Rules::new(parts, plan, entries)?;
    let view = rules.show()?;
    let now = || Moment::of(counts, entries, statistics.as_ref());
    let (mut begin, mut end) = (now(), None);
    let mut time_marks = 0;
    let mut stepped = Stepped::default();
    let tell = |call: Call| {
        match call.number {
            BEGIN => {
                begin = now();
                if plan.watch == Watch::Stepped {
                    steps.begin();
                }
            }
            TIME => (begin.at, time_marks) = (Instant::now(), time_marks + 1),
            _ => (end, stepped) = (Some(now()), steps.end()),
        }
        0
    };
    let closure = move || work(&Scene { view, len_bytes: plan.len_bytes });
    // SAFETY: guest-call, guest-private: the rules map only where nothing is, and the process reads only atomics meanwhile.
    let result = unsafe { guest.run(rules, tell, closure) };
    let result = result.map_err(|stopped| Error::Failed(format!("the closure was stopped: {stopped:?}")))?;
    let end = end.ok_or_else(|| Error::Failed("the closure ended before its end".into()))?;
    Ok(Ran {
        result,
        exits: end.exits - begin.exits - 1 - time_marks,
        faults: end.faults - begin.faults,
        calls: end.calls - begin.calls,
        entries: end.entries - begin.entries,
        forgotten_whole: end.forgotten_whole - begin.forgotten_whole,
        forgotten_pages: end.forgotten_pages - begin.forgotten_pages,
        stepped,
        kvm: end.kvm.zip(begin.kvm).map(|(end, begin)| end.since(begin)),
        took: end.at - begin.at,
    })
}

/// An error of the guest's, as others of a bench are.
pub fn error(error: selfpage_guest::Error) -> Error {
    match error.kind() {
        Kind::Unsupported => Error::skip("kvm", error.to_string()),
        _ => Error::Failed(error.to_string()),
    }
}

struct Moment {
    exits: u64,
    faults: u64,
    calls: u64,
    entries: u64,
    forgotten_whole: u64,
    forgotten_pages: u64,
    kvm: Option<Kvm>,
    at: Instant,
}

impl Moment {
    fn of(counts: &Counts, entries: &AtomicU64, statistics: Option<&Statistics>) -> Moment {
        let kvm = statistics.and_then(Kvm::read);
        Moment {
            exits: counts.exits(),
            faults: counts.faults(),
            calls: counts.calls(),
            entries: entries.load(Ordering::Relaxed),
            forgotten_whole: counts.forgotten_whole(),
            forgotten_pages: counts.forgotten_pages(),
            kvm,
            at: Instant::now(),
        }
    }
}

/// The closure's handler: page tables under the rules.
struct Rules {
    parts: Parts<'static>,
    plan: Plan,
    frames: Handle,
    entries: &'static AtomicU64,
    last: Option<u64>,
    faults: u64,
}

impl Rules {
    fn new(mut parts: Parts<'static>, plan: Plan, entries: &'static AtomicU64) -> Result<Rules, Error> {
        let at = parts.first_place;
        let object = Object { kind: Type::Frame, size_bits: plan.len_bytes.ilog2() as u8 };
        parts.kernel.retype(&parts.space, parts.ram, object, 1, parts.root, at).map_err(ruled)?;
        parts.kernel.set_invalidation(plan.invalidation);
        let mut rules = Rules { parts, plan, frames: Handle::at_root(at), entries, last: None, faults: 0 };
        if plan.on_fault != OnFault::Map {
            let all = Range { at: VirtAddr(MEMORY), len_bytes: plan.len_bytes, pages: plan.pages };
            rules.map(all, 0).map_err(|stopped| ruled(stopped.why))?;
        }
        Ok(rules)
    }

    /// Shows the closure the tables of its pages, where those are small.
    fn show(&mut self) -> Result<Option<TableView>, Error> {
        if self.plan.pages != PageSize::Small4KiB {
            return Ok(None);
        }
        let all = PageRange { first: FIRST, count: self.plan.len_bytes / PAGE_BYTES as u64 };
        self.parts.show_tables(all, VirtAddr(VIEW)).map(Some).map_err(ruled)
    }

    fn map(&mut self, range: Range, offset_bytes: u64) -> Result<(), Unfinished> {
        let Parts { kernel, tables, .. } = &mut self.parts;
        tables.map(kernel, range, self.frames, offset_bytes, READ_WRITE)
    }

    fn map_page(&mut self, offset_bytes: u64) -> bool {
        let len_bytes = self.plan.pages.len_bytes();
        let first = offset_bytes / len_bytes * len_bytes;
        let page = Range { at: VirtAddr(MEMORY + first as usize), len_bytes, pages: self.plan.pages };
        let is_mapped = self.map(page, first).is_ok();
        self.wrote(u64::from(is_mapped));
        is_mapped
    }

    fn allow(&mut self, page: u64, rights: Rights) -> bool {
        let at = VirtAddr(MEMORY + page as usize * PAGE_BYTES);
        let range = Range { at, len_bytes: PAGE_BYTES as u64, pages: PageSize::Small4KiB };
        let Parts { kernel, tables, .. } = &mut self.parts;
        let is_changed = tables.protect(kernel, range, rights).is_ok();
        self.wrote(u64::from(is_changed));
        is_changed
    }

    fn wrote(&self, entries: u64) {
        self.entries.fetch_add(entries, Ordering::Relaxed);
    }
}

impl Handler for Rules {
    fn fault(&mut self, fault: Fault) -> Outcome {
        let offset_bytes = fault.addr.0.wrapping_sub(MEMORY) as u64;
        if offset_bytes >= self.plan.len_bytes {
            return Outcome::NotOurs;
        }
        let page = offset_bytes / PAGE_BYTES as u64;
        self.faults += 1;
        let is_answered = match self.plan.on_fault {
            OnFault::Map => self.map_page(offset_bytes),
            OnFault::Unprotect => self.allow(page, READ_WRITE),
            OnFault::UnprotectAndProtectLast => {
                let last = self.last.replace(page);
                self.allow(page, READ_WRITE) && last.is_none_or(|last| self.allow(last, Rights::READ))
            }
            OnFault::Count(times) => !self.faults.is_multiple_of(times) || self.allow(page, READ_WRITE),
        };
        if is_answered { Outcome::Resolved } else { Outcome::Violation }
    }

    fn answer(&mut self, call: Call) -> u64 {
        let Parts { kernel, space, tables, .. } = &mut self.parts;
        let done = answer(kernel, space, tables, call).unwrap_or(0);
        self.wrote(done);
        done
    }
}

fn ruled(error: capability::Error) -> Error {
    Error::Failed(format!("the rules refuse it: {error:?}"))
}
