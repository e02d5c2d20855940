//! `selfpage trace`: a trace as lines, for people or for machines.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use selfpage::Access;
use selfpage::trace::{Event, Kind, Record, Records};
use serde_json::{Value, json};

use crate::output;

const EXAMPLES: &str = "\
Examples:
  selfpage run --frames 64M --trace t -- python3 script.py
  selfpage trace t | grep evict
  selfpage trace t --json | jq 'select(.what == \"fill\") | .address'

Exit status: 0 done, 1 the lines could not be written, 2 the trace cannot be used.";

/// Print a trace of `selfpage run --trace`: a line for each thing that happened.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The trace.
    #[arg(value_name = "FILE")]
    trace: PathBuf,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

/// Prints. The status to end with.
pub fn run(args: &Args) -> i32 {
    let refused = |why: io::Error| {
        output::tell(format_args!("selfpage trace: {}: {why}", args.trace.display()));
        2
    };
    let records = match Records::open(&args.trace) {
        Ok(records) => records,
        Err(why) => return refused(why),
    };
    let line = if args.json { for_machines } else { for_people };
    let page_bytes = u64::from(records.head().page_bytes);
    let mut out = BufWriter::new(io::stdout().lock());
    let mut damage = None;
    // Up to what is damaged: of a process that was killed there may be half a record at the end.
    let whole = records.map_while(|record| record.map_err(|why| damage = Some(why)).ok());
    let printed = whole.into_iter().try_for_each(|record| writeln!(out, "{}", line(&record, page_bytes)));
    let status = output::status("trace", printed.and_then(|()| out.flush()));
    damage.map_or(status, refused)
}

/// What a kind of event is called.
const fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::First => "first",
        Kind::Fill => "fill",
        Kind::Soft => "soft",
        Kind::Referenced => "referenced",
        Kind::CopyBack => "copy-back",
        Kind::Ahead => "ahead",
        Kind::Evict => "evict",
        Kind::Save => "save",
        Kind::Discard => "discard",
        Kind::Sample => "sample",
    }
}

const fn access_word(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "write",
    }
}

fn for_machines(record: &Record, page_bytes: u64) -> String {
    let object = match record {
        Record::Event(Event { time_ns, page, kind, access, thread }) => {
            let mut object =
                json!({ "what": word(*kind), "time_ns": time_ns, "address": page.0.wrapping_mul(page_bytes) });
            if let Some(access) = access {
                object["access"] = access_word(*access).into();
            }
            if *thread != 0 {
                object["thread"] = Value::from(*thread);
            }
            object
        }
        Record::Region { first, pages, name } => {
            json!({ "what": "region", "address": first.0.wrapping_mul(page_bytes), "pages": pages, "name": name })
        }
        Record::WorkingSet { time_ns, pages, least, most } => {
            json!({ "what": "working-set", "time_ns": time_ns, "pages": pages, "least": least, "most": most })
        }
        Record::Dropped(count) => json!({ "what": "dropped", "events": count }),
    };
    object.to_string()
}

fn for_people(record: &Record, page_bytes: u64) -> String {
    let seconds = |time_ns: u64| format!("{}.{:09}", time_ns / 1_000_000_000, time_ns % 1_000_000_000);
    match record {
        Record::Event(Event { time_ns, page, kind, access, thread }) => {
            let mut line =
                format!("{:>14}  {:<11}  {:#x}", seconds(*time_ns), word(*kind), page.0.wrapping_mul(page_bytes));
            if let Some(access) = access {
                let _ = write!(line, "  {}", access_word(*access)); // A string takes everything.
            }
            if *thread != 0 {
                let _ = write!(line, "  thread {thread}");
            }
            line
        }
        Record::Region { first, pages, name } => {
            let (start, name) = (first.0.wrapping_mul(page_bytes), output::printable(name));
            format!("{:>14}  {:<11}  {start:#x}  {pages} pages  {name}", "", "region")
        }
        Record::WorkingSet { time_ns, pages, least, most } => {
            format!("{:>14}  {:<11}  {pages} pages, {least} to {most}", seconds(*time_ns), "working-set")
        }
        Record::Dropped(count) => format!("{:>14}  {:<11}  {count} events", "", "dropped"),
    }
}

#[cfg(test)]
mod tests {
    use selfpage::trace::Trace;

    use super::*;

    /// A trace with a region, two events, a working set, and three events that were dropped.
    fn trace() -> Trace {
        let mut bytes = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0".to_vec();
        bytes.extend_from_slice(&[0; 8]);
        let mut put = |head: [u8; 4], thread: u32, words: [u64; 3]| {
            bytes.extend_from_slice(&head);
            bytes.extend_from_slice(&thread.to_le_bytes());
            words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        };
        put([64, 0, 0, 0], 0, [0, 0x7000, 16]);
        put([2, 2, 0, 0], 77, [1_500_000_001, 0x7003, 0]);
        put([7, 0, 0, 0], 0, [2_000_000_000, 0x7004, 0]);
        put([66, 0, 0, 0], 0, [3_000_000_000, 12, 10 | 14 << 32]);
        put([67, 0, 0, 0], 0, [3_000_000_000, 0, 3]);
        Trace::parse(&bytes).unwrap()
    }

    #[test]
    fn every_record_is_a_line_for_people() {
        let trace = trace();
        let lines: Vec<String> = trace.records.iter().map(|record| for_people(record, 4096)).collect();
        assert_eq!(
            lines,
            [
                "                region       0x7000000  16 pages  ",
                "   1.500000001  fill         0x7003000  write  thread 77",
                "   2.000000000  evict        0x7004000",
                "   3.000000000  working-set  12 pages, 10 to 14",
                "                dropped      3 events",
            ]
        );
        assert_eq!(trace.dropped(), 3);
        let hostile = Record::Region { first: selfpage::PageNo(7), pages: 1, name: "a\x1b[2Jb\n".into() };
        assert!(for_people(&hostile, 4096).ends_with("  a?[2Jb?"));
    }

    #[test]
    fn every_record_is_an_object_for_machines() {
        let trace = trace();
        let object = |at: usize| serde_json::from_str::<Value>(&for_machines(&trace.records[at], 4096)).unwrap();
        let fill = json!({ "what": "fill", "time_ns": 1_500_000_001u64, "address": 0x700_3000, "access": "write", "thread": 77 });
        assert_eq!(object(0), json!({ "what": "region", "address": 0x700_0000, "pages": 16, "name": "" }));
        assert_eq!(object(1), fill);
        assert_eq!(object(2), json!({ "what": "evict", "time_ns": 2_000_000_000u64, "address": 0x700_4000 }));
        let set = json!({ "what": "working-set", "time_ns": 3_000_000_000u64, "pages": 12, "least": 10, "most": 14 });
        assert_eq!(object(3), set);
        assert_eq!(object(4), json!({ "what": "dropped", "events": 3 }));
    }

    #[test]
    fn every_kind_has_a_word_of_its_own() {
        let words: std::collections::BTreeSet<&str> = Kind::ALL.into_iter().map(word).collect();
        assert_eq!(words.len(), Kind::ALL.len());
        let guide = include_str!("../../../docs/monitoring.md");
        assert!(Kind::ALL.into_iter().all(|kind| guide.contains(&format!("\n| {} | `{}` | ", kind as u8, word(kind)))));
    }
}
