//! What the domains of a run counted: a line of JSON for each process, merged into one object.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;

use rustix::fs::MemfdFlags;
use serde_json::{Map, Value, json};

/// Counts that add up over processes.
const SUMS: [&str; 6] =
    ["faults_total", "fills_total", "saves_total", "evictions_total", "bytes_filled", "bytes_saved"];
/// Those of which the largest of any process is told: each process has frames of its own.
const LARGEST: [&str; 3] = ["frames_bytes", "resident_bytes_max", "unmanaged_bytes_max"];
/// Those that are told of the process with the most faults.
const OF_BUSIEST: [&str; 2] = ["fault_us_p50", "fault_us_p99"];

/// A file without a name, to which processes append while this one lives.
pub struct Records(File);

impl Records {
    pub fn new() -> io::Result<Records> {
        Ok(Records(rustix::fs::memfd_create("selfpage-records", MemfdFlags::CLOEXEC)?.into()))
    }

    /// Where other processes find it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// All records as one object.
    pub fn merge(mut self) -> io::Result<String> {
        let mut lines = String::new();
        self.0.rewind()?;
        self.0.read_to_string(&mut lines)?;
        let lines = lines.lines().filter_map(|line| serde_json::from_str(line).ok());
        Ok(format!("{}\n", merged(kept(lines))))
    }
}

/// The records that count. One that was written for an exec that failed is followed by a line that takes it back.
fn kept(lines: impl Iterator<Item = Value>) -> Vec<Value> {
    let mut kept = Vec::new();
    for line in lines {
        if line["goes_on"] != true {
            kept.push(line);
        } else if let Some(index) = kept.iter().rposition(|record| record["pid"] == line["pid"]) {
            kept.remove(index);
        }
    }
    kept
}

fn merged(processes: Vec<Value>) -> Value {
    let number = |process: &Value, key: &str| process[key].as_f64().unwrap_or(0.0);
    let mut whole = Map::new();
    for key in LARGEST {
        let largest = processes.iter().filter_map(|process| process[key].as_u64()).max();
        whole.insert(key.into(), json!(largest.unwrap_or(0)));
    }
    for key in SUMS {
        let sum: u64 = processes.iter().filter_map(|process| process[key].as_u64()).sum();
        whole.insert(key.into(), json!(sum));
    }
    let busiest =
        processes.iter().max_by(|one, other| number(one, "faults_total").total_cmp(&number(other, "faults_total")));
    for key in OF_BUSIEST {
        whole.insert(key.into(), json!(busiest.map_or(0.0, |process| number(process, key))));
    }
    whole.insert("processes".into(), Value::Array(processes));
    Value::Object(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_limits_do_not() {
        let process = |faults: u64, held: u64, p50: f64| json!({"pid": 1, "faults_total": faults, "frames_bytes": 64, "resident_bytes_max": held, "fault_us_p50": p50});
        let whole = merged(vec![process(3, 10, 5.5), process(4, 8, 2.5)]);
        assert_eq!(whole["faults_total"], 7);
        assert_eq!(whole["frames_bytes"], 64);
        assert_eq!(whole["resident_bytes_max"], 10);
        assert_eq!(whole["fault_us_p50"], 2.5);
        assert_eq!(whole["processes"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn an_exec_that_failed_takes_its_own_record_back() {
        let record = |pid: u32, faults: u64| json!({"pid": pid, "faults_total": faults});
        let goes_on = |pid: u32| json!({"pid": pid, "goes_on": true});
        let lines = [record(1, 3), record(2, 5), goes_on(1), goes_on(1), record(1, 4), record(2, 9), goes_on(2)];
        assert_eq!(kept(lines.into_iter()), [record(2, 5), record(1, 4)]);
    }
}
