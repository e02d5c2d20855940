//! Whose file stands at a number that is lent, in a forked child: what runs there first opens and closes files of its own.

use std::fs::{self, File};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use selfpage::pager::UserPager;
use selfpage::store::{BackingStore, Blok, ReadBlok, StoreError, WriteBlok};
use selfpage::{DescriptorTable, Region};
use selfpage_core::addr::PageBytes;
use selfpage_core::pager::{Context, PagerError};

use crate::child::{self, forked};
use crate::descriptors::close_all;
use crate::lent::{Anew, ByFile, CASES, FRAMES, PAGES, domain, numbered_file, numbered_page, write};
use crate::scenario::{PAGE, check_pages, here, in_child};

/// What a region's file is, page by page: every page comes anew from it.
fn has_words(region: &Region, word: u64) {
    region.evict(0, region.len_bytes()).unwrap();
    for (index, page) in region.as_slice::<[u64; 512]>().iter().enumerate() {
        assert_eq!(page[0], word, "page {index}");
    }
}

/// What `forked` opens has the lowest number that is free, and the program has closed those of others' files.
#[test]
fn a_pager_that_opens_its_own_beside_a_file_that_was_closed() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            close_all();
            let domain = domain(table);
            let lend = || domain.region(PAGES * PAGE).trap(trap).user(ByFile(numbered_file())).unwrap();
            let (mut first, file) = (lend(), numbered_file());
            let mut anew = domain.region(PAGES * PAGE).trap(trap).user(Anew(Mutex::new(file.clone()))).unwrap();
            let mut last = lend();
            write(&mut first, 100);
            write(&mut last, 102);
            close_all();
            let mut look = |round| {
                check_pages(&anew, 0..PAGES);
                for (region, word) in [(&mut first, 100), (&mut last, 102)] {
                    has_words(region, word);
                    write(region, word + 100);
                }
                write(&mut anew, round);
                has_words(&anew, round);
                for (region, word) in [(&mut first, 100), (&mut last, 102)] {
                    has_words(region, word + 100);
                    write(region, word);
                }
            };
            forked(|| {
                look(7);
                forked(|| look(8));
            });
            look(9);
            std::mem::forget((first, anew, last, file));
        })
        .well();
    }
}

/// A store over a file. Its bloks are never free again.
struct OwnStore {
    number: AtomicI32,
    inode: AtomicU64,
    next: AtomicU32,
    /// What its number is in a child, where it is another one.
    in_child: fn() -> Option<RawFd>,
}

impl OwnStore {
    fn new(in_child: fn() -> Option<RawFd>) -> OwnStore {
        let store = OwnStore { number: (-1).into(), inode: 0.into(), next: 1.into(), in_child };
        store.go_on_as(OwnStore::open());
        store
    }

    fn open() -> RawFd {
        tempfile::tempfile_in("/var/tmp").unwrap().into_raw_fd()
    }

    fn go_on_as(&self, number: RawFd) {
        self.number.store(number, Ordering::SeqCst);
        if number >= 0 {
            self.inode.store(self.file().metadata().unwrap().ino(), Ordering::SeqCst);
        }
    }

    fn file(&self) -> ManuallyDrop<File> {
        // SAFETY: test: it is not dropped, and so not closed.
        ManuallyDrop::new(unsafe { File::from_raw_fd(self.number.load(Ordering::SeqCst)) })
    }
}

impl BackingStore for OwnStore {
    fn claim(&self, _: u32) -> Result<(Blok, u32), PagerError> {
        Ok((Blok(self.next.fetch_add(1, Ordering::SeqCst)), 1))
    }

    fn release(&self, _: Blok, _: u32) {}

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn read(&self, _: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        let read =
            |blok: &mut ReadBlok<'_>| self.file().read_exact_at(blok.bytes, u64::from(blok.blok.0) * PAGE as u64);
        bloks.iter_mut().try_for_each(read).map_err(|_| PagerError::Io(libc::EIO))
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        for blok in bloks {
            let written = self.file().write_all_at(blok.bytes, u64::from(blok.blok.0) * PAGE as u64);
            blok.outcome = written.map_err(|_| PagerError::Io(libc::EIO));
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.number.load(Ordering::SeqCst)]
    }

    fn check_descriptor(&self, _: RawFd, found: BorrowedFd<'_>) -> Result<(), StoreError> {
        let inode = File::from(found.try_clone_to_owned().unwrap()).metadata().unwrap().ino();
        assert_eq!(inode, self.inode.load(Ordering::SeqCst));
        Ok(())
    }

    fn after_fork_in_child(&self) {
        (self.in_child)().into_iter().for_each(|number| self.go_on_as(number));
    }
}

