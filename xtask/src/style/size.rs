//! A file is one noun, and a noun fits in 600 lines.

use super::findings::Finding;
use super::source::Source;

const LINES_MAX: usize = 600;

/// Longer files, and why each is still one room.
const LONGER: &[(&str, &str)] = &[];

pub fn check(source: &Source) -> Option<Finding> {
    let is_code = [".rs", ".c", ".h", ".py", ".sh"].iter().any(|ending| source.path.ends_with(ending));
    let lines = source.text.lines().count();
    if !is_code || lines <= LINES_MAX || LONGER.iter().any(|(path, _)| *path == source.path) {
        return None;
    }
    let what = format!("{lines} lines, more than {LINES_MAX}: find the second noun in it, or list it with its reason");
    Some(source.finding(0, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_ends_before_line_601() {
        assert_eq!(check(&Source::new("crates/core/src/a.rs", &"\n".repeat(600))), None);
        assert!(check(&Source::new("crates/core/src/a.rs", &"\n".repeat(601))).is_some());
        assert_eq!(check(&Source::new("docs/a.md", &"\n".repeat(601))), None);
    }
}
