//! `appel-li`: what a program that handles its own pages pays for each operation, as Appel & Li measured it and three papers after them.

use std::fs::File;
use std::hint::black_box;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use selfpage::dirty::{Dirty, DirtyTracker};
use selfpage::{Protection, Trap};

use super::error::Error;
use super::job::{Bench, Job};
use super::raw::{Mapping, PAGE_BYTES};
use super::result::{Better, Sample, Unit, median};
use super::system::{Entry, Group, Systems};
use super::systems::protect::{self, Domains, Duty, Protect};

/// The bench.
pub struct AppelLi;

const CASES: [&str; 9] =
    ["dirty", "prot1", "prot100", "unprot100", "prot100-scattered", "unprot100-scattered", "trap", "appel1", "appel2"];

/// How a system does it.
#[derive(Clone, Copy)]
enum Way {
    /// Page by page, with a handler.
    Pages(fn(size_pages: usize) -> Result<Box<dyn Protect>, Error>),
    /// By switching from one protection domain to another.
    Domains,
    /// A tracker's scan buffer is asked.
    ScanBuffer,
    /// The kernel's table of pages is read, a word for each question.
    Pagemap,
}

static SYSTEMS: Systems<Way> = Systems(&[
    (Entry::plain("selfpage-dirty", Group::Ours), Way::ScanBuffer),
    (Entry::plain("pagemap", Group::Kernel), Way::Pagemap),
    (
        Entry::plain("selfpage-upcall", Group::Ours),
        Way::Pages(|pages| protect::by_write_protection(pages, Trap::Upcall)),
    ),
    (
        Entry::plain("selfpage-worker", Group::Ours),
        Way::Pages(|pages| protect::by_write_protection(pages, Trap::Worker)),
    ),
    (Entry::plain("selfpage-domain", Group::Ours), Way::Domains),
    (Entry::plain("userfaultfd-alone", Group::Bare), Way::Pages(protect::by_userfaultfd_alone)),
    (Entry::plain(MPROTECT, Group::Mprotect), Way::Pages(protect::by_mprotect)),
    (Entry::plain(LIBSIGSEGV, Group::Mprotect), Way::Pages(protect::by_libsigsegv)),
]);

const MPROTECT: &str = "mprotect";
/// Its protections are mprotect's: its traps are what is measured.
const LIBSIGSEGV: &str = "libsigsegv";

/// Pages of the memory.
const SIZE_PAGES: usize = 1000;
/// Pages that are protected together.
const MANY: usize = 100;
/// Rounds of a repetition. The median counts: a round is so short that another program seldom comes in between.
const ROUNDS: usize = 99;
/// Operations in a round.
const TIMES: usize = 100;
/// Questions for each page in a round.
const QUESTIONS: usize = 100;

impl Bench for AppelLi {
    fn name(&self) -> &'static str {
        "appel-li"
    }

    fn about(&self) -> &'static str {
        "protecting pages, trapping, and asking for written ones: by write-protection and domains, by mprotect and signals"
    }

    fn quick_takes(&self) -> &'static str {
        "minutes"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(String::from).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn takes_part(&self, system: &Entry, case: &str) -> bool {
        let (protects, traps) = (case.contains("prot"), ["trap", "appel1", "appel2"].contains(&case));
        match SYSTEMS.way(system) {
            Way::ScanBuffer | Way::Pagemap => case == "dirty",
            Way::Domains => protects,
            Way::Pages(_) => traps || (protects && system.name != LIBSIGSEGV),
        }
    }

    fn unit(&self, case: &str) -> Unit {
        let name = match case {
            "dirty" => "ns/question",
            "trap" => "ns/trap",
            "appel1" | "appel2" => "ns/page",
            _ => "ns",
        };
        Unit { name, better: Better::Lower }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let way = SYSTEMS.way(job.system);
        let mut figures = Vec::new();
        let rounds = match way {
            Way::Pages(make) => {
                let memory = make(SIZE_PAGES)?;
                let pages = Pages::of(&*memory);
                rounds(|| pages.round(job.case))?
            }
            Way::Domains => {
                figures.push(("protection_keys", f64::from(u8::from(Domains::by_keys()))));
                let domains = Domains::over(&match job.case {
                    "prot1" => vec![1],
                    "prot100" | "unprot100" => vec![MANY],
                    _ => vec![1; MANY],
                })?;
                // There and back.
                rounds(|| Ok(per(domains.switch(TIMES)?, 2 * TIMES)))?
            }
            Way::ScanBuffer | Way::Pagemap => {
                let written = Written::new()?;
                match way {
                    Way::ScanBuffer => rounds(|| written.ask_buffer())?,
                    _ => rounds(|| written.ask_kernel())?,
                }
            }
        };
        let mut sorted = rounds;
        sorted.sort_by(f64::total_cmp);
        let quantiles = [("round_least", 0), ("round_p25", ROUNDS / 4), ("round_p75", ROUNDS * 3 / 4)];
        figures.extend(quantiles.map(|(name, at)| (name, sorted[at])));
        Ok(Sample::of(median(sorted), &figures))
    }
}

