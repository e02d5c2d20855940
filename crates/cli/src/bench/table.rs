//! The results for people: an aligned table, with ratios to the named peers.

use super::result::{Better, Confinement, Record};
use super::system::{Entry, Group};

/// The peers that get a column, where the run has any of them.
const PEERS: [(Group, &str); 6] = [
    (Group::Mmap, "/best mmap"),
    (Group::Swap, "/swap"),
    (Group::Raw, "/raw"),
    (Group::Glibc, "/glibc"),
    (Group::Malloc, "/best malloc"),
    (Group::Kernel, "/kernel"),
];

/// All records, a case after the other.
pub fn render(records: &[Record], systems: &[Entry]) -> String {
    let group = |record: &Record| systems.iter().find(|system| system.name == record.system).map(|system| system.group);
    let peers: Vec<_> =
        PEERS.into_iter().filter(|peer| records.iter().any(|record| group(record) == Some(peer.0))).collect();
    let mut header: Vec<String> = ["case", "system", "value", "unit", "min", "max", "p50 us", "p99 us", "p99.9 us"]
        .into_iter()
        .chain(["max us", "CPU s/M", "read MiB", "written MiB"])
        .map(String::from)
        .collect();
    header.extend(peers.iter().map(|peer| peer.1.to_string()));
    header.push("notes".into());
    let mut rows = vec![header];
    let mut sorted: Vec<&Record> = records.iter().collect();
    let order = |record: &&Record| records.iter().position(|first| first.case == record.case);
    sorted.sort_by_key(order);
    for record in sorted {
        let (min, max) = record.range();
        let figure = |name: &str| record.figure(name).map_or("-".into(), short);
        let mib = |name: &str| record.figure(name).map_or("-".into(), |bytes| short(bytes / f64::from(1 << 20)));
        let mut row = vec![record.case.clone(), record.system.into(), short(record.value()), record.unit.name.into()];
        row.extend([short(min), short(max)]);
        row.extend(["p50_us", "p99_us", "p99_9_us", "max_us", "cpu_s_per_million_faults"].map(figure));
        row.extend(["device_bytes_read", "device_bytes_written"].map(mib));
        row.extend(peers.iter().map(|(peer, _)| {
            let theirs = records.iter().filter(|other| other.case == record.case && group(other) == Some(*peer));
            ratio(record, theirs).map_or("-".into(), |ratio| format!("{ratio:.2}"))
        }));
        row.push(notes(record));
        rows.push(row);
    }
    align(&rows)
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

fn notes(record: &Record) -> String {
    let mut notes = Vec::new();
    if !record.counts() {
        notes.push("DOES NOT COUNT: misses did not reach the device");
    }
    if record.confinement == Confinement::Missing {
        notes.push("unconstrained: no cgroup");
    }
    notes.join("; ")
}

/// Three digits or so.
fn short(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "-".into(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
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
    use super::super::system::{Condition, Drive};
    use super::*;

    fn entry(name: &'static str, group: Group) -> Entry {
        Entry { name, group, condition: Condition::Plain, drive: Drive::Requests { len_bytes: 4096 } }
    }

    fn record(system: &'static str, value: f64, miss_rate: f64) -> Record {
        let figures = vec![("miss_rate".to_string(), miss_rate)];
        Record {
            bench: "paging",
            case: "rnd-read-1t".into(),
            system,
            unit: Unit { name: "accesses/s", better: Better::Higher },
            confinement: Confinement::Cgroup,
            samples: vec![Sample { value, counts: system != "swap", figures }],
        }
    }

    #[test]
    fn ratios_are_to_the_best_of_each_group_and_to_the_limit_by_miss_rate() {
        let systems = [
            entry("selfpage-upcall", Group::Ours),
            entry("mmap-random", Group::Mmap),
            entry("mmap-default", Group::Mmap),
            entry("raw-4k", Group::Raw),
            entry("swap", Group::Swap),
        ];
        let records = [
            record("selfpage-upcall", 36.0, 0.75),
            record("mmap-random", 40.0, 0.75),
            record("mmap-default", 4.0, 0.75),
            record("raw-4k", 30.0, 1.0),
            record("swap", 72.0, 0.75),
        ];
        let table = render(&records, &systems);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].contains("/best mmap  /swap  /raw  notes"), "{table}");
        assert!(lines[1].contains("0.90   0.50  0.90"), "{table}");
        assert!(lines[5].contains("DOES NOT COUNT"), "{table}");
    }
}
