//! Children that no fork(2) of the C library has made: those of a bare clone(2), which have nothing of their parent's domains, and those that share
//! its memory.

use std::fs::{File, TryLockError};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::mpsc::channel;

use selfpage::snapshot::Snapshots;
use selfpage::{Domain, FileAccess, Kind, Region};

use crate::child::{bare, fork, say};
use crate::scenario::{PAGE, here, in_child, number_pages};
use crate::skip::skip;

const PAGES: usize = 16;

fn domain() -> (Domain, Region) {
    let domain = Domain::with_frames(4 * PAGES * PAGE).build().unwrap();
    let mut region = domain.region(PAGES * PAGE).zero().unwrap();
    number_pages(&mut region);
    (domain, region)
}

#[test]
fn a_bare_clones_child_is_told_what_it_lacks_and_drops_it() {
    in_child(here!(), "", || {
        let (domain, region) = domain();
        let child = bare(0, move || {
            let calls = [
                region.evict(0, PAGE).map(drop),
                region.flush(0, PAGE),
                region.pin(0, PAGE),
                region.while_still(|| ()),
                region.protection(0).map(drop),
                domain.add_frames(1),
            ];
            for why in calls.map(Result::unwrap_err) {
                assert!(why.kind() == Kind::Lost && why.to_string().contains("use fork"), "{why}");
            }
            domain.flush_trace();
            drop(region);
            drop(domain);
            true
        });
        assert_eq!(child.unwrap().wait(), 0);
    })
    .well();
}

/// It may have one of its own, which is as any other.
#[test]
fn a_bare_clones_child_has_a_domain_of_its_own_and_forks_with_it() {
    in_child(here!(), "", || {
        let (_domain, region) = domain();
        let child = bare(0, || {
            let (_domain, own) = self::domain();
            let is_there = || own.pin(0, PAGE).is_ok() && own.as_slice::<u64>()[512] == 2;
            let lacks = || region.pin(0, PAGE).is_err_and(|why| why.kind() == Kind::Lost);
            is_there() && lacks() && fork(|| is_there() && lacks()).wait() == 0
        });
        assert_eq!(child.unwrap().wait(), 0);
    })
    .well();
}

/// Of its parent's regions it has none, and cannot drop them. Its own are told apart.
#[test]
fn a_bare_clones_child_has_a_file_that_is_its_parents_region() {
    in_child(here!(), "", || {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len((PAGES * PAGE) as u64).unwrap();
        let writes = |domain: &Domain| domain.region(0).file(file.path(), 0, FileAccess::ReadWrite);
        let (domain, _region) = domain();
        let _parents = writes(&domain).unwrap();
        let child = bare(0, || {
            let (domain, _own) = self::domain();
            let first = writes(&domain).inspect_err(|why| say(&why.to_string()));
            first.is_ok() && writes(&domain).is_err_and(|why| why.kind() == Kind::Held)
        });
        assert_eq!(child.unwrap().wait(), 0);
        assert_eq!(writes(&domain).unwrap_err().kind(), Kind::Held);
    })
    .well();
}

/// In a namespace of its own each of them is process 1, and others have the numbers of its parent's threads.
#[test]
fn a_bare_clones_child_with_its_parents_number_forks() {
    in_child(here!(), "", || {
        let forks = || fork(|| true).wait() == 0;
        let first = bare(libc::CLONE_NEWPID, || {
            let (_domain, _region) = domain();
            let second = bare(libc::CLONE_NEWPID, || {
                assert_eq!(std::process::id(), 1);
                let third = bare(0, forks).unwrap();
                third.wait() == 0 && forks()
            });
            std::process::id() == 1 && second.unwrap().wait() == 0
        });
        match first {
            None => skip("root", "only root makes namespaces of processes"),
            Some(first) => assert_eq!(first.wait(), 0),
        }
    })
    .well();
}

