//! Whose pressure the keeper listens to.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use selfpage::alloc;

use crate::own_process;
use crate::skip::skip;

/// A control group of version 2, below the one that this process was in.
struct Group {
    before: PathBuf,
    path: PathBuf,
}

impl Group {
    fn new(name: &str) -> Option<Group> {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let mount = mounts.into_iter().find(|mount| mount.join("cgroup.procs").exists())?;
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let before = mount.join(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
        let path = before.join(format!("selfpage-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).ok()?;
        Some(Group { before, path })
    }

    fn join(&self) {
        enter(&self.path).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = enter(&self.before);
        let _ = fs::remove_dir(&self.path);
    }
}

fn enter(group: &Path) -> std::io::Result<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

/// Whether the keeper, which has descriptors of its own, has this file open.
fn keeper_has(file: &Path) -> bool {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let keepers =
        tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "selfpage-keeper\n"));
    let mut files = keepers.filter_map(|task| fs::read_dir(task.join("fd")).ok()).flat_map(|files| files.flatten());
    files.any(|entry| fs::read_link(entry.path()).is_ok_and(|link| link == file))
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn who_comes_to_another_group_listens_to_that() {
    own_process::run("pressure::who_comes_to_another_group_listens_to_that", || {
        let [Some(first), Some(second)] = ["first", "second"].map(Group::new) else {
            return skip("cgroup", "no groups of version 2 can be made: be root, outside of a container");
        };
        let [of_first, of_second] = [&first, &second].map(|group| group.path.join("memory.pressure"));
        if !of_first.exists() {
            return skip("psi", "groups report no pressure: boot with psi=1");
        }
        // SAFETY: the process has no other thread that looks at its environment.
        unsafe { std::env::remove_var("MEMORY_PRESSURE_WATCH") };
        first.join();
        alloc::keeper::start().unwrap();
        wait_until("its first group is not listened to", || keeper_has(&of_first));
        second.join();
        wait_until("its second group is not listened to", || keeper_has(&of_second));
        assert!(!keeper_has(&of_first), "both are");
    });
}
