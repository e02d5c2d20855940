//! Calls of the library on a stack that lies in a region, and that is evicted all the time: a pager thread must not touch it.

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::SeqCst};

use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{DescriptorTable, Domain, Protection, Region, Sampling};

use crate::descriptors::close_all;
use crate::scenario::{PAGE, here, in_child, number_pages};

const PAGES: usize = 32;
const ROUNDS: usize = 100;

static WORK: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn begin<F: FnMut()>() {
    // SAFETY: test: `on_stack_in` has put it there, for this function.
    unsafe { (*WORK.load(SeqCst).cast::<F>())() }
}

/// Does `work` with the region as its stack.
pub fn on_stack_in<F: FnMut()>(region: &Region, mut work: F) {
    WORK.store((&raw mut work).cast(), SeqCst);
    // SAFETY: test: nobody else uses the region, and the stack's end leads back to here.
    unsafe {
        let (mut back, mut there) = (std::mem::zeroed::<libc::ucontext_t>(), std::mem::zeroed::<libc::ucontext_t>());
        assert_eq!(libc::getcontext(&mut there), 0);
        there.uc_stack.ss_sp = region.as_ptr().cast();
        there.uc_stack.ss_size = region.len_bytes();
        there.uc_link = &mut back;
        libc::makecontext(&mut there, begin::<F>, 0);
        assert_eq!(libc::swapcontext(&mut back, &there), 0);
    }
}

/// Does `work` so often on a stack in a region of the domain's, while another thread evicts that.
pub fn on_evicted_stack(domain: &Domain, rounds: usize, mut work: impl FnMut()) {
    let stack = domain.region(256 * PAGE).stored(MemoryStore::new(4 << 20).unwrap()).unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(SeqCst) {
                // What is in use just then stays.
                let _ = stack.evict(0, stack.len_bytes());
            }
        });
        on_stack_in(&stack, || (0..rounds).for_each(|_| work()));
        ended.store(true, SeqCst);
    });
}

/// A region of a domain, to be worked on.
fn numbered(domain: &Domain) -> Region {
    let mut region = domain.region(PAGES * PAGE).stored(MemoryStore::new(4 << 20).unwrap()).unwrap();
    number_pages(&mut region);
    region
}

#[test]
fn without_descriptors() {
    in_child(here!(), "shared", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let domain = Domain::with_frames(256 * PAGE).build().unwrap();
        let mut region = numbered(&domain);
        let source = numbered(&domain);
        let mut snapshots = Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap();
        let mut clone = None;
        close_all();
        on_evicted_stack(&domain, ROUNDS, || {
            number_pages(&mut region);
            snapshots.take().unwrap();
            region.protect(0, PAGE, Protection::Read).unwrap();
            region.protect(0, PAGE, Protection::ReadWrite).unwrap();
            if clone.is_none() {
                clone = Some(source.cow_clone(MemoryStore::new(4 << 20).unwrap()).unwrap());
            }
        });
    })
    .well();
}

#[test]
fn with_descriptors_of_the_pager_threads_own() {
    in_child(here!(), "private", || {
        let table = DescriptorTable::Private;
        let domain = Domain::with_frames(256 * PAGE).descriptor_table(table).build().unwrap();
        let region = numbered(&domain);
        on_evicted_stack(&domain, ROUNDS, || {
            region.pin(0, PAGE).unwrap();
            region.unpin(0, PAGE).unwrap();
            region.protect(0, PAGE, Protection::Read).unwrap();
            region.protect(0, PAGE, Protection::ReadWrite).unwrap();
            domain.remove_frames(1).unwrap();
            domain.add_frames(1).unwrap();
            assert!(domain.sample(Sampling::Whole).is_ok());
        });
    })
    .well();
}
