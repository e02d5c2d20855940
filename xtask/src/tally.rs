//! What tests said: counts and skips, read from their output.

use std::collections::BTreeSet;
use std::ops::AddAssign;

/// Tests and steps that passed, failed, or were skipped.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Tally {
    /// Reads libtest's `test result: ok. 3 passed; 0 failed; 1 ignored; …`; `None` for any other line.
    pub fn read(line: &str) -> Option<Tally> {
        let (_, counts) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
        let mut tally = Tally::default();
        for part in counts.split("; ") {
            let Some((count, what)) = part.split_once(' ') else {
                continue;
            };
            let Ok(count) = count.parse::<u64>() else { continue };
            match what {
                "passed" => tally.passed = count,
                "failed" => tally.failed = count,
                "ignored" => tally.skipped = count,
                _ => {}
            }
        }
        Some(tally)
    }

    /// The closing line of a run.
    pub fn summary(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// How tests that failed panicked, read from libtest's part about failures: tests that are meant to panic say so elsewhere.
#[derive(Default, Debug)]
pub struct Panics {
    telling: Telling,
    pub lines: Vec<String>,
}

/// What the lines that come are about.
#[derive(Default, Clone, Copy, PartialEq, Eq, Debug)]
enum Telling {
    #[default]
    Other,
    Failures,
    /// One panic among those.
    Panic,
}

impl Panics {
    pub fn hear(&mut self, line: &str) {
        let panics = line.starts_with("thread ") && line.contains(" panicked at ");
        self.telling = match (self.telling, line) {
            (_, "failures:") => Telling::Failures,
            (_, "successes:") => Telling::Other,
            (_, line) if Tally::read(line).is_some() => Telling::Other,
            (Telling::Failures | Telling::Panic, _) if panics => Telling::Panic,
            (Telling::Panic, "stack backtrace:" | "") => Telling::Failures,
            (telling, _) => telling,
        };
        if self.telling == Telling::Panic {
            self.lines.push(line.into());
        }
    }
}

/// A test that could not be run here, and why: `SKIP(name: reason)`, and ` in TEST` where that is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Skip {
    pub name: String,
    pub reason: String,
    pub test: Option<String>,
}

impl Skip {
    /// Reads a line that is a skip and nothing else.
    pub fn read(line: &str) -> Option<Skip> {
        let line = line.trim();
        let (said, test) = match line.strip_suffix(')') {
            Some(said) => (said, None),
            None => line.rsplit_once(") in ").map(|(said, test)| (said, Some(test)))?,
        };
        let (name, reason) = said.strip_prefix("SKIP(")?.split_once(':')?;
        Some(Skip { name: name.trim().into(), reason: reason.trim().into(), test: test.map(str::to_owned) })
    }

    /// How many tests that are: one may say it more than once.
    pub fn count(skips: &[&Skip]) -> u64 {
        let tests: BTreeSet<&str> = skips.iter().filter_map(|skip| skip.test.as_deref()).collect();
        (tests.len() + skips.iter().filter(|skip| skip.test.is_none()).count()) as u64
    }

    /// Whether `required` (a comma list, as in `SELFPAGE_REQUIRE`) says that this may not be skipped.
    pub fn forbidden_by(&self, required: &str) -> bool {
        required.split(',').any(|name| name.trim() == self.name)
    }
}

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SKIP({}: {})", self.name, self.reason)?;
        self.test.iter().try_for_each(|test| write!(f, " in {test}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_libtest_prints() {
        let line = "test result: FAILED. 12 passed; 2 failed; 3 ignored; 0 measured; 7 filtered out; finished in 0.01s";
        assert_eq!(Tally::read(line), Some(Tally { passed: 12, failed: 2, skipped: 3 }));
        assert_eq!(Tally::read("test tally::reads ... ok"), None);
    }

    #[test]
    fn sums_up() {
        let mut all = Tally { passed: 1, failed: 2, skipped: 3 };
        all += Tally { passed: 10, failed: 20, skipped: 30 };
        assert_eq!(all.summary(), "11 passed, 22 failed, 33 skipped");
    }

    #[test]
    fn keeps_how_tests_that_failed_panicked() {
        let mut panics = Panics::default();
        let said = "successes:\n\n---- is meant to stdout ----\nthread 'is meant to' (1) panicked at x.rs:1:1:\nwell\n\n\
                    failures:\n\n---- a::b stdout ----\nfigures\n\nthread 'a::b' (7) panicked at y.rs:2:3:\nleft: 1\n\
                    stack backtrace:\n   0: main\n\nfailures:\n    a::b\n\n\
                    test result: FAILED. 1 passed; 1 failed; 0 ignored\nthread 'c' (9) panicked at z.rs:1:1:\n";
        said.lines().for_each(|line| panics.hear(line));
        assert_eq!(panics.lines, ["thread 'a::b' (7) panicked at y.rs:2:3:", "left: 1"]);
    }

    #[test]
    fn reads_what_a_test_that_skips_prints() {
        let skip = Skip::read(&crate::skip::line("uffd", "EPERM (1): set vm.x=1")).unwrap();
        assert_eq!((skip.name.as_str(), skip.reason.as_str()), ("uffd", "EPERM (1): set vm.x=1"));
        assert_eq!(skip.test, None);
        let both = ["SKIP(a: b (c)) in x y::z", "SKIP(d: e) in x y::z", "SKIP(d: e)"].map(Skip::read);
        assert_eq!(both[0].as_ref().unwrap().to_string(), "SKIP(a: b (c)) in x y::z");
        assert_eq!(Skip::count(&both.iter().flatten().collect::<Vec<_>>()), 2);
        assert_eq!(Skip::read("a line about SKIP(uffd: why)"), None);
    }

    #[test]
    fn a_required_name_matches_whole() {
        let skip = Skip::read("SKIP(move: kernel 6.1)").unwrap();
        assert!(skip.forbidden_by("uffd, move"));
        assert!(!skip.forbidden_by("uffd,mover"));
        assert!(!skip.forbidden_by(""));
    }
}
