//! Each row of the table in docs/run.md, through the C library and by number.

mod run;

use std::path::PathBuf;
use std::sync::OnceLock;

/// Frames are fewer than what each row touches.
const FRAMES: &str = "8M";

fn row(name: &str) {
    static PROGRAMS: OnceLock<Option<[PathBuf; 2]>> = OnceLock::new();
    let programs = PROGRAMS
        .get_or_init(|| run::possible().then(|| [run::compile("mappings", &[]), run::compile("mappings", &["-DRAW"])]));
    for program in programs.iter().flatten() {
        let ran = run::run(FRAMES, program, &[name]);
        assert_eq!(ran.text(), "ok\n", "{}: {}", program.display(), ran.errors());
        let ran = ran.ok();
        assert!(ran.stats["resident_bytes_max"].as_u64().unwrap() <= 8 << 20);
    }
}

macro_rules! rows {
    ($($name:ident,)*) => { $(#[test] fn $name() { row(stringify!($name)); })* };
}

rows! {
    moved_access, moved_wishes, block_again, no_room,
    partial_munmap, fixed_over, mremap, read_only, no_access, reserve_then_commit, executable, dontneed, free, guard,
    huge_page, dont_fork, mlock, mlockall, mincore, process_madvise, kinds,
}
