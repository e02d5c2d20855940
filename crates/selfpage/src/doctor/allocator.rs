//! What the machine gives to the page allocator, and to the `malloc` over it.

use super::limits::{MOUNT, MOUNT_SYS, has_sys};
use super::{Finding, State, setting};
use crate::alloc::medium::{self, Medium};
use crate::alloc::pressure::{Watch, Wishes};
use std::fs;
use std::path::Path;

const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage";
const OF_MEDIUM_PAGES: &str = "hugepages-64kB/enabled";
const VIRTIO_DEVICES: &str = "/sys/bus/virtio/devices";
/// What some kernels let be set of free page reporting.
const PAGE_REPORTING: &str = "/sys/module/page_reporting/parameters";
const HUGE_FEATURE: &str = "huge pages for blocks and frames";
const MEDIUM_FEATURE: &str = "medium huge pages (mTHP)";
/// The virtio device that is a balloon, and the bit of its features that says that it reports free pages.
const BALLOON: &str = "0x0005";
const BALLOON_REPORTING: usize = 5;

/// A line for each feature.
pub(super) fn examine() -> Vec<Finding> {
    let defrag = setting(&format!("{HUGE_PAGES}/defrag")).and_then(|line| chosen(&line));
    let decides = medium::of_huge_pages();
    let enabled = decides.file.to_str().ok().zip(decides.word());
    let [huge, medium] = if has_sys() {
        [
            huge_pages(enabled, defrag.as_deref()),
            medium_pages(medium::examine(), Path::new(HUGE_PAGES).join(OF_MEDIUM_PAGES).exists()),
        ]
    } else {
        [HUGE_FEATURE, MEDIUM_FEATURE].map(unknown)
    };
    vec![
        huge,
        medium,
        overcommit(setting("/proc/sys/vm/overcommit_memory").as_deref()),
        pressure(&Watch::silently(&Wishes::of_environment())),
        page_reporting(is_reporting(Path::new(VIRTIO_DEVICES)), Path::new(PAGE_REPORTING)),
    ]
}

