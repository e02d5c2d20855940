//! The program closes every descriptor, ours among them, and opens files at our numbers.

use std::os::fd::{AsRawFd, OwnedFd};

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::FileStore;
use selfpage::{DescriptorTable, Domain, FileAccess, Region, Trap};

use crate::child::forked;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};

const FRAMES: usize = 64;

pub fn close_all() {
    // SAFETY: test: whoever uses a descriptor of this process must bear it.
    assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0);
}

/// Files full of the wrong contents at every number that may have been ours.
fn take_the_numbers() -> Vec<OwnedFd> {
    let wrong = tempfile::tempfile_in("/var/tmp").unwrap();
    let bytes = vec![0xee; 4 * FRAMES * PAGE];
    std::os::unix::fs::FileExt::write_all_at(&wrong, &bytes, 0).unwrap();
    std::iter::from_fn(|| wrong.try_clone().ok()).take(900).map(OwnedFd::from).collect()
}

struct Case {
    name: &'static str,
    trap: Trap,
    table: DescriptorTable,
}

const CASES: [Case; 3] = [
    Case { name: "worker", trap: Trap::Worker, table: DescriptorTable::Shared },
    Case { name: "private", trap: Trap::Worker, table: DescriptorTable::Private },
    Case { name: "upcall", trap: Trap::Upcall, table: DescriptorTable::Shared },
];

/// Everything that a program does with a region.
fn use_it(region: &mut Region) {
    let all = pages(region);
    check_pages(region, 0..all);
    check_pages(region, (0..all).rev());
    region.pin(0, 8 * PAGE).unwrap();
    check_pages(region, 0..8);
    region.unpin(0, 8 * PAGE).unwrap();
    region.evict(0, 8 * PAGE).unwrap();
    region.pin(0, 8 * PAGE).unwrap();
    check_pages(region, 0..8);
    region.unpin(0, 8 * PAGE).unwrap();
    region.prefetch(0, region.len_bytes()).unwrap();
    number_pages(region);
    region.flush(0, region.len_bytes()).unwrap();
    check_pages(region, 0..all);
    region.discard(0, PAGE).unwrap();
}

fn closed_then(case: &Case, then: fn() -> Vec<OwnedFd>) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("data");
    std::fs::write(&path, vec![0; 4 * FRAMES * PAGE]).unwrap();
    let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(case.table).build().unwrap();
    let store = FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
    let mut stored = domain.region(4 * FRAMES * PAGE).trap(case.trap).stored(store).unwrap();
    let mut file = domain.region(0).trap(case.trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
    number_pages(&mut stored);
    number_pages(&mut file);
    close_all();
    let theirs = then();
    use_it(&mut stored);
    use_it(&mut file);
    // And a region made afterwards.
    let store = FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
    let mut late = domain.region(4 * FRAMES * PAGE).trap(case.trap).stored(store).unwrap();
    number_pages(&mut late);
    check_pages(&late, 0..pages(&late));
    println!("{:?}", domain.stats());
    drop((stored, file, late));
    drop(domain);
    for file in &theirs {
        // SAFETY: test: asks for the flags of a descriptor.
        assert!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) } >= 0, "{file:?} of the program's was closed");
    }
    let bytes = std::fs::read(&path).unwrap();
    let last = 4 * FRAMES as u64;
    assert_eq!(bytes[bytes.len() - PAGE..][..8], last.to_le_bytes());
    for file in theirs.iter().take(1) {
        let mut wrong = vec![0; 4 * FRAMES * PAGE];
        let file = std::fs::File::from(file.try_clone().unwrap());
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut wrong, 0).unwrap();
        assert!(wrong.iter().all(|byte| *byte == 0xee), "the program's file was written to");
    }
}

#[test]
fn all_closed() {
    for case in &CASES {
        in_child(here!(), case.name, || closed_then(case, Vec::new)).well();
    }
}

#[test]
fn all_closed_and_their_numbers_taken() {
    for case in &CASES {
        in_child(here!(), case.name, || closed_then(case, take_the_numbers)).well();
    }
}

#[test]
fn snapshots_whose_numbers_were_taken() {
    for (name, then) in [("closed", Vec::new as fn() -> Vec<OwnedFd>), ("taken", take_the_numbers)] {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = dir.path().join("one.snap");
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(FRAMES / 2 * PAGE).zero().unwrap();
            number_pages(&mut region);
            let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
            snapshots.take().unwrap();
            close_all();
            let theirs = then();
            region.as_mut_slice::<u64>()[0] = 77;
            // The domain's own descriptors are gone from this thread, too: pager threads have them, and the place is taken anew.
            snapshots.take().unwrap();
            drop(snapshots);
            for file in &theirs {
                // SAFETY: test: asks for the flags of a descriptor.
                let open = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) } >= 0;
                assert!(open, "{file:?} of the program's was closed");
            }
            drop(theirs);
            let mut page = [0; PAGE];
            Snapshot::open(&path).unwrap().read_page(0, 0, &mut page).unwrap();
            assert_eq!(page[..8], 77u64.to_le_bytes());
        })
        .well();
    }
}

