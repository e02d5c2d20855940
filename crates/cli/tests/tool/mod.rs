//! The tool as tests start it, the places that it works in, and what it prints.
#![allow(dead_code)]

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

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

/// What the tool shows on a terminal of 120 columns, of a kind that `TERM` would name, if any.
///
/// # Errors
/// It cannot be had here: what the test is to be skipped for, and why.
pub fn on_terminal(kind: Option<&str>, place: &Place, arguments: &str) -> Result<String, (&'static str, String)> {
    let line = format!("stty rows 30 cols 120; {} {arguments}", env!("CARGO_BIN_EXE_selfpage"));
    let mut run = Command::new("script");
    run.args(["-qec", &line, "/dev/null"]).env("TMPDIR", &place.0).env_remove("TERM");
    let output = run
        .envs(kind.map(|kind| ("TERM", kind)))
        .stdin(Stdio::null())
        .output()
        .map_err(|_| ("script", "there is no script(1) to make a terminal: apt-get install bsdutils".to_owned()))?;
    let shown = text(&output.stdout);
    if output.status.code() == Some(1) && shown.contains("selfpage doctor") {
        return Err(("uffd", shown));
    }
    assert_eq!(output.status.code(), Some(0), "{shown}");
    Ok(shown)
}

/// Runs a program to its end as process 1 of a PID namespace of its own, and what it says to standard error.
///
/// # Errors
/// That cannot be had here: what the test is to be skipped for, and why.
pub fn in_a_pid_namespace(program: &Command) -> Result<(Output, String), (&'static str, String)> {
    let mut first = Command::new("unshare");
    first.args(["--pid", "--fork", "--mount-proc"]).arg(program.get_program()).args(program.get_args());
    let output =
        first.output().map_err(|_| ("unshare", "there is no unshare(1): apt-get install util-linux".to_owned()))?;
    let errors = text(&output.stderr);
    if errors.contains("unshare: ") { Err(("root", errors)) } else { Ok((output, errors)) }
}

/// What stays of a terminal's output without colours and moves of the cursor.
pub fn without_escapes(shown: &str) -> String {
    let mut parts = shown.split("\x1b[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|byte: char| byte.is_ascii_alphabetic()).expect("an escape without an end");
        plain += &part[end + 1..];
    }
    plain
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

    /// Puts a copy of the tool there, for another user or under another name. Another process copies: a child that another thread of this one
    /// forks meanwhile would have the copy open for writing, and then nobody can execute it.
    pub fn copy_of_tool(&self, name: impl AsRef<Path>) -> PathBuf {
        let path = self.0.join(name);
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_selfpage")).arg(&path).status().unwrap();
        assert!(copied.success());
        path
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
