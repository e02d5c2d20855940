//! Pages that a device holds, which move meanwhile: each case of tests/c/devices.c.

mod run;

fn case(name: &str) {
    if !run::possible() {
        return;
    }
    let ran = run::run("8M", run::compile("devices", &["-pthread"]), &[name]).ok();
    if ran.text() == "no io_uring\n" {
        return run::skip("io_uring", "the kernel refuses it: sysctl kernel.io_uring_disabled=0");
    }
    assert_eq!(ran.text(), "ok\n");
}

#[test]
fn buffers_stay_registered_while_their_pages_move() {
    case("registered");
}

#[test]
fn pages_move_while_they_are_read_to() {
    case("in_flight");
}

#[test]
fn behind_a_page_that_is_held_nobody_sees_the_new_place_empty() {
    case("moved_over");
}
