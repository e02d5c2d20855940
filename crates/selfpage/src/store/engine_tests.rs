use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;
use selfpage_core::addr::{PAGE_BYTES, PageBytes};

use super::*;
use crate::store::Blok;

fn page(seed: u32) -> PageBytes {
    let mut bytes = [0; PAGE_BYTES];
    for (at, chunk) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *chunk = seed.wrapping_mul(2_654_435_761).wrapping_add(at as u32).to_ne_bytes();
    }
    bytes
}

fn write(engines: &IoEngines, file: &File, bloks: &[u32]) -> Vec<Result<(), PagerError>> {
    let pages: Vec<PageBytes> = bloks.iter().map(|&blok| page(blok)).collect();
    let unset = Err(PagerError::NoStore);
    let with = |(&blok, bytes)| WriteBlok { blok: Blok(blok), bytes, outcome: unset };
    let mut writes: Vec<WriteBlok<'_>> = bloks.iter().zip(&pages).map(with).collect();
    engines.write(file.as_raw_fd(), &mut writes);
    writes.iter().map(|write| write.outcome).collect()
}

fn read(
    bloks: &[u32],
    how: impl Fn(&mut [ReadBlok<'_>]) -> Result<(), PagerError>,
) -> Result<Vec<PageBytes>, PagerError> {
    let mut pages = vec![[0; PAGE_BYTES]; bloks.len()];
    let mut reads: Vec<ReadBlok<'_>> =
        bloks.iter().zip(&mut pages).map(|(&blok, bytes)| ReadBlok { blok: Blok(blok), bytes }).collect();
    how(&mut reads)?;
    Ok(pages)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_way_moves_the_same_pages(picked in prop::collection::btree_set(0..900_u32, 1..500), turn in 0..500_usize) {
        let mut bloks: Vec<u32> = picked.into_iter().collect();
        let turn = turn % bloks.len();
        bloks.rotate_left(turn);
        let (auto, pool) = (IoEngines::new(IoChoice::Auto), IoEngines::new(IoChoice::Pool));
        for (writer, reader) in [(&auto, &pool), (&pool, &auto)] {
            let file = tempfile::tempfile().unwrap();
            prop_assert!(write(writer, &file, &bloks).iter().all(Result::is_ok));
            for (&blok, _) in bloks.iter().zip(0..20) {
                let mut bytes = [0; PAGE_BYTES];
                file.read_exact_at(&mut bytes, blok as u64 * PAGE_BYTES as u64).unwrap();
                prop_assert!(bytes == page(blok), "blok {} is not where it belongs", blok);
            }
            let ways = [
                read(&bloks, |reads| reader.read(file.as_raw_fd(), reads)),
                read(&bloks, |reads| writer.read(file.as_raw_fd(), reads)),
                read(&bloks, |reads| IoEngines::read_in_trap(file.as_raw_fd(), reads)),
            ];
            for pages in ways {
                let pages = pages.unwrap();
                prop_assert!(bloks.iter().zip(&pages).all(|(&blok, bytes)| *bytes == page(blok)));
            }
        }
    }
}

#[test]
fn the_ways_are_what_they_say() {
    let file = tempfile::tempfile().unwrap();
    let (auto, pool) = (IoEngines::new(IoChoice::Auto), IoEngines::new(IoChoice::Pool));
    write(&auto, &file, &[1, 5, 9]);
    write(&pool, &file, &[1, 5, 9]);
    assert!(matches!(*pool.engines[0].engine.lock().unwrap(), Engine::Workers(_)));
    if Ring::new().is_err() {
        let wanted = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
        assert!(!wanted.split(',').any(|name| name == "io_uring"), "io_uring is required, and refused");
        return println!("SKIP(io_uring: refused here)");
    }
    assert!(matches!(*auto.engines[0].engine.lock().unwrap(), Engine::Ring(_)));
}

#[test]
fn a_child_begins_with_no_engine() {
    let file = tempfile::tempfile().unwrap();
    for choice in [IoChoice::Auto, IoChoice::Pool] {
        let engines = IoEngines::new(choice);
        write(&engines, &file, &[1, 3]);
        engines.after_fork_in_child();
        assert!(engines.engines.iter().all(|owned| owned.owner.load(Ordering::Relaxed) == 0));
        assert!(matches!(*engines.engines[0].engine.lock().unwrap(), Engine::None));
        assert!(write(&engines, &file, &[1, 3]).iter().all(Result::is_ok));
    }
}

#[test]
fn one_run_needs_no_engine() {
    let file = tempfile::tempfile().unwrap();
    let engines = IoEngines::new(IoChoice::Auto);
    assert!(write(&engines, &file, &[7, 8, 9]).iter().all(Result::is_ok));
    assert!(matches!(*engines.engines[0].engine.lock().unwrap(), Engine::None));
}

#[test]
fn a_file_cut_short_is_noticed_on_every_way() {
    let file = tempfile::tempfile().unwrap();
    let (auto, pool) = (IoEngines::new(IoChoice::Auto), IoEngines::new(IoChoice::Pool));
    let bloks = [2, 3, 4, 10, 20, 21];
    write(&auto, &file, &bloks);
    // In the middle of blok 20, and then in the middle of a run.
    for (len_bytes, whole) in [(20 * PAGE_BYTES as u64 + 100, &bloks[..4]), (3 * PAGE_BYTES as u64, &bloks[..1])] {
        file.set_len(len_bytes).unwrap();
        let fd = file.as_raw_fd();
        assert_eq!(read(&bloks, |reads| auto.read(fd, reads)).err(), Some(PagerError::Truncated));
        assert_eq!(read(&bloks, |reads| pool.read(fd, reads)).err(), Some(PagerError::Truncated));
        assert_eq!(read(&bloks, |reads| IoEngines::read_in_trap(fd, reads)).err(), Some(PagerError::Truncated));
        assert!(read(whole, |reads| auto.read(fd, reads)).is_ok());
    }
}

#[test]
fn what_the_system_refuses_is_told_page_by_page() {
    let mut full = File::options().read(true).write(true).open("/dev/full").unwrap();
    assert!(full.write_all(b"x").is_err() && full.read(&mut [0]).is_ok());
    let read_only = File::open("/dev/null").unwrap();
    for choice in [IoChoice::Auto, IoChoice::Pool] {
        let engines = IoEngines::new(choice);
        assert_eq!(write(&engines, &full, &[1, 3, 4]), [Err(PagerError::Full); 3]);
        assert_eq!(write(&engines, &read_only, &[1, 3, 4]), [Err(PagerError::Io(9)); 3]);
    }
}

#[test]
fn more_threads_than_engines_still_move_pages() {
    let file = tempfile::tempfile().unwrap();
    let engines = IoEngines::new(IoChoice::Auto);
    std::thread::scope(|scope| {
        for thread in 0..ENGINES as u32 + 4 {
            let (file, engines) = (&file, &engines);
            scope.spawn(move || {
                let bloks: Vec<u32> = (0..100).map(|index| thread * 1000 + index * 3).collect();
                assert!(write(engines, file, &bloks).iter().all(Result::is_ok));
                let pages = read(&bloks, |reads| engines.read(file.as_raw_fd(), reads)).unwrap();
                assert!(bloks.iter().zip(&pages).all(|(&blok, bytes)| *bytes == page(blok)));
            });
        }
    });
}
