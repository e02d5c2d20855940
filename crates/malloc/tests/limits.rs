//! Near the limit of a control group: what is kept of larger blocks makes room for objects in time. And where there is no memory to look
//! for one.

#[path = "../../../tests/limited_group.rs"]
mod limited_group;
mod preloaded;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use limited_group::{Group, REASON};
use preloaded::{compile, errors, preloaded, skip, text};

const MIB: usize = 1 << 20;

/// The program in `group`, by way of a shell.
fn within(group: &Group, arguments: &[&str]) -> Command {
    let mut command = preloaded("/bin/sh");
    let procs = group.path.join("cgroup.procs");
    command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(procs).arg(compile("limits.c", &[])).args(arguments);
    command
}

/// Without a keeper, which would look, too.
fn alone(group: &Group, arguments: &[&str]) -> Command {
    let mut command = within(group, arguments);
    command.env("SELFPAGE_KEEPER", "0");
    command
}

fn lives(mut command: Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    assert_eq!(text(&output), "done\n");
}

#[test]
fn what_is_kept_makes_room_for_objects_below_the_limit() {
    let Some(group) = Group::limited(256 * MIB) else { return skip("cgroup", REASON) };
    lives(within(&group, &[]));
    lives(alone(&group, &[]));
    let mut keeps = within(&group, &[]);
    keeps.env("SELFPAGE_RETAIN", "1G");
    lives(keeps);
}

#[test]
fn and_for_what_the_program_maps_in_pieces() {
    let Some(group) = Group::limited(256 * MIB) else { return skip("cgroup", REASON) };
    lives(alone(&group, &["maps"]));
}

#[test]
fn below_a_low_limit_the_keeper_comes_sooner() {
    let Some(group) = Group::limited(256 * MIB) else { return skip("cgroup", REASON) };
    lives(within(&group, &["threads"]));
}

#[test]
fn a_forked_child_heeds_the_limit_of_its_own_group() {
    let groups = [256, 96].map(|mib| Group::limited(mib * MIB));
    let [Some(parents), Some(childs)] = &groups else { return skip("cgroup", REASON) };
    lives(alone(parents, &["child", childs.path.to_str().unwrap()]));
}

#[test]
fn a_child_that_sees_no_groups_heeds_its_parents_limit() {
    let Some(group) = Group::limited(256 * MIB) else { return skip("cgroup", REASON) };
    let empty = preloaded::directory();
    let arguments = ["sees-nothing", empty.path().to_str().unwrap()];
    lives(alone(&group, &arguments));
    // And one whose keeper looks again.
    lives(within(&group, &arguments));
}

/// As containers and daemons have it: an empty directory is where groups would be mounted.
#[test]
fn nor_does_a_root_with_proc_and_no_groups_in_it_take_the_limit_away() {
    let Some(group) = Group::limited(256 * MIB) else { return skip("cgroup", REASON) };
    let root = preloaded::directory();
    let proc = root.path().join("proc");
    fs::create_dir(&proc).unwrap();
    fs::create_dir_all(root.path().join("sys/fs/cgroup")).unwrap();
    let arguments = ["sees-nothing", root.path().to_str().unwrap(), proc.to_str().unwrap()];
    lives(alone(&group, &arguments));
    lives(within(&group, &arguments));
}

/// What a program says that takes `first` MiB, forbids itself to open files, and takes `more`.
fn opens_nothing(first: &str, more: &str, retain: &str) -> Output {
    let mut command = preloaded(compile("limits.c", &[]));
    command.args(["opens-nothing", more, first]).env("SELFPAGE_RETAIN", retain).output().unwrap()
}

#[test]
fn small_programs_look_for_no_limit() {
    for (more, retain) in [("1", "64M"), ("100", "0")] {
        let output = opens_nothing("0", more, retain);
        assert_eq!(text(&output), "done\n", "{more} MiB: {:?} {}", output.status, errors(&output));
    }
    assert_eq!(opens_nothing("0", "4", "64M").status.signal(), Some(libc::SIGSYS), "nobody would see it");
}

#[test]
fn nor_does_one_that_has_taken_enough_before_it_forbids_itself_to() {
    for (first, more) in [("4", "1"), ("4", "100"), ("16", "100")] {
        let output = opens_nothing(first, more, "64M");
        assert_eq!(text(&output), "done\n", "{first} MiB, {more} MiB: {:?} {}", output.status, errors(&output));
    }
}

#[test]
fn and_where_there_is_to_be_no_keeper_it_may_have_been_one_long_block() {
    let mut command = preloaded(compile("limits.c", &[]));
    command.args(["opens-nothing", "100", "300"]).envs([("SELFPAGE_RETAIN", "64M"), ("SELFPAGE_KEEPER", "0")]);
    lives(command);
}

