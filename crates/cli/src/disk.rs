//! How much room a disk has.

use std::path::Path;

use crate::output::mib;

/// Looks whether there is room for `len_bytes` in `directory`. If not: why, and the remedy.
pub fn check_room(directory: &Path, len_bytes: u64, who: &str, remedy: &str) -> Result<(), String> {
    let shown = directory.display();
    let disk = rustix::fs::statvfs(directory).map_err(|error| format!("look at {shown}: {error}; {remedy}"))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    // Of a file system that states no size, as a ramfs, any number is to be had.
    if disk.f_blocks == 0 || free_bytes >= len_bytes {
        return Ok(());
    }
    let [free, wanted] = [free_bytes, len_bytes].map(mib);
    Err(format!("{free} are free in {shown}, and {who} takes {wanted}; {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_size_is_stated_there_is_room() {
        assert_eq!(check_room(Path::new("/proc"), 1 << 40, "this", "none"), Ok(()));
    }
}
