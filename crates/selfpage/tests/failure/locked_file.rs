//! Regions over a file whose lock somebody holds: perhaps because he waits for a page of that very region.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use selfpage::{Domain, FileAccess, Kind, Region, Trap};

use crate::formatted::{Kind as FileSystem, done};
use crate::own_file::{FILE_SYSTEMS, FRAMES, Later, TRAPS, numbered, on, write_own};
use crate::scenario::{PAGE, here, in_child, is_at, own_number, until};

/// How the lock is held.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Held {
    /// By somebody who writes to the file.
    ToWrite,
    /// By somebody who reads it, where that takes the lock, and a writer is behind him.
    ToRead,
}

/// Does `work` while somebody has the lock of `file`, of which he writes or reads the page at `offset`. How many bytes he got done.
fn while_locked(held: Held, file: &File, offset: usize, work: impl FnOnce()) -> isize {
    let other = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let (later, wanted, enough) = Later::new();
    let page = other.region(PAGE).user(later).unwrap();
    let number = AtomicI32::new(0);
    std::thread::scope(|scope| {
        // So that they go on whatever becomes of this thread.
        let (enough, page, number) = (enough, &page, &number);
        let into = page.as_ptr().expose_provenance();
        let holder = scope.spawn(move || match held {
            Held::ToWrite => write_own(file, page, 0, PAGE, offset),
            // SAFETY: test: the kernel writes to the region's memory.
            Held::ToRead => unsafe {
                let into = std::ptr::with_exposed_provenance_mut(into);
                libc::pread(file.as_raw_fd(), into, PAGE, offset as i64)
            },
        });
        wanted.recv().unwrap();
        if held == Held::ToRead {
            let writer = scope.spawn(move || {
                number.store(own_number(), SeqCst);
                std::os::unix::fs::FileExt::write_all_at(file, &[0; PAGE], offset as u64).unwrap();
            });
            until("the writer waits, or need not", || {
                writer.is_finished() || is_at(number.load(SeqCst), libc::SYS_pwrite64) == Some(true)
            });
        }
        work();
        drop(enough);
        holder.join().unwrap()
    })
}

/// A file of so many numbered pages, none of which the kernel has in memory.
fn uncached(dir: &tempfile::TempDir, count: usize) -> (std::path::PathBuf, File) {
    let path = numbered(dir, count);
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    // SAFETY: test: advice on a file.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    (path, file)
}

/// A domain of one worker, if system calls on absent pages are served.
fn domain() -> Option<Domain> {
    let domain = Domain::with_frames(FRAMES * PAGE).workers(1).build().unwrap();
    if !domain.serves_system_calls() {
        crate::skip::skip("uffd", "faults inside system calls cannot be served");
        return None;
    }
    Some(domain)
}

/// For each file system and way to take a fault.
fn each(test: &str, held: Held, scenario: impl Fn(FileSystem, Trap)) {
    for kind in FILE_SYSTEMS {
        for (trap, name) in TRAPS {
            in_child(test, &format!("{name}-{}-{held:?}", kind.name()), || scenario(kind, trap)).well();
        }
    }
}

#[test]
fn pages_come_and_go_while_somebody_writes_to_their_file() {
    each(here!(), Held::ToWrite, |kind, trap| pages_come_and_go(kind, trap, Held::ToWrite));
}

#[test]
fn pages_come_and_go_while_somebody_waits_to_write_to_their_file() {
    each(here!(), Held::ToRead, |kind, trap| pages_come_and_go(kind, trap, Held::ToRead));
}

fn pages_come_and_go(kind: FileSystem, trap: Trap, held: Held) {
    let Some(dir) = on(kind) else { return };
    // The last is nobody's page of the region.
    let count = 4 * FRAMES;
    let (path, file) = uncached(&dir, count + 1);
    let Some(domain) = domain() else { return };
    let mut region: Region = domain.region(count * PAGE).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
    let done = while_locked(held, &file, count * PAGE, || {
        // More than there are frames: what changes goes to the file meanwhile.
        for round in 0..2 {
            for (index, page) in region.as_mut_slice::<[u64; 512]>().iter_mut().enumerate() {
                assert_eq!(page[0], index as u64 + 1);
                assert_eq!(page[1], if round == 0 { page[0] } else { 7 });
                page[1] = 7;
            }
        }
        println!("{:?}", domain.stats().counts);
    });
    assert_eq!(done, PAGE as isize);
    region.flush(0, region.len_bytes()).unwrap();
}

/// Takes all the room that there is on the disk of `dir`.
fn fill(dir: &std::path::Path) {
    let filler = File::create(dir.join("filler")).unwrap();
    let mut taken = 0;
    let mut step = 16 << 20;
    while step >= PAGE as i64 {
        // SAFETY: test: reserves room for a file.
        match unsafe { libc::posix_fallocate(filler.as_raw_fd(), taken, step) } {
            0 => taken += step,
            _ => step /= 2,
        }
    }
}

#[test]
fn a_save_that_finds_no_room_says_so_while_somebody_writes_to_the_file() {
    for kind in FILE_SYSTEMS {
        in_child(here!(), kind.name(), || {
            let Some(dir) = crate::own_file::on_its_own(kind) else { return };
            let path = dir.path().join("data");
            let file = File::create(&path).unwrap();
            file.set_len((FRAMES / 2 * PAGE) as u64).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &[1; PAGE], 0).unwrap();
            file.sync_all().unwrap();
            let Some(domain) = domain() else { return };
            let mut region = domain.region(0).file(&path, 0, FileAccess::ReadWrite).unwrap();
            fill(dir.path());
            // All are in core before: nothing but a save waits for the lock.
            region.pin(0, region.len_bytes()).unwrap();
            while_locked(Held::ToWrite, &file, 0, || {
                region.as_mut_slice::<u8>()[PAGE..].fill(9);
                let refused = region.flush(0, region.len_bytes()).unwrap_err();
                assert_eq!(refused.kind(), Kind::OutOfSpace, "{refused}");
            });
        })
        .well();
    }
}

/// A directory on a ramfs, which knows no read that does not wait: every page comes by way of a mapping. `None`: it takes root, and that is said.
pub fn on_ramfs() -> Option<tempfile::TempDir> {
    // The parent takes it away: here the ramfs is in it.
    let around = tempfile::tempdir().unwrap().keep();
    let is_there = crate::disk::mount(&around, 1 << 20).is_ok()
        && done("mount", &["-tramfs".as_ref(), "ramfs".as_ref(), around.as_os_str()]);
    if !is_there {
        crate::skip::skip("mount", "there is no ramfs: run as root");
    }
    is_there.then(|| tempfile::tempdir_in(around).unwrap())
}

#[test]
fn pages_come_and_go_where_no_read_can_be_told_not_to_wait() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let Some(dir) = on_ramfs() else { return };
            let path = numbered(&dir, 4 * FRAMES);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            for round in 0..2 {
                for (index, page) in region.as_mut_slice::<[u64; 512]>().iter_mut().enumerate() {
                    assert_eq!((page[0], page[511]), (index as u64 + 1, index as u64 + 1 + round));
                    page[511] += 1;
                }
            }
            region.flush(0, region.len_bytes()).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(bytes.len(), region.len_bytes());
            for (index, page) in bytes.chunks(PAGE).enumerate() {
                assert_eq!(page[PAGE - 8..], (index as u64 + 3).to_le_bytes());
            }
        })
        .well();
    }
}
