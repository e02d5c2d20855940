//! Protection keys that the program has taken for itself. Each test in a process of its own: the mechanism is settled once.

use std::fs::File;
use std::io::Read;

use selfpage::Kind;
use selfpage::protection::{Mechanism, Memory, ProtectionDomain, Rights, mechanism};

mod child;
#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

/// Takes a key, if there is one left.
fn take() -> Option<i64> {
    // SAFETY: a new key, which no memory has.
    Some(unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) }).filter(|key| *key > 0)
}

fn give_back(key: i64) {
    // SAFETY: taken by the test, which gave it to no memory.
    assert_eq!(unsafe { libc::syscall(libc::SYS_pkey_free, key) }, 0);
}

/// Whether there are keys at all, or else that there are none.
fn has_keys() -> bool {
    let key = take();
    match key {
        Some(key) => give_back(key),
        None => skip::skip(
            "pku",
            "this CPU has no protection keys, or the kernel does not use them; cargo xtask qemu-test --keys",
        ),
    }
    key.is_some()
}

/// A page, and a domain that may read and write it.
fn owned(name: &str) -> (Memory, ProtectionDomain) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping, never unmapped.
    let memory = unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        Memory::plain(name, start as usize..start as usize + PAGE).unwrap()
    };
    let domain = ProtectionDomain::new(name);
    domain.set(&memory, Rights::READ | Rights::WRITE).unwrap();
    (memory, domain)
}

/// Whether the kernel may write there for this thread.
fn may_write(memory: &Memory) -> bool {
    // SAFETY: mapped, and nobody else has a reference to it.
    let byte = unsafe { std::slice::from_raw_parts_mut(memory.range().start as *mut u8, 1) };
    File::open("/dev/zero").unwrap().read(byte).is_ok_and(|read| read == 1)
}

#[test]
fn where_the_program_has_all_of_them_rights_go_by_page_tables() {
    if !has_keys() {
        return;
    }
    child::forked(|| {
        while take().is_some() {}
        assert_eq!(mechanism(), Mechanism::PageTables);
        let ((mine, domain), (others, _other)) = (owned("mine"), owned("others"));
        let entered = domain.enter().unwrap();
        assert_eq!((may_write(&mine), may_write(&others)), (true, false));
        drop(entered);
        assert_eq!((may_write(&mine), may_write(&others)), (true, true));
    });
}

#[test]
fn a_domain_for_which_the_program_has_left_none_is_refused_until_it_gives_one_back() {
    if !has_keys() {
        return;
    }
    child::forked(|| {
        assert_eq!(mechanism(), Mechanism::Keys);
        let ((outer, of_outer), (beside, _of_beside)) = (owned("outer"), owned("beside"));
        drop(of_outer.enter().unwrap());
        let taken: Vec<i64> = std::iter::from_fn(take).collect();
        let (inner, of_inner) = owned("inner");
        // Two keys are there: one for what the outer domain may reach, and one for what it may not.
        let entered = of_outer.enter().unwrap();
        for _ in 0..2 {
            let refused = of_inner.enter().unwrap_err();
            assert!(refused.kind() == Kind::Held && refused.to_string().contains("keys are not enough"), "{refused}");
            assert_eq!((may_write(&outer), may_write(&inner)), (true, false));
        }
        taken.into_iter().for_each(give_back);
        let nested = of_inner.enter().unwrap();
        assert_eq!((may_write(&outer), may_write(&inner), may_write(&beside)), (false, true, false));
        drop(nested);
        assert_eq!((may_write(&outer), may_write(&inner)), (true, false));
        drop(entered);
        assert_eq!((may_write(&outer), may_write(&inner)), (true, true));
    });
}
