//! The memory cgroup that every case runs in, so that frames and page cache are counted alike for all systems.

use std::fs;
use std::path::{Path, PathBuf};

use crate::output;

use super::error::Error;

/// The two forms in which Linux shows the memory controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    V1,
    V2,
}

impl Layout {
    fn limit(self) -> &'static str {
        match self {
            Layout::V1 => "memory.limit_in_bytes",
            Layout::V2 => "memory.max",
        }
    }

    fn peak(self) -> &'static str {
        match self {
            Layout::V1 => "memory.max_usage_in_bytes",
            Layout::V2 => "memory.peak",
        }
    }

    /// The file and the value that keep anonymous memory out of swap.
    fn no_swap(self) -> (&'static str, &'static str) {
        match self {
            Layout::V1 => ("memory.swappiness", "0"),
            Layout::V2 => ("memory.swap.max", "0"),
        }
    }
}

/// Whether anonymous memory of the cgroup may be swapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swapping {
    /// Only for the system `swap`.
    Allowed,
    /// For all others.
    Refused,
}

/// A cgroup of our own, removed when dropped.
pub struct Cgroup {
    directory: PathBuf,
    layout: Layout,
}

impl Cgroup {
    /// Makes a cgroup with `limit_bytes` of memory below our own, or below the nearest cgroup above that lets us.
    pub fn create(limit_bytes: u64, swapping: Swapping) -> Result<Cgroup, Error> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let places = places(&mounts, &own);
        let mut reason = "no memory controller is mounted".to_string();
        for (layout, parent) in places {
            match Cgroup::create_below(&parent, layout, limit_bytes, swapping) {
                Ok(cgroup) => return Ok(cgroup),
                Err(why) => reason = why,
            }
        }
        Err(Error::skip("cgroup", format!("{reason}; run as root or in a delegated cgroup")))
    }

    fn create_below(parent: &Path, layout: Layout, limit_bytes: u64, swapping: Swapping) -> Result<Cgroup, String> {
        let directory = parent.join(format!("selfpage-bench-{}", std::process::id()));
        fs::create_dir(&directory).map_err(|error| format!("cannot make {}: {error}", directory.display()))?;
        let cgroup = Cgroup { directory, layout };
        cgroup.write(layout.limit(), &limit_bytes.to_string())?;
        if swapping == Swapping::Refused {
            let (file, value) = layout.no_swap();
            cgroup.write(file, value)?;
        }
        Ok(cgroup)
    }

    fn write(&self, file: &str, value: &str) -> Result<(), String> {
        let path = self.directory.join(file);
        fs::write(&path, value).map_err(|error| format!("cannot write {value} to {}: {error}", path.display()))
    }

    /// Where the child has to enter.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The most memory that was ever charged.
    pub fn peak_bytes(&self) -> Option<u64> {
        fs::read_to_string(self.directory.join(self.layout.peak())).ok()?.trim().parse().ok()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that was killed leaves its cgroup a moment after it is reaped.
        for _ in 0..100 {
            if fs::remove_dir(&self.directory).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        output::tell(format_args!("selfpage bench: could not remove {}", self.directory.display()));
    }
}

/// Puts this process into the cgroup at `directory`. Memory charged before stays where it was.
pub fn enter(directory: &Path) -> Result<(), Error> {
    let path = directory.join("cgroup.procs");
    fs::write(&path, "0").map_err(|error| Error::io("enter", &path, error))
}

/// Directories below which a cgroup may be made, best first, from the texts of /proc/self/mounts and /proc/self/cgroup.
fn places(mounts: &str, own: &str) -> Vec<(Layout, PathBuf)> {
    let mut places = Vec::new();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, mount, kind, options, ..] = fields[..] else {
            continue;
        };
        let layout = match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => Layout::V1,
            "cgroup2" => Layout::V2,
            _ => continue,
        };
        let path = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let ours = match layout {
                Layout::V1 => controllers.split(',').any(|controller| controller == "memory"),
                Layout::V2 => controllers.is_empty(),
            };
            ours.then_some(path)
        });
        let path = Path::new(path.unwrap_or("/"));
        places.extend(
            path.ancestors().map(|above| (layout, Path::new(mount).join(above.strip_prefix("/").unwrap_or(above)))),
        );
    }
    // Where both are mounted the memory controller is in v1, and v2 refuses below.
    places.sort_by_key(|(layout, _)| *layout == Layout::V2);
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_hosts_use_v1_first() {
        let mounts = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n";
        let own = "4:memory:/a/b\n1:cpu:/c\n0::/\n";
        let shown: Vec<String> = places(mounts, own).iter().map(|place| place.1.display().to_string()).collect();
        let v1 = ["/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory/"];
        assert_eq!(shown, [&v1[..], &["/sys/fs/cgroup/unified/"]].concat());
    }

    #[test]
    fn unified_hosts_use_v2() {
        let places = places("cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n", "0::/user.slice/x.scope\n");
        assert_eq!(places[0], (Layout::V2, PathBuf::from("/sys/fs/cgroup/user.slice/x.scope")));
        assert_eq!(places.len(), 3);
    }
}