#[test]
fn a_store_that_opens_its_own_beside_a_file_that_was_closed() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            close_all();
            let domain = domain(table);
            let mut lent = domain.region(PAGES * PAGE).trap(trap).user(ByFile(numbered_file())).unwrap();
            let mut stored = domain
                .region(4 * FRAMES * PAGE)
                .trap(trap)
                .stored_in(Arc::new(OwnStore::new(|| Some(OwnStore::open()))))
                .unwrap();
            write(&mut lent, 100);
            close_all();
            forked(|| {
                write(&mut stored, 5);
                has_words(&lent, 100);
                has_words(&stored, 5);
            });
            has_words(&lent, 100);
            std::mem::forget((lent, stored));
        })
        .well();
    }
}

/// The number whose file a handler of forks replaces.
static REPLACED: AtomicI32 = AtomicI32::new(-1);

extern "C" fn replace() {
    let file = numbered_file();
    // SAFETY: test: what the program has there is what is to go.
    unsafe { libc::dup2(file.as_raw_fd(), REPLACED.load(Ordering::SeqCst)) };
}

/// A handler that was there before the first domain runs before the child has its regions.
#[test]
fn a_handler_of_forks_that_has_another_file_at_the_number() {
    in_child(here!(), "", || {
        // SAFETY: test: a handler of forks.
        unsafe { libc::pthread_atfork(None, None, Some(replace)) };
        let (file, domain) = (numbered_file(), domain(DescriptorTable::Shared));
        let region = domain.region(PAGES * PAGE).name("mine").user(ByFile(file.clone())).unwrap();
        REPLACED.store(file.as_raw_fd(), Ordering::SeqCst);
        let ended = child::in_child(|| {
            check_pages(&region, 0..PAGES);
            true
        });
        assert_eq!(ended & 0x7f, libc::SIGABRT, "{ended:#x}");
        std::process::abort();
    })
    .by(libc::SIGABRT, &["a forked child cannot go on", "file of region mine", "another file has the number"]);
}

/// One for two regions, which comes by a file of its own once in each process, at the number of the old one.
struct Once(Anew, AtomicU32);

impl UserPager for Once {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> std::io::Result<()> {
        self.0.fill(index, bytes)
    }

    fn save(&self, index: u64, bytes: &PageBytes) -> std::io::Result<()> {
        self.0.save(index, bytes)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.0.descriptors()
    }

    fn forked(&self) {
        if self.1.swap(std::process::id(), Ordering::SeqCst) != std::process::id() {
            let number = self.0.descriptors()[0];
            // SAFETY: test: the number is the pager's, whose file goes on being owned by it.
            assert_eq!(unsafe { libc::dup2(numbered_file().as_raw_fd(), number) }, number);
        }
    }
}

#[test]
fn a_pager_of_two_regions_that_comes_by_its_own_at_the_old_number() {
    for (name, trap, table) in CASES {
        for closed in [false, true] {
            in_child(here!(), &format!("{name}-{closed}"), || {
                close_all();
                let domain = domain(table);
                let shared = Arc::new(Once(Anew(Mutex::new(numbered_file())), std::process::id().into()));
                let lend = || domain.region(PAGES * PAGE).trap(trap).user(shared.clone()).unwrap();
                let mut regions = [lend(), lend()];
                write(&mut regions[0], 100);
                if closed {
                    close_all();
                }
                forked(|| {
                    regions[1].evict(0, PAGES * PAGE).unwrap();
                    check_pages(&regions[1], 0..PAGES);
                    write(&mut regions[1], 5);
                    has_words(&regions[0], 5);
                });
                regions.iter().for_each(|region| has_words(region, 100));
                std::mem::forget((regions, shared));
            })
            .well();
        }
    }
}

/// Whether a pager thread has something at the number.
fn pagers_have(number: RawFd) -> bool {
    let mut tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    tasks.any(|task| {
        fs::read_to_string(task.join("comm")).unwrap().starts_with("selfpage-pager")
            && fs::read_link(task.join("fd").join(number.to_string())).is_ok()
    })
}

/// Its file is another one in a child, at a number far from the old one's.
struct Elsewhere(AtomicI32);

impl UserPager for Elsewhere {
    fn fill(&self, _: u64, _: &mut PageBytes) -> std::io::Result<()> {
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> std::io::Result<()> {
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.0.load(Ordering::SeqCst)]
    }

    fn forked(&self) {
        // SAFETY: test: a number that is free.
        let number = unsafe { libc::fcntl(numbered_file().as_raw_fd(), libc::F_DUPFD_CLOEXEC, 200) };
        self.0.store(number, Ordering::SeqCst);
    }
}

#[test]
fn a_file_that_is_named_no_more_is_open_no_more() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            close_all();
            let (file, domain) = (numbered_file(), domain(table));
            let number = file.as_raw_fd();
            let own = domain.region(PAGE).trap(trap).user(Elsewhere(number.into())).unwrap();
            drop(file);
            assert!(pagers_have(number));
            forked(|| {
                assert!(!pagers_have(number));
                let next = numbered_file();
                assert_eq!(next.as_raw_fd(), number);
                let region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(next)).unwrap();
                check_pages(&region, 0..PAGES);
            });
            drop(own);
        })
        .well();
    }
}

