//! What of this process a closure needs to run: the code and the constants of the program and its libraries.

use std::fs;
use std::ptr::NonNull;

use selfpage_core::capability::Rights;

use crate::error::{Error, Result};

/// A mapping of a file, or what the loader put behind one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub begin: usize,
    pub end: usize,
    /// What the guest may do there: never write.
    pub rights: Rights,
}

impl Piece {
    pub const fn len_bytes(&self) -> u64 {
        (self.end - self.begin) as u64
    }

    pub fn host(&self) -> Option<NonNull<u8>> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.begin))
    }
}

/// The pieces of the program, ascending.
pub fn pieces() -> Result<Vec<Piece>> {
    // That of `/proc/self` is empty where the first thread has ended.
    let maps = fs::read("/proc/thread-self/maps");
    let maps = maps.map_err(|error| Error::system("read /proc/thread-self/maps", error))?;
    // What a file is called need be no text.
    Ok(parse(&String::from_utf8_lossy(&maps)))
}

fn parse(maps: &str) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
        let name = words.nth(3).unwrap_or("");
        let Some((begin, end)) = range.split_once('-') else { continue };
        let (Ok(begin), Ok(end)) = (usize::from_str_radix(begin, 16), usize::from_str_radix(end, 16)) else { continue };
        // What a program's data needs beyond its file has no name, and follows it.
        let follows =
            name.is_empty() && rights.starts_with("rw") && pieces.last().is_some_and(|last| last.end == begin);
        let of_a_file = name.starts_with('/') && !name.starts_with("/dev/");
        if !rights.starts_with('r') || !rights.ends_with('p') || !(of_a_file || follows) {
            continue;
        }
        let execute = if rights.contains('x') { Rights::EXECUTE } else { Rights::NONE };
        pieces.push(Piece { begin, end, rights: Rights::READ | execute });
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_whose_name_is_no_text_hides_no_other() {
        use std::os::unix::ffi::OsStrExt;
        let name = [b"selfpage-\xe9-", std::process::id().to_string().as_bytes()].concat();
        let path = std::env::temp_dir().join(std::ffi::OsStr::from_bytes(&name));
        fs::write(&path, [0; 4096]).unwrap();
        let file = fs::File::open(&path).unwrap();
        // SAFETY: a new mapping.
        let mapped = unsafe {
            let file = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_PRIVATE, file, 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let found = pieces();
        // SAFETY: the test's own mapping.
        unsafe { libc::munmap(mapped, 4096) };
        fs::remove_file(path).unwrap();
        let (here, found) = (pieces as *const () as usize, found.unwrap());
        let has = |at: usize| found.iter().any(|piece| (piece.begin..piece.end).contains(&at));
        assert!(has(here) && has(mapped.addr()));
    }

    #[test]
    fn files_and_what_follows_them_are_the_program() {
        let maps = "\
1000-2000 r--p 00000000 fe:01 11 /bin/true
2000-3000 r-xp 00001000 fe:01 11 /bin/true
3000-4000 rw-p 00002000 fe:01 11 /bin/true
4000-5000 rw-p 00000000 00:00 0
6000-7000 rw-p 00000000 00:00 0 [heap]
7000-8000 rw-s 00000000 fe:01 12 /tmp/shared
8000-9000 rw-p 00000000 00:00 0
9000-a000 ---p 00000000 fe:01 13 /lib/guard
b000-c000 rw-p 00000000 00:05 14 /dev/zero
";
        let found: Vec<_> = parse(maps).iter().map(|piece| (piece.begin, piece.rights)).collect();
        let code = Rights::READ | Rights::EXECUTE;
        assert_eq!(found, [(0x1000, Rights::READ), (0x2000, code), (0x3000, Rights::READ), (0x4000, Rights::READ)]);
    }
}
