//! Calls that are refused by somebody who is not the kernel, or for a reason of the program's: no page is given up for that.

use super::{Ground, PAGES, stopped};
use crate::filter::Call;
use crate::skip::skip;
use linux_raw_sys::ioctl::{UFFDIO_COPY, UFFDIO_WRITEPROTECT};
use selfpage_core::addr::{Frame, PAGE_BYTES};
use selfpage_core::linux::memory::{self, Access};
use selfpage_core::mmu::{Mmu, Refusal, Trap};
use std::thread;

const UFFDIO_MOVE: u32 = 0xc028_aa05;

/// Does `work` on a thread whose filter answers a call with an error; 0 is none.
fn where_refused<R: Send>(call: Call, error: i32, work: impl FnOnce() -> R + Send) -> R {
    let filtered = || {
        call.fails(error).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

#[test]
fn a_page_that_cannot_be_read_stays_where_it_is() {
    let Some(ground) = Ground::of(PAGES) else { return };
    ground.fill(0, 5);
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1).unwrap();
    unsafe { memory::protect(ground.worker, PAGE_BYTES, Access::Read) }.unwrap();
    for error in [libc::EPERM, libc::EIO, libc::EINTR, libc::EUCLEAN, 0] {
        let unmapped =
            where_refused(Call::any(libc::SYS_pread64), error, || ground.mmu.unmap(ground.page(0), Frame(0), 1));
        assert_eq!(unmapped, stopped(0, Refusal::Denied), "{error}");
        assert_eq!((ground.read(0), ground.populated(ground.pool)), (5, false), "{error}");
    }
    ground.mmu.unmap(ground.page(0), Frame(0), 1).unwrap();
    assert_eq!(ground.filled_with(0), 5);
}

#[test]
fn a_filters_number_is_not_taken_for_a_place_of_the_programs() {
    let Some(ground) = Ground::of(PAGES) else { return };
    let (page, call) = (ground.page(0), |request| Call::with(libc::SYS_ioctl, 1, request));
    let denied = stopped(0, Refusal::Denied);
    ground.fill(0, 6);
    let map = || ground.mmu.map(Trap::Worker, page, Frame(0), 1);
    assert_eq!(where_refused(call(UFFDIO_MOVE), libc::EUCLEAN, map), denied);
    map().unwrap();
    assert_eq!(where_refused(call(UFFDIO_MOVE), libc::EUCLEAN, || ground.mmu.unmap(page, Frame(0), 1)), denied);
    let writing = selfpage_core::mmu::Writing::Protected;
    let protect = || ground.mmu.set_writing(Trap::Worker, page, 1, writing);
    assert_eq!(where_refused(call(UFFDIO_WRITEPROTECT), libc::EINVAL, protect), denied);
    ground.mmu.unmap(page, Frame(0), 1).unwrap();
    unsafe { memory::protect(ground.worker, PAGE_BYTES, Access::Read) }.unwrap();
    assert_eq!(where_refused(call(UFFDIO_COPY), libc::EINVAL, map), denied);
    assert_eq!(ground.filled_with(0), 6);
}

#[test]
fn a_sealed_page_that_may_not_be_written_stays() {
    let Some(ground) = Ground::of(PAGES) else { return };
    (0..2).for_each(|frame| ground.fill(frame, 7 + frame as u8));
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 2).unwrap();
    unsafe { memory::protect(ground.worker, PAGE_BYTES, Access::Read) }.unwrap();
    if unsafe { libc::syscall(libc::SYS_mseal, ground.worker, 2 * PAGE_BYTES, 0) } != 0 {
        return skip("mseal", "the kernel is older than 6.10");
    }
    assert_eq!(ground.mmu.unmap(ground.page(0), Frame(0), 2), stopped(0, Refusal::Pinned));
    assert_eq!((ground.read(0), ground.populated(ground.pool)), (7, false));
    assert_eq!(ground.mmu.unmap(ground.page(1), Frame(1), 1), Ok(()), "who may write may drop");
    assert_eq!(ground.filled_with(1), 8);
}
