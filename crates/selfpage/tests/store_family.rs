//! Parents and forked children on one store, and what is left of a child that is killed.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::pipe::pipe;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::gettid;
use selfpage::store::{BackingStore, Blok, FileStore, IoChoice, ReadBlok, WriteBlok};
use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::pager::{Context, PagerError};

#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

fn write(store: &FileStore, bloks: &[u32], fill: u8) {
    let page = Page([fill; PAGE_BYTES]);
    let unset = Err(PagerError::NoStore);
    let mut writes: Vec<_> =
        bloks.iter().map(|&blok| WriteBlok { blok: Blok(blok), bytes: &page.0, outcome: unset }).collect();
    store.write(&mut writes);
    assert!(writes.iter().all(|write| write.outcome == Ok(())));
}

fn read(store: &FileStore, blok: u32) -> u8 {
    let mut page = Page([0; PAGE_BYTES]);
    store.read(Context::Trap, &mut [ReadBlok { blok: Blok(blok), bytes: &mut page.0 }]).unwrap();
    page.0[100]
}

/// Forks as a domain does. What the child does ends with `exit`.
fn fork(store: &FileStore, child: impl FnOnce()) -> Pid {
    fork_with_table_of(gettid().as_raw_nonzero().get(), store, child)
}

fn fork_with_table_of(thread: i32, store: &FileStore, child: impl FnOnce()) -> Pid {
    store.before_fork(thread).unwrap();
    // SAFETY: fork-quiet: only this thread is at work, and the child leaves by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: fork-quiet: a child that hangs is a failure, not a wait.
            unsafe { libc::alarm(30) };
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                store.after_fork_in_child();
                child();
            }));
            // SAFETY: fork-quiet: the child's end.
            unsafe { libc::_exit(worked.is_err() as i32) }
        }
        pid => {
            store.after_fork_in_parent();
            Pid::from_raw(pid).expect("fork failed")
        }
    }
}

fn wait_for(pid: Pid) -> Option<i32> {
    waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap().1.exit_status()
}

fn kill(pid: Pid) {
    kill_process(pid, Signal::KILL).unwrap();
    assert_eq!(wait_for(pid), None, "the child ended by itself");
}

/// Claims that many bloks, and says which number is above all of theirs.
fn claim_all(store: &FileStore, bloks: u32) -> u32 {
    let (mut left, mut most) = (bloks, 0);
    while left > 0 {
        let (first, len) = store.claim(left.min(100)).unwrap();
        (left, most) = (left - len, most.max(first.0 + len));
    }
    most
}

fn say(pipe: &OwnedFd) {
    rustix::io::write(pipe, b"x").unwrap();
}

fn hear(pipe: OwnedFd) {
    assert_eq!(std::fs::File::from(pipe).read(&mut [0]).unwrap(), 1, "the child is gone");
}

/// Both have what was saved before; each has its own from then on; what a killed one held comes back.
fn a_killed_child(choice: IoChoice) {
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), 400 << 12).unwrap().with_io(choice);
    assert_eq!(store.claim(100).unwrap(), (Blok(1), 100));
    write(&store, &[1, 3, 5, 100], 7);
    let (heard, said) = pipe().unwrap();
    let child = fork(&store, || {
        assert_eq!([1, 3, 5, 100].map(|blok| read(&store, blok)), [7; 4]);
        let (first, len) = store.claim(100).unwrap();
        assert!(first.0 > 100 && len == 100, "{first:?}+{len}");
        claim_all(&store, 100);
        // More than one run, so that the engine is made anew.
        write(&store, &[first.0, first.0 + 2, first.0 + 4], 8);
        assert_eq!(read(&store, first.0 + 4), 8);
        say(&said);
        std::thread::sleep(Duration::from_secs(60));
    });
    drop(said);
    hear(heard);
    store.release(Blok(1), 50);
    assert_eq!(store.taken_bloks(), 300, "what the child still has is not free");
    store.reclaim_dead();
    assert_eq!(store.taken_bloks(), 300, "a living child was taken for dead");
    let mut left = 0;
    while let Ok((_, len)) = store.claim(400) {
        left += len;
    }
    assert_eq!(left, 100);
    assert_eq!(read(&store, 100), 7);
    kill(child);
    let mut back = 0;
    while let Ok((_, len)) = store.claim(400) {
        back += len;
    }
    assert_eq!(back, 250, "all that the child claimed, and all that only it still had");
    write(&store, &[1, 3, 5], 9);
    assert_eq!([1, 3, 5, 100].map(|blok| read(&store, blok)), [9, 9, 9, 7]);
}

