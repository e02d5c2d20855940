//! Files and sockets that the program lends to a pager of its own.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::store::FileStore;
use selfpage::{DescriptorTable, Domain, Kind, Region, Trap};
use selfpage_core::addr::PageBytes;

use crate::child::{self, forked};
use crate::descriptors::close_all;
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::skip::skip;

pub const FRAMES: usize = 64;
pub const PAGES: usize = 4 * FRAMES;
pub const CASES: [(&str, Trap, DescriptorTable); 3] = [
    ("worker", Trap::Worker, DescriptorTable::Shared),
    ("private", Trap::Worker, DescriptorTable::Private),
    ("upcall", Trap::Upcall, DescriptorTable::Shared),
];

/// Its pages are a file's.
pub struct ByFile(pub Arc<File>);

impl UserPager for ByFile {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        self.0.read_exact_at(bytes, index * PAGE as u64)
    }

    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()> {
        self.0.write_all_at(bytes, index * PAGE as u64)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        // Named twice, it is lent once.
        vec![self.0.as_raw_fd(); 2]
    }
}

/// What [`number_pages`] writes.
pub fn numbered_page(index: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    bytes[..8].copy_from_slice(&(index + 1).to_ne_bytes());
    bytes[PAGE - 8..].copy_from_slice(&(!index).to_ne_bytes());
    bytes
}

pub fn numbered_file() -> Arc<File> {
    let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
    (0..PAGES as u64).for_each(|index| file.write_all(&numbered_page(index)).unwrap());
    Arc::new(file)
}

pub fn domain(table: DescriptorTable) -> Domain {
    Domain::with_frames(FRAMES * PAGE).descriptor_table(table).build().unwrap()
}

/// The file has this word at the beginning of each page.
fn has(file: &File, word: u64) {
    for index in 0..PAGES {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, (index * PAGE) as u64).expect("the program's file is open still");
        assert_eq!(u64::from_ne_bytes(bytes), word, "page {index}");
    }
}

pub fn write(region: &mut Region, word: u64) {
    region.as_mut_slice::<[u64; 512]>().iter_mut().for_each(|page| page[0] = word);
    region.flush(0, region.len_bytes()).unwrap();
}

#[test]
fn a_file_that_was_open_before() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            let file = numbered_file();
            let domain = domain(table);
            // What pager threads open for themselves has no number that they are lent one at.
            let store = FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
            let mut stored = domain.region(4 * FRAMES * PAGE).trap(trap).stored(store).unwrap();
            number_pages(&mut stored);
            check_pages(&stored, 0..pages(&stored));
            let mut region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(file.clone())).unwrap();
            check_pages(&region, 0..PAGES);
            let mut second = None;
            for round in 0..3 {
                write(&mut region, 100 + round);
                has(&file, 100 + round);
                drop(region);
                // The number is the program's as before, and may be lent again, also to two at once.
                has(&file, 100 + round);
                region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(file.clone())).unwrap();
                assert!(region.as_slice::<[u64; 512]>().iter().all(|page| page[0] == 100 + round));
                second = Some(domain.region(PAGES * PAGE).trap(trap).user(ByFile(file.clone())).unwrap());
            }
            drop(region);
            assert!(second.as_ref().unwrap().as_slice::<[u64; 512]>().iter().all(|page| page[0] == 102));
            drop(second);
            // One that the pager alone has is closed with it, and its number is free for another.
            let own = Arc::into_inner(file).unwrap();
            let number = own.as_raw_fd();
            drop(domain.region(PAGES * PAGE).trap(trap).user(ByFile(Arc::new(own))).unwrap());
            let next = numbered_file();
            assert_eq!(next.as_raw_fd(), number);
            let region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(next)).unwrap();
            check_pages(&region, 0..PAGES);
            check_pages(&stored, 0..pages(&stored));
        })
        .well();
    }
}

/// Its pages come by a socket, and nobody saves them.
struct BySocket(Mutex<UnixStream>);

impl UserPager for BySocket {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        let mut socket = self.0.lock().unwrap();
        socket.write_all(&index.to_ne_bytes())?;
        socket.read_exact(bytes)
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.0.lock().unwrap().as_raw_fd()]
    }
}

