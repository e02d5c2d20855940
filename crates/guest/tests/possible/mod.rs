//! Tests of virtual machines skip where there can be none.

use selfpage_guest::{Error, Kind};

#[path = "../../../../tests/skip.rs"]
mod skip;

#[allow(unused_imports)]
pub use skip::skip;

/// What was made; `None`, and said so, where this machine lacks what it takes.
///
/// # Panics
/// It failed for another reason.
pub fn here<T>(made: Result<T, Error>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(error) if error.kind() == Kind::Unsupported => {
            skip("kvm", &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}
