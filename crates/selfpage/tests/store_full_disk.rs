//! A disk that fills up under a store.

use std::ffi::CString;
use std::io;
use std::ptr::null;

use selfpage::store::{BackingStore, Blok, FileStore, IoChoice, ReadBlok, WriteBlok};
use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::pager::{Context, PagerError};

const DISK_BLOKS: usize = 64;

#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

/// Mounts a small disk where only this thread, and those it starts, see it: nothing is left of it when they end.
fn mount_small_disk(dir: &std::path::Path) -> io::Result<()> {
    let (dir, options) =
        (CString::new(dir.to_str().unwrap())?, CString::new(format!("size={}", DISK_BLOKS * PAGE_BYTES))?);
    // SAFETY: mount-own-namespace: strings that end, and a namespace that is this thread's own.
    let done = unsafe {
        libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) == 0
            && libc::mount(null(), c"/".as_ptr(), null(), libc::MS_REC | libc::MS_PRIVATE, null()) == 0
            && libc::mount(c"tmpfs".as_ptr(), dir.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast()) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

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
    if let Err(error) = mount_small_disk(dir.path()) {
        let wanted = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
        assert!(!wanted.split(',').any(|name| name == "mount"), "mount is required: {error}");
        return println!("SKIP(mount: {error})");
    }
    for choice in [IoChoice::Auto, IoChoice::Pool] {
        let store = FileStore::unnamed_in(dir.path(), 1 << 20).unwrap().with_io(choice);
        fill_the_disk(&store);
        let error =
            FileStore::create(&dir.path().join("another"), 1 << 20).err().expect("the disk is full").to_string();
        assert!(error.contains("free disk space"), "{error}");
    }
}