/// A child ends the store in order, though its engines' threads and rings were the parent's.
fn a_child_that_drops_its_store(choice: IoChoice) {
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), 400 << 12).unwrap().with_io(choice);
    let store = std::rc::Rc::new(store);
    store.claim(9).unwrap();
    write(&store, &[1, 3, 5], 7);
    let own = std::rc::Rc::clone(&store);
    let child = fork(&store, move || {
        // SAFETY: fork-quiet: the child has one reference less to give back, and never gives it back.
        unsafe { std::rc::Rc::decrement_strong_count(std::rc::Rc::as_ptr(&own)) };
        drop(own);
    });
    assert_eq!(wait_for(child), Some(0));
    write(&store, &[2, 4, 6], 8);
    assert_eq!([1, 2, 6].map(|blok| read(&store, blok)), [7, 8, 8]);
}

/// What dead children held is claimed again before the file grows.
fn dead_children() {
    const CHILDREN: u32 = 10;
    const EACH: u32 = 2000;
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), 1 << 30).unwrap();
    let children: Vec<Pid> = (0..CHILDREN)
        .map(|_| {
            let (heard, said) = pipe().unwrap();
            let child = fork(&store, || {
                claim_all(&store, EACH);
                say(&said);
                std::thread::sleep(Duration::from_secs(60));
            });
            drop(said);
            hear(heard);
            child
        })
        .collect();
    children.into_iter().for_each(kill);
    let most = claim_all(&store, CHILDREN * EACH - 1000);
    assert!(most < CHILDREN * EACH + 3000, "blok {most} is in use");
}

/// Nothing is claimed meanwhile, which would look for them.
fn dead_children_are_forgotten_at_a_fork() {
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), 1 << 30).unwrap();
    let (first, len) = store.claim(512).unwrap();
    let (live, lives) = pipe().unwrap();
    let children: Vec<Pid> = (0..50)
        .map(|_| {
            fork(&store, || {
                // Until the parent closes its end.
                // SAFETY: fork-quiet: the child's own, which it does not use.
                drop(unsafe { OwnedFd::from_raw_fd(lives.as_raw_fd()) });
                assert_eq!(rustix::io::read(&live, &mut [0; 1]).unwrap(), 0);
            })
        })
        .collect();
    drop(lives);
    children.into_iter().for_each(|child| assert_eq!(wait_for(child), Some(0)));
    store.release(first, len);
    assert_eq!(store.taken_bloks(), 512);
    let child = fork(&store, || ());
    assert_eq!(wait_for(child), Some(0));
    assert_eq!(store.taken_bloks(), 0, "children that have ended hold it");
}

/// A grandchild outlives its parent, and the store is still the family's.
fn orphans() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = dir.path().join("store");
    let (heard, said) = pipe().unwrap();
    let (go, gone) = pipe().unwrap();
    // SAFETY: fork-quiet: only this thread is at work, and the child leaves by `_exit`.
    let first = match unsafe { libc::fork() } {
        0 => {
            drop(gone);
            let store = FileStore::create(&path, 100 << 12).unwrap();
            store.claim(10).unwrap();
            write(&store, &[1, 2, 3], 5);
            fork(&store, || {
                assert_eq!(rustix::io::read(&go, &mut [0; 1]).unwrap(), 0);
                // The parent is dead; its references go, ours stay.
                store.claim(5).unwrap();
                store.reclaim_dead();
                assert_eq!(store.taken_bloks(), 15);
                assert_eq!(read(&store, 3), 5);
                let grandchild = fork(&store, || assert_eq!((read(&store, 3), store.taken_bloks()), (5, 15)));
                assert_eq!(wait_for(grandchild), Some(0));
                say(&said);
                std::thread::sleep(Duration::from_secs(60));
            });
            // SAFETY: fork-quiet: the child's end, without a word to the store.
            unsafe { libc::_exit(0) }
        }
        pid => Pid::from_raw(pid).unwrap(),
    };
    drop((go, said));
    assert_eq!(wait_for(first), Some(0));
    drop(gone);
    hear(heard);
    let error = FileStore::create(&path, 100 << 12).expect_err("an orphan still uses it").to_string();
    assert!(error.contains("another running program"), "{error}");
    kill_holder(&path);
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = FileStore::create(&path, 100 << 12) {
        assert!(Instant::now() < deadline, "{error}");
    }
}

/// Whoever has the file open, found the way `fuser` does.
fn kill_holder(path: &Path) {
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let open = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        if open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|target| target == path) {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        }
    }
}

