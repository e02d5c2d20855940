//! Kernels and containers without what the tracker wants: it works by traps there, and says why on request.

use selfpage::Kind;
use selfpage::dirty::{Dirty, DirtyTracker, Mechanism};

use crate::memory::Memory;
use crate::{arm, in_child, pages};

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
