//! Kernels and users without what is needed: the error names the feature and the remedy.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use selfpage::dirty::{DirtyTracker, Mechanism};
use selfpage::doctor::Finding;
use selfpage::store::{FileStore, MemoryStore};
use selfpage::{
    Answer, Config, DescriptorTable, Domain, FaultHandler, FileAccess, Kind, MemoryFault, Protection, Region, Trap,
};

use crate::child::forked;
use crate::filter::Call;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::skip::skip;
use crate::tried;

const FRAMES: usize = 64;
const TRAPS: [Trap; 2] = [Trap::Worker, Trap::Upcall];

pub fn is_root() -> bool {
    // SAFETY: test: asks for a number.
    unsafe { libc::geteuid() == 0 }
}

/// Makes this process nobody's.
pub fn drop_rights() {
    change_user();
    make_dumpable();
}

/// Makes this process nobody's, and no more: its own files in /proc are root's then.
fn change_user() {
    // SAFETY: test: the process gives its rights away.
    unsafe {
        assert_eq!(libc::setresgid(65534, 65534, 65534), 0);
        assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
    }
}

fn make_dumpable() {
    // SAFETY: test: its own /proc files are its own again.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
}

/// Whether also a process without rights can serve the faults that the kernel takes.
pub fn everybody_serves_system_calls() -> bool {
    let unprivileged = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
    unprivileged.trim() == "1" || std::fs::File::open("/dev/userfaultfd").is_ok()
}

const API: Call = Call::with(libc::SYS_ioctl, 1, 0xc018_aa3f);

#[track_caller]
fn unsupported(words: &[&str]) {
    let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let error = Domain::with_frames(FRAMES * PAGE).build().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), Kind::Unsupported, "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is missing from: {text}"));
    assert_eq!(std::fs::read_dir("/proc/self/fd").unwrap().count(), before);
}

#[test]
fn a_kernel_without_move() {
    in_child(here!(), "", || {
        API.fails_everywhere(libc::EINVAL).unwrap();
        unsupported(&["UFFDIO_MOVE", "Linux 6.8"]);
    })
    .well();
}

/// The descriptor is there, and what it may do cannot be agreed on.
#[test]
fn a_filter_that_blocks_the_handshake_of_userfaultfd_is_no_older_kernel() {
    in_child(here!(), "", || {
        API.fails_everywhere(libc::EPERM).unwrap();
        unsupported(&["ioctl(UFFDIO_API)", "seccomp", "docker run --security-opt"]);
    })
    .well();
}

/// The kernel would send SIGXFSZ, for which the program has no handler.
#[test]
fn to_examine_the_machine_ends_nobody_whose_files_may_have_no_bytes() {
    in_child(here!(), "", || {
        let findings = || -> Vec<String> {
            let without_limits = |finding: &Finding| finding.feature != "O_DIRECT";
            let findings = selfpage::doctor::examine().into_iter().filter(without_limits);
            findings.map(|finding| format!("{} {:?}", finding.feature, finding.state)).collect()
        };
        let before = findings();
        let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: test: the limit is borrowed until the call returns.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
        assert_eq!(findings(), before);
    })
    .well();
}

#[test]
fn a_container_that_blocks_userfaultfd() {
    in_child(here!(), "", || {
        if has_no_device() {
            Call::any(libc::SYS_userfaultfd).fails_everywhere(libc::EPERM).unwrap();
            unsupported(&["userfaultfd", "seccomp", "docker run --security-opt"]);
        }
    })
    .well();
}

/// Makes sure that the device does not stand in for the call.
fn has_no_device() -> bool {
    if is_root() {
        drop_rights();
    }
    let has_none = std::fs::File::open("/dev/userfaultfd").is_err();
    if !has_none {
        skip("unprivileged", "everybody may open /dev/userfaultfd here");
    }
    has_none
}

/// The domain serves what it may, by both traps.
fn pages_come_and_go(domain: &Domain) {
    pages_come_and_go_in(domain, &TRAPS);
}

