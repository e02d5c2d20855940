//! The thread that takes a snapshot is itself in the way of its writes.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};

use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Trap};

use crate::formatted::{Kind as FileSystem, done, mount};
use crate::own_file::limit_file_size;
use crate::own_stack::on_stack_in;
use crate::scenario::{PAGE, here, in_child, number_pages};

const PAGES: usize = 4096;
const FRAMES: usize = 256;

/// The region that the handler writes to, and how often it came.
static REGION: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static WRITTEN: AtomicUsize = AtomicUsize::new(0);

/// Writes to more pages than may be copied at a time before somebody writes them to the file.
extern "C" fn write_many(_signal: libc::c_int) {
    for at in 0..FRAMES / 4 {
        let page = (WRITTEN.fetch_add(1, SeqCst) * 61 + at) % PAGES;
        // SAFETY: test: the region is there, and nobody holds a reference to it.
        unsafe { REGION.load(SeqCst).add(page * PAGE + 8).write_volatile(1) };
    }
}

#[test]
fn a_handler_that_writes_to_the_image_does_not_wait_for_its_own_thread() {
    for (trap, case) in [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")] {
        in_child(here!(), case, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = MemoryStore::new((2 * PAGES * PAGE) as u64).unwrap();
            let mut region = domain.region(PAGES * PAGE).trap(trap).stored(store).unwrap();
            number_pages(&mut region);
            let mut snapshots = Snapshots::of(&[&region], dir.path().join("one.snap")).unwrap();
            REGION.store(region.as_ptr(), SeqCst);
            // SAFETY: test: a handler that only writes to the region.
            let taker = unsafe {
                libc::signal(libc::SIGUSR1, write_many as *const () as usize);
                libc::pthread_self()
            };
            let ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !ended.load(SeqCst) {
                        // SAFETY: test: the thread is there until the scope ends.
                        unsafe { libc::pthread_kill(taker, libc::SIGUSR1) };
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                });
                for _ in 0..2 {
                    // A page that could not be copied in time makes the snapshot none.
                    let _ = snapshots.take();
                }
                ended.store(true, SeqCst);
            });
            assert!(WRITTEN.load(SeqCst) > 0);
        })
        .well();
    }
}

#[test]
fn a_thread_whose_stack_is_to_be_armed_is_refused() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let stack = domain.region(256 * PAGE).stored(MemoryStore::new(4 << 20).unwrap()).unwrap();
        let mut snapshots = Snapshots::of(&[&stack], dir.path().join("one.snap")).unwrap();
        let refused = |why: selfpage::Error| {
            assert!(why.kind() == Kind::Invalid && why.to_string().contains("stack"), "{why}");
        };
        on_stack_in(&stack, || {
            refused(snapshots.arm().unwrap_err());
            refused(snapshots.take().unwrap_err());
            refused(stack.cow_clone(MemoryStore::new(4 << 20).unwrap()).expect_err("its own stack is there"));
        });
        snapshots.take().unwrap();
        drop(stack.cow_clone(MemoryStore::new(4 << 20).unwrap()).unwrap());
    })
    .well();
}

/// The program may refuse fcntl(2) for a moment, and the file of a snapshot that failed is left as it was.
#[test]
fn a_file_that_was_left_past_the_page_cache_is_written_to_all_the_same() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir().unwrap();
        // Its disk reads and writes whole sectors, from and to addresses of whole sectors.
        let Some(disk) = mount(FileSystem::Ext4, dir.path(), 8 << 20) else { return };
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = domain.region(FRAMES / 4 * PAGE).zero().unwrap();
        number_pages(&mut region);
        let mut snapshots = Snapshots::of(&[&region], disk.join("one.snap")).unwrap();
        limit_file_size(4 * PAGE);
        snapshots.take().unwrap_err();
        limit_file_size(1 << 30);
        let is_its = |fd: &i32| {
            std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|link| link.ends_with("one.snap.new"))
        };
        let fd = (0..1000).find(is_its).unwrap();
        // SAFETY: test: a flag of a file that stays open.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_DIRECT) }, 0);
        let taken = snapshots.take();
        drop((snapshots, region, domain));
        assert!(done("umount", &[disk.as_os_str()]));
        taken.unwrap();
    })
    .well();
}
