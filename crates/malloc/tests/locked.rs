//! A program that locks its memory.

mod preloaded;

use preloaded::{compile, errors, preloaded, skip, text};

/// What it says, with all kept that is kept of freed blocks, and with nothing: then calls for memory alone are made.
fn says(arguments: &[&str]) -> [String; 2] {
    ["1G", "0"].map(|retain| {
        let mut command = preloaded(compile("locked.c", &[]));
        let output = command.args(arguments).env("SELFPAGE_RETAIN", retain).output().unwrap();
        assert!(output.status.success(), "{retain}: {:?} {}", output.status, errors(&output));
        text(&output).trim().to_owned()
    })
}

#[test]
fn a_locked_block_stays_locked_as_it_shrinks_and_grows_and_counts_no_longer_than_it_is() {
    assert_eq!(says(&[]), ["done", "done"]);
}

#[test]
fn a_block_stays_locked_where_the_process_may_lock_nothing_any_more() {
    assert_eq!(says(&["lost"]), ["done", "done"]);
}

#[test]
fn where_all_is_locked_it_stays_so_beside_blocks_that_move_and_where_they_come_from() {
    let said = says(&["all"]);
    if said.contains(&"may not".to_owned()) {
        return skip("mlockall", "the process may not lock all of its memory: CAP_IPC_LOCK, or ulimit -l unlimited");
    }
    assert_eq!(said, ["done", "done"]);
}

#[test]
fn where_all_is_locked_what_is_mapped_in_pieces_is_locked_piece_by_piece() {
    let said = says(&["pieces"]);
    if said.contains(&"may not".to_owned()) {
        return skip("mlockall", "the process may not lock all of its memory: CAP_IPC_LOCK, or ulimit -l unlimited");
    }
    assert_eq!(said, ["done", "done"]);
}
