//! What is in the tree is done, and holds on every machine.

use super::findings::Finding;
use super::source::{Source, words};

/// Marks of unfinished work. Written in halves, so that this file does not hold them.
const MARKS: [&str; 4] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
const MACROS: [&str; 2] = [concat!("to", "do!"), concat!("unimple", "mented!")];
const IGNORE: &str = concat!("#[ig", "nore");
/// What a merge leaves at the beginning of a line where it does not know which of two versions to take.
const CONFLICTS: [&str; 3] = [concat!("<<<", "<<<< "), concat!("|||", "|||| "), concat!(">>>", ">>>> ")];
/// Folders that exist on a developer's machine only.
const MACHINE: [&str; 2] = [concat!("/wo", "rk/"), concat!("/tmp/", "wt/")];

pub fn check(source: &Source) -> Vec<Finding> {
    let text = &source.text;
    let mut findings = Vec::new();
    for mark in MARKS {
        let unfinished = words(text, mark).map(|at| source.finding(at, format!("{mark}: finish it, or open an issue")));
        findings.extend(unfinished);
    }
    for word in MACROS.iter().chain([&IGNORE]) {
        let left = source.code.match_indices(word).filter(|(at, _)| !follows_word(&source.code, *at, word));
        findings.extend(left.map(|(at, _)| source.finding(at, format!("`{word}`: finish it, or take it out"))));
    }
    for mark in CONFLICTS {
        let left = text.match_indices(mark).filter(|(at, _)| *at == 0 || text[..*at].ends_with('\n'));
        findings.extend(left.map(|(at, _)| source.finding(at, format!("`{mark}`: choose one of the two versions"))));
    }
    for folder in MACHINE {
        let paths = text.match_indices(folder).filter(|(at, _)| !inside_path(text, *at));
        findings.extend(paths.map(|(at, _)| source.finding(at, format!("`{folder}` exists on one machine only"))));
    }
    findings
}

fn follows_word(text: &str, at: usize, word: &str) -> bool {
    word.starts_with(char::is_alphabetic)
        && text[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_')
}

fn inside_path(text: &str, at: usize) -> bool {
    text[..at].ends_with(|before: char| before.is_alphanumeric() || "_-.~}$)".contains(before))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        check(&Source::new("a.rs", text)).len()
    }

    #[test]
    fn a_conflict_that_was_left_is_found() {
        for mark in CONFLICTS {
            assert_eq!(found(&format!("{mark}main\n")) + found(&format!("one\n{mark}main\n")), 2, "{mark}");
            assert_eq!(found(&format!("a line with {mark}in it")), 0);
        }
    }

    #[test]
    fn unfinished_work_is_found() {
        for mark in MARKS {
            assert_eq!(found(&format!("// {mark}: later")), 1, "{mark}");
        }
        for word in MACROS {
            assert_eq!(found(&format!("fn f() {{ {word}() }}")), 1, "{word}");
        }
        assert_eq!(found(&format!("{IGNORE}]\nfn f() {{}}")), 1);
        assert_eq!(found(&format!("{IGNORE} = \"slow\"]\nfn f() {{}}")), 1);
    }

    #[test]
    fn names_of_temporary_files_and_prose_are_fine() {
        assert_eq!(found(&format!("f(\"/tmp/pageX{}\"); // what there is to do", MARKS[2])), 0);
        assert_eq!(found(&format!("f(\"{}(\")", MACROS[0])), 0);
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        for folder in MACHINE {
            assert_eq!(found(&format!("f(\"{folder}a\")")), 1, "{folder}");
        }
        assert_eq!(found(&format!("f(\"target{}a\")", MACHINE[0])), 0);
    }
}
