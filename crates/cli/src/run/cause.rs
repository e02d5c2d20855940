//! Why the system refused what a run takes, with what helps where that is known.

use std::io::{self, ErrorKind};
use std::path::Path;

use rustix::io::Errno;

/// The cause in words, and the remedy.
pub fn told(cause: &io::Error) -> String {
    match Errno::from_io_error(cause).and_then(remedy) {
        Some(remedy) => format!("{cause}; {remedy}"),
        None => cause.to_string(),
    }
}

/// Why a file that an option names could not be opened.
pub fn of_file(option: &str, path: &Path, cause: &io::Error) -> String {
    let remedy = match cause.kind() {
        ErrorKind::NotFound => "; make its directory, or name another file",
        ErrorKind::IsADirectory => "; name a file in it",
        _ => "",
    };
    format!("{option} {}: {}{remedy}", path.display(), told(cause))
}

/// What lets a file be opened, or a process begin.
pub fn remedy(cause: Errno) -> Option<&'static str> {
    Some(match cause {
        Errno::MFILE => "raise `ulimit -n`",
        Errno::NFILE => "raise fs.file-max (sysctl -w)",
        Errno::TOOBIG => {
            "pass fewer arguments, or a shorter environment; with a higher `ulimit -s` there is room for more"
        }
        Errno::AGAIN => "raise `ulimit -u`, or pids.max of the cgroup",
        _ => return None,
    })
}
