//! The results for people: an aligned table, with ratios to the named peers.

use std::collections::BTreeSet;

use super::result::{Better, Confinement, Record, Timing};
use super::system::{Entry, Group};

/// The peers that get a column, where the run has any of them.
const PEERS: [(Group, &str); 9] = [
    (Group::Mmap, "mmap"),
    (Group::Swap, "swap"),
    (Group::Raw, "raw"),
    (Group::Mprotect, "mprotect"),
    (Group::Bare, "alone"),
    (Group::Glibc, "glibc"),
    (Group::Malloc, "malloc"),
    (Group::Kept, "kept"),
    (Group::Kernel, "kernel"),
];

/// The figures that get a column, where any record has them; and by what they are divided there.
const FIGURES: [(&str, &str, f64); 27] = [
    ("p50_us", "p50 us", 1.0),
    ("p99_us", "p99 us", 1.0),
    ("p99_9_us", "p99.9 us", 1.0),
    ("max_us", "max us", 1.0),
    ("kept_max_us", "kept us", 1.0),
    ("cpu_s_per_million_faults", "CPU s/M", 1.0),
    ("cpu_s_per_million_pages", "CPU s/M pages", 1.0),
    ("device_bytes_read", "read MiB", MIB),
    ("device_bytes_written", "written MiB", MIB),
    ("core_max_bytes", "core MiB", MIB),
    ("collections", "collections", 1.0),
    ("pause_max_ms", "max pause ms", 1.0),
    ("pause_total_ms", "pauses ms", 1.0),
    ("heap_bytes", "heap MiB", MIB),
    ("live_objects", "live objects", 1.0),
    ("operations", "ops", 1.0),
    ("exits", "exits", 1.0),
    ("faults", "faults", 1.0),
    ("calls", "calls", 1.0),
    ("entries_written", "entries", 1.0),
    ("kvm_exits", "KVM's exits", 1.0),
    ("kvm_emulated_instructions", "emulated", 1.0),
    ("pages_found", "found", 1.0),
    ("cpu_of_glibc", "CPU of glibc's", 1.0),
    ("peak_of_glibc", "peak of glibc's", 1.0),
    ("wall_s", "s", 1.0),
    ("peak_bytes", "peak MiB", MIB),
];

const MIB: f64 = 1024.0 * 1024.0;

/// All records, of which each was to have so many repetitions, a case after the other; which way is better; and why there are no times,
/// where that is so.
pub fn render(records: &[Record], systems: &[&Entry], reps: u32) -> String {
    let group = |record: &Record| systems.iter().find(|system| system.name == record.system).map(|system| system.group);
    // What does not count is nobody's measure.
    let stands = |record: &&Record| record.value().is_finite() && record.counts();
    let peers = PEERS.into_iter().filter_map(|(peer, name)| {
        let of_peer = records.iter().filter(stands).filter(|record| group(record) == Some(peer));
        let taking_part: BTreeSet<&str> = of_peer.map(|record| record.system).collect();
        match taking_part.len() {
            0 => None,
            1 => Some((peer, format!("/{name}"))),
            _ => Some((peer, format!("/best {name}"))),
        }
    });
    let peers: Vec<(Group, String)> = peers.collect();
    let has = |name: &str| records.iter().any(|record| record.figure(name).is_some());
    let figures: Vec<_> = FIGURES.into_iter().filter(|figure| has(figure.0)).collect();
    let is_timed = records.iter().any(|record| matches!(record.timing(), Some(Timing::Ns(_))));
    let mut header: Vec<String> = ["case", "system", "value", "unit", "min", "max"].map(String::from).to_vec();
    header.extend(figures.iter().map(|figure| figure.1.to_string()));
    header.extend(is_timed.then(|| "ns/op".to_string()));
    header.extend(peers.iter().map(|peer| peer.1.clone()));
    header.push("notes".into());
    let mut rows = vec![header];
    let mut sorted: Vec<&Record> = records.iter().collect();
    let order = |record: &&Record| records.iter().position(|first| first.case == record.case);
    sorted.sort_by_key(order);
    for record in sorted {
        let (min, max) = record.range();
        let mut row = vec![record.case.clone(), record.system.into(), short(record.value()), record.unit.name.into()];
        row.extend([short(min), short(max)]);
        row.extend(
            figures.iter().map(|(name, _, unit)| record.figure(name).map_or("-".into(), |value| short(value / unit))),
        );
        if is_timed {
            row.push(match record.timing() {
                Some(Timing::Ns(ns)) => short(ns),
                _ => "-".into(),
            });
        }
        row.extend(peers.iter().map(|(peer, _)| {
            let of_case = records.iter().filter(stands).filter(|other| other.case == record.case);
            let theirs = of_case.filter(|other| group(other) == Some(*peer));
            ratio(record, theirs).filter(|ratio| ratio.is_finite()).map_or("-".into(), |ratio| format!("{ratio:.2}"))
        }));
        row.push(notes(record, reps));
        rows.push(row);
    }
    let mut text = align(&rows) + &directions(records);
    let refused = records.iter().find_map(|record| match record.timing() {
        Some(Timing::Refused(why)) => Some(why),
        _ => None,
    });
    if let Some(why) = refused {
        text.push_str(&format!("No times: {why}.\n"));
    }
    text
}

