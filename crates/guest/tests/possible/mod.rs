//! Tests of virtual machines skip where there can be none, and run closures that ask for nothing.

use selfpage_guest::{Error, Guest, Handler, Kind, Stopped};

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

/// Runs a closure that asks the process for nothing.
#[allow(dead_code)]
pub fn run<R: 'static>(
    guest: Guest<'static>,
    handler: impl Handler + 'static,
    closure: impl FnOnce() -> R + 'static,
) -> Result<R, Stopped> {
    // SAFETY: no test makes anything of what the guest has for itself.
    unsafe { guest.run(handler, |call| panic!("nobody asks: {call:?}"), closure) }
}
