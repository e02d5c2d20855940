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

fn write(io: IoChoice, file: &File, bloks: &[u32]) -> Vec<Result<(), PagerError>> {
    let pages: Vec<PageBytes> = bloks.iter().map(|&blok| page(blok)).collect();
    let unset = Err(PagerError::NoStore);
    let with = |(&blok, bytes)| WriteBlok { blok: Blok(blok), bytes, outcome: unset };
    let mut writes: Vec<WriteBlok<'_>> = bloks.iter().zip(&pages).map(with).collect();
    io.write(file.as_raw_fd(), &mut writes);
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
        let (auto, pool) = (IoChoice::Auto, IoChoice::Pool);
        with_engines(|| {
        for (writer, reader) in [(auto, pool), (pool, auto)] {
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
                read(&bloks, |reads| read_in_trap(file.as_raw_fd(), reads)),
            ];
            for pages in ways {
                let pages = pages.unwrap();
                prop_assert!(bloks.iter().zip(&pages).all(|(&blok, bytes)| *bytes == page(blok)));
            }
        }
        Ok(())
        })?;
    }
}

#[test]
fn the_ways_are_what_they_say() {
    with_engines(|| {
        let file = tempfile::tempfile().unwrap();
        let (auto, pool) = (IoChoice::Auto, IoChoice::Pool);
        write(auto, &file, &[1, 5, 9]);
        write(pool, &file, &[1, 5, 9]);
        MINE.with_borrow(|mine| assert!(matches!(mine[pool as usize], Engine::Workers(_))));
        if Ring::new().is_err() {
            let wanted = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
            assert!(!wanted.split(',').any(|name| name == "io_uring"), "io_uring is required, and refused");
            return println!("SKIP(io_uring: refused here)");
        }
        MINE.with_borrow(|mine| assert!(matches!(mine[auto as usize], Engine::Ring(_))));
    });
}

#[test]
fn a_child_begins_with_no_engine() {
    with_engines(|| {
        let file = tempfile::tempfile().unwrap();
        for io in [IoChoice::Auto, IoChoice::Pool] {
            write(io, &file, &[1, 3]);
            forget_engines();
            MINE.with_borrow(|mine| assert!(mine.iter().all(|engine| matches!(engine, Engine::Serial))));
            assert!(write(io, &file, &[1, 3]).iter().all(Result::is_ok));
        }
    });
}

#[test]
fn one_run_needs_no_engine() {
    with_engines(|| {
        let file = tempfile::tempfile().unwrap();
        assert!(write(IoChoice::Auto, &file, &[7, 8, 9]).iter().all(Result::is_ok));
        MINE.with_borrow(|mine| assert!(mine.iter().all(|engine| matches!(engine, Engine::None))));
    });
}

#[test]
fn a_file_cut_short_is_noticed_on_every_way() {
    with_engines(|| {
        let file = tempfile::tempfile().unwrap();
        let (auto, pool) = (IoChoice::Auto, IoChoice::Pool);
        let bloks = [2, 3, 4, 10, 20, 21];
        write(auto, &file, &bloks);
        // In the middle of blok 20, and then in the middle of a run.
        for (len_bytes, whole) in [(20 * PAGE_BYTES as u64 + 100, &bloks[..4]), (3 * PAGE_BYTES as u64, &bloks[..1])] {
            file.set_len(len_bytes).unwrap();
            let fd = file.as_raw_fd();
            assert_eq!(read(&bloks, |reads| auto.read(fd, reads)).err(), Some(PagerError::Truncated));
            assert_eq!(read(&bloks, |reads| pool.read(fd, reads)).err(), Some(PagerError::Truncated));
            assert_eq!(read(&bloks, |reads| read_in_trap(fd, reads)).err(), Some(PagerError::Truncated));
            assert!(read(whole, |reads| auto.read(fd, reads)).is_ok());
        }
    });
}

#[test]
fn what_the_system_refuses_is_told_page_by_page() {
    with_engines(|| {
        let mut full = File::options().read(true).write(true).open("/dev/full").unwrap();
        assert!(full.write_all(b"x").is_err() && full.read(&mut [0]).is_ok());
        let read_only = File::open("/dev/null").unwrap();
        for io in [IoChoice::Auto, IoChoice::Pool] {
            assert_eq!(write(io, &full, &[1, 3, 4]), [Err(PagerError::Full); 3]);
            assert_eq!(write(io, &read_only, &[1, 3, 4]), [Err(PagerError::Io(9)); 3]);
        }
    });
}

/// How many threads of this process are called so: a thread's workers have its name.
fn threads_called(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let named = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    tasks.filter(|task| named(task).is_ok_and(|comm| comm.trim_end() == name)).count()
}

#[test]
fn every_thread_has_engines_and_they_go_with_it() {
    let file = tempfile::tempfile().unwrap();
    for turn in 0..20 {
        let file = file.try_clone().unwrap();
        let (told, with_workers) = std::sync::mpsc::channel();
        let work = move || {
            let bloks: Vec<u32> = (0..100).map(|index| turn * 1000 + index * 3).collect();
            for io in [IoChoice::Auto, IoChoice::Pool] {
                assert!(write(io, &file, &bloks).iter().all(Result::is_ok));
                let pages = read(&bloks, |reads| io.read(file.as_raw_fd(), reads)).unwrap();
                assert!(bloks.iter().zip(&pages).all(|(&blok, bytes)| *bytes == page(blok)));
            }
            told.send(threads_called("engine")).unwrap();
        };
        crate::trap::thread::start(c"engine", work).unwrap().join();
        assert!(with_workers.recv().unwrap() > 1, "thread {turn} had no workers");
        // Whoever has joined a thread may still see it for a moment.
        let began = std::time::Instant::now();
        while threads_called("engine") > 0 {
            assert!(began.elapsed().as_secs() < 60, "workers of a thread that is gone");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_thread_of_the_programs_has_none() {
    let file = tempfile::tempfile().unwrap();
    for io in [IoChoice::Auto, IoChoice::Pool] {
        assert!(write(io, &file, &[1, 3]).iter().all(Result::is_ok));
        MINE.with_borrow(|mine| assert!(mine.iter().all(|engine| matches!(engine, Engine::Serial))));
    }
}
