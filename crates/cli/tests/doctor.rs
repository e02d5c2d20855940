//! `selfpage doctor` as a user and a script meet it.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use selfpage::doctor::{can_run, examine};
use serde_json::Value;

#[path = "../../../tests/filter.rs"]
mod filter;
#[path = "../../../tests/mounts.rs"]
mod mounts;
#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use filter::Call;
use tool::Place;

fn doctor(arguments: &[&str]) -> (String, Output) {
    let output = Command::new(env!("CARGO_BIN_EXE_selfpage")).arg("doctor").args(arguments).output().unwrap();
    let expected = i32::from(!can_run(&examine()));
    assert_eq!(output.status.code(), Some(expected), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (String::from_utf8(output.stdout.clone()).unwrap(), output)
}

/// What no machine goes without a line for.
#[rustfmt::skip]
const FEATURES: [&str; 40] = [
    "kernel", "seccomp", "userfaultfd", "/dev/userfaultfd", "UFFDIO_MOVE", "UFFDIO_MOVE keeps uffd-wp",
    "UFFD_FEATURE_SIGBUS", "UFFD_FEATURE_THREAD_ID", "UFFD_FEATURE_PAGEFAULT_FLAG_WP", "UFFD_FEATURE_WP_ASYNC",
    "UFFDIO_COPY", "UFFDIO_CONTINUE", "UFFDIO_POISON", "unshare(CLONE_FILES)", "pidfd_getfd", "process_vm_readv",
    "process_vm_writev", "/dev/kvm", "soft-dirty bits", "PAGEMAP_SCAN", "/proc/self/mem", "MADV_POPULATE_WRITE", "MADV_GUARD_INSTALL", "transparent huge pages",
    "vm.overcommit_memory", "huge pages for blocks and frames", "medium huge pages (mTHP)", "overcommit for blocks",
    "memory pressure (PSI)", "free page reporting", "guest_halt_poll_ns", "protection keys", "RLIMIT_MEMLOCK", "swap",
    "vm.max_map_count", "io_uring", "preadv2", "pwritev2", "O_DIRECT", "store space",
];

#[test]
fn each_feature_is_one_object_of_json() {
    let (text, _) = doctor(&["--json"]);
    let mut features = BTreeSet::new();
    for line in text.lines() {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}"));
        let object = object.as_object().unwrap();
        assert_eq!(object.keys().collect::<Vec<_>>(), ["feature", "remedy", "state", "why"], "{line}");
        let state = object["state"].as_str().unwrap();
        assert!(["present", "degraded", "refused", "absent"].contains(&state), "{line}");
        assert!(object["why"].as_str().is_some_and(|why| !why.is_empty()), "{line}");
        assert!(object["remedy"].is_null() || object["remedy"].as_str().is_some_and(|one| !one.is_empty()), "{line}");
        assert!(features.insert(object["feature"].as_str().unwrap().to_owned()), "twice: {line}");
    }
    for feature in FEATURES {
        assert!(features.contains(feature), "{feature} has no line in {features:?}");
    }
    let examined: BTreeSet<String> = examine().iter().map(|finding| finding.feature.to_owned()).collect();
    assert_eq!(features, examined);
}

