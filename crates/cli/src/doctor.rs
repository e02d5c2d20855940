//! `selfpage doctor`: a line for each thing that selfpage needs of the machine.

use selfpage::doctor::{Finding, State, can_run, examine};
use std::fmt::Write as _;
use std::io::{self, IsTerminal};

use crate::output;

/// How what was found is printed.
#[derive(Clone, Copy)]
pub enum Form {
    /// One object a line.
    Json,
    /// Aligned lines.
    Lines,
}

/// Whether a terminal shows the lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ink {
    Plain,
    Colored,
}

/// Examines the machine and prints what was found. Returns the exit status: 0 if selfpage can run, else 1.
pub fn run(form: Form) -> i32 {
    let findings = examine();
    let says = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    // no-color.org: a variable that is empty says nothing.
    let is_plain = says("NO_COLOR").is_some() || says("TERM").is_none_or(|kind| kind == "dumb");
    let is_colored = io::stdout().is_terminal() && !is_plain;
    let text = match form {
        Form::Json => lines_for_machines(&findings),
        Form::Lines => lines_for_people(&findings, if is_colored { Ink::Colored } else { Ink::Plain }),
    };
    output::print("doctor", &text).max(i32::from(!can_run(&findings)))
}

fn lines_for_machines(findings: &[Finding]) -> String {
    findings.iter().fold(String::new(), |text, Finding { feature, state, why, remedy }| {
        let object = serde_json::json!({ "feature": feature, "state": state.word(), "why": why, "remedy": remedy });
        text + &object.to_string() + "\n"
    })
}

fn lines_for_people(findings: &[Finding], ink: Ink) -> String {
    let width = findings.iter().map(|finding| finding.feature.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { feature, state, why, remedy } in findings {
        let word = state.word();
        let (on, off) = match state {
            _ if ink == Ink::Plain => ("", ""),
            State::Present => ("\x1b[32m", "\x1b[0m"),
            State::Degraded => ("\x1b[33m", "\x1b[0m"),
            State::Refused | State::Absent => ("\x1b[31m", "\x1b[0m"),
        };
        let remedy = remedy.as_ref().map(|remedy| format!(" [remedy: {remedy}]")).unwrap_or_default();
        let _ = writeln!(text, "{on}{word:<8}{off}  {feature:<width$}  {why}{remedy}"); // A string takes everything.
    }
    if !can_run(findings) {
        text.push_str("selfpage cannot run here: it needs a userfaultfd with UFFDIO_MOVE, unshare(CLONE_FILES), and its own files in /proc.\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        let finding = |feature, state, why: &str, remedy: Option<&str>| Finding {
            feature,
            state,
            why: why.to_owned(),
            remedy: remedy.map(str::to_owned),
        };
        vec![
            finding("short", State::Present, "works", None),
            finding("a longer name", State::Refused, "a \"quoted\"\ttab", Some("echo 'x=\"y\"' > /etc\\z")),
        ]
    }

    #[test]
    fn json_is_one_object_a_line_and_survives_quotes() {
        let text = lines_for_machines(&findings());
        let objects: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("a line is no JSON")).collect();
        assert_eq!(objects.len(), 2);
        assert_eq!(objects[0]["remedy"], serde_json::Value::Null);
        assert_eq!(objects[1]["state"], "refused");
        assert_eq!(objects[1]["why"], "a \"quoted\"\ttab");
        assert_eq!(objects[1]["remedy"], "echo 'x=\"y\"' > /etc\\z");
    }

    #[test]
    fn lines_are_aligned_and_plain_without_a_terminal() {
        let text = lines_for_people(&findings(), Ink::Plain);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "present   short          works");
        assert_eq!(lines[1].find("a \"quoted\""), lines[0].find("works"));
        assert!(lines[2].starts_with("selfpage cannot run here"), "no line says that pages move");
        assert!(!text.contains('\x1b') && lines_for_people(&findings(), Ink::Colored).contains("\x1b[31mrefused"));
    }
}
