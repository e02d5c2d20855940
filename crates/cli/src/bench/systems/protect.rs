//! Ways to protect pages and to answer the faults on them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use selfpage::protection::{self, Mechanism, ProtectionDomain, Rights};
use selfpage::{Answer, Domain, MemoryFault, Protection, Region, Trap};
use selfpage_core::linux::errno::Errno;
use selfpage_core::linux::uffd::Writing;

use super::super::error::Error;
use super::super::raw::watched::Watched;
use super::super::raw::{Mapping, Memory, PAGE_BYTES, trap};

/// What the handler of every system does about a write to a protected page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Nothing, so many times in a row: the write is tried again, and traps again. Then it is let through.
    Wait {
        /// How many times.
        times: usize,
    },
    /// It is let through.
    Unprotect,
    /// It is let through, and the page before it is protected again.
    Exchange,
}

/// What a handler needs to know and to remember.
struct Script {
    exchange: AtomicUsize,
    /// How many faults are left before one is let through.
    waits: AtomicUsize,
    /// The page that was let through last.
    last_page: AtomicUsize,
    faults: AtomicUsize,
}

const NO_PAGE: usize = usize::MAX;

static SCRIPT: Script = Script {
    exchange: AtomicUsize::new(0),
    waits: AtomicUsize::new(0),
    last_page: AtomicUsize::new(NO_PAGE),
    faults: AtomicUsize::new(0),
};

/// Says what the handler does from now on. Returns how many faults there were so far.
pub fn set_duty(duty: Duty) -> usize {
    SCRIPT.exchange.store(usize::from(duty == Duty::Exchange), Ordering::SeqCst);
    SCRIPT.waits.store(if let Duty::Wait { times } = duty { times } else { 0 }, Ordering::SeqCst);
    SCRIPT.last_page.store(NO_PAGE, Ordering::SeqCst);
    SCRIPT.faults.load(Ordering::SeqCst)
}

/// The handler. `false`: a protection could not be changed.
fn on_fault(page: usize, protect: impl Fn(usize, Protection) -> bool) -> bool {
    SCRIPT.faults.fetch_add(1, Ordering::Relaxed);
    let waits = SCRIPT.waits.load(Ordering::Relaxed);
    if waits > 0 {
        SCRIPT.waits.store(waits - 1, Ordering::Relaxed);
        return true;
    }
    if SCRIPT.exchange.load(Ordering::Relaxed) == 0 {
        return protect(page, Protection::ReadWrite);
    }
    let last = SCRIPT.last_page.swap(page, Ordering::Relaxed);
    (last == NO_PAGE || protect(last, Protection::Read)) && protect(page, Protection::ReadWrite)
}

/// Memory whose pages can be protected, with a handler that does its [`Duty`].
pub trait Protect {
    /// The memory.
    fn memory(&self) -> Memory;
    /// Protects pages, from the first to before the last, in one call.
    fn protect(&self, pages: Range<usize>, protection: Protection) -> Result<(), Error>;
}

fn failed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::Failed(format!("{what}: {why}"))
}

/// mprotect, with one of the ways to take its faults.
struct Mprotect(&'static Mapping);

static MAPPING: OnceLock<Mapping> = OnceLock::new();

fn answer(addr: usize) -> bool {
    let Some(mapping) = MAPPING.get().filter(|mapping| mapping.addresses().contains(&addr)) else { return false };
    let page = (addr - mapping.addresses().start) / PAGE_BYTES;
    on_fault(page, |page, protection| mapping.protect_pages(page..page + 1, protection).is_ok())
}

fn mapping(size_pages: usize) -> Result<&'static Mapping, Error> {
    let mapping = Mapping::anonymous(size_pages * PAGE_BYTES).map_err(|error| failed("map memory", error))?;
    Ok(MAPPING.get_or_init(|| mapping))
}

/// mprotect and a handler of `SIGSEGV`.
pub fn by_mprotect(size_pages: usize) -> Result<Box<dyn Protect>, Error> {
    let mapping = mapping(size_pages)?;
    trap::by_signal(libc::SIGSEGV, answer).map_err(|error| failed("handle SIGSEGV", error))?;
    Ok(Box::new(Mprotect(mapping)))
}

/// mprotect and libsigsegv.
pub fn by_libsigsegv(size_pages: usize) -> Result<Box<dyn Protect>, Error> {
    let mapping = mapping(size_pages)?;
    match trap::by_library(mapping, answer) {
        Ok(true) => Ok(Box::new(Mprotect(mapping))),
        Ok(false) => Err(Error::skip("libsigsegv", "no libsigsegv.so.2; on Debian, install libsigsegv2")),
        Err(error) => Err(failed("libsigsegv", error)),
    }
}

impl Protect for Mprotect {
    fn memory(&self) -> Memory {
        self.0.memory()
    }

    fn protect(&self, pages: Range<usize>, protection: Protection) -> Result<(), Error> {
        self.0.protect_pages(pages, protection).map_err(|error| failed("mprotect", error))
    }
}

