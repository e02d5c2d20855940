//! Kernels and containers without what the tracker wants: it works by traps there, and says why on request.

use std::fs::File;
use std::os::unix::fs::FileExt;

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use selfpage_core::linux::probe;

use crate::filter::Call;
use crate::memory::{Memory, PAGE};
use crate::{arm, in_child, pages, skip};

const API: Call = Call::with(libc::SYS_ioctl, 1, 0xc018_aa3f);

/// What stands in: it finds what is written.
fn works_by_traps(why: &str) {
    let refused = DirtyTracker::with(Mechanism::WriteProtection).unwrap_err();
    assert!(refused.kind() == Kind::Unsupported && refused.to_string().contains(why), "{refused}");
    let (tracker, memory, mut found) = (DirtyTracker::new().unwrap(), Memory::anonymous(16), Dirty::new());
    assert_eq!(tracker.mechanism(), Mechanism::Traps);
    arm(&tracker, &memory);
    memory.write(3, 1);
    tracker.scan_and_rearm(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [3]);
    memory.write(4, 1);
    tracker.scan(memory.range(), &mut found).unwrap();
    assert_eq!(pages(&memory, &found), [4]);
    tracker.disarm(memory.range()).unwrap();
}

#[test]
fn a_kernel_without_asynchronous_protection() {
    let ended = in_child(|| {
        API.fails(libc::EINVAL).unwrap();
        works_by_traps("WP_ASYNC");
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn a_filter_that_blocks_the_handshake_of_userfaultfd_is_no_older_kernel() {
    let ended = in_child(|| {
        API.fails(libc::EPERM).unwrap();
        works_by_traps("seccomp");
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn a_container_that_blocks_userfaultfd() {
    let ended = in_child(|| {
        // SAFETY: test: gives away the right to open the device, which would stand in for the call.
        unsafe { libc::setresuid(65534, 65534, 65534) };
        if File::open("/dev/userfaultfd").is_ok() {
            return skip::skip("unprivileged", "everybody may open /dev/userfaultfd here");
        }
        Call::any(libc::SYS_userfaultfd).fails(libc::EPERM).unwrap();
        works_by_traps("seccomp");
    });
    assert_eq!(ended, 0, "how the child ended");
}

#[test]
fn soft_dirty_bits_are_named_and_refused() {
    let refused = DirtyTracker::with(Mechanism::SoftDirty).unwrap_err();
    let said = refused.to_string();
    assert_eq!(refused.kind(), Kind::Unsupported, "{said}");
    assert!(said.contains("soft-dirty") && said.contains("WriteProtection"), "{said}");
}

/// Why they are refused. They are looked at and cleared in two calls of the kernel, and all of the process's are cleared in one.
#[test]
fn soft_dirty_bits_lose_writes_and_other_ranges() {
    if probe::has_soft_dirty().is_err() {
        return skip::skip("soft-dirty", "this kernel has none (CONFIG_MEM_SOFT_DIRTY); cargo xtask qemu-test --keys");
    }
    let (memory, other) = (Memory::anonymous(16), Memory::anonymous(16));
    (0..16).for_each(|page| [&memory, &other].iter().for_each(|memory| memory.write(page, 1)));
    clear_soft_dirty();
    memory.write(3, 2);
    other.write(7, 2);
    assert_eq!((soft_dirty(&memory), soft_dirty(&other)), (vec![3], vec![7]));
    // What `scan_and_rearm` would have to do, of `memory` alone; and a write in the middle of it.
    let found = soft_dirty(&memory);
    std::thread::scope(|scope| scope.spawn(|| memory.write(4, 2)).join()).unwrap();
    clear_soft_dirty();
    assert_eq!((found, soft_dirty(&memory)), (vec![3], vec![]), "page 4 is found by neither");
    assert_eq!(soft_dirty(&other), [], "nobody has looked at page 7 yet");
}

fn clear_soft_dirty() {
    std::fs::write("/proc/self/clear_refs", "4").unwrap();
}

/// The pages that have the bit: 55 of the kernel's word for each.
fn soft_dirty(memory: &Memory) -> Vec<usize> {
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let has = |page: &usize| {
        let mut word = [0u8; 8];
        pagemap.read_exact_at(&mut word, (memory.page(*page) / PAGE * 8) as u64).unwrap();
        u64::from_le_bytes(word) & 1 << 55 != 0
    };
    (0..memory.range().len() / PAGE).filter(has).collect()
}
