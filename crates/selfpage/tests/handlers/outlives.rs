//! Handlers that still run when their region is dropped: the access that they were asked about has gone on.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use selfpage::{Answer, Domain, MemoryFault, Protection, Region, Trap};

use crate::child::forked;
use crate::scenario::{here, in_child, until};
use crate::{PAGE, handled, tried, unprotect, word, write};

/// A region whose handler is still asked about page 0, which it has unprotected when it was asked by another thread, and does `late`. It refuses
/// what it is asked about other pages.
fn under_a_late_handler(late: impl Fn(&MemoryFault<'_>) + Send + Sync + 'static) -> (Domain, Region) {
    let asked = Barrier::new(2);
    let (domain, region) = handled(Trap::Worker, move |fault: &MemoryFault<'_>| {
        if fault.offset_bytes() >= PAGE {
            return Answer::Refuse;
        }
        if asked.wait().is_leader() {
            late(fault);
        }
        unprotect(fault)
    });
    region.protect(0, PAGE, Protection::Read).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| write(&region, 0, 9));
        }
    });
    (domain, region)
}

fn wait_for(flag: &AtomicBool) {
    while !flag.load(SeqCst) {
        std::thread::yield_now();
    }
}

/// Page 5 of the fault's region.
fn fifth(fault: &MemoryFault<'_>) -> *mut u64 {
    ((fault.address() & !(PAGE - 1)) + 5 * PAGE) as *mut u64
}

/// As soon as the first flag says that it may go on, and some time later, it writes to the region, and notes that in the second.
fn under_a_writer() -> (Domain, Region, [Arc<AtomicBool>; 2]) {
    let flags = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let [may_go_on, wrote] = flags.clone();
    let (domain, region) = under_a_late_handler(move |fault| {
        wait_for(&may_go_on);
        // In parts: a process that is stopped meanwhile sleeps on afterwards.
        (0..100).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
        // SAFETY: test: a word of the region.
        unsafe { fifth(fault).write_volatile(1) };
        wrote.store(true, SeqCst);
    });
    (domain, region, flags)
}

#[test]
fn the_region_goes_when_it_has_answered() {
    in_child(here!(), "", || {
        let (_domain, region, [may_go_on, wrote]) = under_a_writer();
        may_go_on.store(true, SeqCst);
        drop(region);
        assert!(wrote.load(SeqCst));
    })
    .well();
}

/// The handler has no more time meanwhile than whoever waits for it.
#[test]
fn it_is_waited_for_as_long_where_the_process_is_stopped() {
    in_child(here!(), "", || {
        let (_domain, region, [may_go_on, wrote]) = under_a_writer();
        let line = format!("kill -STOP {0}; sleep 2; kill -CONT {0}", std::process::id());
        may_go_on.store(true, SeqCst);
        let mut stops = Command::new("sh").args(["-c", &line]).spawn().unwrap();
        drop(region);
        assert!(wrote.load(SeqCst));
        stops.wait().unwrap();
    })
    .well();
}

/// As where it waits for a lock of whoever drops the region.
#[test]
fn one_that_does_not_answer_finds_its_region_gone() {
    in_child(here!(), "", || {
        let (_domain, region, [may_go_on, wrote]) = under_a_writer();
        drop(region);
        may_go_on.store(true, SeqCst);
        std::thread::sleep(Duration::from_secs(30));
        panic!("its write neither ended nor failed: {wrote:?}");
    })
    .by(libc::SIGSEGV, &[]);
}

/// It makes usable what was refused of the region before.
#[test]
fn nor_does_it_open_a_page_of_it_any_more() {
    in_child(here!(), "", || {
        tried::catch();
        let [may_go_on, failed] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (goes_on, fails) = (may_go_on.clone(), failed.clone());
        let (domain, region) = under_a_late_handler(move |fault| {
            wait_for(&goes_on);
            fault.protect(5 * PAGE, PAGE, Protection::ReadWrite).unwrap();
            fails.store(tried::write(fifth(fault), 1) == Err(libc::SIGSEGV), SeqCst);
        });
        region.protect(5 * PAGE, PAGE, Protection::Read).unwrap();
        assert!(tried::write(word(&region, 5), 1).is_err());
        drop(region);
        may_go_on.store(true, SeqCst);
        drop(domain);
        assert!(failed.load(SeqCst));
    })
    .well();
}

#[test]
fn a_domain_ends_whose_handler_waits_for_a_lock_of_whoever_drops_it() {
    in_child(here!(), "", || {
        let lock = Arc::new(Mutex::new(()));
        let locked = lock.lock().unwrap();
        let locks = lock.clone();
        let (domain, region) = under_a_late_handler(move |_| drop(locks.lock().unwrap()));
        drop(region);
        drop(domain);
        drop(locked);
        let is_ours = |task: std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("selfpage-"))
        };
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().flatten();
        until("the domain's threads have ended", || !threads().any(is_ours));
    })
    .well();
}

/// The thread that was asked about it is not there.
#[test]
fn in_a_child_of_a_trap_it_holds_nothing() {
    in_child(here!(), "", || {
        static REGION: Mutex<Option<Region>> = Mutex::new(None);
        let may_go_on = Arc::new(AtomicBool::new(false));
        let goes_on = may_go_on.clone();
        let (domain, region) = under_a_late_handler(move |_| wait_for(&goes_on));
        *REGION.lock().unwrap() = Some(region);
        let forks = |fault: &MemoryFault<'_>| {
            forked(|| {
                let region = REGION.lock().unwrap().take().unwrap();
                let start = format!("{:x}-", region.as_ptr().addr());
                let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(&start);
                assert!(is_mapped());
                drop(region);
                assert!(!is_mapped());
            });
            unprotect(fault)
        };
        let other = domain.region(PAGE).trap(Trap::Upcall).handler(forks).zero().unwrap();
        other.protect(0, PAGE, Protection::Read).unwrap();
        write(&other, 0, 1);
        may_go_on.store(true, SeqCst);
    })
    .well();
}