/// Whichever of them begins with a domain.
#[test]
fn a_bare_clones_childs_own_threads_are_no_pager_threads() {
    /// Does what a pager thread may not.
    fn uses_a_domain() {
        let domain = Domain::with_frames(PAGES * PAGE).build().unwrap();
        assert_eq!(domain.region(PAGE).zero().unwrap().as_slice::<u64>()[0], 0);
        assert_eq!(fork(|| true).wait(), 0);
    }
    in_child(here!(), "", || {
        let first = bare(libc::CLONE_NEWPID, || {
            let (_domain, _region) = domain();
            let is_known = selfpage::trap::pager_threads().any(|thread| thread == 2);
            let child = |begins_second: bool| {
                let second = bare(libc::CLONE_NEWPID, || {
                    let (go_on, goes_on) = channel();
                    let user = std::thread::spawn(move || {
                        // SAFETY: test: a call without arguments.
                        assert_eq!(unsafe { libc::gettid() }, 2);
                        goes_on.recv().unwrap();
                        uses_a_domain();
                    });
                    let _own = (!begins_second).then(self::domain);
                    go_on.send(()).unwrap();
                    user.join().is_ok()
                });
                second.unwrap().wait()
            };
            is_known && [false, true].map(child) == [0, 0]
        });
        match first {
            None => skip("root", "only root makes namespaces of processes"),
            Some(first) => assert_eq!(first.wait(), 0),
        }
    })
    .well();
}

/// Where a file of this name is written to by somebody.
fn is_locked(path: &Path) -> bool {
    matches!(File::open(path).map(|file| file.try_lock()), Ok(Err(TryLockError::WouldBlock)))
}

/// Each of them is process 1, as its parent is.
#[test]
fn a_childs_copies_of_what_takes_snapshots_are_not_its_own() {
    in_child(here!(), "", || {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let first = bare(libc::CLONE_NEWPID, || {
            let (_domain, region) = domain();
            let snapshots = ManuallyDrop::new(Snapshots::of(&[&region], path("one")).unwrap());
            // SAFETY: test: once in each process, which does not use it any more then.
            let copy = || unsafe { std::ptr::read(&*snapshots) };
            let cloned = bare(libc::CLONE_NEWPID, || {
                drop(copy());
                std::process::id() == 1
            });
            assert_eq!(cloned.unwrap().wait(), 0);
            assert!(is_locked(&path("one.new")));
            // SAFETY: test: a number. From now on this process makes no threads, and its next child is process 1.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
            let forked = fork(|| {
                assert_eq!(std::process::id(), 1);
                let mut copy = copy();
                assert!(copy.arm().is_err_and(|why| why.to_string().contains("forked child")));
                let mut own = Snapshots::of(&[&region], path("two")).unwrap();
                drop(copy);
                assert_eq!(Snapshots::of(&[&region], path("three")).unwrap_err().kind(), Kind::Held);
                own.take().is_ok()
            });
            forked.wait() == 0 && is_locked(&path("one.new"))
        });
        match first {
            None => skip("root", "only root makes namespaces of processes"),
            Some(first) => assert_eq!(first.wait(), 0),
        }
    })
    .well();
}

/// As between vfork(2) and execve(2).
#[test]
fn a_child_that_shares_its_parents_memory_forks() {
    extern "C" fn forks(region: *mut libc::c_void) -> libc::c_int {
        // SAFETY: test: the region, which the parent keeps.
        let region = unsafe { &*region.cast::<Region>() };
        let reads = || region.as_slice::<u64>()[512] == 2 && region.pin(0, region.len_bytes()).is_ok();
        let ended = fork(reads).wait();
        if ended != 0 {
            say(&format!("the child of a child that shares its parent's memory ended with {ended}"));
        }
        i32::from(ended != 0)
    }
    in_child(here!(), "", || {
        let (_domain, region) = domain();
        let mut stack = vec![0_u128; 1 << 16];
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let (mut status, at) = (0, (&raw const region).cast_mut().cast());
        // SAFETY: test: the child has a stack of its own, and this thread waits for its end.
        unsafe {
            let child = libc::clone(forks, stack.as_mut_ptr_range().end.cast(), flags, at);
            assert!(child > 0 && libc::waitpid(child, &mut status, 0) == child);
        }
        assert_eq!(status, 0);
    })
    .well();
}
