//! Large blocks that grow, in frames fewer than they have pages.

mod run;

use std::path::PathBuf;
use std::sync::OnceLock;

use run::Ran;

fn case(name: &str) -> Option<Ran> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let flags = ["-fno-builtin"];
    let program = PROGRAM.get_or_init(|| run::possible().then(|| run::compile("large", &flags)));
    Some(run::run("8M", program.as_ref()?, &[name]).ok())
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
