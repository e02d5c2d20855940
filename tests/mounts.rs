//! Mounts that nobody else sees. Include it where tests need it: `#[path = "../../../tests/mounts.rs"] mod mounts;`

use std::ffi::OsStr;
use std::process::{Command, Output};

/// What `line` of a shell's gives, with mounts of its own, where `words` are $0, $1 and so on. `Err`: why there can be none.
pub fn with_mounts<W: AsRef<OsStr>>(line: &str, words: impl IntoIterator<Item = W>) -> Result<Output, String> {
    let Ok(output) = Command::new("unshare").args(["-m", "sh", "-c", line]).args(words).output() else {
        return Err("there is no unshare(1): apt-get install util-linux".into());
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("unshare: ") || errors.contains("mount: ") { Err(errors.into_owned()) } else { Ok(output) }
}
