//! `guest`: what page tables of its own cost a closure in a virtual machine, as far as this machine can say.
//!
//! Counts are exact on any machine. Times are given only where nothing speaks against it ([`evidence`]).
//!
//! # Source
//! Cichlid, Figures 2 and 7, Table 7 and Cichlid/NP; Nemesis, Table 1; Appel and Li, Virtual memory primitives for user programs.

mod appel;
mod collect;
mod evidence;
mod extent;
mod gups;
mod inside;
mod ring0;

use std::time::Duration;

use selfpage_core::tables::{Invalidation, PageSize};
use selfpage_guest::{RING0_INSTRUCTIONS, Stepped};

use super::error::Error;
use super::job::{Bench, Job};
use super::result::{Better, Sample, Timing, Unit};
use super::system::{Entry, Group, Systems};
use appel::Operation;
use evidence::Evidence;
use extent::Extent;
use inside::{Kvm, Ran};

/// The bench.
pub struct Guest;

/// What a case does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// An operation on protected pages, again and again.
    Operation(Operation),
    /// A share of the pages is written to, and found by the dirty bits.
    Collect { percent: u64 },
    /// Random updates of a table in pages of this size.
    Gups { table_mib: u64, pages: PageSize },
}

const SMALL: PageSize = PageSize::Small4KiB;
const LARGE: PageSize = PageSize::Large2MiB;

const CASES: [(&str, Work); 19] = [
    ("dirty", Work::Operation(Operation::Dirty)),
    ("prot1", Work::Operation(Operation::Prot1)),
    ("prot100", Work::Operation(Operation::Prot100)),
    ("unprot100", Work::Operation(Operation::Unprot100)),
    ("trap", Work::Operation(Operation::Trap)),
    ("appel1", Work::Operation(Operation::Appel1)),
    ("appel2", Work::Operation(Operation::Appel2(Invalidation::Adaptive))),
    ("appel2-full", Work::Operation(Operation::Appel2(Invalidation::Full))),
    ("appel2-selective", Work::Operation(Operation::Appel2(Invalidation::Selective))),
    ("collect-1", Work::Collect { percent: 1 }),
    ("collect-10", Work::Collect { percent: 10 }),
    ("collect-50", Work::Collect { percent: 50 }),
    ("collect-100", Work::Collect { percent: 100 }),
    ("gups-2m-4k", Work::Gups { table_mib: 2, pages: SMALL }),
    ("gups-2m-2m", Work::Gups { table_mib: 2, pages: LARGE }),
    ("gups-32m-4k", Work::Gups { table_mib: 32, pages: SMALL }),
    ("gups-32m-2m", Work::Gups { table_mib: 32, pages: LARGE }),
    ("gups-256m-4k", Work::Gups { table_mib: 256, pages: SMALL }),
    ("gups-256m-2m", Work::Gups { table_mib: 256, pages: LARGE }),
];

/// Where a system's closure runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// In a virtual machine, on page tables of its own.
    Guest,
    /// Here, on the kernel's.
    Host,
}

static SYSTEMS: Systems<Side> = Systems(&[
    (Entry::plain("selfpage-guest", Group::Ours), Side::Guest),
    (Entry::plain("host", Group::Kernel), Side::Host),
]);

fn work(case: &str) -> Option<Work> {
    CASES.iter().find(|(name, _)| *name == case).map(|(_, work)| *work)
}