#[test]
fn domains_and_regions_leave_none_behind() {
    for case in &CASES {
        in_child(here!(), case.name, || {
            let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
            file.as_file().set_len(16 * PAGE as u64).unwrap();
            let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
            let before = open();
            for _ in 0..20 {
                let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(case.table).build().unwrap();
                let with_all = || -> usize {
                    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
                    tasks
                        .map(|task| std::fs::read_dir(task.path().join("fd")).map_or(0, |fds| fds.count()))
                        .max()
                        .unwrap()
                };
                let mut counts = Vec::new();
                for _ in 0..10 {
                    let store = FileStore::unnamed_in("/var/tmp", 1 << 20).unwrap();
                    let one = domain.region(16 * PAGE).trap(case.trap).stored(store).unwrap();
                    let two = domain.region(0).trap(case.trap).file(file.path(), 0, FileAccess::ReadWrite).unwrap();
                    drop((one, two));
                    counts.push(with_all());
                }
                assert!(counts[9] <= counts[1] + 3, "descriptors of regions that are gone: {counts:?}");
            }
            assert!(open() <= before + 2, "{before} descriptors before, {} after", open());
        })
        .well();
    }
}

/// A region that shares pages with its clone, and one whose snapshots are taken.
#[test]
fn all_closed_under_clones_and_snapshots() {
    for case in CASES.iter().filter(|case| case.table == DescriptorTable::Shared) {
        in_child(here!(), case.name, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let domain = Domain::with_frames(8 * FRAMES * PAGE).build().unwrap();
            let store = || FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
            let mut source = domain.region(FRAMES * PAGE).trap(case.trap).stored(store()).unwrap();
            number_pages(&mut source);
            source.evict(0, 8 * PAGE).unwrap();
            let clone = source.cow_clone(store()).unwrap();
            close_all();
            // One page that is in core and one that is in the store, then all by the first write to each.
            source.discard(0, PAGE).unwrap();
            source.discard(30 * PAGE, PAGE).unwrap();
            assert_eq!((source.as_slice::<u64>()[0], source.as_slice::<u64>()[30 * PAGE / 8]), (0, 0));
            number_pages(&mut source);
            check_pages(&clone, 0..FRAMES);
            drop(clone);
            let clone = source.cow_clone(store()).unwrap();
            source.as_mut_slice::<u64>().fill(7);
            check_pages(&clone, 0..FRAMES);
            let mut snapshots = Snapshots::of(&[&clone, &source], dir.path().join("both.snap")).unwrap();
            snapshots.take().unwrap();
            source.as_mut_slice::<u64>().fill(8);
            snapshots.take().unwrap();
            check_pages(&clone, 0..FRAMES);
        })
        .well();
    }
}

/// What a forked child has of file and restored regions, whose descriptors the program does not have.
#[test]
fn files_of_a_child_whose_parent_has_no_descriptor() {
    for case in &CASES {
        in_child(here!(), case.name, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let (path, snap) = (dir.path().join("data"), dir.path().join("one.snap"));
            let numbers: Vec<u8> = (1..=4 * FRAMES as u64)
                .flat_map(|number| {
                    let mut page = [0u64; 512];
                    (page[0], page[511]) = (number, !(number - 1));
                    page.map(u64::to_ne_bytes).concat()
                })
                .collect();
            std::fs::write(&path, numbers).unwrap();
            let source = Domain::with_frames(8 * FRAMES * PAGE).build().unwrap();
            let mut zero = source.region(4 * FRAMES * PAGE).zero().unwrap();
            number_pages(&mut zero);
            Snapshots::of(&[&zero], &snap).unwrap().take().unwrap();
            drop((zero, source));
            let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(case.table).build().unwrap();
            let store = FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
            let snapshot = Snapshot::open(&snap).unwrap();
            let restored = domain.region(0).trap(case.trap).restored(&snapshot, 0, store).unwrap();
            let file = domain.region(0).trap(case.trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            drop(snapshot);
            close_all();
            for _ in 0..2 {
                let theirs = take_the_numbers();
                let look = || [&file, &restored].iter().for_each(|region| check_pages(region, 0..4 * FRAMES));
                forked(look);
                look();
                drop(theirs);
            }
        })
        .well();
    }
}
