//! A library that stands in for the C library's `malloc`, preloaded into the process that measures.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::Error;
use crate::loader;

/// The library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// As in skips.
    pub name: &'static str,
    /// The file.
    pub file: &'static str,
    /// Who has it.
    pub origin: Origin,
}

/// Where a library comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This package of the distribution, in one of [`LIBRARIES`].
    Distribution(&'static str),
    /// This crate of ours, beside the tool.
    Workspace(&'static str),
    /// The C library of this process.
    Process,
}

/// Where Debian and others put shared libraries.
const LIBRARIES: [&str; 4] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

impl Preload {
    /// Where the library is, to be named in `LD_PRELOAD`.
    pub fn path(self) -> Result<PathBuf, Error> {
        let first_in = |places: &[PathBuf], remedy: &str| {
            let path = places.iter().map(|directory| directory.join(self.file)).find(|path| path.exists());
            path.ok_or_else(|| format!("no {} here: {remedy}", self.file))
        };
        let path = match self.origin {
            Origin::Distribution(package) => first_in(&LIBRARIES.map(PathBuf::from), &format!("install {package}")),
            Origin::Workspace(package) => loader::find(self.file, package),
            Origin::Process => {
                let library = mapped_file(libc::getauxval as *const () as usize);
                let directory = library.as_deref().and_then(Path::parent).map(Path::to_owned);
                first_in(directory.as_slice(), "build the tool for glibc, linked dynamically")
            }
        };
        let path = path.map_err(|why| Error::skip(self.name, why))?;
        // The process would have the C library's, and be measured with that.
        loader::can_preload(&path).map_err(Error::Failed)?;
        Ok(path)
    }

    /// Its name, and which it is. `None`: it is not here.
    pub fn describe(self) -> Option<(String, String)> {
        let path = self.path().ok()?.canonicalize().ok()?;
        let bytes = std::fs::read(&path).ok()?;
        let file = path.file_name()?.to_string_lossy().into_owned();
        Some((format!("library {}", self.name), format!("{file}, {} bytes, cksum {}", bytes.len(), checksum(&bytes))))
    }
}

/// What cksum(1) says of a file.
fn checksum(bytes: &[u8]) -> u32 {
    let len_bytes = std::iter::successors(Some(bytes.len()), |left| Some(left >> 8)).take_while(|left| *left > 0);
    let all = bytes.iter().copied().chain(len_bytes.map(|left| left as u8));
    let add = |sum: u32, byte: u8| {
        (0..8).fold(sum ^ u32::from(byte) << 24, |sum, _| sum << 1 ^ if sum >> 31 == 1 { 0x04c1_1db7 } else { 0 })
    };
    !all.fold(0, add)
}

/// What changes the C library's `malloc` where the tool is started is not to change it in what is measured.
pub fn without_settings(command: &mut Command) {
    let names = std::env::vars_os().map(|(name, _)| name);
    let is_setting = |name: &OsString| name == "GLIBC_TUNABLES" || name.as_encoded_bytes().starts_with(b"MALLOC_");
    for name in names.filter(is_setting) {
        command.env_remove(name);
    }
}

/// The file that is mapped at `address` of this process.
fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (begin, end) = range.split_once('-')?;
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let path = rest.split_once('/')?.1;
        (number(begin)?..number(end)?).contains(&address).then(|| Path::new("/").join(path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_told_by_what_cksum_says() {
        let library = Preload { name: "glibc", file: "libc.so.6", origin: Origin::Process };
        let said = Command::new("cksum").arg(library.path().unwrap().canonicalize().unwrap()).output().unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        let [sum, len_bytes] = said.split(' ').take(2).collect::<Vec<_>>()[..] else { panic!("{said}") };
        let (name, told) = library.describe().unwrap();
        assert_eq!(
            (name.as_str(), told.split_once(", ").unwrap().1),
            ("library glibc", &*format!("{len_bytes} bytes, cksum {sum}"))
        );
        assert!(told.starts_with("libc"), "{told}");
    }

    #[test]
    fn the_c_library_is_the_one_that_this_process_has() {
        let library = Preload { name: "glibc", file: "libc.so.6", origin: Origin::Process }.path().unwrap();
        let own = mapped_file(libc::malloc as *const () as usize).unwrap();
        assert_eq!(library.canonicalize().unwrap(), own.canonicalize().unwrap());
        assert_ne!(own, std::env::current_exe().unwrap());
        assert_eq!(mapped_file(&raw const library as usize), None, "the stack is no file");
    }
}
