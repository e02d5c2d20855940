//! Domains that cannot be built: an error, and the program goes on as before.

use std::ptr;

use selfpage::{Domain, Kind};

use crate::filter::Call;
use crate::scenario::{PAGE, here, in_child};

/// Maps memory of the program's own, which may be read and written.
fn map(at: usize, len_bytes: usize, flags: libc::c_int) -> usize {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: test: a fresh mapping.
    let mapped = unsafe { libc::mmap(ptr::without_provenance_mut(at), len_bytes, access, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.expose_provenance()
}

/// Where a program's memory is that is not position-independent, or of whoever makes code of its own.
#[test]
fn what_lies_at_low_addresses_stays_where_there_are_none_for_the_frames() {
    in_child(here!(), "", || {
        let low = map(0x1000_0000, PAGE, libc::MAP_FIXED_NOREPLACE);
        assert_eq!(low, 0x1000_0000);
        // SAFETY: test: mapped above.
        unsafe { (low as *mut u64).write_volatile(42) };
        let limit = libc::rlimit { rlim_cur: 1 << 30, rlim_max: 1 << 30 };
        // SAFETY: test: a value of ours.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
        let error = Domain::with_frames(2 << 30).build().unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
        let mut resident = 0;
        // SAFETY: test: one page, and a byte for what is known of it.
        assert_eq!(unsafe { libc::mincore(low as *mut _, PAGE, &mut resident) }, 0, "it was unmapped");
        // SAFETY: test: mapped above.
        assert_eq!(unsafe { (low as *const u64).read_volatile() }, 42);
    })
    .well();
}

/// A container's filter need not know of a call that pager threads begin with.
#[test]
fn a_call_of_pager_threads_that_a_filter_refuses_is_named() {
    for (number, call) in [
        (libc::SYS_unshare, "unshare"),
        (libc::SYS_close_range, "close_range"),
        (libc::SYS_pipe2, "pipe2"),
        (libc::SYS_epoll_create1, "epoll_create1"),
        (libc::SYS_eventfd2, "eventfd2"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
    ] {
        in_child(here!(), call, || {
            Call::any(number).fails(libc::EPERM).unwrap();
            let error = Domain::with_frames(16 * PAGE).build().unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported, "{error}");
            let (said, allow) = (error.to_string(), format!("allow {call} in the container's seccomp profile"));
            assert!(said.contains(&format!("pager threads ({call})")) && said.contains(&allow), "{said}");
        })
        .well();
    }
}

/// A domain wants some for the hashes of its pages, and a region that is far from all for its address.
#[test]
fn random_bytes_that_a_filter_refuses_are_named() {
    let is_named = |error: selfpage::Error| {
        assert_eq!(error.kind(), Kind::Unsupported, "{error}");
        let said = error.to_string();
        assert!(said.contains("allow getrandom in the container's seccomp profile"), "{said}");
    };
    in_child(here!(), "", || {
        let domain = Domain::with_frames(16 * PAGE).build().unwrap();
        Call::any(libc::SYS_getrandom).fails(libc::EPERM).unwrap();
        is_named(Domain::with_frames(16 * PAGE).build().unwrap_err());
        is_named(domain.region(PAGE).far_from_all().zero().unwrap_err());
    })
    .well();
}
