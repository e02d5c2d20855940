//! How much room a disk has.

use std::path::Path;

use crate::output::mib;

/// Looks whether there is room for `len_bytes` in `directory`. If not: why, and the remedy.
pub fn check_room(directory: &Path, len_bytes: u64, who: &str, remedy: &str) -> Result<(), String> {
    let shown = directory.display();
    let disk = rustix::fs::statvfs(directory).map_err(|error| format!("look at {shown}: {error}; {remedy}"))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free_bytes >= len_bytes {
        return Ok(());
    }
    let [free, wanted] = [free_bytes, len_bytes].map(mib);
    Err(format!("{free} are free in {shown}, and {who} takes {wanted}; {remedy}"))
}
