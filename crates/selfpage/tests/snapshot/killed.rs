//! The example that serves and takes snapshots, killed at any moment: what is restored is always one of its own points in time.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[allow(dead_code)]
#[path = "../../examples/kv_snapshot.rs"]
mod kv_snapshot;

const FILE: &str = "SELFPAGE_TEST_KV_FILE";
const ROUNDS: u64 = 30;

/// What the killed process does; by itself it is no test.
#[test]
fn serves_until_killed() {
    if let Some(file) = std::env::var_os(FILE) {
        kv_snapshot::serve(Path::new(&file), &AtomicBool::new(false)).unwrap();
    }
}

#[test]
fn a_process_killed_at_any_moment_goes_on_from_its_own_past() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("table.snap");
    let mut before = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed::serves_until_killed", "--nocapture", "--test-threads=1"])
            .env(FILE, &file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            // How many operations the newest of the snapshots that were told of has at least.
            let said = |line: &str| line.split("snapshot of ").nth(1)?.split(' ').next()?.parse::<u64>().ok();
            BufReader::new(output).lines().map_while(Result::ok).filter_map(|line| said(&line)).last()
        });
        // In the first rounds before the first snapshot, later in the middle of the hundredth.
        std::thread::sleep(Duration::from_millis(1 + round * 37 % 400));
        child.kill().unwrap();
        child.wait().unwrap();
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
