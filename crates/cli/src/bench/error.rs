//! Why a case gave no result.

use std::fmt;
use std::io;
use std::path::Path;

/// Why a case gave no result.
#[derive(Debug)]
pub enum Error {
    /// Something that it needs is not there. Said aloud, and a failure if SELFPAGE_REQUIRE names it.
    Skip { name: &'static str, reason: String },
    /// A place that the command line names cannot be used: bad usage.
    Unusable(String),
    /// It went wrong.
    Failed(String),
    /// A signal asked us to stop.
    Interrupted,
    /// Nobody reads the results any more, and they are not kept.
    Unread,
}

impl Error {
    /// A call on `path` failed.
    pub fn io(operation: &str, path: &Path, error: io::Error) -> Error {
        Error::Failed(format!("{operation} {}: {error}", path.display()))
    }

    /// The library refused something that is about `name`; where the machine cannot do it, that is what is missing.
    pub fn of_library(name: &'static str, error: selfpage::Error) -> Error {
        match error.kind() {
            selfpage::Kind::Unsupported => Error::skip(name, error.to_string()),
            _ => Error::Failed(error.to_string()),
        }
    }

    /// The thing `name` is missing.
    pub fn skip(name: &'static str, reason: impl Into<String>) -> Error {
        Error::Skip { name, reason: reason.into() }
    }
}

/// What regions and domains need, and what they refuse.
impl From<selfpage::Error> for Error {
    fn from(error: selfpage::Error) -> Error {
        Error::of_library("uffd", error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Skip { name, reason } => write!(out, "SKIP({name}: {reason})"),
            Error::Unusable(reason) | Error::Failed(reason) => write!(out, "{reason}"),
            Error::Interrupted => write!(out, "stopped by a signal"),
            Error::Unread => write!(out, "nobody reads the results"),
        }
    }
}

/// True when the environment says that `name` must not be skipped.
pub fn required(name: &str) -> bool {
    std::env::var("SELFPAGE_REQUIRE").is_ok_and(|list| list.split(',').any(|item| item.trim() == name))
}
