//! Buffers that the program has registered with io_uring: devices write to them by their frames, which no page table notes.
//!
//! The kernel counts pinned pages in `VmPin` of `/proc/self/status`, and lists a ring's buffers in the ring's `fdinfo`. Rings are
//! looked for only where something is pinned.

use std::fs;
use std::ops::Range;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::{Errno, thread};

use crate::error::{Error, Result};

/// How often a ring is asked that somebody else uses just then.
const MOST_TRIES: u32 = 10_000;

/// The pages of `range` that are in buffers registered with rings that this process has open, in no order.
pub(super) fn within(range: &Range<usize>) -> Result<Vec<Range<usize>>> {
    if !any_pinned(&fs::read_to_string("/proc/self/status").unwrap_or_default()) {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        if fs::read_link(entry.path()).is_ok_and(|name| name.as_os_str() == "anon_inode:[io_uring]") {
            found.extend(of_ring(&entry.file_name().to_string_lossy())?);
        }
    }
    let pages = found.into_iter().map(|buffer: Range<usize>| {
        let (first, end) = (buffer.start / PAGE_BYTES * PAGE_BYTES, buffer.end.next_multiple_of(PAGE_BYTES));
        first.max(range.start)..end.min(range.end)
    });
    Ok(pages.filter(|pages| !pages.is_empty()).collect())
}

fn any_pinned(status: &str) -> bool {
    let value = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    value.is_some_and(|value| value.trim() != "0 kB")
}

/// The buffers of one ring. The kernel does not list them while the ring is being used.
fn of_ring(number: &str) -> Result<Vec<Range<usize>>> {
    for _ in 0..MOST_TRIES {
        // A ring that was closed meanwhile has none.
        let Ok(info) = fs::read_to_string(format!("/proc/self/fdinfo/{number}")) else { return Ok(Vec::new()) };
        if let Some(buffers) = parse(&info) {
            return Ok(buffers);
        }
        thread::give_way();
    }
    Err(Error::system("scan", "buffers registered with io_uring, which is in use all the time", Errno::AGAIN))
}

/// `None`: they are not listed, or not all.
fn parse(info: &str) -> Option<Vec<Range<usize>>> {
    let mut lines = info.lines().skip_while(|line| !line.starts_with("UserBufs:"));
    let count = lines.next()?.strip_prefix("UserBufs:")?.trim().parse().ok()?;
    let entries: Vec<&str> = lines.take(count).take_while(|line| line.starts_with(' ')).collect();
    let buffer = |line: &&str| {
        let (start, len) = line.split_once(": 0x")?.1.split_once('/')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        Some(start..start.checked_add(len.parse().ok()?)?)
    };
    // A place without a buffer is a line, too.
    (entries.len() == count).then(|| entries.iter().filter_map(buffer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_lists_its_buffers_or_nothing() {
        let info = "UserFiles:\t0\nUserBufs:\t3\n    0: 0x7f00/8192\n    1: <none>\n    2: 0x10064/10\nPollList:\n";
        assert_eq!(parse(info), Some(vec![0x7f00..0x9f00, 0x10064..0x1006e]));
        assert_eq!(parse("UserFiles:\t0\nUserBufs:\t0\nPollList:\n"), Some(vec![]));
        assert_eq!(parse("UserBufs:\t1\nPollList:\n"), None);
        assert_eq!(parse("SqMask:\t0x7\n"), None);
    }

    #[test]
    fn what_is_pinned_is_counted() {
        assert!(any_pinned("VmLck:\t       0 kB\nVmPin:\t      12 kB\n"));
        assert!(!any_pinned("VmPin:\t       0 kB\n") && !any_pinned(""));
    }
}
