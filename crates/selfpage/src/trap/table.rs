//! The descriptor table of a domain's pager threads: a program that closes every descriptor does not close ours.
//!
//! What the program lends them stands there at the number that it has in the program's own table, which is a low one as a rule. So what of ours
//! stays there has a high number, and where a standard stream is missing stands what is nowhere: every call on it is `EBADF`, as where there is
//! nothing.
//!
//! # Context
//! Normal, on the first of the threads.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags, open};
use rustix::pipe::{PipeFlags, pipe_with};
use selfpage_core::linux::thread as this_thread;

use crate::config::DescriptorTable;
use crate::error::{Error, Result};
use crate::store::Alone;

/// Standard input, output and error.
const STREAMS: [i32; 3] = [0, 1, 2];

/// Gives the calling thread, and those it starts from now on, a descriptor table of its own with `keep` in it and nothing else: what the
/// program has open is not held open by us. But where it does not mind our descriptors they are its standard streams, for what code of its own
/// says there. Otherwise whoever reads what a daemon says would wait until nobody has the other end of the pipe; epitaphs find the program's own.
/// A stream that is `reserved` is none.
/// Returns what stands where nothing does, which lasts as long as the table.
///
/// # Errors
/// A call is refused, which the error names.
pub(crate) fn leave_programs(keep: &[i32], table: DescriptorTable, reserved: &[i32]) -> Result<Alone> {
    this_thread::unshare_descriptors().map_err(|why| Error::no_threads("unshare", why))?;
    let streams: &[i32] = if table == DescriptorTable::Shared { &STREAMS } else { &[] };
    let streams = streams.iter().filter(|stream| !reserved.contains(stream));
    let keep: BTreeSet<u32> = keep.iter().chain(streams).filter_map(|fd| u32::try_from(*fd).ok()).collect();
    let mut from = 0;
    for fd in keep {
        if fd > from {
            close(from, fd - 1)?;
        }
        from = fd + 1;
    }
    close(from, u32::MAX)?;
    let nowhere = nowhere()?;
    nowhere.fill_streams().map_err(|why| Error::no_threads("fcntl", why))?;
    Ok(nowhere)
}

/// A descriptor that no call does anything with, but says that it is none.
fn nowhere() -> Result<Alone> {
    // Of something that is in no file system, which could not be unmounted.
    let (pipe, _) = pipe_with(PipeFlags::CLOEXEC).map_err(|why| Error::no_threads("pipe2", why))?;
    let name = format!("/proc/thread-self/fd/{}", pipe.as_raw_fd());
    let opened = open(&name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    opened.map(Alone::raised).map_err(|why| Error::system("open", name, why))
}

fn close(first: u32, last: u32) -> Result<()> {
    this_thread::close_descriptors(first, last).map_err(|why| Error::no_threads("close_range", why))
}
