//! For `crates/malloc/tests/c/by_handle.c`, and the same by ctypes. Include it where tests need it:
//! `#[path = "../../../tests/by_handle.rs"] mod by_handle;`

use std::path::Path;
use std::process::Command;

pub const INNER: [&str; 3] = ["-shared", "-fPIC", "-DINNER"];
pub const OUTER: [&str; 4] = ["-shared", "-fPIC", "-DOUTER", "-Wl,--no-as-needed"];
/// What the program has itself is seen by all, wherever it is loaded.
pub const PROGRAMS: [[&str; 4]; 2] =
    [["-ldl", "-rdynamic", "-pie", "-fPIE"], ["-ldl", "-rdynamic", "-no-pie", "-fno-pie"]];

pub const PYTHON: &str = "
import ctypes, mmap
c = ctypes.CDLL('libc.so.6')
c.strdup.restype = ctypes.c_void_p
for size in 1, 5000, 3 << 20:
    c.free(ctypes.c_void_p(c.strdup(b'x' * size)))
pages = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(pages), 4096):
    pages[at] = 1
start = ctypes.c_char.from_buffer(pages)
c.madvise(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(pages)), mmap.MADV_DONTNEED)
print(sum(pages[::4096]))";

/// The names of a library's functions.
pub fn exported(library: &Path) -> Vec<String> {
    let listed =
        Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().expect("nm, beside the C compiler");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let names: Vec<String> =
        listed.lines().filter_map(|line| line.split_once(" T ")).map(|(_, name)| name.to_owned()).collect();
    assert!(names.iter().any(|name| name == "malloc"), "{listed}");
    names
}