/// One round to warm up, and those that count.
fn rounds(mut round: impl FnMut() -> Result<f64, Error>) -> Result<Vec<f64>, Error> {
    round()?;
    (0..ROUNDS).map(|_| round()).collect()
}

fn per(took: Duration, times: usize) -> f64 {
    took.as_nanos() as f64 / times as f64
}

/// All numbers below `count`, in an order that nobody foresees and every system gets.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|index| (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    order
}

/// Memory in core, nothing of it protected.
struct Pages<'a> {
    way: &'a dyn Protect,
}

impl<'a> Pages<'a> {
    fn of(way: &'a dyn Protect) -> Pages<'a> {
        let pages = Pages { way };
        pages.write_all();
        pages
    }

    fn write_all(&self) {
        (0..SIZE_PAGES).for_each(|page| self.way.memory().write(page, 0, 1));
    }

    fn all(&self, protection: Protection) -> Result<(), Error> {
        self.way.protect(0..SIZE_PAGES, protection)
    }

    /// A round of a case: the time for one operation of it.
    fn round(&self, case: &str) -> Result<f64, Error> {
        match case {
            "prot1" => self.one_page(),
            "trap" => self.trap(),
            "appel1" => self.exchange(),
            "appel2" => self.protect_and_visit(),
            _ => self.many_pages(case, 1),
        }
    }

    /// One page at random, protected and unprotected: the mean of both.
    fn one_page(&self) -> Result<f64, Error> {
        let order = shuffled(SIZE_PAGES);
        let begun = Instant::now();
        for page in order.iter().cycle().take(TIMES) {
            self.way.protect(*page..page + 1, Protection::Read)?;
            self.way.protect(*page..page + 1, Protection::ReadWrite)?;
        }
        Ok(per(begun.elapsed(), 2 * TIMES))
    }

    /// 100 pages: neighbours in one call, or each tenth page, a call each.
    fn many_pages(&self, case: &str, times: usize) -> Result<f64, Error> {
        let ranges: Vec<Range<usize>> = match case.ends_with("-scattered") {
            true => (0..MANY).map(|index| index * 10..index * 10 + 1).collect(),
            false => std::iter::once(MANY..2 * MANY).collect(),
        };
        let change = |protection| -> Result<Duration, Error> {
            let begun = Instant::now();
            ranges.iter().try_for_each(|range| self.way.protect(range.clone(), protection))?;
            Ok(begun.elapsed())
        };
        let (mut protecting, mut unprotecting) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..times {
            protecting += change(Protection::Read)?;
            unprotecting += change(Protection::ReadWrite)?;
            // The next protection takes away what was in use.
            self.write_all();
        }
        Ok(per(if case.starts_with("unprot") { unprotecting } else { protecting }, times))
    }

    /// A write that traps and is tried again, 99 times before it is let through.
    fn trap(&self) -> Result<f64, Error> {
        let memory = self.way.memory();
        self.all(Protection::Read)?;
        let before = protect::set_duty(Duty::Wait { times: TIMES - 1 });
        let begun = Instant::now();
        memory.write(MANY, 1, 1);
        let took = begun.elapsed();
        let traps = protect::set_duty(Duty::Unprotect) - before;
        self.all(Protection::ReadWrite)?;
        expect("traps", traps, TIMES)?;
        Ok(per(took, TIMES))
    }

    /// prot1+trap+unprot: all but one page are protected; the handler lets the write through, and protects the page before it.
    fn exchange(&self) -> Result<f64, Error> {
        let (order, memory) = (shuffled(SIZE_PAGES), self.way.memory());
        self.all(Protection::Read)?;
        let before = protect::set_duty(Duty::Exchange);
        let begun = Instant::now();
        for (count, page) in order.iter().cycle().take(TIMES).enumerate() {
            memory.write(*page, 1, count as u64);
        }
        let took = begun.elapsed();
        let traps = protect::set_duty(Duty::Unprotect) - before;
        self.all(Protection::ReadWrite)?;
        expect("traps", traps, TIMES)?;
        Ok(per(took, TIMES))
    }

    /// protN+trap+unprot: 100 neighbours are protected in one call, and each is written, in another order; for each page.
    fn protect_and_visit(&self) -> Result<f64, Error> {
        let (order, memory) = (shuffled(MANY), self.way.memory());
        let before = protect::set_duty(Duty::Unprotect);
        let begun = Instant::now();
        self.way.protect(MANY..2 * MANY, Protection::Read)?;
        order.iter().for_each(|page| memory.write(MANY + page, 1, 1));
        let took = begun.elapsed();
        expect("traps", protect::set_duty(Duty::Unprotect) - before, MANY)?;
        Ok(per(took, MANY))
    }
}

fn expect(what: &str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Failed(format!("{found} {what}, and {expected} were expected")))
}

