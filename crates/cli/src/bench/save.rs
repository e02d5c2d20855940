//! A run kept for later: `raw.jsonl` and `machine.txt` in a directory, as papers/README.md says.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::device::Device;
use super::error::Error;
use super::host;
use super::result::Record;

const RECORDS: &str = "raw.jsonl";
const MACHINE: &str = "machine.txt";
/// What our `machine.txt` begins with.
const OURS: &str = "command: selfpage bench ";

/// A directory that gets the run. One that gets no record is left as if there had been no run.
pub struct Archive {
    directory: PathBuf,
    /// The directory, locked: no other run is kept there meanwhile.
    _held: fs::File,
}

impl Archive {
    /// The archive that the user named, if any.
    pub fn open_if(directory: Option<&Path>) -> Result<Option<Archive>, Error> {
        directory.map(Archive::open).transpose()
    }

    /// Makes `directory` where it is missing. One that holds a run already is refused: runs are kept. What a run that was killed before its
    /// first record has left is none.
    pub fn open(directory: &Path) -> Result<Archive, Error> {
        let made = fs::create_dir_all(directory).and_then(|()| fs::File::open(directory));
        let held = made.map_err(|cause| {
            Error::Unusable(format!("cannot make {}: {cause}; name another directory with --save", directory.display()))
        })?;
        // Where directories cannot be locked nobody is kept out.
        if matches!(held.try_lock(), Err(fs::TryLockError::WouldBlock)) {
            let shown = directory.display();
            return Err(Error::Unusable(format!("{shown}: another run is being kept there; name a new directory")));
        }
        let left = [(RECORDS, ""), (MACHINE, OURS)].map(|(name, begins)| (directory.join(name), begins));
        if let Some((file, _)) = left.iter().find(|(file, begins)| !is_only_begun(file, begins)) {
            return Err(Error::Unusable(format!(
                "{} exists: a run is kept there; name a new directory",
                file.display()
            )));
        }
        let archive = Archive { directory: directory.to_path_buf(), _held: held };
        archive.remove();
        Ok(archive)
    }

    /// Removes its files.
    fn remove(&self) {
        for name in [RECORDS, MACHINE] {
            let _ = fs::remove_file(self.directory.join(name));
        }
    }

    /// Writes what the machine is, how the run was made, and of what.
    pub fn describe(&self, options: &str, disk: &Path, materials: &[(String, String)]) -> Result<(), Error> {
        let path = self.directory.join(MACHINE);
        let mut text = machine(options, &Device::of(disk)?);
        text.extend(materials.iter().map(|(name, value)| format!("{name}: {value}\n")));
        let written = fs::File::create_new(&path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| Error::io("write", &path, error))
    }

    /// Adds one record, at once and whole or not at all: a run that is stopped keeps what it has.
    pub fn append(&self, record: &Record) -> Result<(), Error> {
        let path = self.directory.join(RECORDS);
        let line = format!("{}\n", record.to_json());
        let add = || {
            let mut file = fs::OpenOptions::new().create(true).append(true).open(&path)?;
            let before = file.metadata()?.len();
            // A part of a line would spoil the others.
            file.write_all(line.as_bytes()).inspect_err(|_| drop(file.set_len(before)))
        };
        add().map_err(|error| Error::io("write", &path, error))
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        if is_only_begun(&self.directory.join(RECORDS), "") {
            self.remove();
        }
    }
}

/// Whether `file` is not there, or a file of ours that has nothing but what begins with `begins`, perhaps cut short by a disk that was full.
fn is_only_begun(file: &Path, begins: &str) -> bool {
    match file.symlink_metadata() {
        Err(why) => why.kind() == ErrorKind::NotFound,
        Ok(about) => {
            let has =
                || fs::read(file).is_ok_and(|has| has.iter().zip(begins.as_bytes()).all(|(one, other)| one == other));
            about.is_file() && (about.len() == 0 || !begins.is_empty() && has())
        }
    }
}

