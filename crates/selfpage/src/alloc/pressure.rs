//! Memory pressure, as the kernel or the service manager reports it.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::block::Severity;
use super::cgroup;

/// Tasks waited for memory for 150 ms in 2 s: what the kernel lets everybody ask for.
const TRIGGER: &[u8] = b"some 150000 2000000\0";
/// File systems of which all files are the kernel's own: /proc, and control groups of both versions.
const OF_KERNEL: [libc::c_long; 3] = [libc::PROC_SUPER_MAGIC, libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC];
/// A second report within this time is severe.
const SEVERE_WITHIN: Duration = Duration::from_secs(5);

/// What the environment says of pressure, by systemd's protocol.
#[derive(Debug)]
pub(crate) struct Wishes {
    /// `MEMORY_PRESSURE_WATCH`.
    path: Option<OsString>,
    /// `MEMORY_PRESSURE_WRITE`.
    write: Option<Vec<u8>>,
}

impl Wishes {
    /// Of a program that has more rights than whoever executed it, none: it would open and write with its rights what the other names.
    pub(crate) fn of_environment() -> Wishes {
        // SAFETY: c-library: the call reads what the kernel gave the process.
        if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
            return Wishes { path: None, write: None };
        }
        Wishes {
            path: std::env::var_os("MEMORY_PRESSURE_WATCH"),
            write: std::env::var("MEMORY_PRESSURE_WRITE").ok().and_then(|text| base64(&text)),
        }
    }
}

/// What reports pressure, if anything does.
#[derive(Debug)]
pub(crate) enum Watch {
    /// What is polled, and for what.
    On(OwnedFd, PollFlags),
    /// It reported once, and reports no more: its group was removed, or the other side has gone.
    Ended,
    /// Nobody reports.
    Off,
    /// Nobody is to listen: the environment says so.
    Silenced,
    /// Whoever would listen has no descriptors of its own.
    Bare,
}

impl Watch {
    /// What is wished for, else the pressure of the process's cgroup, else the machine's.
    pub(crate) fn of(wishes: &Wishes) -> Watch {
        Watch::found(wishes, Watch::open)
    }

    /// The same, and nobody is told what to watch for: whether anything would report.
    pub(crate) fn silently(wishes: &Wishes) -> Watch {
        Watch::found(wishes, |path, _| Watch::open(path, None))
    }

    fn found(wishes: &Wishes, open: impl Fn(&Path, Option<&[u8]>) -> Option<Watch>) -> Watch {
        if wishes.path.as_ref().is_some_and(|path| path == "/dev/null") {
            return Watch::Silenced;
        }
        let named = wishes.path.as_ref().and_then(|path| open(Path::new(path), wishes.write.as_deref()));
        let own = || cgroup::find_pressure(|file| open(file, Some(TRIGGER)));
        let machine = || open(Path::new("/proc/pressure/memory"), Some(TRIGGER));
        named.or_else(own).or_else(machine).unwrap_or(Watch::Off)
    }

    /// The kernel's file, or a FIFO or a socket that has something to read for each report. Nothing is written into any other.
    fn open(path: &Path, write: Option<&[u8]>) -> Option<Watch> {
        let kind = fs::metadata(path).ok()?.file_type();
        if kind.is_socket() {
            // Nor does it wait here: who listens may serve nobody, and have as many in front of him as may be.
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
            net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
            let mut socket = UnixStream::from(socket);
            socket.write_all(write.unwrap_or_default()).ok()?;
            return Some(Watch::On(socket.into(), PollFlags::IN));
        }
        // To open a device may do something by itself.
        if !kind.is_file() && !kind.is_fifo() {
            return None;
        }
        let mut file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        // Of what was opened, whatever the name is by now.
        let kind = file.metadata().ok()?.file_type();
        if !kind.is_fifo() && !fstatfs(&file).is_ok_and(|about| OF_KERNEL.contains(&about.f_type)) {
            return None;
        }
        file.write_all(write.unwrap_or_default()).ok()?;
        Some(Watch::On(file.into(), if kind.is_fifo() { PollFlags::IN } else { PollFlags::PRI }))
    }

    /// Whether anything would report it.
    pub(crate) fn reports(&self) -> bool {
        matches!(self, Watch::On(..))
    }

