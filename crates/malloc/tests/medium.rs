//! Medium huge pages: where the machine's owner allows them, and nowhere else. The settings are the whole machine's, so they are others for
//! no longer than a small program runs.

mod preloaded;

use std::fs::{self, File};

use preloaded::{compile, errors, preloaded, skip, text};

/// Sizes in KiB, and what the setting is unless a test says something else: huge pages on request, and no others.
const SIZES: [(usize, &str); 8] = [
    (16, "never"),
    (32, "never"),
    (64, "never"),
    (128, "never"),
    (256, "never"),
    (512, "never"),
    (1024, "never"),
    (2048, "madvise"),
];

/// A size's setting, for as long as this lives.
struct Setting {
    file: String,
    before: String,
}

fn file(size_kib: usize) -> String {
    format!("/sys/kernel/mm/transparent_hugepage/hugepages-{size_kib}kB/enabled")
}

impl Setting {
    fn of(size_kib: usize, word: &str) -> Option<Setting> {
        let file = file(size_kib);
        let all = fs::read_to_string(&file).ok()?;
        let before = all.split_once('[')?.1.split_once(']')?.0.to_owned();
        fs::write(&file, word).ok()?;
        Some(Setting { file, before })
    }
}

/// `None`: they cannot be set here.
fn settings(allowed: &[usize]) -> Option<Vec<Setting>> {
    let word = |size, unless| if allowed.contains(size) { "madvise" } else { unless };
    SIZES.iter().map(|(size, unless)| Setting::of(*size, word(size, unless))).collect()
}

impl Drop for Setting {
    fn drop(&mut self) {
        let restored = fs::write(&self.file, &self.before);
        assert!(restored.is_ok() || std::thread::panicking(), "{} stays as it is: {restored:?}", self.file);
    }
}

#[derive(Debug)]
struct Cost {
    faults: usize,
    kib: usize,
    huge_kib: usize,
}

/// What a program costs where these sizes are allowed, of those below 2 MiB. `None`, and said so: that cannot be set here.
fn cost(mode: &str, allowed: &[usize]) -> Option<Cost> {
    let mut program = preloaded(compile("medium.c", &[]));
    // One test at a time, of all processes: who came second would put back what the first has set.
    let turn = File::open(file(64));
    let output = turn.ok().filter(|turn| turn.lock().is_ok()).and_then(|_turn| {
        let _settings = settings(allowed)?;
        Some(program.arg(mode).output().unwrap())
    });
    let Some(output) = output else {
        skip("mthp", "the sizes of huge pages cannot be set: be root, and have Linux 6.8 or later");
        return None;
    };
    assert!(output.status.success(), "{mode}: {:?} {}", output.status, errors(&output));
    let said: Vec<usize> = text(&output).split_whitespace().map(|number| number.parse().unwrap()).collect();
    let [faults, kib, huge_kib] = said[..] else { panic!("{said:?}") };
    Some(Cost { faults, kib, huge_kib })
}

#[test]
fn first_touches_take_few_faults_where_they_are_allowed() {
    // The first 4 MiB of objects have small pages, and so have the edges of pieces.
    for (mode, pages) in [("objects", 3584), ("large-objects", 3584), ("pieces", 2304), ("long-pieces", 1792)] {
        let (Some(without), Some(with)) = (cost(mode, &[]), cost(mode, &[64])) else { return };
        assert!(without.faults >= pages, "{mode}: {without:?} where they are forbidden");
        assert!(with.faults <= without.faults * 2 / 5, "{mode}: {with:?} in place of {without:?}");
        assert!(with.kib <= without.kib + 1024, "{mode}: {with:?} in place of {without:?}");
        assert_eq!((without.huge_kib, with.huge_kib), (0, 0), "{mode}: {with:?} in place of {without:?}");
    }
}

#[test]
fn a_small_program_has_none() {
    let (Some(without), Some(with)) = (cost("small", &[]), cost("small", &[64])) else { return };
    assert!(with.faults.abs_diff(without.faults) <= 16, "{with:?} in place of {without:?}");
    assert!(with.kib <= without.kib + 64, "{with:?} in place of {without:?}");
}

#[test]
fn nothing_is_asked_for_where_larger_ones_would_come() {
    let Some(found) = cost("objects", &[64, 128]) else { return };
    assert!(found.faults >= 3584, "{found:?}");
}
