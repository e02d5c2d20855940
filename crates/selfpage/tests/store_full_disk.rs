//! A disk that fills up under a store.

use selfpage::store::{BackingStore, Blok, FileStore, IoChoice, ReadBlok, WriteBlok};
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
