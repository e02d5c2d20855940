//! What the host of a virtual machine does to measurements of memory: it takes back what is free, and a first touch waits for it.

use selfpage::doctor::{self, Finding};

use super::error::Error;
use super::raw::{Child, Mapping};

/// As in `selfpage doctor`.
const FEATURE: &str = "free page reporting";

/// What `selfpage doctor` says of the host taking back free memory.
pub fn reporting() -> Option<Finding> {
    doctor::examine().into_iter().find(|finding| finding.feature == FEATURE)
}

/// Memory that a program can have.
pub fn available_bytes() -> usize {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok());
    kib.map_or(usize::MAX, |kib| kib << 10)
}

/// Has the host supply `len_bytes` that are free afterwards: whoever touches them within the next two seconds measures this machine
/// alone. Does nothing where there is not so much.
pub fn supply(len_bytes: usize) -> Result<(), Error> {
    if len_bytes == 0 || available_bytes() < len_bytes {
        return Ok(());
    }
    // In a process of its own: what this one had at most would count as the peak of programs that it starts.
    let touch = || {
        // A kernel without huge pages refuses the first.
        let mapping = Mapping::huge(len_bytes).or_else(|_| Mapping::anonymous(len_bytes));
        mapping.and_then(|mapping| mapping.populate())
    };
    let touched = Child::fork(touch).and_then(Child::wait);
    touched.map_err(|error| Error::Failed(format!("touch {} MiB before the job: {error}", len_bytes >> 20)))
}