/// Answers what the socket is asked for, until the other end is closed in every table.
fn serve(mut socket: UnixStream) {
    let mut index = [0; 8];
    while socket.read_exact(&mut index).is_ok() {
        socket.write_all(&numbered_page(u64::from_ne_bytes(index))).unwrap();
    }
}

#[test]
fn a_socket() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let serves = std::thread::spawn(|| serve(theirs));
            let domain = domain(table);
            let region = domain.region(PAGES * PAGE).trap(trap).user(BySocket(Mutex::new(ours))).unwrap();
            check_pages(&region, 0..PAGES);
            check_pages(&region, (0..PAGES).rev());
            drop(region);
            serves.join().unwrap();
        })
        .well();
    }
}

#[test]
fn what_is_lent_after_all_was_closed_and_in_children() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            let (file, domain) = (numbered_file(), domain(table));
            let region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(file.clone())).unwrap();
            let look = || {
                check_pages(&region, 0..PAGES);
                check_pages(&region, (0..PAGES).rev());
            };
            forked(|| {
                look();
                has_numbers(&file);
                // A child of the child.
                forked(look);
            });
            look();
            close_all();
            look();
            forked(|| {
                look();
                forked(look);
            });
            // The number is another file's by now.
            let others: Vec<_> = (0..20).map(|_| tempfile::tempfile_in("/var/tmp").unwrap()).collect();
            assert!(others.iter().any(|other| other.as_raw_fd() == file.as_raw_fd()));
            forked(look);
            look();
            assert!(
                others.iter().all(|other| other.metadata().unwrap().len() == 0),
                "the program's file was written to"
            );
            std::mem::forget((others, region, file));
        })
        .well();
    }
}

fn has_numbers(file: &File) {
    let mut bytes = [0; PAGE];
    file.read_exact_at(&mut bytes, 7 * PAGE as u64).expect("the program's file is open still");
    assert!(bytes == numbered_page(7));
}

/// It has a file of its own in each process.
pub struct Anew(pub Mutex<Arc<File>>);

impl UserPager for Anew {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        let file = self.0.lock().unwrap().clone();
        file.read_exact_at(bytes, index * PAGE as u64)
    }

    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()> {
        let file = self.0.lock().unwrap().clone();
        file.write_all_at(bytes, index * PAGE as u64)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.0.lock().unwrap().as_raw_fd()]
    }

    fn forked(&self) {
        *self.0.lock().unwrap() = numbered_file();
    }
}

#[test]
fn a_file_that_is_opened_anew_in_the_child() {
    for (name, trap, table) in CASES {
        for closed in [false, true] {
            in_child(here!(), &format!("{name}-{closed}"), || {
                let (file, domain) = (numbered_file(), domain(table));
                let mut region = domain.region(PAGES * PAGE).trap(trap).user(Anew(Mutex::new(file.clone()))).unwrap();
                if closed {
                    close_all();
                }
                let mut look = || {
                    write(&mut region, 8);
                    region.evict(0, region.len_bytes()).unwrap();
                    assert!(region.as_slice::<[u64; 512]>().iter().all(|page| page[0] == 8));
                };
                if closed {
                    forked(look);
                } else {
                    forked(|| {
                        look();
                        let mut bytes = [0; PAGE];
                        file.read_exact_at(&mut bytes, 0).unwrap();
                        assert!(bytes == numbered_page(0), "the parent's file was written to");
                    });
                }
                check_pages(&region, 0..PAGES);
                std::mem::forget((region, file));
            })
            .well();
        }
    }
}

#[test]
fn a_standard_stream() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            let before = domain(table);
            let file = numbered_file();
            // SAFETY: test: nobody reads from standard input.
            let stream = unsafe {
                assert_eq!(libc::dup2(file.as_raw_fd(), 0), 0);
                <File as std::os::fd::FromRawFd>::from_raw_fd(0)
            };
            let (stream, after) = (Arc::new(stream), domain(table));
            for _ in 0..2 {
                let region = after.region(PAGES * PAGE).trap(trap).user(ByFile(stream.clone())).unwrap();
                check_pages(&region, 0..PAGES);
            }
            // Its threads have the standard input that there was.
            let late = before.region(PAGES * PAGE).trap(trap).user(ByFile(stream.clone()));
            match table {
                DescriptorTable::Shared => assert!(late.unwrap_err().to_string().contains("dup(2)")),
                _ => check_pages(&late.unwrap(), 0..PAGES),
            }
            has_numbers(&stream);
        })
        .well();
    }
}

