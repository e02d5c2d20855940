//! Whose pressure the keeper listens to.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
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

/// What the kernel says of the keeper.
fn keepers() -> impl Iterator<Item = PathBuf> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "selfpage-keeper\n"))
}

/// Whether it, which has descriptors of its own, has this file open.
fn keeper_has(file: &Path) -> bool {
    let mut files = keepers().filter_map(|task| fs::read_dir(task.join("fd")).ok()).flat_map(|files| files.flatten());
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
        // What is new is open before what was there is closed.
        wait_until("both are", || !keeper_has(&of_first));
    });
}

/// Has nobody write to this file any more who sees what this thread does, nor ask it for reports. False: there can be no mounts for it.
fn make_read_only(file: &Path) -> bool {
    let (path, none) = (CString::new(file.as_os_str().as_bytes()).unwrap(), std::ptr::null());
    let flags = [libc::MS_BIND, libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY];
    // SAFETY: texts that outlive the calls.
    flags.into_iter().all(|flags| unsafe { libc::mount(path.as_ptr(), path.as_ptr(), none, flags, none.cast()) == 0 })
}

/// Whether the keeper has looked for what reports, and found nothing: then it sleeps.
fn keeper_sleeps() -> bool {
    let sleeps = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep].map(|call| format!("{call} "));
    keepers().any(|task| {
        let call = fs::read_to_string(task.join("syscall")).unwrap_or_default();
        sleeps.iter().any(|sleep| call.starts_with(sleep))
    })
}

#[test]
fn who_comes_to_a_group_that_reports_from_where_nobody_did_listens_to_it() {
    own_process::run("pressure::who_comes_to_a_group_that_reports_from_where_nobody_did_listens_to_it", || {
        let [Some(first), Some(second)] = ["mute", "heard"].map(Group::new) else {
            return skip("cgroup", "no groups of version 2 can be made: be root, outside of a container");
        };
        let [of_first, of_second] = [&first, &second].map(|group| group.path.join("memory.pressure"));
        if !of_first.exists() {
            return skip("psi", "groups report no pressure: boot with psi=1");
        }
        let none = std::ptr::null();
        // SAFETY: a text that outlives the call; and the process has no other thread that looks at its environment.
        let apart = unsafe {
            std::env::remove_var("MEMORY_PRESSURE_WATCH");
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) == 0
        };
        if !(apart && [&of_first, Path::new("/proc/pressure/memory")].into_iter().all(make_read_only)) {
            return skip("mount", "no mounts of its own: be root, outside of a container");
        }
        first.join();
        alloc::keeper::start().unwrap();
        wait_until("it does not sleep", keeper_sleeps);
        second.join();
        wait_until("its second group is not listened to", || keeper_has(&of_second));
    });
}
