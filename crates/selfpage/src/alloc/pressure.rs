//! Memory pressure, as the kernel or the service manager reports it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Tasks waited for memory for 150 ms in 2 s: what the kernel lets everybody ask for.
const TRIGGER: &[u8] = b"some 150000 2000000\0";

/// What reports pressure, if anything does.
#[derive(Debug)]
pub(crate) struct Watch(Option<(OwnedFd, PollFlags)>);

impl Watch {
    /// What `MEMORY_PRESSURE_WATCH` names (systemd's protocol), else the pressure of the process's cgroup, else the machine's.
    pub(crate) fn of_process() -> Watch {
        if let Some(path) = std::env::var_os("MEMORY_PRESSURE_WATCH") {
            let write = std::env::var("MEMORY_PRESSURE_WRITE").ok().and_then(|text| base64(&text));
            return Watch(
                path.to_str().filter(|path| *path != "/dev/null").and_then(|path| open(path, write.as_deref())),
            );
        }
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
        let own = group.and_then(|group| open(&format!("/sys/fs/cgroup{group}/memory.pressure"), Some(TRIGGER)));
        Watch(own.or_else(|| open("/proc/pressure/memory", Some(TRIGGER))))
    }

    /// Whether anything would report it.
    pub(crate) fn reports(&self) -> bool {
        self.0.is_some()
    }

    /// Waits for a report, at most `limit`. Whether there was one.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let Some((file, flags)) = &self.0 else {
            std::thread::sleep(limit);
            return false;
        };
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        let mut watched = [PollFd::from_borrowed_fd(file.as_fd(), *flags)];
        let reported = matches!(poll(&mut watched, Some(&limit)), Ok(1..)) && watched[0].revents().intersects(*flags);
        if reported && *flags == PollFlags::IN {
            // What is in a pipe says nothing more, and must not be reported again.
            let _ = rustix::io::read(file, &mut [0u8; 256]);
        }
        reported
    }
}

fn open(path: &str, write: Option<&[u8]>) -> Option<(OwnedFd, PollFlags)> {
    let mut file: File = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let is_pipe = file.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo());
    if let Some(bytes) = write {
        file.write_all(bytes).ok()?;
    }
    Some((file.into(), if is_pipe { PollFlags::IN } else { PollFlags::PRI }))
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
    use super::*;

    #[test]
    fn what_systemd_writes_is_read() {
        let trigger = base64("c29tZSAxNTAwMDAgMjAwMDAwMAA=");
        assert_eq!(trigger.as_deref(), Some(TRIGGER));
        assert_eq!(base64("*"), None);
    }

    #[test]
    fn a_pipe_reports_pressure_once_for_each_write() {
        let path = std::env::temp_dir().join(format!("selfpage-pressure-{}", std::process::id()));
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let watch = Watch(open(path.to_str().unwrap(), None));
        assert!(!watch.wait(Duration::from_millis(1)));
        OpenOptions::new().write(true).open(&path).unwrap().write_all(b"x").unwrap();
        assert!(watch.wait(Duration::from_secs(60)));
        assert!(!watch.wait(Duration::from_millis(1)));
        std::fs::remove_file(path).unwrap();
    }
}