/// The word in brackets.
fn chosen(line: &str) -> Option<String> {
    Some(line.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Of a setting that nobody can look at: a program that cannot does without.
fn unknown(feature: &'static str) -> Finding {
    Finding::new(
        feature,
        State::Degraded,
        "unknown: /sys is not mounted, and what may not be looked at is not asked for",
    )
    .remedy(MOUNT_SYS)
}

/// `enabled` is the file that decides, and what it says.
fn huge_pages(enabled: Option<(&str, &str)>, defrag: Option<&str>) -> Finding {
    let (file, enabled) = enabled.unzip();
    if !matches!(enabled, Some("always" | "madvise")) {
        let why = format!(
            "{}: a cold block costs the kernel's fault for each 4 KiB, and a device takes a domain's pages one by one",
            enabled.unwrap_or("not in this kernel")
        );
        let allow = |file| format!("echo madvise > {file}");
        let remedy = file.map_or("boot a kernel built with CONFIG_TRANSPARENT_HUGEPAGE=y".into(), allow);
        return Finding::new(HUGE_FEATURE, State::Degraded, why).remedy(remedy);
    }
    let (state, room) = match defrag {
        Some("never") => (State::Degraded, "none where no 2 MiB are free, and nobody makes room"),
        Some("defer") => {
            (State::Present, "none where no 2 MiB are free until the kernel has made room, in the background")
        }
        _ => (State::Present, "the kernel makes room for one when it is touched"),
    };
    let (enabled, defrag) = (enabled.unwrap_or("?"), defrag.unwrap_or("?"));
    let why = format!(
        "{enabled}, defrag {defrag}: cold blocks from 2 MiB on get them, and frames come as what one is split into; {room}"
    );
    let finding = Finding::new(HUGE_FEATURE, state, why);
    if state == State::Present { finding } else { finding.remedy(format!("echo madvise > {HUGE_PAGES}/defrag")) }
}

/// `is_there`: this kernel has them.
fn medium_pages(found: Medium, is_there: bool) -> Finding {
    match found {
        Medium::Allowed => {
            Finding::new(MEDIUM_FEATURE, State::Present, "64 KiB: most of the heap's small pages come 16 in one fault")
        }
        Medium::Forbidden => {
            let why = "64 KiB is not allowed: each of the heap's small pages costs the kernel's fault";
            let allow = || format!("echo madvise > {HUGE_PAGES}/{OF_MEDIUM_PAGES}");
            let remedy = is_there.then(allow).unwrap_or_else(|| "boot Linux 6.8 or newer".into());
            Finding::new(MEDIUM_FEATURE, State::Degraded, why).remedy(remedy)
        }
        Medium::Outgrown => {
            let why = "64 KiB is allowed, and not asked for: larger ones would come, too large for small programs";
            let remedy =
                format!("for kib in 128 256 512 1024; do echo never > {HUGE_PAGES}/hugepages-${{kib}}kB/enabled; done");
            Finding::new(MEDIUM_FEATURE, State::Degraded, why).remedy(remedy)
        }
    }
}

fn overcommit(mode: Option<&str>) -> Finding {
    const FEATURE: &str = "overcommit for blocks";
    // Blocks go by the same.
    let (mode, remedy) = match mode {
        Some(mode @ ("0" | "1")) => {
            return Finding::new(FEATURE, State::Present, format!("{mode}: what a block does not touch costs nothing"));
        }
        Some(mode) => (mode, "SELFPAGE_RETAIN=0, or sysctl -w vm.overcommit_memory=0"),
        None => ("unreadable: taken for 2", MOUNT),
    };
    let why = format!(
        "{mode}: addresses in reserve count nothing, but blocks count in full, and what is kept of freed ones too"
    );
    Finding::new(FEATURE, State::Degraded, why).remedy(remedy)
}

fn pressure(watch: &Watch) -> Finding {
    const FEATURE: &str = "memory pressure (PSI)";
    if watch.reports() {
        return Finding::new(FEATURE, State::Present, "what is kept of freed blocks goes back when it is reported");
    }
    let (cause, remedy) = match watch {
        Watch::Silenced => ("switched off by MEMORY_PRESSURE_WATCH", "unset MEMORY_PRESSURE_WATCH"),
        _ => (
            "nobody reports it to this process",
            "boot with psi=1 (CONFIG_PSI); where /proc is read-only, a writable MEMORY_PRESSURE_WATCH, or SELFPAGE_RETAIN",
        ),
    };
    let why = format!("{cause}: what is kept of freed blocks goes back by time alone");
    Finding::new(FEATURE, State::Degraded, why).remedy(remedy)
}

/// How long something must be free until the host is told: Linux has a constant, and some kernels settings.
fn free_for(parameters: &Path) -> String {
    let settings = ["min_free_ms", "max_waiting_mib"].into_iter().filter_map(|name| {
        let value = fs::read_to_string(parameters.join(name)).ok()?;
        Some(format!("{name} {}", value.trim()))
    });
    let settings: Vec<String> = settings.collect();
    if settings.is_empty() { "for 2 s".into() } else { format!("for a while ({})", settings.join(", ")) }
}

fn page_reporting(is_on: bool, parameters: &Path) -> Finding {
    const FEATURE: &str = "free page reporting";
    if !is_on {
        return Finding::new(FEATURE, State::Present, "off: memory that is free stays this machine's");
    }
    let why = format!(
        "on: the host takes back what has been free {}, and a first touch waits until it has supplied it again",
        free_for(parameters)
    );
    Finding::new(FEATURE, State::Degraded, why)
        .remedy("on the host: a balloon device without free page reporting (qemu: free-page-reporting=off)")
}

/// Whether one of the devices is a balloon that agreed with its host on reporting.
fn is_reporting(devices: &Path) -> bool {
    let read = |device: &Path, file: &str| fs::read_to_string(device.join(file)).unwrap_or_default();
    fs::read_dir(devices).into_iter().flatten().flatten().any(|device| {
        let device = device.path();
        read(&device, "device").trim() == BALLOON
            && read(&device, "features").as_bytes().get(BALLOON_REPORTING) == Some(&b'1')
    })
}

#[cfg(test)]
mod tests {
    use rustix::event::PollFlags;

    use super::*;

    /// What is said of all sizes, and of 2 MiB alone.
    const OF_ALL: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    const OF_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";

    fn listened_to() -> Watch {
        Watch::On(fs::File::open("/dev/null").unwrap().into(), PollFlags::IN)
    }

    #[test]
    fn what_is_amiss_has_a_remedy_and_says_what_it_costs() {
        for (finding, state, word) in [
            (huge_pages(Some((OF_ALL, "madvise")), Some("madvise")), State::Present, "makes room for one when"),
            (huge_pages(Some((OF_ALL, "always")), Some("defer")), State::Present, "in the background"),
            (huge_pages(Some((OF_ALL, "madvise")), Some("never")), State::Degraded, "nobody makes room"),
            (huge_pages(Some((OF_HUGE_PAGES, "never")), Some("madvise")), State::Degraded, "never: a cold block"),
            (huge_pages(None, None), State::Degraded, "not in this kernel"),
            (medium_pages(Medium::Allowed, true), State::Present, "16 in one fault"),
            (medium_pages(Medium::Forbidden, true), State::Degraded, "is not allowed"),
            (medium_pages(Medium::Outgrown, true), State::Degraded, "larger ones would come"),
            (overcommit(Some("0")), State::Present, "costs nothing"),
            (overcommit(Some("2")), State::Degraded, "count in full"),
            (overcommit(None), State::Degraded, "unreadable: taken for 2"),
            (pressure(&listened_to()), State::Present, "goes back when it is reported"),
            (pressure(&Watch::Silenced), State::Degraded, "switched off by MEMORY_PRESSURE_WATCH"),
            (pressure(&Watch::Off), State::Degraded, "nobody reports it"),
            (page_reporting(false, Path::new("/none")), State::Present, "stays this machine's"),
            (page_reporting(true, Path::new("/none")), State::Degraded, "has been free for 2 s, and"),
        ] {
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.remedy.is_some(), state == State::Degraded, "{finding:?}");
            assert!(finding.why.contains(word), "{word:?} is missing from {finding:?}");
        }
        assert_eq!(chosen("always defer [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("madvise"), None);
    }

    #[test]
    fn when_the_host_takes_memory_back_is_what_the_kernel_says() {
        let parameters = tempfile::tempdir().unwrap();
        let set = |name: &str, value: &str| fs::write(parameters.path().join(name), format!("{value}\n")).unwrap();
        set("min_free_ms", "250");
        assert_eq!(free_for(parameters.path()), "for a while (min_free_ms 250)");
        set("max_waiting_mib", "1024");
        assert_eq!(free_for(parameters.path()), "for a while (min_free_ms 250, max_waiting_mib 1024)");
    }

    #[test]
    fn a_balloon_that_reports_is_told_from_other_devices() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!is_reporting(&devices.path().join("none")));
        let device = |name: &str, kind: &str, features: &str| {
            let device = devices.path().join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("device"), format!("{kind}\n")).unwrap();
            fs::write(device.join("features"), format!("{features}\n")).unwrap();
            is_reporting(devices.path())
        };
        assert!(!device("virtio0", "0x0001", "11000101"));
        assert!(!device("virtio1", "0x0005", "01100001"));
        assert!(device("virtio1", "0x0005", "01100101"));
    }

    #[test]
    fn a_remedy_is_about_the_file_that_decides() {
        let remedy = |finding: Finding| finding.remedy.unwrap();
        let own = remedy(huge_pages(Some((OF_HUGE_PAGES, "never")), None));
        assert!(own.ends_with("hugepages-2048kB/enabled"), "{own}");
        assert!(remedy(huge_pages(Some((OF_ALL, "never")), None)).ends_with("transparent_hugepage/enabled"));
        // Nothing is written into files that are not there.
        for without in [remedy(huge_pages(None, None)), remedy(medium_pages(Medium::Forbidden, false))] {
            assert!(without.starts_with("boot "), "{without}");
        }
    }
}
