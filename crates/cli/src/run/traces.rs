//! The files that a trace is in: each process has one of its own.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// FILE, FILE.PID and FILE.PID.N.
pub struct Traces {
    file: PathBuf,
    /// Those of earlier runs: none is written to again.
    before: BTreeSet<PathBuf>,
}

impl Traces {
    /// Before the program starts.
    pub fn of(file: &OsStr) -> Traces {
        let file = PathBuf::from(file);
        Traces { before: there(&file), file }
    }

    /// When it has ended: a line where there is more than one.
    pub fn line(&self) -> Option<String> {
        let new: Vec<PathBuf> = there(&self.file).difference(&self.before).cloned().collect();
        let largest = new.iter().max_by_key(|path| len_bytes(path))?;
        let (count, file) = (new.len(), self.file.display());
        (count > 1).then(|| {
            format!("the trace is in {count} files, {file} and {file}.PID; the largest is {}", largest.display())
        })
    }
}

/// The largest of the files beside `file` that another process of the same run may have written, if it is larger.
pub fn larger_beside(file: &Path) -> Option<PathBuf> {
    // Where there is no directory in the name, there is no name in that to be looked at either.
    let file = std::path::absolute(file).ok()?;
    let largest = there(&file).into_iter().max_by_key(|path| len_bytes(path))?;
    (len_bytes(&largest) > len_bytes(&file)).then_some(largest)
}

fn len_bytes(path: &Path) -> u64 {
    path.metadata().map_or(0, |about| about.len())
}

fn there(file: &Path) -> BTreeSet<PathBuf> {
    let own = file.file_name().unwrap_or_default().as_bytes();
    let is_one = |path: &PathBuf| {
        let rest = path.file_name().and_then(|name| name.as_bytes().strip_prefix(own));
        rest.is_some_and(|rest| {
            rest.is_empty() || rest.starts_with(b".") && rest.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.')
        })
    };
    let entries = file.parent().and_then(|directory| directory.read_dir().ok());
    entries.into_iter().flatten().flatten().map(|entry| entry.path()).filter(is_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_files_are_told_and_those_of_earlier_runs_are_not() {
        let directory = std::env::temp_dir().join(format!("selfpage-traces-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let write = |name: &str, len: usize| std::fs::write(directory.join(name), vec![0; len]).unwrap();
        write("t.7", 100);
        let traces = Traces::of(directory.join("t").as_os_str());
        write("t", 10);
        write("t.svg", 100);
        write("t2", 100);
        assert_eq!(traces.line(), None, "there is one");
        write("t.8", 20);
        write("t.8.2", 30);
        let line = traces.line().unwrap();
        let beside = ["t", "t.8.2"].map(|name| larger_beside(&directory.join(name)));
        std::fs::remove_dir_all(&directory).unwrap();
        assert_eq!(beside, [Some(directory.join("t.7")), None]);
        assert!(line.contains("in 3 files") && line.ends_with("/t.8.2"), "{line}");
    }
}
