//! A disk that fills up under a store.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use selfpage::store::{BackingStore, Blok, FileStore, IoChoice, ReadBlok, WriteBlok};
use selfpage::{Domain, Region};
use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::pager::{Context, PagerError};

mod disk;
#[path = "../../../tests/skip.rs"]
mod skip;

const DISK_BLOKS: usize = 64;

#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

fn fill_the_disk(store: &FileStore) {
    let bloks: Vec<u32> = (0..200).filter(|index| index % 10 != 9).map(|index| 200 - index).collect();
    let pages: Vec<Page> = bloks.iter().map(|&blok| Page([blok as u8; PAGE_BYTES])).collect();
    let unset = Err(PagerError::NoStore);
    let with = |(&blok, page): (&u32, &'static Page)| WriteBlok { blok: Blok(blok), bytes: &page.0, outcome: unset };
    let pages: &'static [Page] = pages.leak();
    let mut writes: Vec<WriteBlok<'_>> = bloks.iter().zip(pages).map(with).collect();
    store.write(&mut writes);
    let (mut safe, mut full) = (0, 0);
    for write in &writes {
        match write.outcome {
            Ok(()) => {
                let mut page = Page([0; PAGE_BYTES]);
                store.read(Context::Trap, &mut [ReadBlok { blok: write.blok, bytes: &mut page.0 }]).unwrap();
                assert!(page.0 == *write.bytes, "{:?} is said to be safe", write.blok);
                safe += 1;
            }
            Err(error) => {
                assert_eq!(error, PagerError::Full);
                full += 1;
            }
        }
    }
    // One blok of the disk is the store's mark, and the file system takes some.
    assert!(safe > DISK_BLOKS / 2 && safe < DISK_BLOKS, "{safe} of {DISK_BLOKS}");
    assert_eq!(safe + full, bloks.len());
}

#[test]
fn what_does_not_fit_is_told_and_the_rest_is_safe() {
    let dir = tempfile::tempdir().unwrap();
    if let Err(error) = disk::mount(dir.path(), DISK_BLOKS * PAGE_BYTES) {
        return skip::skip("mount", &format!("{error}: run as root"));
    }
    for choice in [IoChoice::Auto, IoChoice::Pool] {
        let store = FileStore::unnamed_in(dir.path(), 1 << 20).unwrap().with_io(choice);
        fill_the_disk(&store);
        let error = FileStore::create(dir.path().join("another"), 1 << 20).expect_err("the disk is full").to_string();
        assert!(error.contains("free disk space"), "{error}");
    }
}

#[test]
fn a_file_that_is_used_again_has_room_for_as_much_and_takes_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_) = on_a_disk(dir.path(), 2 * REGION_BYTES) else { return };
    let path = dir.path().join("store");
    for run in 0..3 {
        let most_bytes = FileStore::most_bytes(&path).unwrap();
        assert!(most_bytes > 2 * REGION_BYTES as u64 - (1 << 20), "{most_bytes} bytes in run {run}");
        let store = FileStore::create(&path, most_bytes).unwrap();
        let used = used_bytes(dir.path());
        assert!(used < 1 << 20, "{used} bytes at the beginning of run {run}");
        claim_written(&store, (REGION_BYTES / PAGE_BYTES) as u32);
    }
}

#[test]
fn the_room_for_a_store_is_where_its_file_is_and_not_its_name() {
    let [dir, elsewhere] = ["/tmp", "/var/tmp"].map(|dir| tempfile::tempdir_in(dir).unwrap());
    let Some(_) = on_a_disk(dir.path(), 1 << 20) else { return };
    let (link, file) = (dir.path().join("link"), elsewhere.path().join("store"));
    std::os::unix::fs::symlink("between", &link).unwrap();
    std::os::unix::fs::symlink(&file, dir.path().join("between")).unwrap();
    // It is not there yet, and then it is.
    for _ in 0..2 {
        let most_bytes = FileStore::most_bytes(&link).unwrap();
        assert!(most_bytes > 1 << 20, "{most_bytes} bytes");
        FileStore::create(&link, 1 << 20).unwrap();
        assert!(file.is_file());
    }
    std::fs::remove_file(dir.path().join("between")).unwrap();
    std::os::unix::fs::symlink("link", dir.path().join("between")).unwrap();
    assert!(FileStore::most_bytes(&link).is_err());
}

#[test]
fn where_a_file_system_states_no_size_there_is_room_for_any_store() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_) = on_a_disk(dir.path(), 0) else { return };
    assert!(FileStore::most_bytes(dir.path().join("store")).unwrap() > 1 << 40);
}

