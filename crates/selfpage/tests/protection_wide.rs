//! Rights that change while threads are in a domain of the whole process, which with keys is one that may not execute what others may.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use selfpage::protection::{Ended, Memory, ProtectionDomain, Rights};

#[path = "../../../tests/alone.rs"]
mod alone;
mod keyed;
#[path = "../../../tests/skip.rs"]
mod skip;

use keyed::has_keys;

use alone::alone;

const PAGE: usize = 4096;

/// A page, never unmapped, with an instruction that returns.
fn page(name: &str, prot: i32) -> Memory {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: test: a fresh mapping, which stays.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u8>().write(0xc3);
        assert_eq!(libc::mprotect(start, PAGE, prot), 0);
        Memory::plain(name, start as usize..start as usize + PAGE).unwrap()
    }
}

fn executes(code: &Memory) {
    // SAFETY: test: what lies there returns at once.
    unsafe { std::mem::transmute::<usize, extern "C" fn()>(code.range().start)() }
}

#[test]
fn a_domain_that_need_not_be_the_whole_processs_any_more_stays_so_while_threads_are_in_it() {
    let _alone = alone();
    if !has_keys() {
        return;
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

/// What a domain with keys is refused, or nobody is allowed, has nothing to do with the one whose rights the whole process has.
#[test]
fn a_violation_beside_a_domain_of_the_whole_processs_is_told_at_once() {
    let _alone = alone();
    if !has_keys() {
        return;
    }
    let read_write = libc::PROT_READ | libc::PROT_WRITE;
    let (code, data) = (page("code", read_write | libc::PROT_EXEC), page("data", read_write));
    let constants = page("constants", libc::PROT_READ);
    let (wide, keyed) = (ProtectionDomain::new("wide"), Arc::new(ProtectionDomain::new("keyed")));
    wide.set(&code, Rights::READ).unwrap();
    keyed.set(&code, Rights::READ | Rights::EXECUTE).unwrap();
    // Both have all rights that there are: it needs no key, and the mapping itself refuses the write.
    [&wide, &*keyed].into_iter().for_each(|domain| domain.set(&constants, Rights::READ).unwrap());
    for memory in [&data, &constants] {
        let (keyed, at, entered) = (keyed.clone(), memory.range().start, wide.enter().unwrap());
        let (tell, told) = mpsc::channel();
        let beside = std::thread::spawn(move || {
            // SAFETY: test: it is refused.
            let ended = keyed.run(move || unsafe { (at as *mut u8).write_volatile(1) });
            let _ = tell.send(matches!(ended, Ok(Ended::Stopped(_))));
        });
        let told = told.recv_timeout(Duration::from_secs(20));
        drop(entered);
        beside.join().unwrap();
        assert_eq!(told, Ok(true), "{}", memory.name());
    }
}