fn pages_come_and_go_in(domain: &Domain, traps: &[Trap]) {
    for &trap in traps {
        let mut region =
            domain.region(4 * FRAMES * PAGE).trap(trap).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
        number_pages(&mut region);
        check_pages(&region, 0..pages(&region));
        crate::signals::read_into_absent(domain, trap, &region);
    }
}

/// Docker's profile forbids the call, and lets the device through where it is passed.
#[test]
fn a_container_that_blocks_userfaultfd_and_has_the_device() {
    in_child(here!(), "", || {
        if std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").is_err() {
            return skip("root", "there is no right to open /dev/userfaultfd");
        }
        Call::any(libc::SYS_userfaultfd).fails_everywhere(libc::EPERM).unwrap();
        assert!(selfpage::doctor::can_run(&selfpage::doctor::examine()));
        let domain = Domain::with_frames(FRAMES * PAGE).needs_system_calls().build().unwrap();
        pages_come_and_go(&domain);
        let tracker = DirtyTracker::with(Mechanism::WriteProtection);
        assert!(tracker.is_ok(), "{:?}", tracker.err());
    })
    .well();
}

/// All frames have memory when the domain is there, whoever acts on its descriptors.
#[test]
fn frames_that_are_populated_at_once() {
    for frames in [FRAMES, 5000] {
        for table in [DescriptorTable::Shared, DescriptorTable::Private] {
            let held = |config: Config| {
                let domain = config.most_frames(2 * frames * PAGE).descriptor_table(table).build().unwrap();
                // What comes later comes as it is needed.
                domain.add_frames(8).unwrap();
                let held = domain.stats().counts.frames_held_max;
                pages_come_and_go_in(&domain, if table == DescriptorTable::Shared { &TRAPS } else { &TRAPS[..1] });
                held
            };
            assert_eq!(held(Domain::with_frames(frames * PAGE)), 0);
            assert_eq!(held(Domain::with_frames(frames * PAGE).populated()), frames as u64);
        }
    }
}

/// The domain is not built half, and nothing of it is left.
#[test]
fn no_memory_for_frames_that_are_populated_at_once() {
    in_child(here!(), "", || {
        Call::with(libc::SYS_madvise, 2, libc::MADV_POPULATE_WRITE as u32).fails_everywhere(libc::ENOMEM).unwrap();
        let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let error = Domain::with_frames(FRAMES * PAGE).populated().build().unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), Kind::OutOfSpace, "{text}");
        assert!(text.contains("64 frames") && text.contains("has memory for 0 of them"), "{text}");
        assert_eq!(std::fs::read_dir("/proc/self/fd").unwrap().count(), before);
    })
    .well();
}

/// A domain takes seven descriptors.
#[test]
fn no_descriptors_to_be_had() {
    in_child(here!(), "", || {
        let limit = libc::rlimit { rlim_cur: 6, rlim_max: 6 };
        // SAFETY: test: a limit for this process.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        let error = Domain::with_frames(FRAMES * PAGE).build().unwrap_err();
        let text = error.to_string();
        assert!(error.kind() == Kind::OutOfSpace && text.matches("ulimit -n").count() == 1, "{text}");
    })
    .well();
}

/// There /proc is empty, as in a chroot that has none: the doctor does not blame the kernel, and the error says what to do.
#[test]
fn no_proc() {
    in_child(here!(), "", || {
        // SAFETY: test: a mount of this process's own.
        let unmounted = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::umount2(c"/proc".as_ptr(), libc::MNT_DETACH) == 0
        };
        if !unmounted {
            return skip("root", "/proc cannot be unmounted");
        }
        let findings = selfpage::doctor::examine();
        assert!(!selfpage::doctor::can_run(&findings));
        let defers = |remedy: &str| remedy.starts_with("mount -t proc proc /proc");
        assert!(
            findings.iter().any(|finding| finding.feature == "/proc" && finding.remedy.as_deref().is_some_and(defers))
        );
        for finding in findings {
            assert!(finding.remedy.as_deref().is_none_or(defers), "{finding:?}");
        }
        let error = Domain::with_frames(FRAMES * PAGE).build().unwrap_err().to_string();
        assert!(error.contains("/proc/thread-self/mem") && error.contains("mount -t proc proc /proc"), "{error}");
    })
    .well();
}

