//! What the documents promise call by call has a test, which the row names.

use super::findings::Finding;
use super::source::{Source, words};

/// The tables whose last column names tests, as `file::name`, and where those are.
const TABLES: [(&str, &str, &str); 1] = [("docs/run.md", "| call | meaning | test |", "crates/preload/tests/")];

pub fn check(sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (document, head, tests) in TABLES {
        let Some(source) = sources.iter().find(|source| source.path == document) else { continue };
        let Some(begin) = source.text.find(head) else {
            findings.push(source.finding(0, format!("no table begins with `{head}`")));
            continue;
        };
        let mut at = begin;
        for line in source.text[begin..].lines().take_while(|line| line.starts_with('|')) {
            if at != begin && !line.starts_with("|---") {
                findings.extend(missing(line, tests, sources).map(|what| source.finding(at, what)));
            }
            at += line.len() + 1;
        }
    }
    findings
}

/// What is wrong with the last cell of a row.
fn missing(row: &str, tests: &str, sources: &[Source]) -> Option<String> {
    let cell = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or_default();
    cell.split(", ").find_map(|name| {
        let Some((file, test)) = name.trim_matches('`').split_once("::") else {
            return Some(format!("`{cell}` names no test as `file::name`"));
        };
        let path = format!("{tests}{file}.rs");
        let has_it = |source: &Source| source.path == path && words(&source.code, test).next().is_some();
        (!sources.iter().any(has_it)).then(|| format!("there is no test `{test}` in {path}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(row: &str) -> Vec<Finding> {
        let text = format!("# Run\n| call | meaning | test |\n|---|---|---|\n{row}\n\nAfter it | nothing | counts |\n");
        let test = Source::new("crates/preload/tests/maps.rs", "fn move_down() {}\n// up");
        check(&[Source::new("docs/run.md", &text), test])
    }

    #[test]
    fn each_row_names_tests_that_there_are() {
        assert_eq!(found("| `a` | b | `maps::move_down` |"), []);
        for row in ["| `a` | b | `maps::move_down`, `maps::up` |", "| `a` | b |  |", "| `a` | b | move_down |"] {
            assert_eq!(found(row).iter().map(|finding| finding.line).collect::<Vec<_>>(), [4], "{row}");
        }
    }

    #[test]
    fn the_table_is_there() {
        assert_eq!(check(&[Source::new("docs/run.md", "| call | meaning |\n")]).len(), 1);
    }
}
