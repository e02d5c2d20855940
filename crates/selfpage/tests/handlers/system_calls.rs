//! System calls of the program on protected pages: the kernel's own faults ask the handler, too.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use selfpage::{Domain, MemoryFault, Protection, Trap};

use crate::scenario::sevens;
use crate::{PAGE, TRAPS, handled, read, skip, unprotect, word, write};

#[test]
fn system_calls_on_protected_pages() {
    for (trap, name) in TRAPS {
        for protection in [Protection::Read, Protection::None] {
            let (domain, region) = handled(trap, unprotect);
            let (pipe, _write) = sevens();
            region.protect(9 * PAGE, PAGE, protection).unwrap();
            // SAFETY: test: the kernel writes into the region.
            let count = unsafe { libc::read(pipe.as_raw_fd(), word(&region, 9).cast(), PAGE) };
            if domain.serves_system_calls() && trap == Trap::Worker {
                assert_eq!((count, read(&region, 9)), (PAGE as isize, 0x0707_0707_0707_0707), "{name}");
            } else {
                assert_eq!(count, -1, "{name}");
                assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT), "{name}");
            }
        }
    }
}

/// Whether the kernel's own faults are served here. Says so where they are not.
fn serves_system_calls(domain: &Domain) -> bool {
    let serves = domain.serves_system_calls();
    if !serves {
        skip::skip("uffd", "faults inside system calls cannot be served");
    }
    serves
}

#[test]
fn the_kernel_reads_from_a_page_that_is_protected_against_everything() {
    let (domain, region) = handled(Trap::Worker, unprotect);
    if !serves_system_calls(&domain) {
        return;
    }
    let (mut from, into) = std::io::pipe().unwrap();
    region.protect(9 * PAGE, PAGE, Protection::None).unwrap();
    // SAFETY: test: the kernel reads a page of the region.
    let count = unsafe { libc::write(into.as_raw_fd(), word(&region, 9).cast(), PAGE) };
    assert_eq!(count, PAGE as isize, "{}", std::io::Error::last_os_error());
    let mut came = [0; PAGE];
    from.read_exact(&mut came).unwrap();
    assert_eq!(came[..8], 10u64.to_ne_bytes());
    assert_eq!(region.protection(9 * PAGE).unwrap(), Protection::ReadWrite);
}

#[test]
fn the_kernel_writes_to_several_protected_pages_in_one_call() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = asked.clone();
    let (domain, region) = handled(Trap::Worker, move |fault: &MemoryFault<'_>| {
        noted.lock().unwrap().push(fault.offset_bytes() / PAGE);
        unprotect(fault)
    });
    if !serves_system_calls(&domain) {
        return;
    }
    let (from, mut into) = std::io::pipe().unwrap();
    into.write_all(&[7; 8 * PAGE]).unwrap();
    region.protect(20 * PAGE, PAGE, Protection::Read).unwrap();
    region.protect(21 * PAGE, 3 * PAGE, Protection::None).unwrap();
    region.protect(40 * PAGE, 2 * PAGE, Protection::Read).unwrap();
    let of = |page: usize, count: usize| libc::iovec { iov_base: word(&region, page).cast(), iov_len: count * PAGE };
    // The last part is not protected.
    let parts = [of(20, 4), of(40, 2), of(60, 2)];
    // SAFETY: test: the kernel writes to pages of the region.
    let count = unsafe { libc::readv(from.as_raw_fd(), parts.as_ptr(), 3) };
    assert_eq!(count, 8 * PAGE as isize, "{}", std::io::Error::last_os_error());
    for page in [20, 21, 22, 23, 40, 41, 60, 61] {
        assert_eq!(read(&region, page), 0x0707_0707_0707_0707, "page {page}");
    }
    assert_eq!((read(&region, 19), read(&region, 24), read(&region, 42), read(&region, 62)), (20, 25, 43, 63));
    let mut asked = asked.lock().unwrap().clone();
    asked.sort();
    assert_eq!(asked, [20, 21, 22, 23, 40, 41]);
}

#[test]
fn a_futex_may_lie_on_a_protected_page() {
    let (domain, region) = handled(Trap::Worker, unprotect);
    if !serves_system_calls(&domain) {
        return;
    }
    let futex = |page: usize, what: libc::c_int, value: u32, timeout: *const libc::timespec| {
        let add_one = (1 << 28) | (1 << 12); // FUTEX_OP_ADD, and wakes nobody.
        // SAFETY: test: the kernel reads a word of the region, or adds one to another.
        let result = unsafe {
            let (of, other) = (word(&region, page), word(&region, 12));
            libc::syscall(libc::SYS_futex, of, what | libc::FUTEX_PRIVATE_FLAG, value, timeout, other, add_one)
        };
        if result < 0 { Err(std::io::Error::last_os_error().raw_os_error().unwrap()) } else { Ok(result) }
    };
    let moment = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    region.protect(10 * PAGE, 3 * PAGE, Protection::None).unwrap();
    assert_eq!(futex(10, libc::FUTEX_WAIT, 99, &moment), Err(libc::EAGAIN), "the page has another number");
    assert_eq!(futex(11, libc::FUTEX_WAIT, 12, &moment), Err(libc::ETIMEDOUT), "the page has this number");
    // Where the kernel changes the word itself it does not wait for an answer: the page has to be there.
    write(&region, 12, 77);
    region.pin(12 * PAGE, PAGE).unwrap();
    assert_eq!((futex(11, libc::FUTEX_WAKE_OP, 1, std::ptr::null()), read(&region, 12)), (Ok(0), 78));
    region.unpin(12 * PAGE, PAGE).unwrap();
}
