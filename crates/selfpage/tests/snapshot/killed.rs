//! The example that serves and takes snapshots, killed at any moment: what is restored is always one of its own points in time.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::random::{Random, seed};

#[allow(dead_code)]
#[path = "../../examples/kv_snapshot.rs"]
mod kv_snapshot;

const FILE: &str = "SELFPAGE_TEST_KV_FILE";
const ROUNDS: usize = 30;
/// How many snapshots the longest round may see.
const SNAPSHOTS: usize = 200;

/// What the killed process does; by itself it is no test.
#[test]
fn serves_until_killed() {
    if let Some(file) = std::env::var_os(FILE) {
        kv_snapshot::serve(Path::new(&file), &AtomicBool::new(false)).unwrap();
    }
}

fn serving(file: &Path) -> (Child, ChildStdout) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::serves_until_killed", "--nocapture", "--test-threads=1"])
        .env(FILE, file)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = child.stdout.take().unwrap();
    (child, output)
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// How many operations each snapshot that is told of has at least.
fn told(output: ChildStdout) -> impl Iterator<Item = u64> {
    let said = |line: String| line.split("snapshot of ").nth(1)?.split(' ').next()?.parse().ok();
    BufReader::new(output).lines().map_while(Result::ok).filter_map(said)
}

/// How long so many snapshots take on this machine, from the start of the process on.
fn length(file: &Path) -> Duration {
    let began = Instant::now();
    let (child, output) = serving(file);
    let mut told = told(output);
    let count = told.by_ref().take(SNAPSHOTS).count();
    let length = began.elapsed();
    kill(child);
    assert_eq!(count, SNAPSHOTS);
    length
}

#[test]
fn a_process_killed_at_any_moment_goes_on_from_its_own_past() {
    let seed = seed();
    let mut random = Random(seed);
    let dir = tempfile::tempdir().unwrap();
    let length = length(&dir.path().join("measured.snap"));
    println!("seed {seed}, {SNAPSHOTS} snapshots in {length:?}");
    let file = dir.path().join("table.snap");
    let mut before = 0;
    for round in 1..=ROUNDS {
        let (child, output) = serving(&file);
        let reader = std::thread::spawn(|| told(output).last());
        // In the first rounds before the first snapshot, later in the middle of the hundredth.
        let most_us = length.as_micros() as usize * round / ROUNDS;
        std::thread::sleep(Duration::from_micros(random.below(most_us) as u64));
        kill(child);
        let told = reader.join().unwrap();
        assert!(told.is_none() || file.exists());
        if file.exists() {
            let done = kv_snapshot::check(&file).unwrap();
            assert!(
                done >= told.unwrap_or(0) && done >= before,
                "{done} operations; {told:?} were told, {before} before"
            );
            before = done;
        }
    }
    assert!(before > 0, "no snapshot was ever whole");
}
