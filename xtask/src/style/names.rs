//! A room is named after what is in it.

use super::findings::Finding;
use super::source::{Source, words};

/// Names that say nothing about what is inside.
const EMPTY: [&str; 8] = ["util", "utility", "utilities", "common", "helper", "manager", "misc", "miscellaneous"];

pub fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for room in source.path.split('/') {
        let stem = room.split('.').find(|part| !part.is_empty()).unwrap_or(room);
        if is_empty(stem) {
            findings.push(source.finding(0, format!("`{stem}` names no thing: call it after what is in it")));
        }
    }
    for at in words(&source.code, "mod") {
        let after = source.code.get(at + 3..).unwrap_or_default().trim_start();
        let name = after.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        if is_empty(name) {
            findings.push(source.finding(at, format!("module `{name}` names no thing: call it after what is in it")));
        }
    }
    findings
}

fn is_empty(name: &str) -> bool {
    name.split(['_', '-']).any(|part| {
        let part = part.to_ascii_lowercase();
        EMPTY.contains(&part.as_str()) || part.strip_suffix('s').is_some_and(|singular| EMPTY.contains(&singular))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        check(&Source::new(path, text)).len()
    }

    #[test]
    fn files_and_folders_have_nouns() {
        assert_eq!(found("crates/core/src/utils.rs", ""), 1);
        assert_eq!(found("crates/cli/tests/common/mod.rs", ""), 1);
        assert_eq!(found("crates/core/src/page_helper.rs", ""), 1);
        assert_eq!(found("crates/core/src/commonality.rs", ""), 0);
    }

    #[test]
    fn modules_have_nouns() {
        assert_eq!(found("a.rs", "pub mod manager { }"), 1);
        assert_eq!(found("a.rs", "mod page;\n// mod util;"), 0);
    }
}