/// Pager threads of a domain that is made from here on have none.
fn close_standard_input() {
    // SAFETY: test: nobody reads from it.
    assert_eq!(unsafe { libc::close(0) }, 0);
}

/// What is lent where pager threads have no stream goes with its region, and another may come there.
#[test]
fn one_after_another_at_the_number_of_a_stream() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            close_standard_input();
            let domain = domain(table);
            let lend = || {
                // The lowest number that is free.
                let file = numbered_file();
                assert_eq!(file.as_raw_fd(), 0);
                let region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(file)).unwrap();
                check_pages(&region, 0..PAGES);
                region
            };
            for _ in 0..3 {
                drop(lend());
            }
            let mut last = Some(lend());
            forked(|| {
                check_pages(last.as_ref().unwrap(), (0..PAGES).rev());
                drop(last.take());
                drop(lend());
            });
            drop(last);
            let (ours, theirs) = UnixStream::pair().unwrap();
            assert_eq!(ours.as_raw_fd(), 0);
            let (tell, ended) = channel();
            std::thread::spawn(move || {
                serve(theirs);
                tell.send(()).unwrap();
            });
            let region = domain.region(PAGES * PAGE).trap(trap).user(BySocket(Mutex::new(ours))).unwrap();
            check_pages(&region, 0..PAGES);
            drop(region);
            ended.recv_timeout(Duration::from_secs(10)).expect("the socket is open in no table any more");
        })
        .well();
    }
}

/// The program's file may have the number of what stands where pager threads have no stream.
#[test]
fn at_numbers_that_pager_threads_have_for_their_own() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            close_standard_input();
            let domain = domain(table);
            let file = numbered_file();
            assert_eq!(file.as_raw_fd(), 0);
            let mut refused = 0;
            for number in 700..720 {
                // SAFETY: test: a number, and then a descriptor that nobody else has.
                let high = unsafe {
                    if libc::fcntl(number, libc::F_GETFD) >= 0 {
                        continue;
                    }
                    assert_eq!(libc::dup2(0, number), number);
                    <File as std::os::fd::FromRawFd>::from_raw_fd(number)
                };
                match domain.region(PAGES * PAGE).trap(trap).user(ByFile(Arc::new(high))) {
                    Ok(region) => check_pages(&region, 0..PAGES),
                    Err(why) => {
                        assert!(why.to_string().contains("dup(2)"), "{why}");
                        refused += 1;
                    }
                }
            }
            assert!((1..20).contains(&refused), "{refused} refused");
            for _ in 0..2 {
                let region = domain.region(PAGES * PAGE).trap(trap).user(ByFile(file.clone())).unwrap();
                check_pages(&region, 0..PAGES);
            }
        })
        .well();
    }
}

/// Regions of these domains whose file is at a number, two of each domain's.
fn lent_at(number: RawFd, file: &File, domains: &[&Domain], trap: Trap) -> Vec<Region> {
    assert!(is_free(&number), "{number}");
    // SAFETY: test: a number that is free, and then a descriptor that nobody else has.
    let there = Arc::new(unsafe {
        assert_eq!(libc::dup2(file.as_raw_fd(), number), number);
        <File as std::os::fd::FromRawFd>::from_raw_fd(number)
    });
    let lend = |domain: &&Domain| domain.region(PAGES * PAGE).trap(trap).user(ByFile(there.clone())).unwrap();
    domains.iter().chain(domains).map(lend).collect()
}

fn is_free(number: &RawFd) -> bool {
    // SAFETY: test: numbers alone.
    unsafe { libc::fcntl(*number, libc::F_GETFD) < 0 }
}

