//! `cargo xtask qemu-test`: tests on a second CPU, which qemu emulates, under a Debian kernel. Nothing of this machine's own KVM is
//! used. `--guest`: the tests of `selfpage-guest`; the CPU is AMD's, with SVM and nested paging. `--keys`: the tests of protection
//! domains, and of dirty pages; the CPU has protection keys, and the kernel soft-dirty bits. `cargo xtask qemu-bench --keys`: what switching
//! those domains takes there, in instructions. `qemu-bench --dirty`: what finding dirty pages takes, soft-dirty bits included.

mod bench;

use crate::steps::{Step, cargo, output};
use crate::tally::Skip;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const QEMU: &str = "qemu-system-x86_64";
/// All that qemu can emulate; with five levels of page tables, nested paging would have five as well.
const CPU: &str = "max,la57=off";
/// All CPUs in one thread, in turns. Each in its own, one that spins for a lock takes qemu's lock at each round, and where the host is
/// busy the others do not get at it for minutes.
const ACCEL: &str = "tcg,thread=single";
/// For the few things that are done before and after the programs.
const SHELL: &str = "busybox-static";
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// What is run on the emulated CPU.
pub struct Trial {
    package: &'static str,
    /// cargo's option for programs of this kind, and their names.
    kind: &'static str,
    programs: &'static [&'static str],
    /// What the shell does for each `$program`.
    command: &'static str,
    /// For programs that need no library: a C library of that kind, or linked in by `rustflags`.
    target: &'static str,
    rustflags: &'static str,
    /// What nothing must be skipped for, and what /proc/cpuinfo must list for that.
    required: &'static str,
    flag: &'static str,
    /// Depends on the kernel's package of today, under a name of its own.
    kernel: &'static str,
    folder: &'static str,
    /// What the kernel loads, in this order.
    modules: &'static [&'static str],
    /// What else qemu is told.
    machine: &'static [&'static str],
    /// What is made of all that was shown, once every program has ended well.
    conclude: fn(dir: &Path, shown: &str) -> Result<(), String>,
}

const SHOW_ALL: &str = "$program --show-output";
/// Its file systems cannot hold swap.
const WITHOUT_SWAP: &str = "$program --show-output --skip swapping_is_no_write_and_hides_none";

/// `selfpage-guest`, for which the kernel has KVM.
pub const GUEST: Trial = Trial {
    package: "selfpage-guest",
    kind: "--test",
    programs: &["vm", "closure", "handler", "stale", "steps", "oracle"],
    command: SHOW_ALL,
    target: "x86_64-unknown-linux-musl",
    rustflags: "",
    required: "kvm",
    flag: "svm",
    kernel: "linux-image-cloud-amd64",
    folder: "qemu",
    modules: &["virt/lib/irqbypass.ko", "arch/x86/kvm/kvm.ko", "arch/x86/kvm/kvm-amd.ko"],
    machine: &[],
    conclude: |_, _| Ok(()),
};

/// Protection domains, and dirty pages. Regions need pages that move, which Debian 12's first kernel has not. Two CPUs, each with a register
/// of keys.
pub const KEYS: Trial = Trial {
    package: "selfpage",
    kind: "--test",
    programs: &[
        "protection",
        "protection_parts",
        "protection_wide",
        "protection_signals",
        "rights",
        "keys_taken",
        "domains_random",
        "dirty",
    ],
    command: WITHOUT_SWAP,
    target: "x86_64-unknown-linux-gnu",
    rustflags: "-C target-feature=+crt-static",
    required: "pku,uffd,soft-dirty",
    flag: "ospke",
    kernel: "linux-image-6.12-cloud-amd64",
    folder: "qemu-keys",
    modules: &[],
    machine: &["-smp", "2"],
    conclude: |_, _| Ok(()),
};

/// Switches of protection domains, beside mprotect. The guest's clock counts the instructions that its one CPU executes, one a
/// nanosecond.
pub const KEYS_BENCH: Trial = Trial {
    package: "selfpage-cli",
    kind: "--bin",
    programs: &["selfpage"],
    command: bench::KEYS,
    machine: &["-icount", "shift=0,sleep=off"],
    conclude: bench::conclude_keys,
    ..KEYS
};

