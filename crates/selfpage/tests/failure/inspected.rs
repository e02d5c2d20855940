//! Somebody looks into a process that pages: by `/proc`, by a core dump, or as its tracer.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};

use crate::child;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages, sevens};
use crate::skip::skip;

const FRAMES: usize = 64;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// Set where the tracer does not look at what system calls are given.
const BLIND: &str = "SELFPAGE_BLIND";

/// A region of numbered pages, of which the first is absent.
fn first_absent(trap: Trap) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let mut region = domain.region(4 * FRAMES * PAGE).trap(trap).stored(MemoryStore::new(1 << 26).unwrap()).unwrap();
    number_pages(&mut region);
    let _ = region.evict(0, PAGE);
    assert_eq!(region.residency()[0].load(std::sync::atomic::Ordering::Relaxed), 0);
    (domain, region)
}

#[test]
fn by_its_file_in_proc() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = first_absent(trap);
            let memory = format!("/proc/{}/mem", std::process::id());
            let look = |page: usize| {
                let mut word = [0; 8];
                let file = std::fs::File::open(&memory).unwrap();
                let result = file.read_exact_at(&mut word, (region.as_ptr().addr() + page * PAGE) as u64);
                result.map(|()| u64::from_ne_bytes(word)).map_err(|error| error.raw_os_error())
            };
            assert_eq!(look(0), Err(Some(libc::EIO)));
            region.pin(0, 2 * PAGE).unwrap();
            assert_eq!((look(0), look(1)), (Ok(1), Ok(2)));
            region.unpin(0, 2 * PAGE).unwrap();
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

/// Reads the first word of a region of process `of`, or says which error that was.
fn read_of(of: i32, region: &Region) -> Result<u64, i32> {
    let mut word = 0u64;
    let here = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
    let there = libc::iovec { iov_base: region.as_ptr().cast(), iov_len: 8 };
    // SAFETY: test: one place each, of which this process's is alive.
    match unsafe { libc::process_vm_readv(of, &here, 1, &there, 1, 0) } {
        8 => Ok(word),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
    }
}

#[test]
fn by_process_vm_readv() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (domain, region) = first_absent(trap);
            let served = trap == Trap::Worker && domain.serves_system_calls();
            let expected = if served { Ok(1) } else { Err(libc::EFAULT) };
            let parent = std::process::id() as i32;
            // SAFETY: test: who may look into this process, which Yama else reserves for its ancestors. Refused where there is no Yama.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
            child::forked(|| assert_eq!(read_of(parent, &region), expected));
            check_pages(&region, 0..pages(&region));
        })
        .well();
    }
}

/// What was in core is in the dump, and nobody waits for what was not.
#[test]
fn by_a_core_dump() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let (_domain, region) = first_absent(trap);
            let last = pages(&region) - 1;
            std::env::set_current_dir(std::env::temp_dir()).unwrap();
            let dumps = child::fork(|| {
                check_pages(&region, last..last + 1);
                region.pin(last * PAGE, PAGE).unwrap();
                let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
                // SAFETY: test: a limit of this process, and its end.
                unsafe {
                    libc::setrlimit(libc::RLIMIT_CORE, &limit);
                    libc::abort()
                }
            });
            assert_eq!(dumps.wait() & 127, libc::SIGABRT);
            // `core`, or with the number of the process.
            let is_dump = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b"core");
            let mut here = std::fs::read_dir(".").unwrap().flatten().filter(|entry| is_dump(&entry.file_name()));
            let Some(dump) = here.next().map(|entry| entry.path()) else {
                return skip("core", "the kernel writes no core dumps here: see core_pattern and the limit for them");
            };
            let is_last = |page: &[u8]| {
                let word = |at: usize| u64::from_ne_bytes(page[8 * at..][..8].try_into().unwrap());
                (word(0), word(511)) == (last as u64 + 1, !(last as u64))
            };
            assert!(std::fs::read(dump).unwrap().chunks_exact(PAGE).any(is_last), "what was in core is not in it");
        })
        .well();
    }
}

/// strace stops pager threads too: it may look at what it traces, and not into what they have to bring in first.
#[test]
fn by_strace() {
    let test = here!();
    in_child(test, "traced", || {
        let (domain, region) = first_absent(Trap::Worker);
        (0..3).for_each(|_| check_pages(&region, 0..pages(&region)));
        if std::env::var_os(BLIND).is_some() && domain.serves_system_calls() {
            let _ = region.evict(0, PAGE);
            let (_pipe, mut into) = sevens();
            // SAFETY: test: a page of the region, which nobody changes.
            into.write_all(unsafe { std::slice::from_raw_parts(region.as_ptr(), PAGE) }).unwrap();
        }
    })
    .well();
    if Command::new("strace").arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return skip("strace", "there is no strace");
    }
    for options in [&["-f"][..], &["-f", "-e", "raw=all"], &["-f", "-c"], &[]] {
        in_child(test, &format!("strace{}", options.concat()), || {
            let mut strace = Command::new("strace");
            strace.args(options).args(["-o", "/dev/null"]).arg(std::env::current_exe().unwrap());
            strace.args([test, "--exact", "--nocapture", "--test-threads=1"]);
            strace.env("SELFPAGE_SCENARIO", format!("{test}/traced"));
            if options != ["-f"] {
                strace.env(BLIND, "1");
            }
            assert!(strace.status().unwrap().success());
        })
        .well();
    }
}
