//! What this process was executed with open. Once the program has it too, it is the program's: where that closes it, whoever has the other
//! end sees it closed.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// Numbers of descriptors from 3 on.
pub struct Inherited(Vec<RawFd>);

impl Inherited {
    /// Before this process opens anything. Where there is no /proc none is known, and all stay open.
    pub fn look() -> Inherited {
        let listed = Path::new("/proc/self/fd").read_dir().into_iter().flatten().flatten();
        let numbers: Vec<RawFd> = listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        // The list's own is gone by now.
        Inherited(numbers.into_iter().filter(|number| *number > 2 && is_to_go(*number)).collect())
    }

    /// Once the program has them. In the place of standard input and output comes `nothing`: errors are still to be told.
    pub fn let_go(self, nothing: impl AsFd) {
        for number in self.0 {
            // SAFETY: own-descriptor: it was there before this process opened any, so nobody here knows it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
        // What cannot be let go stays as it was.
        if is_to_go(0) {
            let _ = rustix::stdio::dup2_stdin(&nothing);
        }
        if is_to_go(1) {
            let _ = rustix::stdio::dup2_stdout(&nothing);
        }
    }
}

/// Whether there is such a descriptor, and somebody may wait for its end. Nobody does for that of a file on disk, and with it the locks would go
/// (fcntl(2)) that whoever executed this process holds by its number.
fn is_to_go(number: RawFd) -> bool {
    std::fs::metadata(format!("/proc/self/fd/{number}")).is_ok_and(|about| !about.is_file())
}