fn limit_open_files(most: u64) {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: test: a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

/// What is opened later, by a forked child for its domains or by anyone for a store, does not come to the number of a file that the program has
/// closed, and pager threads have.
#[test]
fn at_numbers_that_are_free_for_what_is_opened_later() {
    for (name, trap, table) in CASES {
        for (most, from) in [(800, 700), (64, 3)] {
            in_child(here!(), &format!("{name}-{most}"), || {
                limit_open_files(most);
                let first = domain(table);
                let domains = [domain(table), domain(table)];
                // Its numbers are free again.
                drop(first);
                let file = numbered_file();
                let numbers: Vec<_> = (from..most as RawFd).filter(is_free).take(5).collect();
                let lend = |number: &RawFd| lent_at(*number, &file, &[&domains[0], &domains[1]], trap);
                let regions: Vec<_> = numbers.iter().flat_map(lend).collect();
                close_all();
                let look = || regions.iter().for_each(|region| check_pages(region, 0..PAGES));
                let store = || {
                    let store = FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
                    let mut stored = domains[0].region(4 * FRAMES * PAGE).trap(trap).stored(store).unwrap();
                    number_pages(&mut stored);
                    check_pages(&stored, 0..pages(&stored));
                    stored
                };
                forked(|| {
                    look();
                    let stored: Vec<_> = (0..3).map(|_| store()).collect();
                    forked(look);
                    drop(stored);
                });
                let stored: Vec<_> = (0..3).map(|_| store()).collect();
                forked(look);
                look();
                std::mem::forget((regions, stored, file));
            })
            .well();
        }
    }
}

/// Where all numbers are in use up to those that the program has closed, a copy for a child has no other.
#[test]
fn at_numbers_beyond_thousands_that_are_in_use() {
    const FIRST: RawFd = 5000;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: test: the limit is written to a place for one.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    if limit.rlim_max < FIRST as u64 + 100 {
        return skip("open-files", "the limit on open files is low: raise it (ulimit -Hn 6000)");
    }
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            limit_open_files(FIRST as u64 + 100);
            let domains = [domain(table), domain(table)];
            let file = numbered_file();
            let _rest: Vec<_> = (3..FIRST).filter(is_free).map(|_| file.try_clone().unwrap()).collect();
            let lend = |number| lent_at(number, &file, &[&domains[0], &domains[1]], trap);
            let regions: Vec<_> = (FIRST..FIRST + 3).rev().flat_map(lend).collect();
            // SAFETY: test: whoever uses them must bear it.
            assert_eq!(unsafe { libc::close_range(FIRST as u32, FIRST as u32 + 2, 0) }, 0);
            let look = || regions.iter().for_each(|region| check_pages(region, 0..PAGES));
            forked(|| {
                look();
                forked(look);
            });
            look();
            std::mem::forget(regions);
        })
        .well();
    }
}

/// Where nothing is free but what the program has closed, a child gets nothing, rather than one file in place of another.
#[test]
fn at_the_only_numbers_that_are_free() {
    for (name, trap, table) in CASES {
        in_child(here!(), name, || {
            limit_open_files(64);
            let domain = domain(table);
            let file = numbered_file();
            let _rest: Vec<_> = (3..60).filter(is_free).map(|_| file.try_clone().unwrap()).collect();
            let regions: Vec<_> = (60..64).flat_map(|number| lent_at(number, &file, &[&domain], trap)).collect();
            // SAFETY: test: whoever uses them must bear it.
            assert_eq!(unsafe { libc::close_range(60, 63, 0) }, 0);
            let look = || regions.iter().for_each(|region| check_pages(region, 0..PAGES));
            let ended = child::in_child(|| {
                look();
                true
            });
            assert_eq!(ended, libc::SIGSEGV);
            look();
            std::mem::forget(regions);
        })
        .well();
    }
}

pub struct Names(pub RawFd);

impl UserPager for Names {
    fn fill(&self, _: u64, _: &mut PageBytes) -> io::Result<()> {
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.0]
    }
}

#[test]
fn numbers_of_nothing() {
    for number in [-1, 999, RawFd::MAX] {
        let domain = domain(DescriptorTable::Shared);
        let error = domain.region(PAGE).name("mine").user(Names(number)).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
        for word in ["mine", &number.to_string(), "UserPager::descriptors"] {
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
    }
}
