//! What the host of a virtual machine does to measurements: it takes back free memory, and a first touch waits for it; it takes the
//! CPU of a guest that is idle, and whoever is woken there waits for it.

use selfpage::doctor::{self, Finding, State};

use super::error::Error;
use super::job::Place;
use super::raw::{self, Child, Mapping};

/// As in `selfpage doctor`.
const REPORTING: &str = "free page reporting";
const HALTING: &str = "guest_halt_poll_ns";

/// What `selfpage doctor` says of what figures depend on and the host decides.
pub fn findings() -> Vec<Finding> {
    doctor::examine().into_iter().filter(|finding| [REPORTING, HALTING].contains(&finding.feature)).collect()
}

/// What a bench at `place` has to say of a finding beside its figures.
pub fn note(finding: &Finding, place: Place) -> Option<String> {
    let loss = match finding.feature {
        REPORTING if place == Place::Memory => "first touches may wait for the host",
        // Contents that the bench writes itself have their frames before the clock runs.
        REPORTING => "in `seq` cases the first touches by file and by mmap may wait for the host",
        HALTING => "whoever waits for a worker or the disk waits for the host as well",
        _ => return None,
    };
    (finding.state != State::Present).then(|| format!("NOTE({}: {}; {loss})", finding.feature, finding.why))
}

/// Numbers of threads worth a case here: one, two, and each doubling for which there is a CPU each.
pub fn thread_counts() -> impl Iterator<Item = usize> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    (0..usize::BITS).map(|doublings| 1 << doublings).take_while(move |threads| *threads <= cpus.max(2))
}

/// Memory that a program can have.
pub fn available_bytes() -> usize {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok());
    kib.map_or(usize::MAX, |kib| kib << 10)
}

/// Has the host supply `len_bytes` that are free afterwards: whoever touches them before it takes them back, two seconds later on most
/// kernels, measures this machine alone. Does nothing where there is not so much.
pub fn supply(len_bytes: usize) -> Result<(), Error> {
    if len_bytes == 0 || available_bytes() < len_bytes {
        return Ok(());
    }
    // In a process of its own, which a signal ends in the middle of it.
    let touch = || {
        // A kernel without huge pages refuses the first.
        let mapping = Mapping::huge(len_bytes).or_else(|_| Mapping::anonymous(len_bytes));
        mapping.and_then(|mapping| mapping.populate())
    };
    let touched = Child::fork(touch).and_then(Child::wait);
    if raw::interrupted() {
        return Err(Error::Interrupted);
    }
    touched.map_err(|error| Error::Failed(format!("touch {} MiB before the job: {error}", len_bytes >> 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note_on(feature: &'static str, state: State, place: Place) -> Option<String> {
        note(&Finding { feature, state, why: "on".into(), remedy: None }, place)
    }

    #[test]
    fn what_spoils_figures_is_told_where_it_does() {
        let said = note_on(REPORTING, State::Degraded, Place::Memory).unwrap();
        assert_eq!(said, "NOTE(free page reporting: on; first touches may wait for the host)");
        assert!(note_on(REPORTING, State::Degraded, Place::Disk).unwrap().contains("`seq` cases"));
        assert!(note_on(HALTING, State::Degraded, Place::Disk).unwrap().starts_with("NOTE(guest_halt_poll_ns: on; "));
        for (feature, state, place) in [
            (REPORTING, State::Present, Place::Memory),
            (HALTING, State::Present, Place::Disk),
            ("swap", State::Degraded, Place::Disk),
        ] {
            assert_eq!(note_on(feature, state, place), None);
        }
    }

    #[test]
    fn doctor_has_a_line_for_each() {
        assert_eq!(findings().len(), 2, "{:?}", findings());
    }
}
