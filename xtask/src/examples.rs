//! `cargo xtask examples`: runs the library's examples as a reader would. What they show they assert.

use crate::steps::cargo;
use crate::tally::Skip;
use std::path::Path;

/// These do not end by themselves: crates/selfpage/tests/snapshot runs this one.
const ENDLESS: &[&str] = &["kv_snapshot"];

/// Runs each of them, where this machine lets a program page itself. False if one failed.
pub fn run(root: &Path) -> bool {
    let doctor = cargo(root, "run --quiet -p selfpage-cli -- doctor").output();
    if doctor.is_ok_and(|said| said.status.code() == Some(1)) {
        let reason = "`selfpage doctor` says what this machine lacks".into();
        println!("{}", Skip { name: "uffd".into(), reason, test: None });
        return true;
    }
    names(root).iter().fold(true, |fine, name| {
        println!("example {name}");
        let status = cargo(root, &format!("run --quiet -p selfpage --example {name}")).status();
        let succeeded = status.is_ok_and(|status| status.success());
        if !succeeded {
            println!("example {name} failed");
        }
        fine && succeeded
    })
}

fn names(root: &Path) -> Vec<String> {
    let files = std::fs::read_dir(root.join("crates/selfpage/examples")).into_iter().flatten().flatten();
    let stems = files.filter_map(|file| Some(file.path().file_stem()?.to_str()?.to_owned()));
    let mut names: Vec<String> = stems.filter(|name| !ENDLESS.contains(&name.as_str())).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_end_are_run() {
        let names = names(&crate::root());
        assert!(names.iter().any(|name| name == "own_policy") && names.is_sorted(), "{names:?}");
        for endless in ENDLESS {
            assert!(!names.iter().any(|name| name == endless), "{names:?}");
            assert!(crate::root().join(format!("crates/selfpage/examples/{endless}.rs")).exists(), "{endless}");
        }
    }
}
