//! The disk under the data file: what it is, what it moved, and its readahead.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::output;

use super::error::Error;

const SECTOR_BYTES: u64 = 512;

/// Bytes moved, as two witnesses tell it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    /// Read by requests that this process made (/proc/self/io): what other programs do is not in it.
    pub process_read_bytes: u64,
    /// Written by this process, or made dirty in the page cache by it.
    pub process_written_bytes: u64,
    /// Read by the device since boot (its `stat`), other programs' requests included.
    pub device_read_bytes: u64,
    /// Written by the device, likewise.
    pub device_written_bytes: u64,
}

impl Traffic {
    /// What was moved since `before`.
    pub fn since(self, before: Traffic) -> Traffic {
        Traffic {
            process_read_bytes: self.process_read_bytes - before.process_read_bytes,
            process_written_bytes: self.process_written_bytes - before.process_written_bytes,
            device_read_bytes: self.device_read_bytes - before.device_read_bytes,
            device_written_bytes: self.device_written_bytes - before.device_written_bytes,
        }
    }

    /// Bytes that both witnesses say were read.
    pub fn read_bytes(self) -> u64 {
        self.process_read_bytes.min(self.device_read_bytes)
    }

    /// Bytes that both witnesses say were written.
    pub fn written_bytes(self) -> u64 {
        self.process_written_bytes.min(self.device_written_bytes)
    }
}

/// The block device that holds a directory.
pub struct Device {
    /// MAJOR:MINOR.
    number: String,
}

impl Device {
    /// The device that `path` lies on.
    pub fn of(path: &Path) -> Result<Device, Error> {
        let id = fs::metadata(path).map_err(|error| Error::io("stat", path, error))?.dev();
        Ok(Device { number: format!("{}:{}", libc::major(id), libc::minor(id)) })
    }

    fn directory(&self) -> PathBuf {
        Path::new("/sys/dev/block").join(&self.number)
    }

    /// What counts its traffic. `None`: the file system has no block device of its own (network, memory, an overlay, btrfs).
    fn witness(&self) -> Option<Witness> {
        let stat = self.directory().join("stat");
        stat.exists().then_some(Witness { stat })
    }

    /// The file with the readahead, in KiB, that files opened from now on get.
    fn readahead_file(&self) -> Option<PathBuf> {
        let by_number = Path::new("/sys/class/bdi").join(&self.number).join("read_ahead_kb");
        // A partition has none; its disk is the directory above.
        let disk = fs::canonicalize(self.directory()).ok();
        let of_device = disk.as_ref().map(|path| path.join("bdi/read_ahead_kb"));
        let of_disk = disk.as_ref().and_then(|path| path.parent()).map(|path| path.join("bdi/read_ahead_kb"));
        [Some(by_number), of_device, of_disk].into_iter().flatten().find(|path| path.exists())
    }

    /// The file with the disk's readahead, and its setting.
    pub fn readahead(&self) -> Result<(PathBuf, String), Error> {
        const NONE: &str = "this file system has no read_ahead_kb; use --dir on a local disk";
        let path = self.readahead_file().ok_or_else(|| Error::skip("readahead", NONE))?;
        let value = fs::read_to_string(&path).map_err(|error| Error::io("read", &path, error))?;
        Ok((path, value.trim().to_string()))
    }

    /// One line for machine.txt: name, size, what the kernel thinks of it.
    pub fn describe(&self) -> String {
        let own = fs::canonicalize(self.directory()).unwrap_or_default();
        let disk =
            if own.join("queue").exists() { own } else { own.parent().map(Path::to_path_buf).unwrap_or_default() };
        let read =
            |name: &str| fs::read_to_string(disk.join(name)).map(|text| text.trim().to_string()).unwrap_or("?".into());
        let name = disk.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or("no block device".into());
        let size_gib = read("size").parse::<u64>().unwrap_or(0) / ((1 << 30) / SECTOR_BYTES);
        format!(
            "{name}, {size_gib} GiB, rotational {}, scheduler {}, logical block {} bytes, readahead {} KiB",
            read("queue/rotational"),
            read("queue/scheduler"),
            read("queue/logical_block_size"),
            read("queue/read_ahead_kb"),
        )
    }
}

/// The counters of a block device, and of this process.
pub struct Witness {
    stat: PathBuf,
}

impl Witness {
    /// Those of the device that `directory` lies on. Without them nobody can tell what came from a disk.
    pub fn below(directory: &Path) -> Result<Witness, Error> {
        let unusable = || {
            let shown = directory.display();
            Error::Unusable(format!(
                "{shown} has no block device of its own that counts what is read (network, memory, an overlay, btrfs); name a directory on \
                 another file system with --dir"
            ))
        };
        Device::of(directory)?.witness().ok_or_else(unusable)
    }

    /// What was moved so far.
    pub fn traffic(&self) -> Traffic {
        let stat = fs::read_to_string(&self.stat).unwrap_or_default();
        let field = |index| stat.split_whitespace().nth(index).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let io = fs::read_to_string("/proc/self/io").unwrap_or_default();
        Traffic {
            process_read_bytes: named(&io, "read_bytes:"),
            process_written_bytes: named(&io, "write_bytes:"),
            device_read_bytes: field(2) * SECTOR_BYTES,
            device_written_bytes: field(6) * SECTOR_BYTES,
        }
    }
}

fn named(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// The device's readahead while this is kept; dropped, the machine's own setting is back.
pub struct Readahead {
    restore: Option<(PathBuf, String)>,
}

impl Readahead {
    /// Sets the readahead of `device` to `size_kib`.
    pub fn set(device: &Device, size_kib: u32) -> Result<Readahead, Error> {
        let (path, old) = device.readahead()?;
        if old == size_kib.to_string() {
            return Ok(Readahead { restore: None });
        }
        fs::write(&path, size_kib.to_string()).map_err(|error| {
            let reason = format!("cannot set {} to {size_kib}: {error}; run as root", path.display());
            Error::skip("readahead", reason)
        })?;
        Ok(Readahead { restore: Some((path, old)) })
    }
}

impl Drop for Readahead {
    fn drop(&mut self) {
        if let Some((path, old)) = &self.restore
            && let Err(error) = fs::write(path, old)
        {
            output::tell(format_args!("selfpage bench: could not set {} back to {old}: {error}", path.display()));
        }
    }
}

/// Empties the page cache, so that what a case reads comes from the device.
pub fn drop_caches() -> Result<(), Error> {
    fs::write("/proc/sys/vm/drop_caches", "3").map_err(|error| {
        Error::skip("drop_caches", format!("cannot write /proc/sys/vm/drop_caches: {error}; run as root"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `st_dev` of an overlay or of btrfs is: a number that no block device has.
    #[test]
    fn a_device_that_is_none_counts_nothing() {
        assert!(Device { number: "0:4095".into() }.witness().is_none());
        let memory = Witness::below(Path::new("/proc")).err();
        assert!(matches!(memory, Some(Error::Unusable(why)) if why.contains("/proc has no") && why.contains("--dir")));
    }

    #[test]
    fn a_line_is_found_by_its_whole_key() {
        let io = "rchar: 5\nread_bytes: 8192\nwrite_bytes: 4096\ncancelled_write_bytes: 1\n";
        assert_eq!(named(io, "read_bytes:"), 8192);
        assert_eq!(named(io, "write_bytes:"), 4096);
        assert_eq!(named(io, "nothing:"), 0);
    }
}
