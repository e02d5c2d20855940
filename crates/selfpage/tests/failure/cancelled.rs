//! A thread that is cancelled in the middle of a fault.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::{Domain, PAGE_BYTES, Trap};

use crate::scenario::{PAGE, here, in_child, until};

const PTHREAD_CANCEL_ASYNCHRONOUS: libc::c_int = 1;

unsafe extern "C" {
    fn pthread_setcanceltype(new: libc::c_int, old: *mut libc::c_int) -> libc::c_int;
    fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
}

static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static FILLS: AtomicBool = AtomicBool::new(false);

/// Takes its time.
struct Slow;

impl UserPager for Slow {
    fn fill(&self, _: u64, bytes: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
        FILLS.store(true, SeqCst);
        std::thread::sleep(Duration::from_millis(100));
        bytes.fill(7);
        Ok(())
    }

    fn save(&self, _: u64, _: &[u8; PAGE_BYTES]) -> io::Result<()> {
        Ok(())
    }

    fn forget(&self, _: u64) {}
}

extern "C" fn read_one(_: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: test: a page of the region, which stays until this thread has ended.
    unsafe {
        pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, ptr::null_mut());
        (ADDRESS.load(SeqCst) as *const u8).read_volatile();
    }
    loop {
        std::hint::spin_loop();
    }
}

#[test]
fn asynchronously() {
    for (trap, case) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
        in_child(here!(), case, || {
            let domain = Domain::with_frames(64 * PAGE).build().unwrap();
            let region = domain.region(16 * PAGE).trap(trap).user(Slow).unwrap();
            ADDRESS.store(region.as_ptr().addr(), SeqCst);
            let mut thread: libc::pthread_t = 0;
            // SAFETY: test: the function has the type that is wanted, and the thread is joined.
            unsafe {
                assert_eq!(libc::pthread_create(&mut thread, ptr::null(), read_one, ptr::null_mut()), 0);
                until("the page is filled", || FILLS.load(SeqCst));
                assert_eq!(pthread_cancel(thread), 0);
                assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
            }
            assert!(region.as_slice::<u8>()[..2 * PAGE].iter().all(|byte| *byte == 7));
        })
        .well();
    }
}