/// Dirty pages, by each way that there is to find them.
pub const DIRTY_BENCH: Trial = Trial { command: bench::DIRTY, conclude: bench::conclude_dirty, ..KEYS_BENCH };

/// Runs the programs, or says why that cannot be done here. False if one failed, or did not end.
pub fn run(root: &Path, trial: &Trial) -> bool {
    let dir = root.join("target").join(trial.folder);
    let system = match System::fetch(&dir, trial) {
        Ok(system) => system,
        Err(reason) => {
            let skip = Skip { name: "qemu".into(), reason: reason.replace('\n', " "), test: None };
            println!("{skip}");
            let forbidden = skip.forbidden_by(&std::env::var("SELFPAGE_REQUIRE").unwrap_or_default());
            if forbidden {
                eprintln!("FAILED qemu: SELFPAGE_REQUIRE names qemu");
            }
            return !forbidden;
        }
    };
    let shown = build(root, trial).and_then(|programs| system.start(&dir, trial, &programs));
    let concluded = shown.and_then(|shown| (trial.conclude)(&dir, &shown));
    match &concluded {
        Ok(()) => println!("qemu: {} ended well on an emulated CPU", trial.programs.join(", ")),
        Err(why) => eprintln!("FAILED qemu: {why}"),
    }
    concluded.is_ok()
}

/// A kernel, modules for it, and a shell.
struct System {
    kernel: PathBuf,
    modules: Vec<PathBuf>,
    shell: PathBuf,
}

impl System {
    /// Fetches what is not there yet.
    ///
    /// # Errors
    /// What is missing, and the remedy.
    fn fetch(dir: &Path, trial: &Trial) -> Result<System, String> {
        if output(Command::new(QEMU).arg("--version")).is_err() {
            return Err(format!("there is no {QEMU}; apt-get install qemu-system-x86"));
        }
        let target = trial.target;
        let added = output(Command::new("rustup").args(["target", "add", target]));
        added.map_err(|why| format!("rustup has no target {target}, for programs without libraries: {why}"))?;
        let unpacked = dir.join("unpacked");
        System::find(&unpacked, trial).or_else(|_| {
            let remedy = "it needs Debian's apt-get, its lists (apt-get update) and a network";
            fetch_packages(dir, trial).map_err(|why| format!("no kernel could be fetched: {why}; {remedy}"))?;
            System::find(&unpacked, trial)
        })
    }

    fn find(unpacked: &Path, trial: &Trial) -> Result<System, String> {
        let missing = |path: &Path| format!("the kernel's package has no {}; Debian 12's has", path.display());
        let release = std::fs::read_dir(unpacked.join("lib/modules")).ok().and_then(|mut all| all.next()?.ok());
        let release = release.ok_or_else(|| missing(Path::new("lib/modules")))?;
        let kernel = unpacked.join("boot").join(format!("vmlinuz-{}", release.file_name().display()));
        let modules = trial.modules.iter().map(|module| release.path().join("kernel").join(module)).collect();
        let shell = unpacked.join("bin/busybox");
        let system = System { kernel, modules, shell };
        let absent = system.modules.iter().chain([&system.kernel, &system.shell]).find(|path| !path.is_file());
        absent.map_or(Ok(()), |path| Err(missing(path)))?;
        Ok(system)
    }

