//! Whether a program can be entered by the preloaded library, and why not.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, StatVfsMountFlags};
use rustix::io::Errno;

use super::cause;
use super::elf::{self, Kind};

/// A script's interpreter may be a script, so often.
const MOST_SCRIPTS: usize = 4;

/// The program's file, looked for as a shell would, if the library can enter it.
pub fn find(name: &OsStr) -> Result<PathBuf, String> {
    if name.is_empty() {
        return Err("the name of the program is empty; name one behind --".into());
    }
    let path = if name.as_bytes().contains(&b'/') { PathBuf::from(name) } else { in_path(name)? };
    check(&path, 0)?;
    Ok(path)
}

fn in_path(name: &OsStr) -> Result<PathBuf, String> {
    let dirs = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let there: Vec<PathBuf> =
        std::env::split_paths(&dirs).map(|dir| dir.join(name)).filter(|path| path.is_file()).collect();
    let found = there.iter().find(|path| rustix::fs::access(*path, Access::EXEC_OK).is_ok());
    // Of what may not be executed the first, for which it is said why.
    found
        .or(there.first())
        .cloned()
        .ok_or_else(|| format!("there is no program {} in PATH: give its path, or add its directory", name.display()))
}

fn check(path: &Path, scripts: usize) -> Result<(), String> {
    let shown = path.display();
    let cannot = |cause: io::Error| format!("cannot run {shown}: {}", cause::told(&cause));
    let about = std::fs::metadata(path).map_err(cannot)?;
    if !about.is_file() {
        return Err(format!("cannot run {shown}: it is no file"));
    }
    rustix::fs::access(path, Access::EXEC_OK)
        .map_err(|cause| format!("cannot run {shown}: {}", not_executable(path, cause)))?;
    let file = File::open(path).map_err(cannot)?;
    let mut head = [0; 256];
    let len = file.read_at(&mut head, 0).map_err(cannot)?;
    if let Some(line) = head[..len].strip_prefix(b"#!") {
        return check_script(path, line, scripts);
    }
    let read = |bytes: &mut [u8], at: u64| file.read_exact_at(bytes, at).is_ok();
    let kind = elf::see(path.as_os_str().as_bytes(), read);
    if kind == Kind::NoElf {
        return Err(format!("cannot run {shown}: it is neither a program nor a script that begins with #!"));
    }
    // To a script Linux gives no rights.
    may_be_preloaded(path, &about)?;
    match kind {
        Kind::Enterable => Ok(()),
        Kind::NoElf | Kind::Damaged => Err(format!("cannot run {shown}: its ELF header is damaged")),
        Kind::OfAnotherMachine => {
            Err(format!("cannot enter {shown}: it is not a 64-bit x86 program, and the library is"))
        }
        Kind::OfAnotherLibrary(name) => {
            let mut loader = vec![0; name.len_bytes.min(4096) as usize];
            let is_there = read(&mut loader, name.at);
            let loader = String::from_utf8_lossy(if is_there { &loader } else { b"unknown" });
            let loader = loader.trim_end_matches('\0');
            Err(format!(
                "cannot enter {shown}: it uses another C library (its loader is {loader}), and ours is for glibc"
            ))
        }
        Kind::Static => Err(format!(
            "cannot enter {shown}: it is statically linked, and nothing can be preloaded there; link it dynamically"
        )),
    }
}

/// Why a file may not be executed, and what helps.
fn not_executable(path: &Path, cause: Errno) -> String {
    if rustix::fs::statvfs(path).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::NOEXEC)) {
        return "its file system is mounted noexec; copy it elsewhere, or remount it with exec".into();
    }
    match cause {
        Errno::ACCESS => "it is not executable; chmod +x would make it so".into(),
        cause => cause::told(&cause.into()),
    }
}

/// Whether the loader heeds `LD_PRELOAD` there: not where the kernel says that the program has rights which its caller has not.
fn may_be_preloaded(path: &Path, about: &Metadata) -> Result<(), String> {
    let mode = about.mode();
    // So mounted, a file system gives nobody rights.
    if rustix::fs::statvfs(path).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::NOSUID)) {
        return Ok(());
    }
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let gains_nothing = rustix::thread::no_new_privs().unwrap_or(false);
    let changes_user = mode & 0o4000 != 0 && about.uid() != user;
    let changes_group = mode & 0o2010 == 0o2010 && about.gid() != group;
    if !gains_nothing && (changes_user || changes_group) {
        return Err(format!(
            "cannot enter {}: it runs with more rights than yours (setuid or setgid), and the loader preloads nothing there; run it as \
             the user that it becomes",
            path.display()
        ));
    }
    // With those that are in effect from the beginning (the first bit) it counts as one with more rights, whether it gains them or not.
    let mut capabilities = [0; 64];
    let has_any = rustix::fs::getxattr(path, "security.capability", &mut capabilities).is_ok();
    if user != 0 && has_any && (!gains_nothing || capabilities[0] & 1 == 1) {
        return Err(format!(
            "cannot enter {}: it has file capabilities, and the loader preloads nothing there; run a copy of it, which has none",
            path.display()
        ));
    }
    Ok(())
}

fn check_script(path: &Path, line: &[u8], scripts: usize) -> Result<(), String> {
    // As the kernel does: a carriage return, say, is a part of the name.
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | 0)).filter(|word| !word.is_empty());
    let interpreter = words.next().unwrap_or_default();
    if interpreter.is_empty() {
        return Err(format!("cannot run {}: its first line names no interpreter", path.display()));
    }
    let interpreter = Path::new(OsStr::from_bytes(interpreter));
    if let (Some(meant), false) = (interpreter.as_os_str().as_bytes().strip_suffix(b"\r"), interpreter.exists()) {
        return Err(format!(
            "cannot run {}: its first line names the interpreter {} with a carriage return behind it; save it with Unix line ends",
            path.display(),
            OsStr::from_bytes(meant).display()
        ));
    }
    if scripts == MOST_SCRIPTS {
        return Err(format!("cannot run {}: the chain of its interpreters does not end", path.display()));
    }
    // The script that was asked for is named, and the last.
    check(interpreter, scripts + 1).map_err(|why| match scripts {
        0 => format!("{}: {why}", path.display()),
        _ => why,
    })
}