#[test]
fn people_get_a_line_for_each_feature_and_no_colours_without_a_terminal() {
    let (text, _) = doctor(&[]);
    for finding in examine() {
        let line = |line: &&str| line[line.find(' ').unwrap_or(0)..].trim_start().starts_with(finding.feature);
        assert!(text.lines().any(|one| line(&one)), "{} has no line in {text}", finding.feature);
    }
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn a_terminal_gets_colours_unless_it_has_none_or_they_are_not_wanted() {
    let has_colours = |settings: &[(&str, &str)]| {
        let mut run = Command::new("script");
        run.args(["-qec", &format!("{} doctor", env!("CARGO_BIN_EXE_selfpage")), "/dev/null"]);
        run.env("TERM", "xterm").env_remove("NO_COLOR").envs(settings.iter().copied()).stdin(Stdio::null());
        run.output().map(|output| String::from_utf8_lossy(&output.stdout).contains("\x1b[3"))
    };
    let Ok(coloured) = has_colours(&[]) else {
        return skip::skip("script", "there is no script(1) to make a terminal: apt-get install bsdutils");
    };
    assert!(coloured && has_colours(&[("NO_COLOR", "")]).unwrap());
    assert!(!has_colours(&[("NO_COLOR", "1")]).unwrap() && !has_colours(&[("TERM", "dumb")]).unwrap());
}

#[test]
fn a_limit_on_threads_is_found_and_named() {
    let place = Place::new("threads");
    let tool = place.copy_of_tool("selfpage");
    // A user with no other processes, for whom this one is all that may be.
    let mut limited = Command::new("prlimit");
    limited.args(["--nproc=1", "setpriv", "--reuid=64123", "--clear-groups"]).arg(&tool).arg("doctor");
    let Ok(output) = limited.current_dir("/").output() else {
        return skip::skip("prlimit", "there is no prlimit(1): apt-get install util-linux");
    };
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if errors.contains("setpriv: ") || errors.contains("prlimit: ") {
        return skip::skip("root", &errors);
    }
    let line = text.lines().find(|line| line.contains("no program can be paged")).unwrap_or_default();
    assert!(line.contains("no thread can be started") && line.contains("ulimit -u"), "{text}{errors}");
    assert_eq!((output.status.code(), &*errors), (Some(1), ""), "{text}");
}

/// Mounts of this process's own, and nothing below these two.
fn without_dev_and_sys() -> std::io::Result<()> {
    // SAFETY: test: names that end with NUL.
    let done = unsafe {
        let mount = |from: &CStr, on: &CStr, flags| {
            libc::mount(from.as_ptr(), on.as_ptr(), from.as_ptr(), flags, std::ptr::null())
        };
        libc::unshare(libc::CLONE_NEWNS) == 0
            && mount(c"none", c"/", libc::MS_REC | libc::MS_PRIVATE) == 0
            && mount(c"tmpfs", c"/dev", 0) == 0
            && mount(c"tmpfs", c"/sys", 0) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn a_root_without_dev_and_sys_is_not_a_kernel_that_lacks_them() {
    if !can_run(&examine()) {
        return skip::skip("uffd", "here all is refused, or absent");
    }
    let mut bare = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    // SAFETY: test: system calls alone.
    let Ok(output) = unsafe { bare.arg("doctor").pre_exec(without_dev_and_sys) }.output() else {
        return skip::skip("root", "nothing can be mounted over /dev and /sys");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for feature in ["unshare(CLONE_FILES)", "pidfd_getfd"] {
        assert!(text.lines().any(|line| line.starts_with("present") && line.contains(feature)), "{feature}: {text}");
    }
    assert!(!text.contains("not in this kernel") && !text.contains("6.8 or newer"), "{text}");
    assert!(text.contains("mount -t sysfs sysfs /sys"), "{text}");
}

const UFFDIO_COPY: Call = Call::with(libc::SYS_ioctl, 1, 0xC028_AA03);
const UFFDIO_WRITEPROTECT: Call = Call::with(libc::SYS_ioctl, 1, 0xC018_AA06);

#[test]
fn a_call_that_a_filter_refuses_is_found_and_named() {
    if !can_run(&examine()) {
        return skip::skip("uffd", "here all is refused, or absent");
    }
    // Before Linux 6.9 there is no PIDFD_THREAD.
    let of_thread = Call::with(libc::SYS_pidfd_open, 1, libc::O_EXCL as u32);
    for (call, errno, feature, state, status) in [
        (UFFDIO_WRITEPROTECT, libc::EPERM, "UFFD_FEATURE_PAGEFAULT_FLAG_WP", "refused", 0),
        (UFFDIO_COPY, libc::EPERM, "UFFDIO_COPY", "refused", 0),
        (Call::with(libc::SYS_unshare, 0, libc::CLONE_FILES as u32), libc::EPERM, "unshare(CLONE_FILES)", "refused", 1),
        (Call::with(libc::SYS_pidfd_getfd, 2, 0), libc::EPERM, "pidfd_getfd", "refused", 0),
        (of_thread, libc::EINVAL, "pidfd_getfd", "degraded", 0),
        (Call::with(libc::SYS_process_vm_readv, 5, 0), libc::EPERM, "process_vm_readv", "refused", 0),
        (Call::with(libc::SYS_process_vm_writev, 5, 0), libc::EPERM, "process_vm_writev", "refused", 0),
        (Call::any(libc::SYS_preadv2), libc::EPERM, "preadv2", "refused", 0),
        (Call::any(libc::SYS_pwritev2), libc::ENOSYS, "pwritev2", "absent", 0),
        (Call::with(libc::SYS_prlimit64, 1, libc::RLIMIT_MEMLOCK), libc::EPERM, "RLIMIT_MEMLOCK", "degraded", 0),
        (Call::with(libc::SYS_prlimit64, 1, libc::RLIMIT_NOFILE), libc::EPERM, "RLIMIT_NOFILE", "degraded", 0),
    ] {
        let mut filtered = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        // SAFETY: test: two system calls.
        let output = unsafe { filtered.arg("doctor").pre_exec(move || call.fails(errno)) }.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let found = text.lines().any(|line| line.starts_with(state) && line.split(' ').any(|word| word == feature));
        assert!(found, "{feature} is not {state} in {text}");
        assert_eq!(output.status.code(), Some(status), "{feature}: {text}");
    }
}

#[test]
fn a_bench_leaves_out_what_a_filter_refuses() {
    const UFFDIO_API: Call = Call::with(libc::SYS_ioctl, 1, 0xC018_AA3F);
    for (name, case, system) in [
        ("faults", "first-touch-4k", "selfpage-upcall-zero"),
        ("snapshot", "write-1k", "selfpage-worker"),
        ("appel-li", "trap", "selfpage-upcall"),
        ("faults", "first-touch-4k", "userfaultfd-alone"),
        ("appel-li", "trap", "userfaultfd-alone"),
    ] {
        let mut filtered = Command::new(env!("CARGO_BIN_EXE_selfpage"));
        filtered.args(["bench", name, "--quick", "--reps", "1", "--case", case, "--system", system]);
        // SAFETY: test: two system calls.
        let output = unsafe { filtered.pre_exec(|| UFFDIO_API.fails(libc::EPERM)) };
        let output = output.env_remove("SELFPAGE_REQUIRE").output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.contains("SKIP(uffd: "), "{errors}");
    }
}

#[test]
fn pressure_that_is_switched_off_is_no_matter_of_the_kernels() {
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    let output = doctor.args(["doctor", "--json"]).env("MEMORY_PRESSURE_WATCH", "/dev/null").output().unwrap();
    let objects = String::from_utf8(output.stdout).unwrap();
    let mut objects = objects.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let pressure = objects.find(|object| object["feature"] == "memory pressure (PSI)").unwrap();
    assert!(pressure["why"].as_str().unwrap().contains("switched off by MEMORY_PRESSURE_WATCH"), "{pressure}");
    assert_eq!(pressure["remedy"], "unset MEMORY_PRESSURE_WATCH");
}

/// What the tool says, as after `prepare`; and its status.
fn after(
    arguments: &[&str],
    prepare: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static,
) -> (String, Option<i32>) {
    let mut run = Command::new(env!("CARGO_BIN_EXE_selfpage"));
    // SAFETY: test: system calls alone.
    let output = unsafe { run.args(arguments).pre_exec(prepare) }.output();
    output.map_or_else(
        |why| (why.to_string(), None),
        |output| {
            let said = [output.stdout, output.stderr].concat();
            (String::from_utf8_lossy(&said).into_owned(), output.status.code())
        },
    )
}

/// The line about a feature.
#[track_caller]
fn line_of<'a>(text: &'a str, feature: &str) -> &'a str {
    let line =
        text.lines().find(|line| line.split_once(' ').is_some_and(|(_, rest)| rest.trim_start().starts_with(feature)));
    line.unwrap_or_else(|| panic!("{feature} has no line in {text}"))
}

/// Before 5.11 there is no flag for faults of the program's alone, and no device beside the call before 6.1.
#[test]
fn a_kernel_without_userfaultfds_for_the_program_alone_is_refused_by_name() {
    if !can_run(&examine()) {
        return skip::skip("uffd", "here all is refused, or absent");
    }
    let old = || {
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u32 | 1;
        without_dev_and_sys().and_then(|()| Call::with(libc::SYS_userfaultfd, 0, flags).fails(libc::EINVAL))
    };
    let (text, status) = after(&["doctor"], old);
    if status.is_none() {
        return skip::skip("root", &text);
    }
    assert_eq!(status, Some(1), "{text}");
    for feature in [
        "UFFDIO_MOVE ",
        "UFFD_FEATURE_SIGBUS",
        "UFFD_FEATURE_THREAD_ID",
        "UFFD_FEATURE_PAGEFAULT_FLAG_WP",
        "UFFDIO_COPY",
    ] {
        let line = line_of(&text, feature);
        assert!(line.starts_with("absent") && line.contains("boot Linux 6.8 or newer"), "{line}");
    }
    let (text, status) = after(&["tour", "--quick"], old);
    assert!(status == Some(1) && text.contains("boot Linux 6.8 or newer") && !text.contains("seccomp"), "{text}");
}

#[test]
fn a_limit_on_addresses_is_named() {
    for (option, limit) in [("-d", "RLIMIT_DATA"), ("-v", "RLIMIT_AS")] {
        let line = format!("ulimit {option} 4000000 && exec \"$0\" doctor");
        let output = Command::new("sh").args(["-c", &line, env!("CARGO_BIN_EXE_selfpage")]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let line = line_of(&text, "vm.overcommit_memory");
        let remedy = format!("[remedy: ulimit {option} unlimited]");
        let is_named = line.contains(&format!("{limit} is 3.8 GiB")) && line.contains(&remedy);
        // Where the kernel counts every address the limit is not what is in the way alone.
        assert!(line.starts_with("refused") && is_named || line.starts_with("degraded"), "{line}");
    }
}

#[test]
fn a_limit_on_open_files_below_what_a_domain_takes_is_no_machine_to_run_on() {
    if !can_run(&examine()) {
        return skip::skip("uffd", "here all is refused, or absent");
    }
    let under = |files: u32, verb: &str| {
        let line = format!("ulimit -n {files} && exec \"$0\" {verb}");
        let mut run = Command::new("sh");
        run.args(["-c", &line, env!("CARGO_BIN_EXE_selfpage")]);
        // With the standard streams alone, whatever whoever runs this has left open.
        let alone = || {
            // SAFETY: test: no descriptor is closed before the exec.
            let marked = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
            if marked == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: test: a system call.
        let output = unsafe { run.pre_exec(alone) }.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (status, text) = under(10, "doctor");
    let line = line_of(&text, "RLIMIT_NOFILE");
    assert!(status == Some(1) && line.starts_with("refused") && line.contains("ulimit -n"), "{status:?} {line}");
    // From where the doctor says that it goes on, it does.
    let least = (10..64).find(|files| under(*files, "doctor").0 == Some(0)).unwrap();
    assert_eq!(under(least, "tour --quick").0, Some(0), "with {least} open files");
}

#[test]
fn a_program_with_more_rights_than_its_caller_heeds_no_wish_for_pressure() {
    let place = Place::new("rights");
    if rustix::fs::statvfs(&place.0).unwrap().f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID) {
        return skip::skip("suid", "no program in /var/tmp gets its owner's rights: mount it without nosuid");
    }
    let tool = place.copy_of_tool("selfpage");
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let mut run = Command::new(&tool);
    run.arg("doctor").current_dir("/").env("MEMORY_PRESSURE_WATCH", "/dev/null").uid(64123).gid(64123);
    let Ok(output) = run.output() else {
        return skip::skip("root", "nobody can be another user here");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let line = line_of(&text, "memory pressure (PSI)");
    assert!(!line.contains("switched off"), "{line}");
}

/// Names of files, and what the kernel calls a process, are bytes.
#[test]
fn names_that_are_no_text_hide_nothing_from_the_doctor() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new("bytes");
    let there = place.0.join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
    std::fs::create_dir(&there).unwrap();
    let tool = place.copy_of_tool(there.join(std::ffi::OsStr::from_bytes(b"self\xe9")));
    let output = Command::new(&tool).arg("doctor").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!line_of(&text, "vm.max_map_count").contains(" 0 in use"), "{text}");
    assert!(!line_of(&text, "seccomp").contains("unknown"), "{text}");
}

#[test]
fn swap_areas_that_cannot_be_read_may_be_there() {
    let place = Place::new("swaps");
    let areas = b"Filename\tType\tSize\tUsed\tPriority\n/caf\xe9 file 1048572 0 -2\n";
    std::fs::write(place.0.join("swaps"), areas).unwrap();
    for line in [r#"mount --bind "$1/swaps" /proc/swaps"#, r#"mount -t tmpfs none "$1" && mount --bind "$1" /proc"#] {
        let line = format!(r#"{line} && exec "$0" doctor"#);
        let output = mounts::with_mounts(&line, [Path::new(env!("CARGO_BIN_EXE_selfpage")), &place.0]);
        let output = match output {
            Ok(output) => output,
            Err(why) => return skip::skip("mount", &why),
        };
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!line_of(&text, "swap ").contains("frames stay in memory"), "{line}: {text}");
    }
}