impl Bench for Guest {
    fn name(&self) -> &'static str {
        "guest"
    }

    fn about(&self) -> &'static str {
        "a closure on page tables of its own in a virtual machine: Appel and Li, dirty bits, GUPS; needs /dev/kvm"
    }

    fn quick_takes(&self) -> &'static str {
        "a minute"
    }

    fn cases(&self) -> Vec<String> {
        CASES.map(|(name, _)| name.into()).to_vec()
    }

    fn systems(&self) -> Vec<&'static Entry> {
        SYSTEMS.entries()
    }

    fn takes_part(&self, system: &Entry, case: &str) -> bool {
        match SYSTEMS.way(system) {
            Side::Guest => true,
            Side::Host => matches!(work(case), Some(Work::Gups { .. })),
        }
    }

    fn unit(&self, _: &str) -> Unit {
        Unit { name: "ring-0 instructions/op", better: Better::Lower }
    }

    fn measure(&self, job: &Job<'_>) -> Result<Sample, Error> {
        let work = job.known(work(job.case))?;
        let objections = Evidence::gather()?.objections();
        let updates = job.sizes.accesses as u64 * 50;
        let (mut sample, took) = match work {
            Work::Operation(operation) => {
                let ran = operation.run(&Extent::WHOLE)?;
                (counted(&ran, operation.times(&Extent::WHOLE), []), ran.took)
            }
            Work::Collect { percent } => {
                let ran = collect::run(percent, &Extent::WHOLE)?;
                let written = collect::written(percent, &Extent::WHOLE);
                let found = [("pages_written", written), ("pages_found", ran.result.found)];
                (counted(&ran, ran.result.looked_at, found), ran.took)
            }
            Work::Gups { table_mib, pages } => match SYSTEMS.way(job.system) {
                Side::Guest => {
                    let ran = gups::in_guest(table_mib << 20, pages, updates)?;
                    (counted(&ran, updates, [("checksum", ran.result)]), ran.took)
                }
                Side::Host => {
                    let (checksum, took) = gups::on_host(table_mib << 20, pages, updates)?;
                    // What the host's kernel does for it nobody counts.
                    let figures = figures([("operations", updates), ("checksum", checksum)]);
                    (Sample { figures, ..Sample::of(f64::NAN, &[]) }, took)
                }
            },
        };
        if SYSTEMS.way(job.system) == Side::Guest {
            sample.figures.extend(work.ring3_instructions()?);
        }
        sample.timing = Some(timing(&objections, took, sample.figure("operations").unwrap_or(f64::NAN)));
        Ok(sample)
    }
}

impl Work {
    /// Instructions of ring 3, from a run of its own that does less.
    fn ring3_instructions(self) -> Result<Vec<(String, f64)>, Error> {
        let extent = &Extent::STEPPED;
        let (operations, Stepped { closure, handler }) = match self {
            Work::Operation(operation) => (operation.times(extent), operation.run(extent)?.stepped),
            Work::Collect { percent } => {
                let ran = collect::run(percent, extent)?;
                (ran.result.looked_at, ran.stepped)
            }
            Work::Gups { pages, .. } => (gups::STEPPED_UPDATES, gups::stepped(pages)?.stepped),
        };
        Ok(figures([
            ("stepped_operations", operations),
            ("ring3_closure_instructions", closure),
            ("ring3_handler_instructions", handler),
        ]))
    }
}

/// What was counted in a guest.
fn counted<R, const N: usize>(ran: &Ran<R>, operations: u64, more: [(&str, u64); N]) -> Sample {
    let instructions = (ran.faults + ran.calls) * RING0_INSTRUCTIONS;
    let mut all = figures([
        ("operations", operations),
        ("exits", ran.exits),
        ("faults", ran.faults),
        ("calls", ran.calls),
        ("ring0_instructions", instructions),
        ("entries_written", ran.entries),
        ("forgotten_whole", ran.forgotten_whole),
        ("forgotten_pages", ran.forgotten_pages),
    ]);
    if let Some(Kvm { exits, emulated }) = ran.kvm {
        all.extend(figures([("kvm_exits", exits), ("kvm_emulated_instructions", emulated)]));
    }
    all.extend(figures(more));
    Sample { figures: all, ..Sample::of(instructions as f64 / operations as f64, &[]) }
}

fn figures<const N: usize>(named: [(&str, u64); N]) -> Vec<(String, f64)> {
    named.map(|(name, value)| (name.to_string(), value as f64)).to_vec()
}

fn timing(objections: &[String], took: Duration, operations: f64) -> Timing {
    if objections.is_empty() {
        Timing::Ns(took.as_nanos() as f64 / operations)
    } else {
        Timing::Refused(objections.join("; "))
    }
}