/// The record's value over the best of `peers`. A disk's limit is a limit for misses, so an access that hits counts as the
/// part of a request that its miss rate says.
fn ratio<'a>(record: &Record, peers: impl Iterator<Item = &'a Record>) -> Option<f64> {
    let better = record.unit.better;
    let best = peers.reduce(|best, other| {
        let wins = match better {
            Better::Higher => other.value() > best.value(),
            Better::Lower => other.value() < best.value(),
        };
        if wins { other } else { best }
    })?;
    let is_limit = best.system.starts_with("raw-4k");
    let share = if is_limit { record.figure("miss_rate")? } else { 1.0 };
    (best.value() != 0.0).then(|| record.value() * share / best.value())
}

/// Which way is better, a line for each that there is.
fn directions(records: &[Record]) -> String {
    let line = |better: Better, word: &str| {
        let units: BTreeSet<&str> = records
            .iter()
            .map(|record| record.unit)
            .filter(|unit| unit.better == better)
            .map(|unit| unit.name)
            .collect();
        let units: Vec<&str> = units.into_iter().collect();
        if units.is_empty() { String::new() } else { format!("{word} is better: {}.\n", units.join(", ")) }
    };
    line(Better::Higher, "Higher") + &line(Better::Lower, "Lower")
}

fn notes(record: &Record, reps: u32) -> String {
    let mut notes = Vec::new();
    notes.extend(record.flaw().map(|why| format!("DOES NOT COUNT: {why}")));
    if record.samples.len() < reps as usize {
        notes.push(format!("{} of {reps} repetitions", record.samples.len()));
    }
    if record.figure("protection_keys") == Some(0.0) {
        notes.push("by mprotect: there are no protection keys here".into());
    }
    if record.confinement == Confinement::Missing {
        notes.push("unconstrained: no cgroup".into());
    }
    notes.join("; ")
}

/// Three digits or so.
fn short(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "-".into(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            // Names stand left, figures right.
            0 | 1 | 3 => format!("{cell:<width$}"),
            _ if column + 1 == columns => cell.clone(),
            _ => format!("{cell:>width$}"),
        });
        let line: Vec<String> = cells.collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::result::{Sample, Unit};
    use super::*;

    fn record(system: &'static str, value: f64, miss_rate: f64) -> Record {
        let sample = Sample::of(value, &[("miss_rate", miss_rate)]);
        Record {
            bench: "paging",
            case: "rnd-read-1t".into(),
            system,
            unit: Unit { name: "accesses/s", better: Better::Higher },
            confinement: Confinement::Cgroup,
            samples: vec![Sample { flaw: (system == "swap").then(|| "a cache answered".into()), ..sample }],
        }
    }

    #[test]
    fn times_have_a_column_or_a_reason() {
        let systems = [Entry::plain("selfpage-guest", Group::Ours), Entry::plain("host", Group::Kernel)];
        let records = |timing: Timing| {
            [record("selfpage-guest", 0.0042, 0.0), record("host", f64::NAN, 0.0)].map(|mut record| {
                record.samples[0].timing = Some(timing.clone());
                record
            })
        };
        let table = render(&records(Timing::Ns(250.0)), &systems.each_ref(), 1);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].ends_with("ns/op  notes") && !table.contains("No times"), "{table}");
        assert!(lines[1].contains("0.0042") && lines[1].contains("  250"), "{table}");
        let table = render(&records(Timing::Refused("ring 0 is emulated".into())), &systems.each_ref(), 1);
        assert!(!table.contains("ns/op") && !table.contains("NaN"), "{table}");
        assert_eq!(table.lines().last(), Some("No times: ring 0 is emulated."));
    }

    #[test]
    fn ratios_are_to_the_best_of_each_group_and_to_the_limit_by_miss_rate() {
        let systems = [
            Entry::plain("selfpage-upcall", Group::Ours),
            Entry::plain("mmap-random", Group::Mmap),
            Entry::plain("mmap-default", Group::Mmap),
            Entry::plain("raw-4k", Group::Raw),
            Entry::plain("swap", Group::Swap),
            Entry::plain("mmap-ra128k", Group::Mmap),
        ];
        let mut records = [
            record("selfpage-upcall", 36.0, 0.75),
            record("mmap-random", 40.0, 0.75),
            record("mmap-default", 4.0, 0.75),
            record("raw-4k", 30.0, 1.0),
            record("swap", 72.0, 0.75),
            record("mmap-ra128k", f64::NAN, 0.75),
        ];
        let table = render(&records, &systems.each_ref(), 3);
        let lines: Vec<&str> = table.lines().collect();
        // A cache answered `swap`: that it is faster says nothing of ours.
        assert!(lines[0].ends_with("/best mmap  /raw  notes"), "{table}");
        assert!(lines[1].contains(" 0.90  0.90  1 of 3 repetitions"), "{table}");
        assert!(lines[5].contains("DOES NOT COUNT: a cache answered"), "{table}");
        assert_eq!(lines[7], "Higher is better: accesses/s.");
        // What was not measured comes first, and what does not count is the fastest of its group.
        records.swap(1, 5);
        records[2].samples[0] =
            Sample { value: 400.0, flaw: Some("a cache answered".into()), ..records[2].samples[0].clone() };
        let table = render(&records, &systems.each_ref(), 1);
        let lines: Vec<&str> = table.lines().collect();
        assert!(
            lines[0].ends_with("  /mmap   /raw  notes")
                && lines[1].ends_with("  0.90   0.90")
                && !table.contains("NaN"),
            "{table}"
        );
    }
}
