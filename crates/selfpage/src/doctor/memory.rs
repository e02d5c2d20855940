//! What the kernel does with memory that is ours.

use super::limits::has_sys;
use super::userfaultfd::MORE_ADDRESSES;
use super::{Finding, State, name, probed, readable, setting};
use selfpage_core::linux::limit::{self, Resource};
use selfpage_core::linux::probe::{self, Shortfall};

/// More addresses than any machine has memory, fewer than an address space.
const RESERVED_BYTES: usize = 1 << 40;

/// A line for each feature.
pub(super) fn examine() -> Vec<Finding> {
    vec![
        probed(
            "PAGEMAP_SCAN",
            probe::scans_pages(),
            "tells what is populated and what was written",
            "discarded pages cannot be told from resident ones",
            "boot Linux 6.7 or newer, with /proc mounted",
        ),
        probed(
            "/proc/self/mem",
            probe::reads_protected(),
            "pages that the program protected can be evicted",
            "pages that the program protected stay in their frames",
            "mount -t proc proc /proc; boot without proc_mem.force_override=never",
        ),
        probed(
            "process_vm_readv",
            probe::reads_itself(),
            "files are read without their lock; a write-protected page that a forked child shares can be evicted",
            "a page of a file waits for the file's lock (not on ext4, btrfs, tmpfs); a write-protected page stays in its frame while a forked \
             child shares it",
            "allow process_vm_readv in the container's seccomp profile",
        ),
        probed(
            "process_vm_writev",
            probe::writes_itself(),
            "changed pages of a file are saved without its lock",
            "a file's last page, and all of one whose lock is taken, cannot be saved",
            "allow process_vm_writev in the container's seccomp profile",
        ),
        probed(
            "MADV_POPULATE_WRITE",
            probe::populates(),
            "pools get memory in batches",
            "selfpage cannot populate its pools",
            "boot Linux 5.14 or newer",
        ),
        probed(
            "MADV_GUARD_INSTALL",
            probe::guards(),
            "a violation is the program's own SIGSEGV",
            "violations are answered by mprotect",
            "boot Linux 6.13 or newer",
        ),
        huge_pages(),
        addresses(),
    ]
}

fn huge_pages() -> Finding {
    let setting = setting("/sys/kernel/mm/transparent_hugepage/enabled");
    let setting =
        setting.as_deref().unwrap_or(if has_sys() { "not in this kernel" } else { "unknown, as /sys is not mounted" });
    probed(
        "transparent huge pages",
        probe::keeps_pages_small(),
        &format!("{setting}; kept off frames and regions"),
        &format!("{setting}, also in frames: each of their pages that moves splits one"),
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )
}

fn addresses() -> Finding {
    const FEATURE: &str = "vm.overcommit_memory";
    let mode = setting("/proc/sys/vm/overcommit_memory").unwrap_or_else(|| "unreadable".to_owned());
    match probe::reserves(RESERVED_BYTES) {
        Ok(()) => {
            Finding::new(FEATURE, State::Present, format!("{mode}: regions far larger than memory can be reserved"))
        }
        Err(Shortfall::Refused(why)) if mode == "2" => Finding::new(
            FEATURE,
            State::Degraded,
            format!("2: a region counts in full against the commit limit ({})", name(why)),
        )
        .remedy("sysctl -w vm.overcommit_memory=0"),
        Err(shortfall) => {
            const LOSS: &str = "regions far larger than memory cannot be reserved";
            let limits = [
                (Resource::Addresses, "RLIMIT_AS", "ulimit -v unlimited"),
                (Resource::Data, "RLIMIT_DATA", "ulimit -d unlimited"),
            ];
            let set = limits.into_iter().filter_map(|(resource, name, remedy)| {
                let limit_bytes = limit::of_this_process(resource).ok()??;
                let is_in_the_way = limit_bytes < RESERVED_BYTES as u64;
                is_in_the_way.then(|| (format!("{name} is {}", readable(limit_bytes)), remedy))
            });
            let (set, remedies): (Vec<_>, Vec<_>) = set.unzip();
            if set.is_empty() {
                return probed(FEATURE, Err(shortfall), "", LOSS, MORE_ADDRESSES);
            }
            Finding::new(FEATURE, State::Refused, format!("{}; {LOSS}", set.join(", "))).remedy(remedies.join("; "))
        }
    }
}
