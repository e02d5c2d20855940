//! What KVM itself counts of a virtual CPU.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

/// KVM's own counts of one virtual CPU, as long as its machine exists.
///
/// # Source
/// Linux, Documentation/virt/kvm/api.rst, KVM_GET_STATS_FD.
pub struct Statistics {
    file: File,
    /// Where the descriptions begin, how many there are, how long their names are, and where the numbers begin.
    descriptions: u64,
    count: u64,
    name_bytes: u64,
    numbers: u64,
}

/// What stands before a name in a description: flags, exponent, how many numbers, where they are, and a width.
const DESCRIPTION_BYTES: u64 = 16;
const OFFSET_IN_DESCRIPTION: u64 = 8;

impl Statistics {
    /// `None`: this KVM is older than Linux 5.14.
    pub(crate) fn of(cpu: &impl AsRawFd) -> Option<Statistics> {
        /// `_IO(KVMIO, 0xce)`.
        const KVM_GET_STATS_FD: libc::Ioctl = 0xaece;
        // SAFETY: guest-statistics: it takes no memory.
        let fd = unsafe { libc::ioctl(cpu.as_raw_fd(), KVM_GET_STATS_FD, 0) };
        if fd < 0 {
            return None;
        }
        // SAFETY: guest-statistics: a new descriptor, which is ours alone.
        let file = unsafe { File::from_raw_fd(fd) };
        let word = |at| number(&file, at).map(u64::from);
        let [name_bytes, count, descriptions, numbers] = [word(4), word(8), word(16), word(20)].map(Result::ok);
        Some(Statistics {
            descriptions: descriptions?,
            count: count?,
            name_bytes: name_bytes?,
            numbers: numbers?,
            file,
        })
    }

    /// One of them by KVM's name for it, such as `exits` or `insn_emulation`. `None`: this KVM does not count that.
    pub fn read(&self, name: &str) -> Option<u64> {
        let mut found = vec![0; self.name_bytes as usize];
        for index in 0..self.count {
            let at = self.descriptions + index * (DESCRIPTION_BYTES + self.name_bytes);
            self.file.read_exact_at(&mut found, at + DESCRIPTION_BYTES).ok()?;
            if found.split(|byte| *byte == 0).next() == Some(name.as_bytes()) {
                let offset = number(&self.file, at + OFFSET_IN_DESCRIPTION).ok()?;
                let mut value = [0; 8];
                self.file.read_exact_at(&mut value, self.numbers + u64::from(offset)).ok()?;
                return Some(u64::from_ne_bytes(value));
            }
        }
        None
    }
}

fn number(file: &File, at: u64) -> io::Result<u32> {
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, at)?;
    Ok(u32::from_ne_bytes(bytes))
}