#[test]
fn a_kernel_without_userfaultfd() {
    in_child(here!(), "", || {
        if has_no_device() {
            Call::any(libc::SYS_userfaultfd).fails_everywhere(libc::ENOSYS).unwrap();
            unsupported(&["userfaultfd", "CONFIG_USERFAULTFD"]);
        }
    })
    .well();
}

/// Linux 6.8, which has `UFFDIO_MOVE`, gives the descriptor table of a process alone.
#[test]
fn a_kernel_that_gives_no_threads_table() {
    in_child(here!(), "", || {
        Call::with(libc::SYS_pidfd_open, 1, libc::O_EXCL as u32).fails_everywhere(libc::EINVAL).unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = FileStore::unnamed_in("/var/tmp", 1 << 24).unwrap();
        let mut region = domain.region(4 * FRAMES * PAGE).stored(store).unwrap();
        number_pages(&mut region);
        check_pages(&region, 0..pages(&region));
    })
    .well();
}

#[test]
fn a_child_gets_a_file_where_no_threads_table_is_given() {
    in_child(here!(), "", || {
        Call::with(libc::SYS_pidfd_open, 1, libc::O_EXCL as u32).fails_everywhere(libc::EINVAL).unwrap();
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len((4 * FRAMES * PAGE) as u64).unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(DescriptorTable::Private).build().unwrap();
        let mut region = domain.region(0).file(file.path(), 0, FileAccess::ReadWrite).unwrap();
        number_pages(&mut region);
        region.flush(0, region.len_bytes()).unwrap();
        forked(|| check_pages(&region, 0..pages(&region)));
    })
    .well();
}

/// Pages that are saved in two turns, each second one in each: what is brought in after that takes a request for each page.
fn bring_in_by_many_requests(region: &mut Region, domain: &Domain) {
    for parity in [0, 1] {
        for (index, page) in
            region.as_mut_slice::<[u64; 512]>().iter_mut().enumerate().filter(|(index, _)| index % 2 == parity)
        {
            (page[0], page[511]) = (index as u64 + 1, !(index as u64));
        }
        region.evict(0, region.len_bytes()).unwrap();
        region.flush(0, region.len_bytes()).unwrap();
    }
    // Others take what frames are left, those on standby among them.
    let others = domain.region(4 * FRAMES * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
    assert!(others.as_slice::<[u64; 512]>().iter().all(|page| page[0] == 0));
    drop(others);
    let filled = || domain.stats().counts.bytes_filled;
    let before = filled();
    region.prefetch(0, region.len_bytes()).unwrap();
    crate::scenario::until("all are in core", || filled() - before >= region.len_bytes() as u64);
    check_pages(region, 0..pages(region));
}

#[test]
fn a_container_that_blocks_io_uring() {
    for (call, name) in [(libc::SYS_io_uring_setup, "setup"), (libc::SYS_io_uring_enter, "enter")] {
        in_child(here!(), name, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = FileStore::unnamed_in("/var/tmp", 1 << 24).unwrap();
            let mut region = domain.region(FRAMES / 2 * PAGE).stored(store).unwrap();
            if call == libc::SYS_io_uring_enter {
                // The rings are there when they are forbidden.
                bring_in_by_many_requests(&mut region, &domain);
            }
            let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
            let before = threads();
            Call::any(call).fails_everywhere(libc::EPERM).unwrap();
            bring_in_by_many_requests(&mut region, &domain);
            assert!(threads() >= before + 3, "{} threads, and {before} before: who reads?", threads());
        })
        .well();
    }
}

