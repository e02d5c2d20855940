//! What a rule found.

/// A line that breaks a rule, and what to do about it.
#[derive(PartialEq, Eq, Debug)]
pub struct Finding {
    pub path: String,
    /// Counted from 1.
    pub line: usize,
    pub what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}