    /// Runs the programs on it, as the whole of what it does: what was shown.
    ///
    /// # Errors
    /// Which program did not end well, or what went wrong before.
    fn start(&self, dir: &Path, trial: &Trial, programs: &[PathBuf]) -> Result<String, String> {
        let files = dir.join("files.cpio");
        std::fs::write(&files, self.files(trial, programs)?)
            .map_err(|error| format!("{}: {error}", files.display()))?;
        let mut qemu = Command::new(QEMU);
        qemu.args(["-accel", ACCEL, "-cpu", CPU, "-m", "2G", "-nodefaults", "-no-reboot"]);
        qemu.args(["-display", "none", "-serial", "stdio"]).args(trial.machine);
        qemu.args(["-append", "console=ttyS0 loglevel=3 panic=-1"]);
        qemu.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&files);
        let mut screen = Screen::default();
        let report = Step { name: QEMU.into(), limit: LIMIT, commands: vec![qemu] }.run(&mut screen);
        report.failure.map_or(Ok(()), Err)?;
        let shown = String::from_utf8_lossy(&screen.shown).into_owned();
        verdict(trial, &shown)?;
        Ok(shown)
    }

    /// The files that it finds when it starts.
    fn files(&self, trial: &Trial, programs: &[PathBuf]) -> Result<Vec<u8>, String> {
        let mut archive = Archive::default();
        for name in ["bin", "dev", "proc", "sys", "tmp", "var", "var/tmp", "modules", "programs"] {
            archive.add(name, Archive::FOLDER, &[]);
        }
        archive.add("init", Archive::PROGRAM, init(trial).as_bytes());
        archive.add("bin/busybox", Archive::PROGRAM, &read(&self.shell)?);
        for module in &self.modules {
            archive.add(&format!("modules/{}", file_name(module)), Archive::PROGRAM, &read(module)?);
        }
        for (name, program) in trial.programs.iter().zip(programs) {
            archive.add(&format!("programs/{name}"), Archive::PROGRAM, &read(program)?);
        }
        Ok(archive.finish())
    }
}

/// Brings the packages, and unpacks them where they are in nobody's way.
fn fetch_packages(dir: &Path, trial: &Trial) -> Result<(), String> {
    std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let depends = output(Command::new("apt-cache").args(["depends", trial.kernel]))?;
    let kernel = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    let kernel = kernel.ok_or_else(|| format!("apt-cache knows no {}", trial.kernel))?;
    for package in [kernel, SHELL] {
        println!("qemu: fetching {package}");
        output(Command::new("apt-get").current_dir(dir).args(["-q", "download", package]))?;
    }
    let all = std::fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    for package in all.flatten().map(|entry| entry.path()) {
        if package.extension().is_some_and(|extension| extension == "deb") {
            output(Command::new("dpkg-deb").arg("-x").arg(&package).arg(dir.join("unpacked")))?;
        }
    }
    Ok(())
}

/// Builds the programs so that they need nothing but a kernel: where each of them is.
fn build(root: &Path, trial: &Trial) -> Result<Vec<PathBuf>, String> {
    let mut cargo = cargo(root, "build --release");
    cargo.args(["--package", trial.package, "--target", trial.target]);
    if !trial.rustflags.is_empty() {
        cargo.env("RUSTFLAGS", trial.rustflags);
    }
    cargo.args(trial.programs.iter().flat_map(|program| [trial.kind, *program]));
    let messages = output(cargo.args(["--message-format", "json"]))?;
    let built = programs(&messages);
    // A test's file has a number behind its name.
    let is = |path: &&PathBuf, name: &str| file_name(path).split('-').next() == Some(name);
    let find = |name: &&str| built.iter().find(|path| is(path, name)).cloned();
    trial.programs.iter().map(|name| find(name).ok_or_else(|| format!("cargo built no {name}"))).collect()
}

/// The programs that cargo says it has built, in JSON.
fn programs(messages: &str) -> Vec<PathBuf> {
    messages.lines().filter_map(|message| Some(after(message, "\"executable\":\"", '"')?.into())).collect()
}

/// What stands in a line between `key` and the next `end`.
fn after<'a>(line: &'a str, key: &str, end: char) -> Option<&'a str> {
    Some(line.split_once(key)?.1.split_once(end)?.0)
}

