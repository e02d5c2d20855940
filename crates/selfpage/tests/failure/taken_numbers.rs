//! What was opened before the program closed all of its descriptors is used after that, when its number is another file's.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use selfpage::store::{BackingStore, FileStore};
use selfpage::trace::Trace;
use selfpage::{DescriptorTable, Domain, FileAccess, Kind, Region};
use selfpage_core::linux::memory::Access;

use crate::descriptors::close_all;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, until};

const TABLES: [DescriptorTable; 2] = [DescriptorTable::Shared, DescriptorTable::Private];
const FRAMES: usize = 16;
const LETTER: &[u8] = b"Dear Sir or Madam";

fn file_store() -> Arc<FileStore> {
    Arc::new(FileStore::unnamed_in("/var/tmp", 1 << 20).unwrap())
}

fn domain(table: DescriptorTable) -> Domain {
    Domain::with_frames(FRAMES * PAGE).descriptor_table(table).build().unwrap()
}

/// A file of the program's own, at this number.
fn letter_at(number: i32) -> File {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, LETTER, 0).unwrap();
    // SAFETY: test: the number is free.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
    file
}

/// What is at the number is the program's as before.
fn is_untouched(number: i32, file: &File) {
    let mut bytes = vec![0; 4 * PAGE];
    // SAFETY: test: a buffer and its length.
    let len = unsafe { libc::pread(number, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(&bytes[..usize::try_from(len).expect("the program's file was closed")], LETTER);
    assert_eq!(file.metadata().unwrap().len(), LETTER.len() as u64);
}

fn refused(made: selfpage::Result<Region>, words: &[&str]) {
    let why = made.expect_err("a region over a file of the program's own");
    assert_eq!(why.kind(), Kind::Invalid, "{why}");
    words.iter().for_each(|word| assert!(why.to_string().contains(word), "{why}"));
}

/// What a domain is there for, after something was refused.
fn works(domain: &Domain) {
    let mut region = domain.region(4 * FRAMES * PAGE).stored_in(file_store()).unwrap();
    number_pages(&mut region);
    check_pages(&region, 0..4 * FRAMES);
}

#[test]
fn a_store_whose_number_is_the_programs_own_files() {
    for table in TABLES {
        in_child(here!(), &format!("{table:?}"), || {
            let (store, domain) = (file_store(), domain(table));
            let number = store.descriptors()[0];
            close_all();
            let own = letter_at(number);
            refused(domain.region(64 * PAGE).stored_in(store), &["store in /var/tmp", "closed", "make it after"]);
            is_untouched(number, &own);
            works(&domain);
            is_untouched(number, &own);
        })
        .well();
    }
}

/// Under a low limit on open files numbers are low: the next file that is opened has one that pager threads use for something else.
#[test]
fn numbers_that_pager_threads_use_already() {
    for table in TABLES {
        in_child(here!(), &format!("{table:?}"), || {
            let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
            // SAFETY: test: a limit of this process.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
            let domain = domain(table);
            let mut early = domain.region(4 * FRAMES * PAGE).stored_in(file_store()).unwrap();
            number_pages(&mut early);
            close_all();
            let regions: Vec<_> = (0..4)
                .map(|_| {
                    let mut late = domain.region(4 * FRAMES * PAGE).stored_in(file_store()).unwrap();
                    number_pages(&mut late);
                    late
                })
                .collect();
            regions.iter().chain([&early]).for_each(|region| check_pages(region, 0..4 * FRAMES));
        })
        .well();
    }
}

/// A trace's file is open in the pager threads' table alone, and the number of a region's file may be as low there.
#[test]
fn a_trace_under_a_low_limit_is_not_written_to_a_file_of_the_programs() {
    in_child(here!(), "trace", || {
        let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        // SAFETY: test: a limit of this process.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (trace, file) = (directory.path().join("trace"), directory.path().join("file"));
        const REGIONS: usize = 40;
        let whole = vec![7; REGIONS * 4 * FRAMES * PAGE];
        std::fs::write(&file, &whole).unwrap();
        close_all();
        let domain = Domain::with_frames(FRAMES * PAGE).trace(&trace, std::time::Duration::ZERO).build().unwrap();
        // What is opened from here on has the number 0 first, and so the lowest of the others in the end.
        // SAFETY: test: nobody reads from it.
        assert_eq!(unsafe { libc::close(0) }, 0);
        let len_bytes = whole.len() / REGIONS;
        let part = |index| domain.region(len_bytes).file(&file, (index * len_bytes) as u64, FileAccess::ReadWrite);
        let regions: Vec<_> = (0..REGIONS).map_while(|index| part(index).ok()).collect();
        assert!(!regions.is_empty());
        for region in &regions {
            assert!(region.as_slice::<u8>().iter().all(|byte| *byte == 7));
        }
        domain.flush_trace();
        assert!(std::fs::read(&file).unwrap() == whole, "the file has something else");
        assert!(Trace::read(&trace).is_ok_and(|trace| trace.records.len() > FRAMES), "the trace is whole");
    })
    .well();
}

/// A store that only its domain's pager threads have the file of.
#[test]
fn a_private_store_in_another_domain_and_after_its_regions() {
    in_child(here!(), "private", || {
        let [one, other] = [(); 2].map(|()| domain(DescriptorTable::Private));
        let store = file_store();
        let words = ["store in /var/tmp", "does not have its descriptor any more", "one for each domain"];
        let mut first = one.region(64 * PAGE).stored_in(store.clone()).unwrap();
        let mut second = one.region(64 * PAGE).stored_in(store.clone()).unwrap();
        refused(other.region(64 * PAGE).stored_in(store.clone()), &words);
        [&mut first, &mut second].into_iter().for_each(number_pages);
        [&first, &second].into_iter().for_each(|region| check_pages(region, 0..64));
        drop((first, second));
        refused(one.region(64 * PAGE).stored_in(store), &words);
        works(&one);
        works(&other);
    })
    .well();
}

/// The mapping of a part is made anew, where the program has closed what it is registered with.
#[test]
fn a_part_is_restored_after_all_was_closed() {
    for table in TABLES {
        in_child(here!(), &format!("{table:?}"), || {
            let domain = domain(table);
            let mut region = domain.region(4 * FRAMES * PAGE).stored_in(file_store()).unwrap();
            number_pages(&mut region);
            close_all();
            // SAFETY: test: nobody looks at the two pages meanwhile.
            unsafe {
                region.while_empty(0, 2 * PAGE, || ()).unwrap();
                region.restore(0, 2 * PAGE, Access::ReadWrite).unwrap();
            }
            let before = domain.stats().counts.faults_total;
            assert_eq!(region.as_slice::<u64>()[512], 0);
            until("the domain is asked for the page", || domain.stats().counts.faults_total > before);
            number_pages(&mut region);
            check_pages(&region, 0..4 * FRAMES);
            region.evict(0, PAGE).unwrap();
            check_pages(&region, 0..4 * FRAMES);
        })
        .well();
    }
}
