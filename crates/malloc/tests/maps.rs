//! What a program maps in pieces: huge pages where it uses them, and none where it would not.

mod preloaded;

use std::process::Command;

use preloaded::{compile, errors, preloaded, skip, text};

/// Bytes of it in memory, and faults, of a program that maps in that manner.
#[derive(Debug)]
struct Cost {
    bytes: usize,
    faults: usize,
}

fn cost(mut command: Command) -> Cost {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, errors(&output));
    let said: Vec<usize> = text(&output).split_whitespace().map(|number| number.parse().unwrap()).collect();
    let [kib, faults] = said[..] else { panic!("{said:?}") };
    Cost { bytes: kib << 10, faults }
}

/// Without the library, and with it.
fn costs(mode: &str) -> [Cost; 2] {
    let program = compile("maps.c", &[]);
    let commands = [Command::new(&program), preloaded(&program)];
    commands.map(|mut command| {
        command.arg(mode);
        cost(command)
    })
}

fn no_huge_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    // Where all have them, faults tell nothing.
    let without = !setting.contains("[madvise]");
    if without {
        skip("thp", "huge pages are not on request: write madvise into /sys/kernel/mm/transparent_hugepage/enabled");
    }
    without
}

#[test]
fn a_program_that_maps_much_and_touches_little_stays_small() {
    let [plain, with] = costs("sparse");
    assert!(with.bytes <= plain.bytes / 2 * 3 + (2 << 20), "{with:?} in place of {plain:?}");
}

#[test]
fn one_that_comes_to_touch_little_has_soon_no_huge_pages() {
    let [plain, with] = costs("turns");
    assert!(with.bytes <= plain.bytes + (40 << 20), "{with:?} in place of {plain:?}");
}

#[test]
fn what_is_filled_comes_in_huge_pages() {
    if no_huge_pages() {
        return;
    }
    // Whatever is kept: all of it, a third of it zeros; none of it; or a part of each piece. And by a thread that is left alone.
    for mode in ["dense", "zeros", "churn", "aligned", "alone"] {
        let [plain, with] = costs(mode);
        assert!(with.faults <= plain.faults / 8, "{mode}: {with:?} in place of {plain:?}");
    }
}

#[test]
fn what_is_mapped_can_be_left_to_the_kernel() {
    if no_huge_pages() {
        return;
    }
    let mut command = preloaded(compile("maps.c", &[]));
    command.arg("dense").env("SELFPAGE_MAPS", "0");
    let alone = cost(command);
    let [plain, _] = costs("dense");
    assert!(alone.faults >= plain.faults, "{alone:?} in place of {plain:?}");
}