/// As CAVEATS.md promises.
#[test]
fn where_nothing_is_kept_a_program_may_forbid_itself_all_calls_but_those_for_memory() {
    let run = |wishes: &[(&str, &str)]| {
        let mut command = preloaded(compile("limits.c", &[]));
        command.arg("memory-alone").envs(wishes.iter().copied()).output().unwrap()
    };
    let wishes = ["SELFPAGE_RETAIN", "SELFPAGE_KEEPER", "SELFPAGE_MAPS"].map(|name| (name, "0"));
    let output = run(&[&wishes[..], &[("MIMALLOC_USE_NUMA_NODES", "1")]].concat());
    assert_eq!(text(&output), "done\n", "{:?} {}", output.status, errors(&output));
    assert_eq!(run(&[]).status.signal(), Some(libc::SIGSYS), "nobody would see it");
}

/// As CAVEATS.md lists them, where all is kept.
#[test]
fn a_program_may_forbid_itself_all_calls_that_are_not_listed() {
    // What it does, and for what calls are allowed.
    let run = |does: &str, allowed: &str| {
        let mut command = preloaded(compile("limits.c", &[]));
        let wishes = [("SELFPAGE_KEEPER", "0"), ("SELFPAGE_MAPS", "0"), ("MIMALLOC_USE_NUMA_NODES", "1")];
        command.args(["listed", does, allowed]).envs(wishes).output().unwrap()
    };
    for does in ["usual", "long", "longer"] {
        let output = run(does, does);
        assert_eq!(text(&output), "done\n", "{does}: {:?} {}", output.status, errors(&output));
    }
    for (does, allowed) in [("long", "usual"), ("longer", "long")] {
        assert_eq!(run(does, allowed).status.signal(), Some(libc::SIGSYS), "{does}: nobody would see it");
    }
}

#[test]
fn most_of_what_few_addresses_have_room_for_is_the_programs() {
    for kib in [2_000_000, 14_800_000] {
        let mut command = preloaded("/bin/sh");
        command.args(["-c", &format!("ulimit -v {kib}; exec timeout -s KILL 120 \"$0\"")]);
        command.arg(compile("addresses.c", &[]));
        lives(command);
    }
}

/// Little data, in KiB: what is begun as the program grows finds nothing left.
fn goes_on_with(kib: usize, mode: &str) {
    let mut command = preloaded("/bin/sh");
    let limit = format!("ulimit -d {kib}; exec timeout -s KILL 60 \"$0\" \"$1\"");
    command.args(["-c", &limit]).arg(compile("used_up.c", &[])).arg(mode);
    lives(command);
}

#[test]
fn a_look_at_the_limit_that_there_is_no_memory_for_ends_nothing() {
    for kib in [20_000, 40_000, 100_000] {
        goes_on_with(kib, "");
    }
}

#[test]
fn nor_does_a_keeper_that_there_is_no_memory_for() {
    goes_on_with(400_000, "keeper");
}

#[test]
fn what_was_freed_under_a_limit_on_data_is_there_for_blocks_of_other_lengths() {
    for kib in [20_000, 40_000, 100_000, 400_000] {
        goes_on_with(kib, "again");
        goes_on_with(kib, "again-after-blocks");
    }
}

#[test]
fn it_leaves_errno_as_it_was() {
    let mut command = preloaded(compile("used_up.c", &[]));
    command.arg("errno");
    lives(command);
}

/// How many mappings a program has left that had `count` blocks of 1.1 MB. `None`: the kernel would refuse them, whoever asks.
fn mappings_left(count: &str, mode: &str, retain: &str) -> Option<usize> {
    let setting = fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    if setting.trim() == "2" {
        skip("overcommit", "44 GB may be more than is allowed: sysctl -w vm.overcommit_memory=0");
        return None;
    }
    let mut command = preloaded(compile("many.c", &[]));
    let output = command.args([count, mode]).env("SELFPAGE_RETAIN", retain).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    Some(text(&output).trim().parse().unwrap())
}

#[test]
fn the_mappings_of_freed_blocks_go_back() {
    let Some(left) = mappings_left("24000", "trim", "1G") else { return };
    assert!(left < 1000, "{left} mappings after malloc_trim");
}

#[test]
fn also_where_nothing_is_kept() {
    let Some(left) = mappings_left("24000", "", "0") else { return };
    assert!(left < 10_000, "{left} mappings");
}

#[test]
fn there_are_more_blocks_than_mappings_for_them() {
    mappings_left("40000", "trim", "1G");
}