/// Children are killed at random instants of claiming and releasing; nothing is lost, nothing is given out twice.
fn killed_at_any_instant() {
    const BLOKS: u64 = 3000;
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), BLOKS << 12).unwrap();
    store.claim(500).unwrap();
    for round in 0..60 {
        let children = [1, 2, 3].map(|seed| {
            fork(&store, || {
                let mut held = vec![(Blok(1), 500)];
                for step in 0_u32.. {
                    if (step.wrapping_mul(2_654_435_761) >> 16).wrapping_add(seed) % 2 == 0
                        && let Ok(run) = store.claim(1 + step % 70)
                    {
                        held.push(run);
                    } else if let Some((first, len)) = held.pop() {
                        store.release(first, len);
                    }
                }
            })
        });
        std::thread::sleep(Duration::from_micros(200 + 97 * round));
        // Ours meanwhile.
        let (first, len) = store.claim(64).unwrap_or((Blok(1), 0));
        children.into_iter().for_each(kill);
        store.release(first, len);
        store.reclaim_dead();
        assert_eq!(store.taken_bloks(), 500, "round {round}");
    }
}

/// A process that is made behind the C library's back, and does `work`.
fn bare_child(work: impl FnOnce()) -> Pid {
    // SAFETY: fork-quiet: as fork(2), without anybody's handlers; only this thread is at work, and the child leaves by `_exit`.
    match unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } {
        0 => {
            // SAFETY: fork-quiet: a child that hangs is a failure, not a wait.
            unsafe { libc::alarm(30) };
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            // SAFETY: fork-quiet: the child's end.
            unsafe { libc::_exit(worked.is_err() as i32) }
        }
        pid => Pid::from_raw(pid as i32).expect("clone failed"),
    }
}

/// A child that is no member gives back what it has of its parent's, and nothing of the parent's is free by that.
fn a_child_that_is_no_member() {
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), 400 << 12).unwrap();
    let (first, len) = store.claim(100).unwrap();
    let child = bare_child(|| {
        store.reclaim_dead();
        store.release(first, len);
        assert_eq!(store.claim(1), Err(PagerError::NoStore));
        assert!(store.before_fork(gettid().as_raw_nonzero().get()).is_err());
    });
    assert_eq!(wait_for(child), Some(0));
    assert_eq!(store.taken_bloks(), 100, "the parent's bloks were given back by a child");
    store.release(first, len);
    assert_eq!(store.taken_bloks(), 0);
}

/// A process that is just being started has the store's descriptor, and its lock, until it calls exec.
fn made_again_while_a_process_is_started() {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = dir.path().join("store");
    let store = FileStore::create(&path, 100 << 12).unwrap();
    let (end, ends) = pipe().unwrap();
    let child = bare_child(|| hear(end.try_clone().unwrap()));
    drop(store);
    let again = FileStore::create(&path, 100 << 12).map(drop);
    say(&ends);
    assert_eq!(wait_for(child), Some(0));
    again.unwrap();
    // What a child drops is its parent's still.
    let store = FileStore::create(&path, 100 << 12).unwrap();
    let child = bare_child(|| {
        // SAFETY: fork-quiet: the child's copy, which is used no more.
        drop(unsafe { std::ptr::read(&store) });
    });
    assert_eq!(wait_for(child), Some(0));
    let error = FileStore::create(&path, 100 << 12).expect_err("the parent uses it").to_string();
    assert!(error.contains("another running program"), "{error}");
}

/// The program has closed the descriptor; a pager thread with a table of its own still has it.
fn closed_by_the_program() {
    let store = FileStore::unnamed_in(Path::new(env!("CARGO_MANIFEST_DIR")), 100 << 12).unwrap();
    store.claim(10).unwrap();
    write(&store, &[1, 2, 3], 5);
    std::thread::scope(|scope| {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let (tid_is, tid) = std::sync::mpsc::channel();
        scope.spawn(move || {
            // SAFETY: fd-number: this thread opens and closes nothing.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }.unwrap();
            tid_is.send(gettid().as_raw_nonzero().get()).unwrap();
            let _ = wait.recv();
        });
        let tid = tid.recv().unwrap();
        // SAFETY: fd-number: closing under the store's feet is the point.
        unsafe { rustix::io::close(store.descriptors()[0]) };
        assert!(store.before_fork(gettid().as_raw_nonzero().get()).is_err());
        let child = fork_with_table_of(tid, &store, || assert_eq!(read(&store, 3), 5));
        assert_eq!(wait_for(child), Some(0));
        drop(done);
    });
}

/// One after the other: a fork wants the process at rest.
#[test]
fn families() {
    a_killed_child(IoChoice::Auto);
    a_killed_child(IoChoice::Pool);
    a_child_that_drops_its_store(IoChoice::Auto);
    a_child_that_drops_its_store(IoChoice::Pool);
    dead_children();
    dead_children_are_forgotten_at_a_fork();
    orphans();
    killed_at_any_instant();
    closed_by_the_program();
    a_child_that_is_no_member();
    made_again_while_a_process_is_started();
}
