//! Why something failed, in words: a few, made without allocation, for a line that a trap writes.

use core::error::Error;
use core::fmt::{Display, Formatter, Result};

use crate::fault::Failure;
use crate::linux::Errno;
use crate::mmu::Refusal;
use crate::pager::PagerError;
use crate::shortage::Shortage;

const EPERM: i32 = 1;
const EFBIG: i32 = 27;
const ENOSYS: i32 = 38;

/// What files are read and written by.
const IO: &str = "pread64, pwrite64, preadv, pwritev, preadv2, pwritev2, process_vm_readv, process_vm_writev, mmap or io_uring_enter";

impl Error for Failure {}
impl Error for Shortage {}
impl Error for Refusal {}
impl Error for PagerError {}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Failure::Pager(error) => error.fmt(f),
            Failure::Shortage(shortage) => shortage.fmt(f),
            Failure::Machine(refusal) | Failure::Writing(refusal) => refusal.fmt(f),
        }
    }
}

impl Display for Shortage {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Shortage::AllHeld => {
                f.write_str(
                    "no frame: every page in core is held there, or the policy names none that can go; give it more frames, or hold fewer \
                     pages at a time",
                )
            }
            Shortage::NoMemory => f.write_str("no frame: the system has no memory to give"),
            Shortage::Unsaved(error) => write!(f, "no frame, because pages cannot be saved: {error}"),
        }
    }
}

impl Display for Refusal {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str("the kernel refused the translation: ")?;
        f.write_str(match self {
            Refusal::Denied => {
                "a filter on system calls (seccomp) forbids one that the pager makes, as UFFDIO_MOVE or pread64; allow it, or set the \
                 filter before the domain is built"
            }
            Refusal::NoMemory => "it has no memory for page tables",
            Refusal::NoDescriptor => "the userfaultfd is gone from its thread's table",
            Refusal::Pinned => "a device holds the page",
            Refusal::Occupied | Refusal::Hole | Refusal::Foreign => "the program changed the mapping",
            Refusal::Ending => "the process is ending",
        })
    }
}

impl Display for PagerError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match *self {
            PagerError::Io(EFBIG) => "the limit on the size of files is reached (EFBIG); raise `ulimit -f`",
            PagerError::Io(number @ (EPERM | ENOSYS)) => {
                let number = Errno::from_raw_os_error(number);
                return write!(
                    f,
                    "the pager failed with {number}: one of the program's own knows why; else a filter on system calls (seccomp) may \
                     forbid {IO}: allow them"
                );
            }
            PagerError::Io(number) => return write!(f, "the pager failed with {}", Errno::from_raw_os_error(number)),
            PagerError::Corrupt => "the store gave back other bytes than were saved",
            PagerError::Truncated => "the file ends before this page",
            PagerError::Full => "the store is full (ENOSPC)",
            PagerError::Panicked => "the pager panicked",
            PagerError::NoStore => "the pager has no store",
            PagerError::WrongContext => "not in this context",
            PagerError::Orphaned => "what the region is a clone of was dropped, and the page could not be copied",
        })
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::string::ToString;

    use super::*;

    #[test]
    fn a_number_has_its_name_where_it_is_known() {
        assert_eq!(PagerError::Io(5).to_string(), "the pager failed with EIO");
        assert!(PagerError::Io(27).to_string().contains("(EFBIG); raise `ulimit -f`"));
        let said = PagerError::Io(1).to_string();
        assert!(said.contains("EPERM") && said.contains("seccomp") && said.contains("preadv"), "{said}");
        assert!(said.contains("of the program's own"), "{said}");
        // Saves to files past their lock.
        assert!(said.contains("pwritev2") && said.contains("process_vm_writev"), "{said}");
        assert_eq!(PagerError::Io(133).to_string(), "the pager failed with errno 133");
        let unsaved = Failure::Shortage(Shortage::Unsaved(PagerError::Full));
        assert_eq!(unsaved.to_string(), "no frame, because pages cannot be saved: the store is full (ENOSPC)");
    }
}
