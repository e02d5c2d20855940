//! Large blocks that grow, in frames fewer than they have pages.

mod run;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use run::Ran;

/// What moves, in all: three times the frames.
const PAGES: u64 = 24 << 20 >> 12;

fn case(name: &str) -> Option<Ran> {
    case_with(&["--frames", "8M"], name)
}

fn case_with(options: &[&str], name: &str) -> Option<Ran> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let flags = ["-fno-builtin", "-pthread"];
    let program = PROGRAM.get_or_init(|| run::possible().then(|| run::compile("large", &flags)));
    Some(run::run_with(Path::new("/"), options, program.as_ref()?, &[name]).ok())
}

fn number(ran: &Ran) -> u64 {
    ran.text().trim().parse().unwrap_or_else(|_| panic!("{}", ran.text()))
}

/// Each time that one moves it finds room to double: from 1 to 64 MiB that is six times, and not sixty-three.
#[test]
fn blocks_that_grow_in_turns_seldom_move() {
    let Some(ran) = case("turns") else { return };
    let moves = number(&ran);
    assert!(moves <= 4 * 6, "{moves} moves");
}

/// Room is nobody's where there is no other.
#[test]
fn room_to_grow_is_used_where_there_is_no_other() {
    let Some(ran) = case("all_of_it") else { return };
    let mib = number(&ran);
    assert!(mib > 31 << 10, "{mib} MiB of 32 GiB");
}

fn count(ran: &Ran, key: &str) -> u64 {
    ran.stats[key].as_u64().unwrap()
}

/// What a case with moves brings in and saves more than the one without: copying would take all of it each time.
fn seen_of(moved: &str, still: &str) -> Option<(u64, u64)> {
    let (moved, still) = (case(moved)?, case(still)?);
    assert!(number(&moved) >= 8 && number(&still) == 0, "{} moves", number(&moved));
    let more = |key: &str| count(&moved, key).saturating_sub(count(&still, key));
    // Each page was written and looked at.
    assert!(count(&still, "fills_total") > PAGES, "{}", still.stats);
    Some((more("fills_total"), more("saves_total")))
}

#[test]
fn blocks_move_without_being_read() {
    let Some((fills, saves)) = seen_of("moved", "still") else { return };
    assert!(fills < PAGES / 4 && saves < PAGES / 4, "{fills} fills and {saves} saves more");
}

#[test]
fn mappings_move_without_being_read() {
    let Some((fills, saves)) = seen_of("remapped", "mapped") else { return };
    assert!(fills < PAGES / 4 && saves < PAGES / 4, "{fills} fills and {saves} saves more");
}

/// What is known of a mapping that stays the kernel's changes as a whole, however many stretches of it count.
#[test]
fn address_space_that_is_used_in_stretches_opens_and_ends_about_as_fast_as_in_the_kernel() {
    let most: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if most < 60_000 {
        return run::skip("mappings", "a process may have too few mappings: sysctl vm.max_map_count=65530");
    }
    let Some(ran) = case("stretches") else { return };
    assert!(number(&ran) < 4, "{} times the kernel's time", number(&ran));
}

/// Each page has one frame, whatever becomes of its block.
#[test]
fn blocks_move_without_a_store() {
    let Some(ran) = case_with(&["--frames", "128M", "--store", "none"], "once") else { return };
    let fills = count(&ran, "fills_total");
    assert!(number(&ran) == 2 && fills < PAGES + PAGES / 4, "{fills} fills");
}

#[test]
fn blocks_move_while_others_are_used_and_in_a_child() {
    case("beside");
}

#[test]
fn a_block_with_a_guard_moves() {
    let Some(ran) = case("with_a_guard") else { return };
    if number(&ran) == 0 {
        run::skip("guards", "the kernel has none (MADV_GUARD_INSTALL, Linux 6.13)");
    }
}
