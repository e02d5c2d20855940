//! Buffers that the program has registered with io_uring: devices write to them by their frames, which no page table notes.
//!
//! The kernel counts pinned pages in `VmPin` of the process's `status`, and lists a ring's buffers in the ring's `fdinfo`. Rings are
//! looked for only where something is pinned. All of it is read into buffers on the stack: a collector scans while it has threads
//! stopped, one of which may hold the lock of malloc.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, RawDir};
use rustix::io::Errno;
use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::linux::thread;

use super::Dirty;

/// How often a ring is asked that somebody else uses just then.
const MOST_TRIES: u32 = 10_000;
/// How much of a line is looked at.
const LINE_BYTES: usize = 512;

/// Whether there are buffers in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Registered {
    None,
    Some,
}

/// Marks the pages of `range` that are in buffers registered with rings that the calling thread has open, and all of it where they cannot be
/// looked for (no descriptor is free); to be followed by [`Dirty::end`] where there are any.
pub(super) fn mark(range: &Range<usize>, found: &mut Dirty) -> Registered {
    let mut registered = Registered::None;
    let mut each = |buffer: Range<usize>| {
        let (first, end) = (buffer.start / PAGE_BYTES * PAGE_BYTES, buffer.end.next_multiple_of(PAGE_BYTES));
        let pages = first.max(range.start)..end.min(range.end);
        if !pages.is_empty() {
            found.mark(pages);
            registered = Registered::Some;
        }
    };
    if each_buffer(&mut each).is_err() {
        // No error: it would have to be allocated, and all that is written is found this way, too.
        found.mark(range.clone());
        return Registered::Some;
    }
    registered
}

