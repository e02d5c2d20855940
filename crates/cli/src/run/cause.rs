//! Why the system refused what a run takes, with what helps where that is known.

use std::io;

use rustix::io::Errno;

/// The cause in words, and the remedy.
pub fn told(cause: &io::Error) -> String {
    match Errno::from_io_error(cause).and_then(remedy) {
        Some(remedy) => format!("{cause}; {remedy}"),
        None => cause.to_string(),
    }
}

/// What lets a file be opened, or a process begin.
pub fn remedy(cause: Errno) -> Option<&'static str> {
    Some(match cause {
        Errno::MFILE => "raise `ulimit -n`",
        Errno::NFILE => "raise fs.file-max (sysctl -w)",
        Errno::AGAIN => "raise `ulimit -u`, or pids.max of the cgroup",
        _ => return None,
    })
}