/// Memory of which a tracker knows that every tenth page was written.
struct Written {
    mapping: Mapping,
    _tracker: DirtyTracker,
    found: Dirty,
    pagemap: File,
}

impl Written {
    fn new() -> Result<Written, Error> {
        let failed = |error| Error::of_library("dirty", error);
        let io = |error: std::io::Error| Error::Failed(error.to_string());
        let mapping = Mapping::anonymous(SIZE_PAGES * PAGE_BYTES).map_err(io)?;
        let memory = mapping.memory();
        (0..SIZE_PAGES).for_each(|page| memory.write(page, 0, 1));
        let tracker = DirtyTracker::with(selfpage::dirty::Mechanism::WriteProtection).map_err(failed)?;
        mapping.arm(&tracker).map_err(failed)?;
        (0..SIZE_PAGES).step_by(10).for_each(|page| memory.write(page, 0, 2));
        let mut found = Dirty::new();
        tracker.scan(mapping.addresses(), &mut found).map_err(failed)?;
        let pagemap = File::open("/proc/self/pagemap").map_err(io)?;
        Ok(Written { mapping, _tracker: tracker, found, pagemap })
    }

    fn ask_buffer(&self) -> Result<f64, Error> {
        let start = self.mapping.addresses().start;
        self.ask(QUESTIONS, |page| black_box(&self.found).contains(start + page * PAGE_BYTES))
    }

    /// Bit 57 of a page's word says that the page is still protected: it was not written.
    fn ask_kernel(&self) -> Result<f64, Error> {
        let first = self.mapping.addresses().start / PAGE_BYTES;
        self.ask(1, |page| {
            let mut word = [0; 8];
            let read = self.pagemap.read_exact_at(&mut word, (first + page) as u64 * 8);
            read.is_ok() && u64::from_ne_bytes(word) >> 57 & 1 == 0
        })
    }

    /// Asks for each page, in an order that nobody foresees, so many times.
    fn ask(&self, times: usize, written: impl Fn(usize) -> bool) -> Result<f64, Error> {
        let order = shuffled(SIZE_PAGES);
        let mut yes = 0;
        let begun = Instant::now();
        for _ in 0..times {
            yes += order.iter().filter(|page| written(**page)).count();
        }
        let took = begun.elapsed();
        expect("pages found written", yes, times * SIZE_PAGES / 10)?;
        Ok(per(took, times * SIZE_PAGES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_page_once_and_is_no_run() {
        let order = shuffled(MANY);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..MANY).collect::<Vec<_>>());
        assert!(order.windows(2).filter(|pair| pair[1] == pair[0] + 1).count() < MANY / 10, "{order:?}");
    }
}