/// Its file is opened anew, at the old one's number, in the next fill after somebody says so.
struct Reopens {
    path: PathBuf,
    number: RawFd,
    reopen: AtomicBool,
}

impl UserPager for Reopens {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> std::io::Result<()> {
        if self.reopen.swap(false, Ordering::SeqCst) {
            put_anew(&self.path, self.number);
        }
        // SAFETY: test: it is not dropped, and so not closed.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(self.number) });
        file.read_exact_at(bytes, index * PAGE as u64)
    }

    fn save(&self, _: u64, _: &PageBytes) -> std::io::Result<()> {
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.number]
    }
}

/// Has the file of this name at the number, in the calling thread's table.
fn put_anew(path: &Path, number: RawFd) {
    let anew = File::open(path).unwrap();
    // SAFETY: test: the number is the pager's, whose file goes.
    assert_eq!(unsafe { libc::dup3(anew.as_raw_fd(), number, libc::O_CLOEXEC) }, number);
}

/// A file full of what [`numbered_page`] says.
fn write_numbered(path: &Path) {
    fs::write(path, (0..PAGES as u64).flat_map(numbered_page).collect::<Vec<u8>>()).unwrap();
}

#[test]
fn a_file_that_was_replaced_in_both_tables() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let [path, new] = ["data", "new"].map(|name| dir.path().join(name));
            write_numbered(&path);
            let number = File::open(&path).unwrap().into_raw_fd();
            let pager = Arc::new(Reopens { path: path.clone(), number, reopen: false.into() });
            let domain = domain(table);
            let region = domain.region(PAGES * PAGE).trap(trap).user(pager.clone()).unwrap();
            check_pages(&region, 0..PAGES);
            write_numbered(&new);
            fs::rename(new, &path).unwrap();
            put_anew(&path, number);
            pager.reopen.store(true, Ordering::SeqCst);
            region.evict(0, PAGES * PAGE).unwrap();
            check_pages(&region, 0..PAGES);
            assert!(!pager.reopen.load(Ordering::SeqCst));
            forked(|| {
                check_pages(&region, 0..PAGES);
                forked(|| check_pages(&region, 0..PAGES));
            });
        })
        .well();
    }
}

#[test]
fn a_store_without_a_file_in_a_child() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            let (file, domain) = (numbered_file(), domain(table));
            let store = Arc::new(OwnStore::new(|| Some(-1)));
            let stored = domain.region(4 * PAGE).trap(trap).stored_in(store.clone()).unwrap();
            let other = domain.region(PAGES * PAGE).trap(trap).user(ByFile(file)).unwrap();
            forked(move || {
                check_pages(&other, 0..PAGES);
                let refused = domain.region(4 * PAGE).trap(trap).stored_in(store);
                assert!(refused.unwrap_err().to_string().contains("descriptor -1"));
                drop(stored);
            });
        })
        .well();
    }
}

#[test]
fn a_pager_that_opens_its_own_beside_a_store_whose_file_was_closed() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            close_all();
            let domain = domain(table);
            let store = Arc::new(OwnStore::new(|| None));
            let number = store.descriptors()[0];
            let pager = Arc::new(Anew(Mutex::new(numbered_file())));
            let stored = domain.region(4 * PAGE).trap(trap).stored_in(store).unwrap();
            let anew = domain.region(PAGES * PAGE).trap(trap).user(pager.clone()).unwrap();
            close_all();
            forked(|| {
                assert_ne!(pager.descriptors()[0], number, "whose the store's number is");
                assert!(!pagers_have(number));
                check_pages(&anew, 0..PAGES);
            });
            std::mem::forget((stored, anew, pager));
        })
        .well();
    }
}

/// Its numbers are another domain's.
#[test]
fn a_domain_beside_one_whose_file_was_closed_at_a_streams_number() {
    in_child(here!(), "", || {
        // SAFETY: test: nobody reads from it.
        assert_eq!(unsafe { libc::close(0) }, 0);
        let [with, without] = [(); 2].map(|()| domain(DescriptorTable::Shared));
        let file = numbered_file();
        assert_eq!(file.as_raw_fd(), 0);
        let lent = with.region(PAGES * PAGE).user(ByFile(file.clone())).unwrap();
        // SAFETY: test: what the pager owns it does not close.
        assert_eq!(unsafe { libc::close(0) }, 0);
        forked(|| {
            check_pages(&lent, 0..PAGES);
            let next = numbered_file();
            assert_eq!(next.as_raw_fd(), 0);
            check_pages(&without.region(PAGES * PAGE).user(ByFile(next)).unwrap(), 0..PAGES);
        });
        std::mem::forget((lent, file));
    })
    .well();
}