/// Kernel, CPU, memory, disk. No host name and no path.
fn machine(options: &str, disk: &Device) -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key));
        line.and_then(|line| line.split_once(':')).map_or("?".to_string(), |(_, value)| value.trim().to_string())
    };
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let cpu = read("/proc/cpuinfo");
    let hypervisor =
        if field(&cpu, "flags").split(' ').any(|flag| flag == "hypervisor") { "virtual" } else { "bare metal" };
    let own = [
        ("command", format!("selfpage bench {options}")),
        ("selfpage", format!("{}, commit {}", env!("CARGO_PKG_VERSION"), env!("SELFPAGE_COMMIT"))),
        ("kernel", read("/proc/sys/kernel/osrelease").trim().to_string()),
        ("cpu", format!("{}, {cpus} cores, {hypervisor}", field(&cpu, "model name"))),
        ("memory", field(&read("/proc/meminfo"), "MemTotal")),
        ("transparent huge pages", read("/sys/kernel/mm/transparent_hugepage/enabled").trim().to_string()),
        ("huge pages by size", huge_page_sizes()),
        ("disk", disk.describe()),
    ];
    let of_host = host::findings().into_iter().map(|finding| (finding.feature, finding.why));
    own.into_iter().chain(of_host).map(|(name, value)| format!("{name}: {value}\n")).collect()
}

/// The sizes of transparent huge pages that programs can have, each with its setting.
fn huge_page_sizes() -> String {
    let sizes = fs::read_dir("/sys/kernel/mm/transparent_hugepage").into_iter().flatten().flatten();
    let mut allowed: Vec<(usize, String)> = sizes
        .filter_map(|size| {
            let setting = fs::read_to_string(size.path().join("enabled")).ok()?;
            let chosen = setting.split_once('[')?.1.split_once(']')?.0;
            let kib = size.file_name().to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            (chosen != "never").then(|| (kib, format!("{kib} KiB {chosen}")))
        })
        .collect();
    allowed.sort();
    let words: Vec<String> = allowed.into_iter().map(|(_, words)| words).collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_machine_is_told_without_host_name_or_path() {
        let text = machine("paging --quick", &Device::of(Path::new("/")).unwrap());
        assert!(text.starts_with("command: selfpage bench paging --quick\nselfpage: "));
        assert!(text.contains(concat!(", commit ", env!("SELFPAGE_COMMIT"), "\n")), "{text}");
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let words = || text.split(|mark: char| !mark.is_alphanumeric() && mark != '-');
        assert!(words().all(|word| word != host.trim()), "{text}");
        for name in
            ["kernel", "cpu", "memory", "huge pages by size", "disk", "free page reporting", "guest_halt_poll_ns"]
        {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            assert!(line.len() > name.len() + 4 && !line.contains(" /"), "{line}");
        }
    }

    #[test]
    fn the_commit_is_the_one_that_is_checked_out() {
        let git = |revision: &str| -> Option<String> {
            let answer = Command::new("git").args(["rev-parse", "--verify", revision]).output().ok()?;
            answer.status.success().then(|| String::from_utf8_lossy(&answer.stdout).trim().to_string())
        };
        let told = env!("SELFPAGE_COMMIT");
        let commit = told.strip_suffix("-dirty").unwrap_or(told);
        match git("HEAD") {
            Some(head) if commit != "unknown" => assert_eq!(git(&format!("{commit}^{{commit}}")), Some(head)),
            _ => assert!(!commit.is_empty()),
        }
    }

    #[test]
    fn a_run_without_records_leaves_its_directory_to_the_next() {
        let directory = std::env::temp_dir().join(format!("selfpage-archive-none-{}", std::process::id()));
        let described = || {
            let archive = Archive::open(&directory).unwrap();
            archive.describe("faults", Path::new("/"), &[]).unwrap();
            archive
        };
        drop(described());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        // As one that was killed leaves it: before it had described the machine, in the middle, and after.
        let archive = described();
        let text = fs::read_to_string(directory.join(MACHINE)).unwrap();
        drop(archive);
        for left in ["", &text[..9], &text] {
            fs::write(directory.join(MACHINE), left).unwrap();
            fs::write(directory.join(RECORDS), "").unwrap();
            drop(described());
        }
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn two_runs_are_not_kept_in_one_directory() {
        let directory = std::env::temp_dir().join(format!("selfpage-archive-two-{}", std::process::id()));
        let first = Archive::open(&directory).unwrap();
        let second = Archive::open(&directory);
        assert!(matches!(second, Err(Error::Unusable(why)) if why.contains("another run")));
        drop(first);
        drop(Archive::open(&directory).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_kept_run_is_not_written_over() {
        let directory = std::env::temp_dir().join(format!("selfpage-archive-{}", std::process::id()));
        Archive::open(&directory).unwrap();
        for name in [RECORDS, MACHINE] {
            fs::write(directory.join(name), "{}\n").unwrap();
            let again = Archive::open(&directory);
            fs::remove_file(directory.join(name)).unwrap();
            assert!(matches!(again, Err(Error::Unusable(why)) if why.contains(name) && why.contains("is kept there")));
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
