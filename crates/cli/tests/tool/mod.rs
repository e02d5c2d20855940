//! The tool as tests start it, the places that it works in, and what it prints.
#![allow(dead_code)]

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the tool to its end.
pub fn selfpage(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_selfpage")).args(arguments).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What was printed as JSON, an object a line.
pub fn rows(output: &Output) -> Vec<Value> {
    let lines = text(&output.stdout);
    lines.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|why| panic!("{why}: {line}"))).collect()
}

/// A figure of a row.
#[track_caller]
pub fn figure(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// A directory on disk for one test, open to everybody.
pub struct Place(pub PathBuf);

impl Place {
    pub fn new(name: &str) -> Place {
        let path = Path::new("/var/tmp").join(format!("selfpage-test-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        Place(path)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn is_empty(&self) -> bool {
        std::fs::read_dir(&self.0).unwrap().next().is_none()
    }

    /// Whether a block device counts what is read here, as `bench paging` wants it; why not.
    pub fn has_device(&self) -> Result<(), &'static str> {
        let number = std::fs::metadata(&self.0).unwrap().dev();
        let device = format!("/sys/dev/block/{}:{}", libc::major(number), libc::minor(number));
        let why = "/var/tmp has no block device of its own: mount a local disk there";
        Path::new(&device).exists().then_some(()).ok_or(why)
    }

    /// Puts a shell's script there as a program.
    pub fn program(&self, name: &str, script: &str) {
        let path = self.0.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }

    /// PATH with the programs of this place before all others.
    pub fn first_in_path(&self) -> String {
        format!("{}:{}", self.0.display(), std::env::var("PATH").unwrap())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A system call by its number, and by what one of its arguments is.
pub type Call = (libc::c_long, u32, u32);

/// Has the kernel answer the call with `errno` from now on, as a container's filter does, or an older kernel.
pub fn refuse((call, argument, value): Call, errno: i32) -> io::Result<()> {
    let line = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at| line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let unless = |value, skipped| line(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, value, 0, skipped);
    let end = |what| line(libc::BPF_RET | libc::BPF_K, what, 0, 0);
    let mut lines = [
        load(0),
        unless(call as u32, 3),
        load(16 + 8 * argument),
        unless(value, 1),
        end(libc::SECCOMP_RET_ERRNO | errno as u32),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
    // SAFETY: test: the kernel copies the program.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}
