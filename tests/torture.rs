//! Programs of `crates/malloc/tests/c/torture.c` that free what they do not have, and what they are told, with any of our allocators.
//! Include it where tests need it: `#[path = "../../../tests/torture.rs"] mod torture;`

/// What is given to `free` and is no block.
pub const NO_BLOCKS: [(&str, &str); 5] = [
    ("large-freed-twice", "freed already"),
    ("foreign", "no block"),
    ("within", "inside of the block"),
    ("askew", "no block"),
    ("beyond", "no block"),
];

/// How an object can be freed twice.
pub const WAYS_TO_FREE_TWICE: [&str; 9] = [
    "at-once",
    "after-others",
    "after-thread",
    "before-thread",
    "by-threads",
    "given-back",
    "aligned",
    "resized",
    "measured",
];

/// One line, which names the pointer that the program wrote to its output, and says what it is.
#[track_caller]
pub fn names_what_it_is(arguments: &[&str], pointer: &str, said: &str, what: &str) {
    assert!(said.contains(&format!("({})", pointer.trim())) && said.contains(what), "{arguments:?} {pointer}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
}
