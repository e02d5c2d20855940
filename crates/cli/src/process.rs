//! What the kernel says of this process.

use std::io;

/// A size in /proc/self/status, by its name there.
pub fn status_bytes(name: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let size_kib = value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    size_kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other(format!("/proc/self/status has no {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_found_by_their_whole_name() {
        let (resident, anonymous) = (status_bytes("VmRSS").unwrap(), status_bytes("RssAnon").unwrap());
        assert!(anonymous >= 4096 && anonymous < resident, "{anonymous} of {resident}");
        assert!(status_bytes("VmR").unwrap_err().to_string().contains("no VmR"));
    }
}
