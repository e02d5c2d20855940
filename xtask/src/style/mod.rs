//! The rules of STYLE.md that a program can check.

mod findings;
mod names;
mod open_ends;
mod rooms;
mod rows;
mod size;
mod source;

use findings::Finding;
use source::Source;
use std::path::Path;

/// Checks the whole tree; prints what it finds. True if that is nothing.
pub fn run(root: &Path) -> bool {
    let sources = source::tree(root);
    let soundness = std::fs::read_to_string(root.join("docs/soundness.md")).unwrap_or_default();
    let invariants = rooms::invariants(&soundness);
    let mut findings: Vec<Finding> = sources.iter().flat_map(|source| check(source, &invariants)).collect();
    findings.extend(rows::check(&sources));
    for finding in &findings {
        eprintln!("{finding}");
    }
    println!("style: {} files, {} findings", sources.len(), findings.len());
    findings.is_empty() && !sources.is_empty()
}

fn check(source: &Source, invariants: &[&str]) -> Vec<Finding> {
    let mut findings = names::check(source);
    findings.extend(size::check(source));
    findings.extend(open_ends::check(source));
    findings.extend(rooms::check(source, invariants));
    findings
}
