//! What the tool shows on a terminal while it works: of one that can do little, too.

#[path = "../../../tests/skip.rs"]
mod skip;
mod tool;

use tool::{Place, on_terminal, without_escapes};

const BENCH: &str = "bench faults --quick --reps 2 --case first-touch-4k --system kernel";

/// What is shown on a terminal of this kind. `None`, and said so: there can be none here.
fn shown(place: &Place, kind: Option<&str>, arguments: &str) -> Option<String> {
    on_terminal(kind, place, arguments).map_err(|(needs, why)| skip::skip(needs, &why)).ok()
}

#[test]
fn a_terminal_that_moves_no_cursor_gets_lines() {
    let place = Place::new("lines");
    for kind in [Some("dumb"), None] {
        for (arguments, line) in [(BENCH, "[2/2] first-touch-4k kernel 2/2: "), ("tour --quick", "  writing: in core ")]
        {
            let Some(shown) = shown(&place, kind, arguments) else { return };
            assert!(shown.lines().any(|one| one.starts_with(line)) && !shown.contains('\x1b'), "{kind:?}: {shown:?}");
        }
    }
}

#[test]
fn an_object_of_json_has_its_line_to_itself() {
    let place = Place::new("objects");
    let both = format!("{BENCH} --system userfaultfd-alone --json");
    let Some(shown) = shown(&place, Some("xterm"), &both) else { return };
    let plain = without_escapes(&shown);
    assert!(plain.contains("░"), "no live line: {plain:?}");
    let objects: Vec<&str> = plain.split(['\r', '\n']).filter(|line| line.contains(r#"{"bench""#)).collect();
    assert!(!objects.is_empty() && objects.iter().all(|line| line.starts_with('{')), "{objects:?}");
}
