//! Whether a program that is about to be executed can be entered by this library. Where not, it runs as it always did, and the
//! record says so: `run` tells its user. Nothing is allocated: after `vfork` this is our parent's memory.

use std::ffi::{CStr, c_char};
use std::ops::Range;

use crate::elf::{self, Kind};
use crate::sys::call;
use crate::{filters, record};

const LIBRARY: &[u8] = b"/libselfpage_frames.so";
const OTHER_LIBRARY: &str = "it uses another C library";
const PATH_BYTES: usize = 4096;

/// Whether somebody who asks for memory at `range` may want to put code there: it is within reach of a jump from the program's own, and
/// small. A compiler like LuaJIT's takes no other place, and tries again and again.
pub fn may_want_for_code(range: &Range<usize>) -> bool {
    const MOST_BYTES: usize = 64 << 20;
    const REACH_BYTES: usize = 1 << 31;
    if range.start == 0 || range.len() > MOST_BYTES {
        return false;
    }
    // SAFETY: c-library: a look at what the kernel gave the process.
    let program = unsafe { libc::getauxval(libc::AT_ENTRY) } as usize;
    [range.start, range.end].iter().all(|at| at.abs_diff(program) < REACH_BYTES)
}

/// What becomes of this library in a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// It is in, or is passed over.
    Harmless,
    /// The loader takes it for a library of its own C library's, finds no functions that it needs, and ends: musl's.
    Fatal,
}

/// Looks at the program at a path.
///
/// # Safety
/// *c-library*: `path` is a string, or an address that the kernel cannot read.
pub unsafe fn see(path: *const c_char) -> Entry {
    // What this takes a filter may forbid.
    if filters::are_set() || !may_execute(path) {
        return Entry::Harmless;
    }
    // SAFETY: c-library: the kernel has read it to its end.
    look_at(unsafe { CStr::from_ptr(path) })
}

/// Asked of the kernel alone: the program may pass an address of nothing.
fn may_execute(path: *const c_char) -> bool {
    // SAFETY: raw-call: the kernel reads the path, if it can, and fills a structure of its own.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        // A directory has the right too, and is passed over in a search.
        call(libc::SYS_access, [path as usize, libc::X_OK as usize, 0, 0, 0, 0]) == 0
            && call(libc::SYS_stat, [path as usize, &raw mut about as usize, 0, 0, 0, 0]) == 0
            && about.st_mode & libc::S_IFMT == libc::S_IFREG
    }
}

fn look_at(path: &CStr) -> Entry {
    let why = why_not(path);
    if let Some(why) = why {
        record::not_managed(path.to_bytes(), why);
    }
    if why == Some(OTHER_LIBRARY) { Entry::Fatal } else { Entry::Harmless }
}

/// The same, looked for in PATH if its name has no slash.
///
/// # Safety
/// *c-library*: `file` is a string, or null.
pub unsafe fn see_in_path(file: *const c_char) -> Entry {
    if filters::are_set() {
        return Entry::Harmless;
    }
    // SAFETY: c-library: passed on from our caller; PATH is a string, if it is there.
    let (file, dirs) = unsafe {
        let Some(name) = file.as_ref().map(|file| CStr::from_ptr(file).to_bytes()) else {
            return Entry::Harmless;
        };
        if name.contains(&b'/') {
            return see(file);
        }
        let Some(dirs) = libc::getenv(c"PATH".as_ptr()).as_ref().map(|dirs| CStr::from_ptr(dirs).to_bytes()) else {
            return Entry::Harmless;
        };
        (name, dirs)
    };
    let mut path = [0u8; PATH_BYTES];
    for dir in dirs.split(|byte| *byte == b':') {
        // As the C library: an element that is empty is where we are.
        let dir: &[u8] = if dir.is_empty() { b"." } else { dir };
        let len = dir.len() + 1 + file.len();
        if len >= PATH_BYTES {
            continue;
        }
        path[..dir.len()].copy_from_slice(dir);
        path[dir.len()] = b'/';
        path[dir.len() + 1..len].copy_from_slice(file);
        path[len] = 0;
        if let Ok(path) = CStr::from_bytes_until_nul(&path)
            && may_execute(path.as_ptr())
        {
            return look_at(path);
        }
    }
    Entry::Harmless
}

