//! Tests that need protection keys.

use selfpage::protection::{Mechanism, mechanism};

use crate::skip;

/// Whether rights are enforced by keys. Where they are not, the calling test is skipped for want of them.
pub fn has_keys() -> bool {
    let has_keys = mechanism() == Mechanism::Keys;
    if !has_keys {
        let why = "this CPU has no protection keys, or the kernel does not use them; cargo xtask qemu-test --keys";
        skip::skip("pku", why);
    }
    has_keys
}
