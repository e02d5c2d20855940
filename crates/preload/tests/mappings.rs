//! Each row of the table in docs/run.md, through the C library and by number.

mod run;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

use run::HugePages;

/// Frames are fewer than what each row touches.
const FRAMES: &str = "8M";

/// A program in both ways; `None`: nothing can be run here.
type Both = Option<[PathBuf; 2]>;

/// The program of that name in tests/c.
fn programs(source: &'static str) -> Both {
    static MADE: LazyLock<Mutex<HashMap<&'static str, Both>>> = LazyLock::new(Mutex::default);
    let make =
        || run::possible().then(|| [run::compile(source, &["-pthread"]), run::compile(source, &["-pthread", "-DRAW"])]);
    MADE.lock().unwrap_or_else(PoisonError::into_inner).entry(source).or_insert_with(make).clone()
}

fn row(source: &'static str, name: &str) {
    for program in programs(source).iter().flatten() {
        let ran = run::run(FRAMES, program, &[name]);
        if ran.text() == "too many\n" {
            let why = "a process may have more mappings than can be made here: sysctl vm.max_map_count=65530";
            return run::skip("mappings", why);
        }
        if ran.text() == "no mseal\n" {
            return run::skip("mseal", "the kernel is older than 6.10");
        }
        if ran.text() == "no faults of the kernel's\n" {
            let why =
                "the kernel's own faults are nothing that this user may answer: sysctl vm.unprivileged_userfaultfd=1";
            return run::skip("userfaultfd", why);
        }
        if ran.text() == "no huge pages\n" {
            return HugePages::skip();
        }
        if ran.text() == "no chroot\nok\n" {
            return run::skip("root", "only root can do without /proc, by a root directory of its own");
        }
        if ran.text() == "not 0\n" {
            return run::skip("address-0", "this user may map nothing at address 0: it takes root");
        }
        assert_eq!(ran.text(), "ok\n", "{}: {}", program.display(), ran.errors());
        let ran = ran.ok();
        assert!(ran.stats["resident_bytes_max"].as_u64().unwrap() <= 8 << 20);
    }
}

macro_rules! rows {
    (of $source:literal: $($name:ident,)*) => { $(#[test] fn $name() { row($source, stringify!($name)); })* };
    ($($name:ident,)*) => { rows! { of "mappings": $($name,)* } };
}

rows! {
    moved_access, moved_wishes, block_again, no_room,
    partial_munmap, fixed_over, fixed_over_refused, other_bits, mremap, to_address_0, read_only, no_access, reserve_then_commit, executable, dontneed, free, guard,
    huge_page, dont_fork, mlock, locked_block, mlockall, mincore, process_madvise, kinds, mseal,
}

rows! {
    of "calls":
    msync, bad_pointers, fixed_noreplace, protection_key, posix_madvise, mlock2, munlockall, moved_over_locked, lock_and_fork, populate, dump, fork_again, will_need,
    hints, near_the_program, pageout, dontneed_locked, other_advice, mremap_over_differing, mremap_smaller_over,
    other_clone, all_wishes, rounded_hints, map_locked, single_pages, many_wishes, in_system_calls, own_userfaultfd, own_namespace,
}

rows! {
    of "steps":
    taken_away, closed_on_its_way, mapped_over_a_file, mapped_over_what_is_closed, mapped_over_what_is_used, moved_over, moved_over_by_copies, moved_over_what_is_closed,
    moved_over_what_is_protected,
}

rows! {
    of "moves":
    smaller_on_the_way, not_managed_and_smaller_on_the_way, as_long_where_it_stays, out_to_a_free_place, out_untouched,
    refused_by_a_driver_under_a_filter,
}

#[test]
fn huge_pages_over() {
    let _allowed = HugePages::allow();
    row("moves", "huge_pages_over");
    row("moves", "huge_files_over_under_a_filter");
    row("moves", "huge_files_over_under_a_filter_from_before");
    row("moves", "huge_files_over_under_a_filter_that_says_nothing");
}

rows! {
    of "unwinding":
    through_mmap, through_execl, each_has_rules, trapped, trapped_and_made,
}

rows! {
    of "waits":
    locked_by_faults, grown_by_faults, left_to_others, told_of_its_end, told_of_advice, paged_out_meanwhile,
}
