//! What a program's ELF header says of whether the library can be preloaded into it. The tool has this file too, and looks before it begins
//! anything: nothing else of this library stands in it. Nothing is allocated.

/// How the name of glibc's loader ends.
const LOADER: &[u8] = b"/ld-linux-x86-64.so.2";

/// What a file is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    NoElf,
    /// The library can be preloaded there.
    Enterable,
    /// Its header names places that are not in it.
    Damaged,
    /// No 64-bit x86 program.
    OfAnotherMachine,
    /// Another C library's, whose loader has its name there.
    OfAnotherLibrary(Name),
    Static,
}

/// Where in a file a name is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name {
    pub at: u64,
    pub len_bytes: u64,
}

/// Looks at a program by its path, and by a function that fills a buffer from an offset on, if the file has as much.
pub fn see(path: &[u8], read: impl Fn(&mut [u8], u64) -> bool) -> Kind {
    const PT_INTERP: u64 = 3;
    let mut head = [0; 64];
    if !read(&mut head[..4], 0) || !head.starts_with(b"\x7fELF") {
        return Kind::NoElf;
    }
    // The loader itself is a program too, which loads what it is told.
    if path.ends_with(LOADER) {
        return Kind::Enterable;
    }
    if !read(&mut head, 0) {
        return Kind::Damaged;
    }
    if head[4] != 2 || number(&head[18..20]) != 62 {
        return Kind::OfAnotherMachine;
    }
    let (from, size, count) = (number(&head[32..40]), number(&head[54..56]), number(&head[56..58]));
    for index in 0..count {
        let mut header = [0; 56];
        // Neither factor is larger than 16 bits.
        if !from.checked_add(index * size).is_some_and(|at| read(&mut header, at)) {
            return Kind::Damaged;
        }
        if number(&header[..4]) == PT_INTERP {
            let (at, len_bytes) = (number(&header[8..16]), number(&header[32..40]));
            // How it ends, and the NUL.
            let mut end = [0; LOADER.len() + 1];
            let place = at.checked_add(len_bytes).and_then(|behind| behind.checked_sub(end.len() as u64));
            let is_whole = place.is_some_and(|place| place >= at && read(&mut end, place));
            let is_glibcs = is_whole && end.strip_suffix(b"\0") == Some(LOADER);
            return if is_glibcs { Kind::Enterable } else { Kind::OfAnotherLibrary(Name { at, len_bytes }) };
        }
    }
    Kind::Static
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
