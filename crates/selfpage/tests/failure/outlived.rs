//! A process that shares the memory of one that has ended, and with it the regions, but no thread that serves them.

use std::ffi::c_void;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use selfpage::store::MemoryStore;
use selfpage::{DescriptorTable, Domain, Trap};

use crate::child;
use crate::scenario::{PAGE, here, in_child};
use crate::skip::skip;

const FRAMES: usize = 64;
const STACK: usize = 64 << 10;

/// What the process that outlives is told.
struct Told {
    parent: i32,
    pipe: i32,
    page: *const u8,
}

/// Waits until it is an orphan, and writes its number and then the page.
extern "C" fn outlive(told: *mut c_void) -> i32 {
    // SAFETY: test: lives as long as the memory, which this process shares; system calls alone, since its thread data is another's.
    unsafe {
        let Told { parent, pipe, page } = *told.cast::<Told>();
        while libc::syscall(libc::SYS_getppid) == libc::c_long::from(parent) {
            libc::syscall(libc::SYS_sched_yield);
        }
        let own = libc::syscall(libc::SYS_getpid) as i32;
        libc::syscall(libc::SYS_write, pipe, &raw const own, size_of_val(&own));
        // Not from the page itself: in the middle of a write the kernel has the pipe locked, and its reader could not even be killed.
        let copy = page.cast::<[u8; PAGE]>().read_volatile();
        libc::syscall(libc::SYS_write, pipe, copy.as_ptr(), PAGE);
        libc::syscall(libc::SYS_exit, 0);
    }
    0
}

/// It gets the page, or waits: zeros would be wrong.
#[test]
fn nobody_reads_zeros_where_a_process_has_ended_whose_memory_is_shared() {
    in_child(here!(), "", || {
        if io_uring::IoUring::new(1).is_err() {
            return skip("io_uring", "refused here, and so the userfaultfds end with the pager threads");
        }
        // SAFETY: test: takes a number.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) }, 0);
        let (reader, writer) = std::io::pipe().unwrap();
        let parent = child::fork(|| {
            let config = Domain::with_frames(FRAMES * PAGE).descriptor_table(DescriptorTable::Private);
            let domain = config.build().unwrap();
            if !domain.serves_system_calls() {
                skip("root", "the kernel's own faults are not served");
                return false;
            }
            let mut region =
                domain.region(4 * FRAMES * PAGE).trap(Trap::Worker).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
            region.as_mut_slice::<u8>().fill(7);
            region.evict(0, region.len_bytes()).unwrap();
            region.flush(0, region.len_bytes()).unwrap();
            let told = Told {
                parent: std::process::id() as i32,
                pipe: writer.as_raw_fd(),
                page: region.as_slice::<u8>().as_ptr(),
            };
            let (stack, told) = (Box::leak(vec![0_u8; STACK].into_boxed_slice()), Box::leak(Box::new(told)));
            // SAFETY: test: the stack and what is told stay as long as the memory, and so do the region and the domain.
            let outlives = unsafe {
                let top = stack.as_mut_ptr().add(STACK).cast();
                libc::clone(outlive, top, libc::CLONE_VM | libc::SIGCHLD, std::ptr::from_mut(told).cast())
            };
            std::mem::forget((region, domain));
            outlives > 0
        });
        drop(writer);
        if parent.wait() != 0 {
            return skip("root", "the process that is outlived could not begin");
        }
        let mut reader = File::from(std::os::fd::OwnedFd::from(reader));
        let mut number = [0; 4];
        reader.read_exact(&mut number).unwrap();
        let mut wait = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let began = Instant::now();
        // SAFETY: test: one descriptor.
        let came = unsafe { libc::poll(&mut wait, 1, 300) };
        let mut page = [0; PAGE];
        let got = if came == 1 { reader.read(&mut page).unwrap() } else { 0 };
        println!("{got} bytes after {:?}", began.elapsed());
        let outlives = i32::from_ne_bytes(number);
        // SAFETY: test: ends a child of ours.
        unsafe {
            libc::kill(outlives, libc::SIGKILL);
            assert_eq!(libc::waitpid(outlives, std::ptr::null_mut(), 0), outlives);
        }
        assert!(page[..got].iter().all(|byte| *byte == 7), "zeros in place of the page");
        assert!(began.elapsed() < Duration::from_secs(10), "it cannot be ended");
    })
    .well();
}