#[test]
fn nobody() {
    in_child(here!(), "", || {
        if !is_root() {
            return skip("root", "only root can become nobody");
        }
        drop_rights();
        tried::catch();
        if everybody_serves_system_calls() {
            return skip("unprivileged", "this machine lets everybody serve the kernel's faults");
        }
        let error = Domain::with_frames(FRAMES * PAGE).needs_system_calls().build().unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), Kind::Unsupported, "{text}");
        for word in
            ["userfaultfd", "system calls", "CAP_SYS_PTRACE", "vm.unprivileged_userfaultfd=1", "/dev/userfaultfd"]
        {
            assert!(text.contains(word), "{word:?} is missing from: {text}");
        }
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        assert!(!domain.serves_system_calls());
        pages_come_and_go(&domain);
    })
    .well();
}

/// As a server does it that needs root for its socket alone: there are words for it, and a remedy that helps.
#[test]
fn a_process_that_has_changed_its_user() {
    const REMEDY: [&str; 2] = ["not dumpable", "prctl(PR_SET_DUMPABLE, 1)"];
    in_child(here!(), "", || {
        if !is_root() {
            return skip("root", "only root can become nobody");
        }
        // A file of root's could not be opened again for a child.
        let store = MemoryStore::new(1 << 24).unwrap();
        let before = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = before.region(4 * FRAMES * PAGE).stored(store).unwrap();
        number_pages(&mut region);
        change_user();
        unsupported(&["/proc/thread-self/mem", REMEDY[0], REMEDY[1]]);
        let findings = selfpage::doctor::examine();
        let proc = findings.iter().find(|finding| finding.feature == "/proc").unwrap();
        let remedy = proc.remedy.as_deref().unwrap();
        assert!(REMEDY.iter().all(|word| remedy.contains(word)) && !proc.why.contains("not mounted"), "{proc:?}");
        // Its threads have all open.
        check_pages(&region, 0..pages(&region));
        make_dumpable();
        assert!(Domain::with_frames(FRAMES * PAGE).build().is_ok());
        forked(|| check_pages(&region, 0..pages(&region)));
    })
    .well();
    in_child(here!(), "forks", || {
        if !is_root() {
            // SAFETY: test: ends as it should.
            unsafe { libc::abort() };
        }
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let region = domain.region(4 * FRAMES * PAGE).stored(MemoryStore::new(1 << 24).unwrap()).unwrap();
        change_user();
        // What it does without the region, it can do.
        forked(|| assert!(std::process::Command::new("/bin/true").status().unwrap().success()));
        // SAFETY: test: the child ends before the call is over.
        if unsafe { libc::fork() } == 0 {
            check_pages(&region, 0..1);
        }
        let mut status = 0;
        // SAFETY: test: waits for the child, and ends as that did.
        unsafe {
            libc::wait(&mut status);
            assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
            libc::abort();
        }
    })
    .by(libc::SIGABRT, if is_root() { &["does not get its parent's regions", REMEDY[0], REMEDY[1]] } else { &[] });
}

/// A file that is somebody else's: what the caller can do about it is not to change the kernel.
#[test]
fn a_file_of_somebody_elses() {
    in_child(here!(), "", || {
        if !is_root() {
            return skip("root", "only root can become nobody");
        }
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, [0; PAGE]).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        drop_rights();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let why = [
            domain.region(0).file(&file, 0, FileAccess::Read).unwrap_err(),
            selfpage::snapshot::Snapshot::open(&file).map(drop).unwrap_err(),
        ];
        for why in why {
            assert_eq!(why.kind(), Kind::Denied, "{why}");
            assert!(why.to_string().contains("Permission denied") && why.to_string().contains("the right to"), "{why}");
        }
    })
    .well();
}