/// What the kernel starts: loads its modules, runs the programs, says how each ended, and switches off. They write to a pipe, where
/// nobody draws bars.
fn init(trial: &Trial) -> String {
    let insert = |module: &&str| format!("busybox insmod /modules/{}\n", file_name(Path::new(module)));
    let modules: String = trial.modules.iter().map(insert).collect();
    let Trial { flag, required, command, .. } = trial;
    let programs = trial.programs.join(" ");
    format!(
        "#!/bin/busybox sh
export PATH=/bin:/programs SELFPAGE_REQUIRE={required}
set -o pipefail
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
{modules}
busybox grep -q -w {flag} /proc/cpuinfo || echo \"qemu: the CPU has no {flag}\"
for program in {programs}; do
    {{ {command}; }} 2>&1 | busybox cat
    echo \"qemu: $program ended with $?\"
done
busybox poweroff -f
"
    )
}

/// Whether each program has said that it ended well.
fn verdict(trial: &Trial, shown: &str) -> Result<(), String> {
    if let Some(lack) = shown.lines().find(|line| line.starts_with("qemu: the CPU has no")) {
        return Err(lack.into());
    }
    let is_good = |name: &&str| shown.lines().any(|line| line == format!("qemu: {name} ended with 0"));
    match trial.programs.iter().filter(|name| !is_good(name)).copied().collect::<Vec<_>>().join(", ") {
        bad if bad.is_empty() => Ok(()),
        bad => Err(format!("in qemu, not ended well: {bad}")),
    }
}

/// What is written is shown, and remembered.
#[derive(Default)]
struct Screen {
    shown: Vec<u8>,
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.shown.extend(bytes);
        std::io::stdout().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stdout().flush()
    }
}

/// An archive that the kernel unpacks as its first file system.
///
/// # Source
/// The kernel's Documentation/driver-api/early-userspace/buffer-format.rst, "newc".
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    files: u32,
}

impl Archive {
    const FOLDER: u32 = 0o040_755;
    const PROGRAM: u32 = 0o100_755;

    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.files += 1;
        let (inode, owner, group, links, changed, device) = (self.files, 0, 0, 1, 0, 0);
        let (content_bytes, name_bytes) = (content.len() as u32, name.len() as u32 + 1);
        self.bytes.extend(b"070701");
        for number in [inode, mode, owner, group, links, changed, content_bytes, device, device, device, device] {
            self.bytes.extend(format!("{number:08x}").bytes());
        }
        // The checksum is for another form.
        self.bytes.extend(format!("{name_bytes:08x}{:08x}{name}\0", 0).bytes());
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_must_say_that_it_ended_well() {
        for trial in [GUEST, KEYS, KEYS_BENCH, DIRTY_BENCH] {
            let lines: Vec<_> = trial.programs.iter().map(|name| format!("qemu: {name} ended with 0\n")).collect();
            assert_eq!(verdict(&trial, &lines.concat()), Ok(()));
            assert!(verdict(&trial, &lines[1..].concat()).unwrap_err().ends_with(trial.programs[0]));
            assert!(verdict(&trial, &lines.concat().replace("ended with 0", "ended with 101")).is_err());
            assert!(verdict(&trial, "").is_err());
            let lack = "qemu: the CPU has no flag\n";
            assert!(verdict(&trial, &(lack.to_owned() + &lines.concat())).is_err());
        }
    }

    #[test]
    fn programs_are_read_from_what_cargo_says() {
        let messages = "{\"target\":{},\"executable\":null}\n{\"executable\":\"/deps/vm-1\",\"fresh\":true}\n";
        assert_eq!(programs(messages), [PathBuf::from("/deps/vm-1")]);
    }

    #[test]
    fn an_archive_is_made_of_aligned_parts() {
        let mut archive = Archive::default();
        archive.add("ab", Archive::PROGRAM, b"12345");
        let bytes = archive.finish();
        // 110 bytes of header, the name and its end, the content.
        assert_eq!((bytes.len() % 4, &bytes[..6], &bytes[110..113]), (0, &b"070701"[..], &b"ab\0"[..]));
        assert_eq!(
            (&bytes[54..62], &bytes[116..121], &bytes[124..130]),
            (&b"00000005"[..], &b"12345"[..], &b"070701"[..])
        );
    }
}
