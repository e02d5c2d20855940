//! Code that runs in a protection domain, on a thread of its own, and does there what it likes.

use selfpage::protection::{Ended, ProtectionDomain};

use crate::scenario::{here, in_child};

fn leaked(name: &str) -> &'static ProtectionDomain {
    Box::leak(Box::new(ProtectionDomain::new(name)))
}

#[test]
fn code_that_forgets_to_leave_a_domain_comes_to_its_end() {
    in_child(here!(), "", || {
        let (outer, inner) = (leaked("outer"), leaked("inner"));
        let work = || {
            std::mem::forget(inner.enter().unwrap());
            std::mem::forget(outer.enter().unwrap());
            7
        };
        assert!(matches!(outer.run(work).unwrap(), Ended::Well(7)));
        // By page tables one domain at a time can be entered.
        for domain in [inner, outer, leaked("another")] {
            drop(domain.enter().unwrap());
        }
    })
    .well();
}

#[test]
fn a_child_that_such_code_forks_ends_at_what_is_refused() {
    in_child(here!(), "", || {
        let work = || {
            // SAFETY: test: the child touches what is not there, or else ends.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    std::hint::black_box(std::ptr::without_provenance_mut::<u8>(8)).write_volatile(1);
                    libc::_exit(0);
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
            }
        };
        let ended = leaked("forks").run(work).unwrap();
        assert!(matches!(ended, Ended::Well(Some(libc::SIGSEGV))), "{ended:?}");
    })
    .well();
}