/// Why a program will not be managed. What cannot be looked at may be.
fn why_not(path: &CStr) -> Option<&'static str> {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    // SAFETY: raw-call: the path ends with NUL.
    let file = unsafe { call(libc::SYS_open, [path.as_ptr() as usize, flags, 0, 0, 0, 0]) };
    if file < 0 {
        return None;
    }
    let why = keeps_out(file as usize, path);
    // SAFETY: raw-call: our own descriptor.
    unsafe { call(libc::SYS_close, [file as usize, 0, 0, 0, 0, 0]) };
    why.or_else(lacks_library)
}

/// The names in LD_PRELOAD.
pub fn preloaded(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|byte| b" :".contains(byte))
}

/// Whether that is this library.
pub fn is_own(name: &[u8]) -> bool {
    name.ends_with(LIBRARY)
}

/// Whether the loader will not find this library, as behind another root: it says so, and goes on without.
fn lacks_library() -> Option<&'static str> {
    // SAFETY: c-library: the name ends with NUL, and so does what it stands for.
    let list = unsafe { libc::getenv(c"LD_PRELOAD".as_ptr()).as_ref().map(|list| CStr::from_ptr(list).to_bytes())? };
    // Others may have put a library of theirs before it.
    let own = preloaded(list).find(|name| is_own(name))?;
    // The last name ends where the list does, with NUL. Others are copied, which takes room on the program's stack.
    let is_last = own.as_ptr_range().end == list.as_ptr_range().end;
    let cannot = if is_last { cannot_read(own.as_ptr()) } else { cannot_read_copied(own) };
    cannot.then_some("the library cannot be read where it runs")
}

#[inline(never)]
fn cannot_read_copied(name: &[u8]) -> bool {
    let mut path = [0u8; PATH_BYTES];
    let Some(room) = path.get_mut(..name.len()).filter(|room| room.len() < PATH_BYTES) else { return false };
    room.copy_from_slice(name);
    cannot_read(path.as_ptr())
}

/// As the loader does: access(2) does not know what a process has denied itself (Landlock). The path ends with NUL.
fn cannot_read(path: *const u8) -> bool {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    // SAFETY: raw-call: the kernel reads the path.
    let file = unsafe { call(libc::SYS_open, [path as usize, flags, 0, 0, 0, 0]) };
    if file >= 0 {
        // SAFETY: raw-call: our own descriptor.
        unsafe { call(libc::SYS_close, [file as usize, 0, 0, 0, 0, 0]) };
    }
    // Another thread may have taken the last number; the loader has all of them.
    file < 0 && ![libc::EMFILE, libc::ENFILE].contains(&-(file as i32))
}

/// Whether it is setuid or setgid to somebody else: the loader preloads nothing there.
fn gains_rights(file: usize) -> bool {
    // SAFETY: raw-call: the kernel fills structures of its own; the other calls take numbers.
    unsafe {
        let (mut about, mut mount): (libc::stat, libc::statfs64) = std::mem::zeroed();
        if call(libc::SYS_fstat, [file, &raw mut about as usize, 0, 0, 0, 0]) < 0
            || call(libc::SYS_fstatfs, [file, &raw mut mount as usize, 0, 0, 0, 0]) < 0
            // So mounted, a file system gives nobody rights.
            || mount.f_flags & libc::ST_NOSUID.cast_signed() != 0
            || call(libc::SYS_prctl, [libc::PR_GET_NO_NEW_PRIVS as usize, 0, 0, 0, 0, 0]) == 1
        {
            return false;
        }
        let changes_user = about.st_mode & 0o4000 != 0 && about.st_uid != libc::geteuid();
        let changes_group = about.st_mode & 0o2010 == 0o2010 && about.st_gid != libc::getegid();
        about.st_mode & libc::S_IFMT == libc::S_IFREG && (changes_user || changes_group)
    }
}

/// What of a file keeps the library out.
fn keeps_out(file: usize, path: &CStr) -> Option<&'static str> {
    let read = |bytes: &mut [u8], at: u64| {
        // SAFETY: raw-call: the buffer has that many bytes.
        let read =
            unsafe { call(libc::SYS_pread64, [file, bytes.as_mut_ptr() as usize, bytes.len(), at as usize, 0, 0]) };
        read == bytes.len() as isize
    };
    match elf::see(path.to_bytes(), read) {
        // To a script Linux gives no rights.
        Kind::NoElf => None,
        _ if gains_rights(file) => Some("it runs with more rights"),
        Kind::Enterable | Kind::Damaged => None,
        Kind::OfAnotherMachine => Some("it is not a 64-bit x86 program"),
        Kind::OfAnotherLibrary(_) => Some(OTHER_LIBRARY),
        Kind::Static => Some("it is linked statically"),
    }
}
