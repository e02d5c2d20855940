//! A control group with a limit, for tests of what happens near one. Include it where tests need it:
//! `#[path = "../../../tests/limited_group.rs"] mod limited_group;`

use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// A group below the one that this process was in.
pub struct Group {
    before: PathBuf,
    /// Where it is: what is written to its `cgroup.procs` is in it.
    pub path: PathBuf,
}

impl Group {
    /// With nobody in it.
    pub fn limited(limit_bytes: usize) -> Option<Group> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let group = |start: &str, mount: &str| {
            let line = groups.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(start))?;
            Some(PathBuf::from(format!("/sys/fs/cgroup{mount}{line}")))
        };
        let places = [(group("memory:", "/memory"), "memory.limit_in_bytes"), (group(":", ""), "memory.max")];
        places.into_iter().find_map(|(before, limit)| {
            let before = before?;
            let name = format!("selfpage-test-{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let group = Group { path: before.join(name), before };
            fs::create_dir(&group.path).ok()?;
            fs::write(group.path.join(limit), limit_bytes.to_string()).ok()?;
            Some(group)
        })
    }

    /// Takes this process in, until the group is dropped.
    #[allow(dead_code)]
    pub fn join(&self) {
        fs::write(self.path.join("cgroup.procs"), process::id().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // One that never was in it is where it was.
        let _ = fs::write(self.before.join("cgroup.procs"), process::id().to_string());
        let _ = fs::remove_dir(&self.path);
    }
}

/// Why a test is skipped that has none.
pub const REASON: &str = "no control group with a limit can be made: be root, outside of a container";
