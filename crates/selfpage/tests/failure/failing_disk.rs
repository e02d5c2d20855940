//! Disks that fail under the file of a region: what was not written is told, and never read as if it had been.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use selfpage::store::{FileStore, MemoryStore};
use selfpage::{Domain, FileAccess, Kind, Region, Trap};

use crate::formatted::{Kind as FileSystem, done, mount};
use crate::own_file::{FRAMES, TRAPS};
use crate::scenario::{PAGE, here, in_child, number_pages, until};
use crate::skip::skip;
use crate::tried;

/// The last page of the file, of which it has a hundred bytes: no write past the page cache could write them alone.
const LAST: usize = 8;

/// A disk, and on it a file that has blocks, and nothing in them: of the memory behind the disk they have none yet.
fn on_disk(dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let disk = mount(FileSystem::Ext4, dir, 8 << 20)?;
    let path = disk.join("data");
    let file = File::create(&path).unwrap();
    // SAFETY: test: reserves room for a file.
    assert_eq!(unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, (LAST * PAGE + 100) as i64) }, 0);
    file.sync_all().unwrap();
    Some((disk, path))
}

/// Somebody else takes all the room that the memory behind the disk has.
fn takes_no_more(dir: &Path) {
    let mut filler = File::create(dir.join("memory/filler")).unwrap();
    while filler.write_all(&[1; 1 << 12]).is_ok() {}
}

fn over(path: &Path, trap: Trap) -> (Domain, Region) {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let region = domain.region(0).trap(trap).file(path, 0, FileAccess::ReadWrite).unwrap();
    (domain, region)
}

#[test]
fn what_a_disk_did_not_take_is_told_each_time() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir().unwrap();
        let Some((disk, path)) = on_disk(dir.path()) else { return };
        let (domain, mut region) = over(&path, Trap::Worker);
        takes_no_more(dir.path());
        region.as_mut_slice::<u8>()[LAST * PAGE + 99] = 8;
        let refused = region.flush(0, region.len_bytes()).map_err(|error| error.to_string());
        let again = region.flush(0, region.len_bytes()).map_err(|error| error.to_string());
        drop((region, domain));
        assert!(done("umount", &[disk.as_os_str()]));
        assert!(refused.is_err(), "the disk took it");
        assert!(again.is_err(), "what was not written is said to be safe: first {refused:?}");
    })
    .well();
}

/// Has the page cache drop what it has of a file, and says what the disk has at `offset`.
fn on_disk_at(file: &File, offset: usize) -> u8 {
    // SAFETY: test: numbers.
    assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset as u64).unwrap();
    byte[0]
}

/// The kernel takes what a disk has refused for written, and may drop it before anybody flushes.
#[test]
fn what_a_disk_did_not_take_is_not_read_as_it_was_before() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let dir = tempfile::tempdir().unwrap();
            let Some((disk, path)) = on_disk(dir.path()) else { return };
            let other = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            let (domain, mut region) = over(&path, trap);
            // Its frame too is another page's then: out of that it would come back without a read.
            let mut others = domain.region(4 * FRAMES * PAGE).stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
            let mut gone = |region: &Region, page: usize| {
                until("the page has gone", || {
                    region.evict(page * PAGE, 1).unwrap();
                    number_pages(&mut others);
                    region.residency()[page].load(Relaxed) == 0
                });
            };
            // Whoever writes to the file may: that is no damage.
            assert_eq!(region.as_slice::<u8>()[0], 0);
            gone(&region, 0);
            other.write_all_at(&[5], 0).unwrap();
            other.sync_all().unwrap();
            assert_eq!(region.as_slice::<u8>()[0], 5);
            takes_no_more(dir.path());
            let at = LAST * PAGE + 99;
            region.as_mut_slice::<u8>()[at] = 8;
            gone(&region, LAST);
            other.sync_all().unwrap_err();
            until("the page cache has dropped it", || on_disk_at(&other, at) == 0);
            let word = region.as_ptr().wrapping_add(LAST * PAGE + 96).cast::<u64>();
            for turn in ["first", "again"] {
                assert_eq!(tried::read(word), Err(libc::SIGBUS), "{turn}: what was written is gone");
            }
            let error = region.pin(LAST * PAGE, 1).unwrap_err();
            assert!(error.kind() == Kind::Lost && error.to_string().contains("other bytes"), "{error}");
            // The others are as they were.
            assert_eq!(region.as_slice::<u8>()[0], 5);
            region.flush(0, region.len_bytes()).unwrap_err();
            drop((region, others, domain, other));
            assert!(done("umount", &[disk.as_os_str()]));
        })
        .well();
    }
}

/// A quota that is used up is no full disk: this one is nearly empty.
#[test]
fn a_quota_is_not_said_to_be_a_lack_of_space() {
    for over in ["file", "store"] {
        in_child(here!(), over, || {
            let dir = tempfile::tempdir().unwrap();
            let Some(disk) = mount(FileSystem::Btrfs, dir.path(), 128 << 20) else { return };
            let limits: [&[&str]; 2] = [&["quota", "enable"], &["qgroup", "limit", "1M"]];
            let is_set = |words: &&[&str]| {
                let words: Vec<&OsStr> = words.iter().map(OsStr::new).chain([disk.as_os_str()]).collect();
                done("btrfs", &words)
            };
            if !limits.iter().all(is_set) {
                return skip("btrfs", "there is no quota: the kernel has none for btrfs, or install btrfs-progs");
            }
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            // Of two pages together btrfs itself says sometimes that the disk has no room for them.
            let len_bytes = PAGE;
            let mut region = match over {
                "file" => {
                    let path = disk.join("data");
                    File::create(&path).unwrap().set_len(len_bytes as u64).unwrap();
                    domain.region(0).file(&path, 0, FileAccess::ReadWrite).unwrap()
                }
                _ => domain.region(len_bytes).stored(FileStore::unnamed_in(&disk, 8 << 20).unwrap()).unwrap(),
            };
            let mut others = File::create(disk.join("others")).unwrap();
            while others.write_all(&[1; PAGE]).is_ok() {}
            region.as_mut_slice::<u64>().fill(9);
            let said = region.flush(0, len_bytes).unwrap_err().to_string();
            assert!(said.contains("quota") && !said.contains("No space") && !said.contains("full"), "{said}");
            assert!(region.as_slice::<u64>().iter().all(|word| *word == 9));
        })
        .well();
    }
}
