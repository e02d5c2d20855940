//! Rights that change while threads are in a domain of the whole process, which with keys is one that may not execute what others may.

use selfpage::protection::{Mechanism, Memory, ProtectionDomain, Rights, mechanism};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

/// A page, never unmapped, with an instruction that returns.
fn page(name: &str, prot: i32) -> Memory {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: test: a fresh mapping, which stays.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, prot, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u8>().write(0xc3);
        Memory::plain(name, start as usize..start as usize + PAGE).unwrap()
    }
}

fn executes(code: &Memory) {
    // SAFETY: test: what lies there returns at once.
    unsafe { std::mem::transmute::<usize, extern "C" fn()>(code.range().start)() }
}

#[test]
fn a_domain_that_need_not_be_the_whole_processs_any_more_stays_so_while_threads_are_in_it() {
    if mechanism() != Mechanism::Keys {
        let why = "this CPU has no protection keys, or the kernel does not use them; cargo xtask qemu-test --keys";
        return skip::skip("pku", why);
    }
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    let [code, other] = ["code", "other"].map(|name| page(name, read_write | libc::PROT_EXEC));
    let data = page("data", read_write);
    let all = Rights::READ | Rights::EXECUTE;
    let [readers, others] = ["readers", "others"].map(ProtectionDomain::new);
    others.set(&code, all).unwrap();
    others.set(&other, all).unwrap();
    readers.set(&code, Rights::READ).unwrap();
    readers.set(&other, all).unwrap();
    let entered = readers.enter().unwrap();
    // This thread may change nothing in there.
    let elsewhere = |change: &(dyn Fn() + Sync)| std::thread::scope(|scope| scope.spawn(change).join().unwrap());
    elsewhere(&|| {
        readers.set(&code, all).unwrap();
        others.set(&data, Rights::READ).unwrap();
        readers.set(&data, Rights::READ).unwrap();
    });
    executes(&code);
    executes(&other);
    drop(entered);
    // Now it follows.
    others.set(&data, Rights::NONE).unwrap();
    let _readers = readers.enter().unwrap();
    let _others = others.enter().unwrap();
    executes(&code);
}