#[test]
fn no_threads_to_be_had() {
    in_child(here!(), "", || {
        if !is_root() {
            return skip("root", "only root can become nobody");
        }
        drop_rights();
        let limit = libc::rlimit { rlim_cur: 4, rlim_max: 4 };
        // SAFETY: test: a limit for this process.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &limit) }, 0);
        let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let before = (fds(), threads());
        let Err(error) = Domain::with_frames(FRAMES * PAGE).build() else {
            return skip("nproc", "RLIMIT_NPROC does not hold here");
        };
        assert!(error.to_string().contains("start pager threads"), "{error}");
        assert_eq!(error.to_string().matches("ulimit -u").count(), 1, "{error}");
        assert_eq!(error.kind(), Kind::OutOfSpace, "{error}");
        crate::scenario::until("its threads are gone", || (fds(), threads()) == before);
    })
    .well();
}

/// setuid(3) and its like have each thread follow, and hold the C library's list of stacks until all have: whoever starts a thread waits for
/// that list, and must be able to follow meanwhile.
#[test]
fn groups_that_are_set_while_domains_come_and_go() {
    in_child(here!(), "", || {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    // SAFETY: test: nothing is changed.
                    assert_eq!(unsafe { libc::setresgid(libc::gid_t::MAX, libc::gid_t::MAX, libc::gid_t::MAX) }, 0);
                    // The list is an unfair lock: whoever took it again at once would have it for ever.
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            });
            for _ in 0..100 {
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let mut region = domain.region(4 * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
                number_pages(&mut region);
            }
            stop.store(true, Relaxed);
        });
    })
    .well();
}

/// The first page's handler meets its own fault on the next.
struct Nests;

impl FaultHandler for Nests {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if fault.offset_bytes() < PAGE {
            let next = (fault.address() & !(PAGE - 1)) + PAGE;
            // SAFETY: test: the next page of the region.
            unsafe { (next as *mut u64).write_volatile(1) };
        }
        fault.protect_page(Protection::ReadWrite).unwrap();
        Answer::Handled
    }
}

#[test]
fn no_thread_for_a_handler_that_faults() {
    for threads in [true, false] {
        let ended = in_child(here!(), &format!("{threads}"), || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = MemoryStore::new(1 << 20).unwrap();
            let mut region = domain.region(4 * PAGE).name("heap").handler(Nests).stored(store).unwrap();
            region.protect(0, 2 * PAGE, Protection::Read).unwrap();
            if !threads {
                Call::any(libc::SYS_clone3).fails_everywhere(libc::EAGAIN).unwrap();
            }
            region.as_mut_slice::<u64>()[0] = 1;
        });
        if threads {
            ended.well();
        } else {
            ended.by(libc::SIGSEGV, &["heap", "its handler faults, and there is no thread to answer that"]);
        }
    }
}

/// [`Nests`], once a thread could be had again.
struct NestsLater;

impl FaultHandler for NestsLater {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        most_threads(None);
        Nests.handle(fault)
    }
}

/// Sets how many threads the user may have, as far as the hard limit (`None`).
fn most_threads(most: Option<libc::rlim_t>) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: test: a limit for this process, borrowed until each call returns.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NPROC, &mut limit), 0);
        limit.rlim_cur = most.unwrap_or(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NPROC, &limit), 0);
    }
}

/// A worker would start it with the descriptors of pager threads, and on one CPU.
#[test]
fn a_worker_starts_no_thread_for_handlers() {
    extern "C" fn refused(_: libc::c_int) {
        // SAFETY: test: ends the process well.
        unsafe { libc::_exit(0) }
    }
    in_child(here!(), "", || {
        if is_root() {
            drop_rights();
        }
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = MemoryStore::new(1 << 20).unwrap();
        let mut region = domain.region(4 * PAGE).handler(NestsLater).stored(store).unwrap();
        region.protect(0, 2 * PAGE, Protection::Read).unwrap();
        most_threads(Some(0));
        if std::thread::Builder::new().spawn(|| ()).is_ok() {
            return skip("nproc", "RLIMIT_NPROC does not hold here");
        }
        // SAFETY: test: the handler ends the process.
        unsafe { libc::signal(libc::SIGSEGV, refused as extern "C" fn(libc::c_int) as libc::sighandler_t) };
        region.as_mut_slice::<u64>()[0] = 1;
        panic!("the handler's own fault was answered by a thread that a worker started");
    })
    .well();
}