const REGION_BYTES: usize = 8 << 20;
const WORDS: usize = PAGE_BYTES / 8;

/// A store that could be much larger than the disk that it is on, which has `disk_bytes`.
fn on_a_disk(dir: &Path, disk_bytes: usize) -> Option<FileStore> {
    if let Err(error) = disk::mount(dir, disk_bytes) {
        skip::skip("mount", &format!("{error}: run as root"));
        return None;
    }
    Some(FileStore::unnamed_in(dir, 8 << 30).unwrap())
}

fn small_domain() -> Domain {
    Domain::with_frames(1 << 20).build().unwrap()
}

fn fill_by_others(dir: &Path) {
    let mut others = File::create(dir.join("others")).unwrap();
    while others.write_all(&[1; PAGE_BYTES]).is_ok() {}
}

/// Changes every page, which was as the round before left it.
fn rewrite(region: &mut Region, round: u64) {
    for (page, words) in region.as_mut_slice::<u64>().chunks_mut(WORDS).enumerate() {
        let number = page as u64 * 1_000_000;
        assert!(round == 0 || words[1] == number + round - 1, "page {page} in round {round}");
        words[1] = number + round;
    }
}

fn used_bytes(dir: &Path) -> usize {
    let room = rustix::fs::statvfs(dir).unwrap();
    ((room.f_blocks - room.f_bfree) * room.f_frsize) as usize
}

#[test]
fn a_region_saved_over_and_over_takes_little_of_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let Some(store) = on_a_disk(dir.path(), 4 * REGION_BYTES) else { return };
    let domain = small_domain();
    let mut region = domain.region(REGION_BYTES).name("heap").stored(store).unwrap();
    (0..60).for_each(|round| rewrite(&mut region, round));
    let used = used_bytes(dir.path());
    assert!(used < 2 * REGION_BYTES + (8 << 20), "{used} bytes for {REGION_BYTES}");
}

/// What is free in the store's own file is enough, in the gaps between what is saved.
#[test]
fn a_disk_that_others_have_filled_stops_nobody_who_has_bloks() {
    let dir = tempfile::tempdir().unwrap();
    let Some(store) = on_a_disk(dir.path(), 4 * REGION_BYTES) else { return };
    let domain = small_domain();
    let mut region = domain.region(REGION_BYTES).name("heap").stored(store).unwrap();
    (0..2).for_each(|round| rewrite(&mut region, round));
    fill_by_others(dir.path());
    (2..40).for_each(|round| rewrite(&mut region, round));
}

/// Claims bloks that have space.
fn claim_written(store: &FileStore, want: u32) -> (Blok, u32) {
    let (first, len) = store.claim(want).unwrap();
    let page = Page([7; PAGE_BYTES]);
    for blok in first.0..first.0 + len {
        let mut writes = [WriteBlok { blok: Blok(blok), bytes: &page.0, outcome: Err(PagerError::NoStore) }];
        store.write(&mut writes);
        writes[0].outcome.unwrap();
    }
    (first, len)
}

#[test]
fn a_save_that_finds_no_space_goes_where_there_is_some() {
    let dir = tempfile::tempdir().unwrap();
    let Some(store) = on_a_disk(dir.path(), REGION_BYTES) else { return };
    let store = Arc::new(store);
    let (first, len) = claim_written(&store, 64);
    store.release(first, len);
    fill_by_others(dir.path());
    let domain = small_domain();
    let mut region = domain.region(64 * PAGE_BYTES).stored_in(store).unwrap();
    region.as_mut_slice::<u64>().fill(9);
    region.flush(0, region.len_bytes()).unwrap();
}

/// Of the bloks that have space few are free: each batch of a flush has to be saved where the one before was.
#[test]
fn few_free_bloks_are_enough_on_a_full_disk() {
    for spare in [1, 16, 100] {
        let dir = tempfile::tempdir().unwrap();
        let Some(store) = on_a_disk(dir.path(), 2 * REGION_BYTES) else { return };
        let store = Arc::new(store);
        let domain = Domain::with_frames(4 * REGION_BYTES).build().unwrap();
        let mut region = domain.region(REGION_BYTES).name("heap").stored_in(store.clone()).unwrap();
        let (first, len) = claim_written(&store, spare);
        assert_eq!(len, spare);
        region.as_mut_slice::<u64>().fill(9);
        region.flush(0, REGION_BYTES).unwrap();
        store.release(first, len);
        fill_by_others(dir.path());
        for round in 0..3 {
            rewrite(&mut region, round);
            let flushed = region.flush(0, REGION_BYTES);
            assert!(flushed.is_ok(), "{spare} free bloks, round {round}: {flushed:?}");
        }
    }
}