    /// Looks again for what reports, where that has ended, or the process has come out of the `groups` that it was found for, or nothing was.
    pub(super) fn renew(&mut self, wishes: &Wishes, groups: &mut Option<String>) {
        // Where nobody says, it is taken to have stayed.
        let now = cgroup::groups().ok().filter(|now| groups.as_ref() != Some(now));
        if matches!(self, Watch::Ended) || now.is_some() && matches!(self, Watch::On(..) | Watch::Off) {
            *self = Watch::of(wishes);
        }
        *groups = now.or_else(|| groups.take());
    }

    /// Waits for a report, at most `limit`. Whether there was one.
    pub(super) fn wait(&mut self, limit: Duration) -> bool {
        let Watch::On(file, flags) = self else {
            std::thread::sleep(limit);
            return false;
        };
        let most = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        let mut watched = [PollFd::from_borrowed_fd(file.as_fd(), *flags)];
        match poll(&mut watched, Some(&most)) {
            Ok(1..) => {}
            Ok(_) | Err(Errno::INTR) => return false,
            // As where the program may have no descriptors any more: it fails at once, each time.
            Err(_) => {
                std::thread::sleep(limit);
                return false;
            }
        }
        // The file of a group that was removed reports without end, and so does a pipe or a socket without another side.
        let gone = watched[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
        let (reported, ended) = if *flags == PollFlags::IN { discard(file, gone) } else { (!gone, gone) };
        if ended {
            *self = Watch::Ended;
        }
        reported
    }
}

/// Reads what is there: it says nothing more, and must not be reported again. Whether there was something, and whether there will be no
/// more.
fn discard(file: &OwnedFd, gone: bool) -> (bool, bool) {
    let mut came = false;
    loop {
        match rustix::io::read(file, &mut [0u8; 256]) {
            Ok(0) => return (came, true),
            Ok(_) => came = true,
            Err(Errno::AGAIN) => return (came, gone),
            // What could not be read stays there, and would be reported without end.
            Err(_) => return (came, true),
        }
    }
}

/// When pressure was reported last.
#[derive(Debug, Default)]
pub(super) struct Reports(Option<Instant>);

impl Reports {
    /// There is another one, at `now`.
    pub(super) fn add(&mut self, now: Instant) -> Severity {
        match self.0.replace(now) {
            Some(last) if now.duration_since(last) < SEVERE_WITHIN => Severity::Full,
            _ => Severity::Some,
        }
    }

    /// Whether none came for some time.
    pub(super) fn are_over(&self, now: Instant) -> bool {
        self.0.is_none_or(|last| now.duration_since(last) > 10 * SEVERE_WITHIN)
    }
}

fn base64(text: &str) -> Option<Vec<u8>> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for digit in text.trim_end_matches('=').bytes() {
        bits = bits << 6 | DIGITS.iter().position(|one| *one == digit)? as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::child;

    #[test]
    fn what_systemd_writes_is_read() {
        let trigger = base64("c29tZSAxNTAwMDAgMjAwMDAwMAA=");
        assert_eq!(trigger.as_deref(), Some(TRIGGER));
        assert_eq!(base64("*"), None);
    }

    #[test]
    fn who_only_looks_tells_nobody_what_to_watch_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pressure");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let wishes = Wishes { path: Some(path.into()), write: Some(b"x".to_vec()) };
        let mut watch = Watch::silently(&wishes);
        assert!(watch.reports() && !watch.wait(Duration::from_millis(1)));
        // The end that is told is the one that listens.
        assert!(Watch::of(&wishes).wait(Duration::from_secs(60)));
    }