/// Write-protection by a userfaultfd with a handler of `SIGBUS`, and no pager: the kernel's part of ours.
struct Bare(&'static Watched);

static WATCHED: OnceLock<Watched> = OnceLock::new();

impl Bare {
    fn set(&self, pages: Range<usize>, protection: Protection) -> Result<(), Errno> {
        let writing = if protection == Protection::ReadWrite { Writing::Allowed } else { Writing::Protected };
        self.0.set_writing(pages, writing)
    }
}

fn answer_bare(addr: usize) -> bool {
    let Some(watched) = WATCHED.get().filter(|watched| watched.addresses().contains(&addr)) else { return false };
    let page = (addr - watched.addresses().start) / PAGE_BYTES;
    on_fault(page, |page, protection| Bare(watched).set(page..page + 1, protection).is_ok())
}

/// A userfaultfd, and a handler that makes one call.
pub fn by_userfaultfd_alone(size_pages: usize) -> Result<Box<dyn Protect>, Error> {
    let mapping = Mapping::anonymous(size_pages * PAGE_BYTES).map_err(|error| failed("map memory", error))?;
    let watched = Watched::for_writes(mapping)?;
    trap::by_signal(libc::SIGBUS, answer_bare).map_err(|error| failed("handle SIGBUS", error))?;
    Ok(Box::new(Bare(WATCHED.get_or_init(|| watched))))
}

impl Protect for Bare {
    fn memory(&self) -> Memory {
        self.0.memory()
    }

    fn protect(&self, pages: Range<usize>, protection: Protection) -> Result<(), Error> {
        self.set(pages, protection).map_err(|error| failed("write-protect", format!("{error:?}")))
    }
}

/// A region with a handler.
struct WriteProtection {
    region: Region,
    _domain: Domain,
}

/// A region whose handler runs where the trap says.
pub fn by_write_protection(size_pages: usize, trap: Trap) -> Result<Box<dyn Protect>, Error> {
    let len_bytes = size_pages * PAGE_BYTES;
    let handler = |fault: &MemoryFault<'_>| {
        let protect = |page, protection| fault.protect(page * PAGE_BYTES, PAGE_BYTES, protection).is_ok();
        if on_fault(fault.offset_bytes() / PAGE_BYTES, protect) { Answer::Handled } else { Answer::Refuse }
    };
    let domain = Domain::with_frames(2 * len_bytes).build()?;
    let region = domain.region(len_bytes).trap(trap).handler(handler).zero()?;
    Ok(Box::new(WriteProtection { region, _domain: domain }))
}

impl Protect for WriteProtection {
    fn memory(&self) -> Memory {
        Memory::of_region(&self.region)
    }

    fn protect(&self, pages: Range<usize>, protection: Protection) -> Result<(), Error> {
        let (offset_bytes, len_bytes) = (pages.start * PAGE_BYTES, pages.len() * PAGE_BYTES);
        Ok(self.region.protect(offset_bytes, len_bytes, protection)?)
    }
}

/// Two protection domains over the same regions: in one they may be written, in the other only be read.
pub struct Domains {
    writing: ProtectionDomain,
    reading: ProtectionDomain,
    regions: Vec<Arc<Region>>,
    _domain: Domain,
}

impl Domains {
    /// Regions of so many pages each, all in core.
    pub fn over(size_pages: &[usize]) -> Result<Domains, Error> {
        let pages: usize = size_pages.iter().sum();
        // A domain has some frames at least.
        let domain = Domain::with_frames((2 * pages).max(64) * PAGE_BYTES).build()?;
        let (writing, reading) = (ProtectionDomain::new("writing"), ProtectionDomain::new("reading"));
        let mut regions = Vec::new();
        for size_pages in size_pages {
            let region = Arc::new(domain.region(size_pages * PAGE_BYTES).zero()?);
            let memory = Memory::of_region(&region);
            (0..memory.size_pages()).for_each(|page| memory.write(page, 0, 1));
            let memory = protection::Memory::of(&region)?;
            writing.set(&memory, Rights::READ | Rights::WRITE)?;
            reading.set(&memory, Rights::READ)?;
            regions.push(region);
        }
        Ok(Domains { writing, reading, regions, _domain: domain })
    }

    /// Takes the calling thread from the one to the other and back, so many times: pages protected, and unprotected.
    pub fn switch(&self, times: usize) -> Result<std::time::Duration, Error> {
        let _writing = self.writing.enter()?;
        let begun = std::time::Instant::now();
        for _ in 0..times {
            drop(self.reading.enter()?);
        }
        let took = begun.elapsed();
        // What was switched can be written again.
        self.regions.iter().for_each(|region| Memory::of_region(region).write(0, 0, 2));
        Ok(took)
    }

    /// Whether keys enforce it, or else mprotect.
    pub fn by_keys() -> bool {
        protection::mechanism() == Mechanism::Keys
    }
}
