//! The mappings of this process, as the kernel lists them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;

use crate::error::{Error, Result};

const LIST: &str = "/proc/thread-self/maps";

/// One mapping.
pub(crate) struct Mapping {
    pub(crate) range: Range<usize>,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) executable: bool,
    /// The file, or what the kernel calls it; empty for anonymous memory.
    pub(crate) name: String,
}

/// All, by address.
///
/// # Errors
/// No descriptor is free, or there is no /proc: nothing is known of them.
pub(crate) fn of_this_process() -> Result<Vec<Mapping>> {
    within(&(0..usize::MAX))
}

/// Those with a part in a range, by address. Takes little memory: where there are as many mappings as there can be, there may be none for all.
///
/// # Errors
/// As for [`of_this_process`].
pub(crate) fn within(range: &Range<usize>) -> Result<Vec<Mapping>> {
    let refused = |why| Error::system("read", LIST, why);
    let mut found = Vec::new();
    for line in BufReader::new(File::open(LIST).map_err(refused)?).split(b'\n') {
        let mapping = parse(&String::from_utf8_lossy(&line.map_err(refused)?));
        found.extend(mapping.filter(|mapping| mapping.range.start < range.end && range.start < mapping.range.end));
    }
    Ok(found)
}

fn parse(line: &str) -> Option<Mapping> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    let allowed = rest.as_bytes().get(..3)?;
    // Protection, offset, device, inode, and then the name, which may have spaces.
    let name = rest.splitn(5, ' ').nth(4).unwrap_or_default().trim();
    Some(Mapping {
        range,
        readable: allowed[0] == b'r',
        writable: allowed[1] == b'w',
        executable: allowed[2] == b'x',
        name: name.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_range_rights_and_a_name() {
        let mapping = parse("7f00-7fff r-xp 00001000 fe:01 1234          /a path/lib.so").unwrap();
        assert_eq!((mapping.range, mapping.name.as_str()), (0x7f00..0x7fff, "/a path/lib.so"));
        assert!(mapping.readable && !mapping.writable && mapping.executable);
        let anonymous = parse("1000-2000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.name.as_str(), anonymous.writable), ("", true));
        assert!(parse("").is_none());
    }

    #[test]
    fn the_kernel_lists_this_very_test() {
        let here = parse as *const () as usize;
        let mapping = of_this_process().unwrap().into_iter().find(|mapping| mapping.range.contains(&here)).unwrap();
        assert!(mapping.executable && mapping.name.starts_with('/'));
    }
}
