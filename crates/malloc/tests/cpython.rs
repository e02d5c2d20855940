//! Those of CPython's own tests that take minutes.

mod preloaded;

#[test]
fn multiprocessing_by_fork() {
    preloaded::cpython(&["test_multiprocessing_fork"], "malloc");
}
