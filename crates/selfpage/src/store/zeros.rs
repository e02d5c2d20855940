//! Whether a file holds anything that somebody would miss.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread};

/// As much of a file is looked at in one go.
const LOOK_BYTES: usize = 1 << 20;

/// Whether there are only zeros in the first `len_bytes` of a file. Its holes are not read.
pub(crate) fn holds_nothing(file: impl AsFd, len_bytes: u64) -> io::Result<bool> {
    let mut bytes = vec![0; LOOK_BYTES];
    let mut at = 0;
    while at < len_bytes {
        match seek(&file, SeekFrom::Data(at)) {
            Ok(data) if data >= len_bytes => break,
            Ok(data) => at = data,
            Err(Errno::NXIO) => break,
            // A device has no holes.
            Err(Errno::INVAL) => {}
            Err(why) => return Err(why.into()),
        }
        let most = (len_bytes - at).min(LOOK_BYTES as u64) as usize;
        match pread(&file, &mut bytes[..most], at)? {
            0 => break,
            len if bytes[..len].iter().any(|byte| *byte != 0) => return Ok(false),
            len => at += len as u64,
        }
    }
    Ok(true)
}
