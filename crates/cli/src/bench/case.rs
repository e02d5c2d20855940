//! The names of paging cases: `<seq|rnd|cyclic-lru|cyclic-mru>-<read|write>-<1|2>t`.

use std::fmt;
use std::str::FromStr;

/// The order of accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One pass over the data, page after page, every cache line of each.
    Sequential,
    /// Pages at random, one word of each, frames full from the start.
    Random,
    /// Passes over data of 4/3 the frames; a system that can choose evicts what was used longest ago.
    CyclicLru,
    /// The same, evicting what was used last.
    CyclicMru,
}

impl Pattern {
    /// True for the two loops over data of 4/3 the frames.
    pub fn is_cyclic(self) -> bool {
        matches!(self, Pattern::CyclicLru | Pattern::CyclicMru)
    }
}

/// What is done to each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Words are read and checked.
    Read,
    /// The same, and word 0 is written.
    Write,
}

/// One case of `paging`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The order of accesses.
    pub pattern: Pattern,
    /// What is done to each page.
    pub access: Access,
    /// Each thread has pages of its own.
    pub threads: usize,
}

impl Case {
    /// All cases, in the order in which they run.
    pub fn all() -> Vec<Case> {
        let mut all = Vec::new();
        for pattern in [Pattern::Sequential, Pattern::Random, Pattern::CyclicLru, Pattern::CyclicMru] {
            for access in [Access::Read, Access::Write] {
                all.extend([1, 2].map(|threads| Case { pattern, access, threads }));
            }
        }
        all
    }
}

impl fmt::Display for Case {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pattern = match self.pattern {
            Pattern::Sequential => "seq",
            Pattern::Random => "rnd",
            Pattern::CyclicLru => "cyclic-lru",
            Pattern::CyclicMru => "cyclic-mru",
        };
        let access = match self.access {
            Access::Read => "read",
            Access::Write => "write",
        };
        write!(out, "{pattern}-{access}-{}t", self.threads)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(name: &str) -> Result<Case, String> {
        Case::all()
            .into_iter()
            .find(|case| case.to_string() == name)
            .ok_or_else(|| format!("unknown case '{name}' of paging"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_sixteen_of_the_grammar() {
        let names: Vec<String> = Case::all().iter().map(Case::to_string).collect();
        assert_eq!(names.len(), 16);
        assert_eq!(names[0], "seq-read-1t");
        assert_eq!(names[15], "cyclic-mru-write-2t");
        for name in names {
            assert_eq!(name.parse::<Case>().unwrap().to_string(), name);
        }
        assert!("rnd-read-3t".parse::<Case>().is_err());
    }
}
