//! What the domains of a run counted: a line of JSON for each process, merged into one object.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::{Map, Value, json};

use super::cause;
use super::limits::RECORDS_BYTES;

/// Counts that add up over processes.
const SUMS: [&str; 6] =
    ["faults_total", "fills_total", "saves_total", "evictions_total", "bytes_filled", "bytes_saved"];
/// Those of which the largest of any process is told: each process has frames of its own.
const LARGEST: [&str; 3] = ["frames_bytes", "resident_bytes_max", "unmanaged_bytes_max"];
/// So much of the file is read. Processes that append at once may make it a little longer than it becomes by one; what else writes to it may
/// write anything.
const MOST_BYTES: u64 = 2 * RECORDS_BYTES;
/// Those that are told of the process with the most faults.
const OF_BUSIEST: [&str; 2] = ["fault_us_p50", "fault_us_p99"];

/// A file without a name, to which processes append while this one lives.
pub struct Records(File);

impl Records {
    pub fn new() -> Result<Records, String> {
        let file = rustix::fs::memfd_create("selfpage-records", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let allow = "allow memfd_create in the container's seccomp profile";
        let refused = |cause| format!("memfd_create: {cause}; {}", cause::remedy(cause).unwrap_or(allow));
        let file = file.map_err(refused)?;
        // Processes have their parts of it mapped, and would get SIGBUS there.
        let not_sealed = |cause| format!("fcntl(F_ADD_SEALS): {cause}; allow it in the container's seccomp profile");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).map_err(not_sealed)?;
        Ok(Records(file.into()))
    }

    /// Where other processes find it, and what it is by its device and inode: they may live longer than this one, and then another file
    /// may have the name. Before that the namespace that this process has its number in.
    pub fn name(&self) -> io::Result<String> {
        let (about, namespace) = (self.0.metadata()?, std::fs::metadata("/proc/self/ns/pid")?.ino());
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd());
        Ok(format!("{namespace}:{}:{}:{path}", about.dev(), about.ino()))
    }

    /// What they say.
    pub fn read(mut self) -> io::Result<Told> {
        self.0.rewind()?;
        let mut told = Told { is_full: self.0.metadata()?.len() >= RECORDS_BYTES, ..Told::default() };
        for line in BufReader::new(self.0.take(MOST_BYTES)).split(b'\n') {
            if let Ok(line) = serde_json::from_slice(&line?) {
                told.add(line);
            }
        }
        Ok(told)
    }
}

/// What processes left.
#[derive(Default)]
pub struct Told {
    /// The records that count.
    processes: Vec<Value>,
    /// Programs that were executed and could not be entered, each once.
    not_managed: Vec<Value>,
    /// Whether there was no room for more of either.
    is_full: bool,
}

impl Told {
    fn add(&mut self, line: Value) {
        if line["not_managed"].is_string() {
            if !self.not_managed.contains(&line) {
                self.not_managed.push(line);
            }
        // Whatever else stands there, none of ours has written it.
        } else if !line["pid"].is_u64() {
        } else if line["goes_on"] != true {
            self.processes.push(line);
        // The exec, or the filter, that the last record was written for has failed.
        } else if let Some(index) = self.processes.iter().rposition(|record| record["pid"] == line["pid"]) {
            self.processes.remove(index);
        }
    }

    /// Whether no process left anything.
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.not_managed.is_empty()
    }

    /// A line for each program that was executed and could not be entered, and one if not all is told.
    pub fn complaints(&self) -> impl Iterator<Item = String> {
        let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
        let entered_not = self.not_managed.iter().map(move |line| {
            format!("{} was executed and not managed: {}", text(line, "not_managed"), text(line, "why"))
        });
        let full = self.is_full.then(|| {
            format!(
                "there is no room for more records ({} MiB): processes that ended later are not in the statistics, nor are programs \
                 that were executed later and not managed; run a part at a time",
                RECORDS_BYTES >> 20
            )
        });
        entered_not.chain(full)
    }

    /// All of it as one object.
    pub fn json(self) -> String {
        let mut whole = merged(self.processes);
        whole["not_managed"] = Value::Array(self.not_managed);
        format!("{whole}\n")
    }
}

fn merged(processes: Vec<Value>) -> Value {
    let number = |process: &Value, key: &str| process[key].as_f64().unwrap_or(0.0);
    let mut whole = Map::new();
    for key in LARGEST {
        let largest = processes.iter().filter_map(|process| process[key].as_u64()).max();
        whole.insert(key.into(), json!(largest.unwrap_or(0)));
    }
    for key in SUMS {
        let sum = processes.iter().filter_map(|process| process[key].as_u64()).fold(0, u64::saturating_add);
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
    use std::io::Write;

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
        let mut told = Told::default();
        lines.into_iter().for_each(|line| told.add(line));
        assert_eq!(told.processes, [record(2, 5), record(1, 4)]);
    }

    fn told(lines: &str) -> Told {
        let mut records = Records::new().unwrap();
        records.0.write_all(lines.as_bytes()).unwrap();
        records.read().unwrap()
    }

    #[test]
    fn what_is_no_record_is_passed_over() {
        let told = told("7\n[1]\n\"text\"\nnull\n{\"pid\":\"7\"}\n{}\n{\"pid\":7}\n{\"goes_on\":true}\n");
        assert_eq!(told.processes, [json!({"pid": 7})]);
    }

    #[test]
    fn sums_end_at_the_largest_number() {
        let line = format!("{{\"pid\":1,\"faults_total\":{}}}\n", u64::MAX);
        assert!(told(&line.repeat(2)).json().contains(&format!("\"faults_total\":{}", u64::MAX)));
    }

    #[test]
    fn so_much_is_read_and_no_more() {
        let mut records = Records::new().unwrap();
        let line = b"{\"pid\":1}\n";
        records.0.write_all(line).unwrap();
        // Without an end of a line, until far behind what there may be.
        records.0.set_len(64 * MOST_BYTES).unwrap();
        records.0.seek(io::SeekFrom::End(0)).unwrap();
        records.0.write_all(&[b"\n", &line[..]].concat()).unwrap();
        let told = records.read().unwrap();
        assert!(told.is_full && told.processes.len() == 1);
    }

    /// Processes have it mapped.
    #[test]
    fn the_file_does_not_become_shorter() {
        let mut records = Records::new().unwrap();
        records.0.write_all(b"{}\n").unwrap();
        assert!(records.0.set_len(0).is_err());
    }

    #[test]
    fn a_program_that_was_not_entered_is_told_once() {
        let line = |program: &str| json!({"not_managed": program, "why": "it is linked statically"});
        let mut told = Told::default();
        [line("/a"), line("/b"), line("/a")].into_iter().for_each(|line| told.add(line));
        let complaints: Vec<_> = told.complaints().collect();
        assert_eq!(complaints.len(), 2);
        assert!(complaints[0].contains("/a") && complaints[0].contains("statically"));
        assert!(told.processes.is_empty());
    }
}
