//! Protection domains over a region of which the process has a part only, or nothing. Each test in a process of its own: by page tables
//! rights are the whole process's.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use selfpage::pager::{Context, PagerError};
use selfpage::protection::{Mechanism, Memory, ProtectionDomain, Rights, mechanism};
use selfpage::store::{BackingStore, Blok, MemoryStore, ReadBlok, StoreError, WriteBlok};
use selfpage::{DescriptorTable, Domain, Kind, Region};

mod child;
#[path = "../../../tests/over_memory.rs"]
mod over_memory;
#[path = "../../../tests/skip.rs"]
mod skip;
#[path = "failure/tried.rs"]
mod tried;

use over_memory::over_memory;
use tried::word;

const PAGE: usize = 4096;
const PAGES: usize = 16;

/// A region whose pages all have contents.
fn region(table: DescriptorTable, store: impl BackingStore + 'static) -> Option<Arc<Region>> {
    let domain = match Domain::with_frames(64 * PAGE).descriptor_table(table).build() {
        Err(why) if why.kind() == Kind::Unsupported => {
            skip::skip("uffd", &why.to_string());
            return None;
        }
        domain => domain.unwrap(),
    };
    let mut region = domain.region(PAGES * PAGE).stored(store).unwrap();
    region.as_mut_slice::<u64>().fill(7);
    Some(Arc::new(region))
}

#[test]
fn what_the_program_has_made_of_a_part_keeps_its_own_protection() {
    [DescriptorTable::Shared, DescriptorTable::Private].into_iter().for_each(a_part_keeps_its_own_protection);
}

fn a_part_keeps_its_own_protection(table: DescriptorTable) {
    child::forked(|| {
        tried::catch();
        let Some(region) = region(table, MemoryStore::new(1 << 20).unwrap()) else { return };
        let memory = Memory::of(&region).unwrap();
        let [closed, readers] = ["closed", "readers"].map(ProtectionDomain::new);
        readers.set(&memory, Rights::READ).unwrap();
        let [hole, own, last] = [4, 8, PAGES - 1].map(|page| word(&region, page));
        {
            let _entered = closed.enter().unwrap();
            // SAFETY: test: pages that nobody has a reference into.
            unsafe {
                assert_eq!(libc::munmap(hole.cast(), PAGE), 0);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                assert_eq!(libc::mmap(own.cast(), PAGE, libc::PROT_READ, flags, -1, 0), own.cast());
            }
        }
        let outside = || {
            assert_eq!((tried::read(last), tried::write(last, 7)), (Ok(7), Ok(())), "the region's");
            assert_eq!((tried::read(own), tried::write(own, 1)), (Ok(0), Err(libc::SIGSEGV)), "the program's");
            assert_eq!(tried::read(hole), Err(libc::SIGSEGV), "nobody's");
        };
        outside();
        for (domain, found) in [(&closed, Err(libc::SIGSEGV)), (&readers, Ok(7))] {
            let entered = domain.enter().unwrap();
            assert_eq!((tried::read(last), tried::read(own)), (found, Ok(0)), "{domain:?}");
            assert_eq!(tried::write(last, 1), Err(libc::SIGSEGV), "{domain:?}");
            drop(entered);
            outside();
        }
        drop((closed, readers, memory));
        outside();
    });
}

/// A store that no child can have.
struct Alone(MemoryStore);

impl BackingStore for Alone {
    over_memory!(0: claim, release, reads_in_trap, read, write);

    fn before_fork(&self, _: i32) -> Result<(), StoreError> {
        Err(StoreError { object: "of this test".into(), cause: io::Error::other("no"), remedy: "there is none" })
    }
}

#[test]
fn a_region_that_a_child_does_not_get_is_opened_by_no_right() {
    child::forked(|| {
        tried::catch();
        let Some(region) = region(DescriptorTable::Shared, Alone(MemoryStore::new(1 << 20).unwrap())) else { return };
        let memory = Memory::of(&region).unwrap();
        let [closed, readers] = ["closed", "readers"].map(ProtectionDomain::new);
        readers.set(&memory, Rights::READ).unwrap();
        let entered = closed.enter().unwrap();
        let mut of_child = Some((entered, &readers));
        child::forked(|| {
            let (entered, readers) = of_child.take().unwrap();
            let read = || tried::read(word(&region, 3));
            let within = read();
            drop(entered);
            let outside = read();
            let entered = readers.enter().unwrap();
            let reading = read();
            drop(entered);
            assert_eq!([within, outside, reading], [Err(libc::SIGSEGV); 3]);
        });
        drop(of_child);
        assert_eq!(tried::read(word(&region, 3)), Ok(7), "the parent's");
    });
}

/// Whether a child ends well, and in time.
fn ends(child: libc::pid_t, limit: Duration) -> bool {
    let (mut status, began) = (0, Instant::now());
    // SAFETY: test: waits for our own child.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } != child {
        if began.elapsed() > limit {
            // SAFETY: test: ends it.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    status == 0
}

/// Does `work` in a child that is made past the handlers of forks. It has the time to see that a fork of its own hangs.
fn in_bare_clone(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: test: as fork(2); the child only does `work` and ends.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        // SAFETY: test: the child's end.
        0 => unsafe { libc::_exit(i32::from(!work())) },
        child => ends(child as libc::pid_t, Duration::from_secs(60)),
    }
}

/// Forks, and has the child end at once.
fn forks() -> bool {
    // SAFETY: test: the child only ends.
    match unsafe { libc::fork() } {
        // SAFETY: test: the child's end.
        0 => unsafe { libc::_exit(0) },
        child => ends(child, Duration::from_secs(20)),
    }
}

#[test]
fn a_clone_that_has_no_regions_leaves_domains_and_forks() {
    [DescriptorTable::Shared, DescriptorTable::Private].into_iter().for_each(|table| {
        child::forked(|| {
            // By page tables, on every machine.
            // SAFETY: test: new keys, which no memory has.
            while unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } > 0 {}
            assert_eq!(mechanism(), Mechanism::PageTables);
            let Some(region) = region(table, MemoryStore::new(1 << 20).unwrap()) else { return };
            let (_memory, closed) = (Memory::of(&region).unwrap(), ProtectionDomain::new("closed"));
            let entered = closed.enter().unwrap();
            let left = in_bare_clone(|| {
                // SAFETY: test: the clone's copy; the other is the parent's.
                drop(unsafe { std::ptr::read(&entered) });
                forks()
            });
            assert!(left, "{table:?}: it hangs as it leaves a domain");
            drop(entered);
            std::thread::scope(|scope| {
                let ((tell, is_in), (done, is_done)) = (channel(), channel::<()>());
                let closed = &closed;
                scope.spawn(move || {
                    let _entered = closed.enter().unwrap();
                    tell.send(()).unwrap();
                    let _ = is_done.recv();
                });
                is_in.recv().unwrap();
                let forked = in_bare_clone(forks);
                drop(done);
                assert!(forked, "{table:?}: its fork hangs");
            });
            let first = word(&region, 0);
            assert_eq!((tried::read(first), tried::write(first, 7)), (Ok(7), Ok(())), "the parent's");
        });
    });
}
