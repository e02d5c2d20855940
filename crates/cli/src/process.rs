//! What the kernel says of this process.

use std::io;

/// A size in /proc/self/status, by its name there.
pub fn status_bytes(name: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let size_kib = value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    size_kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other(format!("/proc/self/status has no {name}")))
}

/// What this process has in core since a moment, all its mappings together.
pub struct InCore {
    before_bytes: u64,
}

impl InCore {
    /// From now on.
    pub fn since_now() -> io::Result<InCore> {
        // The most that it ever had starts anew, too (proc(5)).
        std::fs::write("/proc/self/clear_refs", "5")?;
        Ok(InCore { before_bytes: status_bytes("VmRSS")? })
    }

    /// The most that it had at any time, less what it had before. The kernel keeps it, so no moment is missed.
    pub fn most_bytes(&self) -> io::Result<u64> {
        Ok(status_bytes("VmHWM")?.saturating_sub(self.before_bytes))
    }
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