fn each_buffer(each: &mut impl FnMut(Range<usize>)) -> Result<(), Errno> {
    let is_pinned = |line: &[u8]| line.strip_prefix(b"VmPin:").map(|value| value.trim_ascii() != b"0 kB");
    let Some(status) = unless_gone(open(CWD, c"/proc/thread-self/status"))? else { return Ok(()) };
    if !each_line(&status, is_pinned)?.unwrap_or(false) {
        return Ok(());
    }
    let (links, infos) = (open(CWD, c"/proc/thread-self/fd")?, open(CWD, c"/proc/thread-self/fdinfo")?);
    let mut room = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(&links, &mut room);
    while let Some(entry) = entries.next() {
        let (entry, mut link) = (entry?, [MaybeUninit::uninit(); 64]);
        match rustix::fs::readlinkat_raw(&links, entry.file_name(), &mut link) {
            Ok((link, _)) if link == b"anon_inode:[io_uring]" => of_ring(&infos, entry.file_name(), each)?,
            // No ring; closed meanwhile; no link, as `..`; a file below very many directories.
            Ok(_) | Err(Errno::NOENT | Errno::INVAL | Errno::NAMETOOLONG) => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

fn open(dir: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// None for what is not there, or no more.
fn unless_gone<T>(done: Result<T, Errno>) -> Result<Option<T>, Errno> {
    match done {
        Err(Errno::NOENT) => Ok(None),
        done => done.map(Some),
    }
}

/// Shows `look` each line of a file, or the front of a long one, until it has found what it looks for.
fn each_line<T>(file: &OwnedFd, mut look: impl FnMut(&[u8]) -> Option<T>) -> Result<Option<T>, Errno> {
    let mut buffer = [0; LINE_BYTES];
    // How much of it is there, and whether that is the rest of a line whose front was shown.
    let (mut len, mut is_rest) = (0, false);
    loop {
        let read = rustix::io::read(file, &mut buffer[len..])?;
        len += read;
        let mut from = 0;
        while let Some(end) = buffer[from..len].iter().position(|byte| *byte == b'\n') {
            let line = &buffer[from..from + end];
            if !std::mem::replace(&mut is_rest, false)
                && let Some(found) = look(line)
            {
                return Ok(Some(found));
            }
            from += end + 1;
        }
        buffer.copy_within(from..len, 0);
        len -= from;
        if len == LINE_BYTES || read == 0 && len > 0 {
            if !is_rest && let Some(found) = look(&buffer[..len]) {
                return Ok(Some(found));
            }
            (len, is_rest) = (0, true);
        }
        if read == 0 {
            return Ok(None);
        }
    }
}

/// The buffers of one ring. The kernel does not list them while the ring is being used.
fn of_ring(infos: &OwnedFd, name: &CStr, each: &mut impl FnMut(Range<usize>)) -> Result<(), Errno> {
    for _ in 0..MOST_TRIES {
        // A ring that was closed meanwhile has none.
        let Some(info) = unless_gone(open(infos, name))? else { return Ok(()) };
        let mut listed = List::Unseen;
        let read = unless_gone(each_line(&info, |line| listed.follow(line, each)))?;
        if read.is_none() || listed == List::Left(0) {
            return Ok(());
        }
        thread::give_way();
    }
    Err(Errno::AGAIN)
}

/// How far the list of a ring's buffers was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum List {
    Unseen,
    /// So many more lines.
    Left(usize),
}

impl List {
    /// Reads on. `Some`: nothing more of the list comes.
    fn follow(&mut self, line: &[u8], each: &mut impl FnMut(Range<usize>)) -> Option<()> {
        match *self {
            List::Unseen => {
                let count = line.strip_prefix(b"UserBufs:")?;
                *self = List::Left(number(count.trim_ascii(), 10)?);
            }
            // The number is padded to five places, and may have five itself.
            List::Left(left) if left > 0 && line.trim_ascii_start().first().is_some_and(u8::is_ascii_digit) => {
                // A place without a buffer is a line, too.
                buffer(line).into_iter().for_each(each);
                *self = List::Left(left - 1);
            }
            List::Left(_) => return Some(()),
        }
        (*self == List::Left(0)).then_some(())
    }
}

/// `    0: 0x7f00/8192`
fn buffer(line: &[u8]) -> Option<Range<usize>> {
    let text = std::str::from_utf8(line).ok()?;
    let (start, len) = text.split_once(": 0x")?.1.split_once('/')?;
    let start = number(start.as_bytes(), 16)?;
    Some(start..start.checked_add(number(len.as_bytes(), 10)?)?)
}

fn number(digits: &[u8], radix: u32) -> Option<usize> {
    usize::from_str_radix(std::str::from_utf8(digits).ok()?, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    /// A ring's buffers, and whether all were listed.
    fn parse(info: &str) -> (Vec<Range<usize>>, bool) {
        let (mut found, mut list) = (Vec::new(), List::Unseen);
        let _ = each_line(&file(info), |line| list.follow(line, &mut |buffer| found.push(buffer)));
        (found, list == List::Left(0))
    }

    fn file(text: &str) -> OwnedFd {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        file.into()
    }

    #[test]
    fn a_ring_lists_its_buffers_or_nothing() {
        let info = "UserFiles:\t0\nUserBufs:\t3\n    0: 0x7f00/8192\n    1: <none>\n    2: 0x10064/10\nPollList:\n";
        assert_eq!(parse(info), (vec![0x7f00..0x9f00, 0x10064..0x1006e], true));
        assert_eq!(parse("UserFiles:\t0\nUserBufs:\t0\nPollList:\n"), (vec![], true));
        assert_eq!(parse("UserBufs:\t1\nPollList:\n"), (vec![], false));
        let many: String = (0..10_001).map(|at| format!("{at:5}: 0x{:x}/4096\n", (at + 1) * 4096)).collect();
        let (found, whole) = parse(&format!("UserBufs:\t10001\n{many}PollList:\n"));
        assert_eq!((found.len(), found.last().cloned(), whole), (10_001, Some(10_001 * 4096..10_002 * 4096), true));
        assert_eq!(parse("UserBufs:\t1\n"), (vec![], false));
        assert_eq!(parse("SqMask:\t0x7\n"), (vec![], false));
    }

    #[test]
    fn long_lines_are_cut_and_none_is_lost() {
        let long = "x".repeat(3 * LINE_BYTES + 5);
        let text = format!("one\n{long}\ntwo\n{}\n{}\n\nlast", &long[..LINE_BYTES], &long[..LINE_BYTES - 1]);
        let mut seen = Vec::new();
        let nothing = each_line(&file(&text), |line| {
            seen.push(line.len());
            None::<()>
        });
        assert_eq!(nothing, Ok(None));
        assert_eq!(seen, [3, LINE_BYTES, 3, LINE_BYTES, LINE_BYTES - 1, 0, 4]);
        let found = each_line(&file(&text), |line| (line == b"two").then_some(2));
        assert_eq!(found, Ok(Some(2)));
    }
}