    #[test]
    fn nothing_is_written_into_a_file_of_anybodys() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("precious");
        fs::write(&path, "precious").unwrap();
        assert!(Watch::open(&path, Some(b"x")).is_none());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert!(Watch::open(Path::new("/dev/zero"), Some(b"x")).is_none());
    }

    #[test]
    fn a_pipe_reports_pressure_once_for_each_write() {
        let path = std::env::temp_dir().join(format!("selfpage-pressure-{}", std::process::id()));
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let mut watch = Watch::open(&path, None).unwrap();
        assert!(!watch.wait(Duration::from_millis(1)));
        OpenOptions::new().write(true).open(&path).unwrap().write_all(b"x").unwrap();
        assert!(watch.wait(Duration::from_secs(60)));
        assert!(!watch.wait(Duration::from_millis(1)));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_socket_reports_pressure_and_is_told_what_to_watch_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pressure");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut watch = Watch::open(&path, Some(TRIGGER)).unwrap();
        let (mut manager, _) = listener.accept().unwrap();
        let mut told = [0; TRIGGER.len()];
        std::io::Read::read_exact(&mut manager, &mut told).unwrap();
        assert_eq!(told, TRIGGER);
        manager.write_all(&[1; 1000]).unwrap();
        assert!(watch.wait(Duration::from_secs(60)));
        assert!(!watch.wait(Duration::from_millis(1)) && watch.reports());
        manager.write_all(b"x").unwrap();
        drop(manager);
        assert!(watch.wait(Duration::from_secs(60)));
        assert!(!watch.reports());
    }

    #[test]
    fn a_socket_that_nobody_serves_keeps_nobody_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pressure");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        net::listen(&listener, 0).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let (tells, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tells.send(Watch::open(&path, Some(TRIGGER)).is_none()));
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(true));
    }

    #[test]
    fn what_has_no_other_side_any_more_is_not_asked_again() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        drop(write);
        let mut watch = Watch::On(read, PollFlags::IN);
        assert!(!watch.wait(Duration::from_secs(60)));
        assert!(matches!(watch, Watch::Ended));
        let begin = Instant::now();
        assert!(!watch.wait(Duration::from_millis(50)));
        assert!(begin.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn what_cannot_be_asked_is_not_asked_again_at_once() {
        let limit = Duration::from_millis(50);
        child::forked(|| {
            let (read, _write) = rustix::pipe::pipe().unwrap();
            let mut watch = Watch::On(read, PollFlags::IN);
            child::opens_nothing();
            let begin = Instant::now();
            assert!(!watch.wait(limit) && watch.reports());
            assert!(begin.elapsed() >= limit);
        });
        // There is something to read for good, and reading fails.
        let directory = fs::File::open("/").unwrap();
        let mut watch = Watch::On(directory.into(), PollFlags::IN);
        assert!(!watch.wait(Duration::from_secs(60)));
        assert!(matches!(watch, Watch::Ended));
    }

    #[test]
    fn a_group_that_is_removed_ends_its_watch() {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let group = mounts.map(|mount| mount.join(format!("selfpage-pressure-{}", std::process::id())));
        let made = group.iter().find(|group| group.parent().is_some_and(|mount| mount.join("cgroup.procs").exists()));
        let Some(group) = made.filter(|group| fs::create_dir(group).is_ok()) else {
            return crate::skip::skip("cgroup", "no group of version 2 can be made: be root, outside of a container");
        };
        let watch = Watch::open(&group.join("memory.pressure"), Some(TRIGGER));
        fs::remove_dir(group).unwrap();
        let Some(mut watch) = watch else {
            return crate::skip::skip("psi", "groups report no pressure: boot with psi=1");
        };
        assert!(!watch.wait(Duration::from_secs(60)));
        assert!(matches!(watch, Watch::Ended));
    }

    #[test]
    fn the_kernels_own_file_is_watched_where_nobody_wishes_for_another() {
        let machine = Watch::open(Path::new("/proc/pressure/memory"), Some(TRIGGER));
        if machine.is_none() {
            return crate::skip::skip(
                "psi",
                "the machine reports no pressure, or not to everybody: boot with psi=1, be root",
            );
        }
        let watch = Watch::of(&Wishes { path: None, write: None });
        let Watch::On(file, flags) = watch else { panic!("nothing reports") };
        assert_eq!(flags, PollFlags::PRI);
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        // Its group's, where that reports.
        assert!(path.ends_with("memory.pressure") || path == Path::new("/proc/pressure/memory"), "{path:?}");
        // One that has a trigger takes no other.
        assert_eq!(rustix::io::write(&file, TRIGGER), Err(rustix::io::Errno::BUSY));
    }

    #[test]
    fn a_second_report_soon_after_the_first_is_severe() {
        let (mut reports, begin) = (Reports::default(), Instant::now());
        let mut report = |seconds: u64| reports.add(begin + Duration::from_secs(seconds));
        assert_eq!(report(0), Severity::Some);
        assert_eq!(report(4), Severity::Full);
        assert_eq!(report(8), Severity::Full);
        assert_eq!(report(13), Severity::Some);
        assert!(!reports.are_over(begin + Duration::from_secs(60)));
        assert!(reports.are_over(begin + Duration::from_secs(64)));
    }
}
