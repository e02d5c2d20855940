//! Kernels and containers without what the tracker wants: it works by traps there, and says why on request.

use std::fs::File;
use std::os::unix::fs::FileExt;

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use selfpage_core::linux::probe;

use crate::memory::{Memory, PAGE};
use crate::{arm, in_child, pages, skip};

const UFFDIO_API: u32 = 0xc018_aa3f;

/// Has the kernel refuse system call `number` to this process with `errno`, where its second argument is `request`, if that is said.
fn refuse(number: libc::c_long, request: Option<u32>, errno: i32) {
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at: u32| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let equal = |to: u32, else_skip: u8| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to, 0, else_skip);
    let end = |with: u32| step(libc::BPF_RET | libc::BPF_K, with, 0, 0);
    let (deny, allow) = (end(libc::SECCOMP_RET_ERRNO | errno as u32), end(libc::SECCOMP_RET_ALLOW));
    let mut filter = match request {
        None => vec![load(0), equal(number as u32, 1), deny, allow],
        Some(request) => vec![load(0), equal(number as u32, 3), load(24), equal(request, 1), deny, allow],
    };
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter is borrowed until the call returns.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &program), 0);
    }
}

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
        refuse(libc::SYS_ioctl, Some(UFFDIO_API), libc::EINVAL);
        works_by_traps("WP_ASYNC");
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
        refuse(libc::SYS_userfaultfd, None, libc::EPERM);
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
