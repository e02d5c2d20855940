//! Forks where a child cannot have all of its parent's memory, or has other rights.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use selfpage::snapshot::Snapshots;
use selfpage::store::{BackingStore, Blok, FileStore, MemoryStore, ReadBlok, StoreError, WriteBlok};
use selfpage::{Domain, Kind, Region, Sampling, Trap};
use selfpage_core::pager::{Context, PagerError};

use crate::child::{fork, forked};
use crate::filter::Call;
use crate::rights::{drop_rights, everybody_serves_system_calls, is_root};
use crate::scenario::{PAGE, check_pages, here, in_child, number_pages, pages};
use crate::skip::skip;
use crate::store::Failing;
use crate::tried;

const FRAMES: usize = 64;
const ALL: usize = 4 * FRAMES;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// A store that counts what it is told of forks, and answers as it was made to.
struct Told<S> {
    store: S,
    forks: AtomicU32,
    may_fork: fn() -> Result<(), StoreError>,
}

impl<S: BackingStore> BackingStore for Told<S> {
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        self.store.claim(want)
    }
    fn release(&self, first: Blok, count: u32) {
        self.store.release(first, count);
    }
    fn reads_in_trap(&self) -> bool {
        self.store.reads_in_trap()
    }
    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        self.store.read(context, bloks)
    }
    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        self.store.write(bloks);
    }
    fn descriptors(&self) -> Vec<i32> {
        self.store.descriptors()
    }
    fn before_fork(&self, _: i32) -> Result<(), StoreError> {
        self.forks.fetch_add(1, SeqCst);
        (self.may_fork)()
    }
    fn after_fork_in_parent(&self) {
        self.forks.fetch_add(100, SeqCst);
    }
    fn after_fork_in_child(&self) {
        self.forks.fetch_add(10_000, SeqCst);
    }
}

/// A store that no child can have.
fn not_for_children() -> Arc<dyn BackingStore> {
    let may_fork =
        || Err(StoreError { object: "of this test".into(), cause: io::Error::other("no"), remedy: "there is none" });
    Arc::new(Told { store: file_store(), forks: AtomicU32::new(0), may_fork })
}

/// One that each child shares.
fn for_children() -> Arc<Told<MemoryStore>> {
    let store = MemoryStore::new((8 * ALL * PAGE) as u64).unwrap();
    Arc::new(Told { store, forks: AtomicU32::new(0), may_fork: || Ok(()) })
}

fn numbered(domain: &Domain, trap: Trap, store: Arc<dyn BackingStore>) -> Region {
    let mut region = domain.region(ALL * PAGE).trap(trap).stored_in(store).unwrap();
    number_pages(&mut region);
    region
}

fn file_store() -> FileStore {
    FileStore::unnamed_in("/var/tmp", (4 * ALL * PAGE) as u64).unwrap()
}

/// Each region has a handle of its own to the one store.
#[test]
fn a_store_is_told_of_a_fork_once_however_many_handles_there_are() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = for_children();
        let alone = for_children();
        let mut regions: Vec<_> = (0..3).map(|_| domain.region(ALL * PAGE).stored(store.clone()).unwrap()).collect();
        regions.push(numbered(&domain, Trap::Worker, store.clone()));
        regions.push(numbered(&domain, Trap::Worker, alone.clone()));
        regions.iter_mut().for_each(number_pages);
        forked(|| {
            assert_eq!((store.forks.load(SeqCst), alone.forks.load(SeqCst)), (10_001, 10_001));
            regions.iter().for_each(|region| check_pages(region, 0..pages(region)));
        });
        assert_eq!((store.forks.load(SeqCst), alone.forks.load(SeqCst)), (101, 101));
        regions.iter().for_each(|region| check_pages(region, 0..pages(region)));
    })
    .well();
}

/// What is on its way to a store when a fork comes gets there, and no more comes after it.
#[test]
fn while_others_evict_all_the_time_over_a_slow_store() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(2 * ALL * PAGE).build().unwrap();
        let store = Failing::new();
        store.write_ms.store(30, SeqCst);
        let region = numbered(&domain, Trap::Upcall, store);
        let (words, ended) = (region.as_ptr() as usize, AtomicBool::new(false));
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (region, ended) = (&region, &ended);
                scope.spawn(move || {
                    for turn in 0.. {
                        let page = thread * ALL / 4 + turn * 4 % (ALL / 4);
                        for page in page..page + 4 {
                            // SAFETY: test: a word of the region's that nobody else uses.
                            unsafe { ((words + page * PAGE + 64) as *mut usize).write_volatile(turn) };
                        }
                        let _ = region.evict(page * PAGE, 4 * PAGE);
                        if ended.load(SeqCst) {
                            return;
                        }
                    }
                });
            }
            for _ in 0..5 {
                let begun = Instant::now();
                forked(|| check_pages(&region, 0..ALL));
                assert!(begun.elapsed() < Duration::from_secs(5), "the fork took {:?}", begun.elapsed());
            }
            ended.store(true, SeqCst);
        });
    })
    .well();
}

/// Maps a page of the program's own at `at`, where nothing may be.
fn map_at(at: *mut u8) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: test: nothing is replaced.
    unsafe { libc::mmap(at.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) == at.cast() }
}

#[test]
fn a_child_without_the_regions_does_no_harm() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            tried::catch();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let first: Arc<dyn BackingStore> = Arc::new(MemoryStore::new((4 * ALL * PAGE) as u64).unwrap());
            let given = numbered(&domain, trap, first);
            let store = not_for_children();
            let region = numbered(&domain, trap, store.clone());
            // Each is dropped in the child only, and once.
            let (domain, given, region) = (Box::leak(Box::new(domain)), Some(given), Some(region));
            let (mut given, mut region) = (given, region);
            forked(|| {
                for region in [&mut given, &mut region] {
                    let region = region.take().unwrap();
                    assert_eq!(tried::read(region.as_ptr().cast()), Err(libc::SIGSEGV));
                    assert!(!map_at(region.as_ptr()), "what the child maps later comes to lie in a region");
                    assert!(region.flush(0, PAGE).is_err() && region.pin(0, PAGE).is_err());
                    assert!(region.evict(0, PAGE).is_err() && region.prefetch(0, PAGE).is_err());
                    assert!(region.while_still(|| ()).is_err() && region.protection(0).is_err());
                    let snapshots = Snapshots::of(&[&region], "/var/tmp/of-no-region.snap");
                    assert_eq!(snapshots.err().map(|error| error.kind()), Some(Kind::Lost));
                    assert_eq!(domain.sample(Sampling::Whole).err().map(|error| error.kind()), Some(Kind::Lost));
                    drop(region);
                }
                // There is nobody to serve them.
                let store = MemoryStore::new(1 << 20).unwrap();
                for refused in [
                    domain.region(PAGE).zero().map(drop),
                    domain.region(PAGE).stored(store).map(drop),
                    domain.region(PAGE).pinned().map(drop),
                    domain.add_frames(1),
                    domain.remove_frames(FRAMES as u32 / 2),
                ] {
                    assert_eq!(refused.unwrap_err().kind(), Kind::Lost);
                }
                // SAFETY: test: leaked above, and used for the last time.
                drop(unsafe { Box::from_raw(std::ptr::from_ref(domain).cast_mut()) });
            });
            // Had the child given back what the parent has saved, others' pages would go over it.
            let others = numbered(domain, trap, store);
            for region in [&given, &region] {
                check_pages(region.as_ref().unwrap(), 0..ALL);
            }
            check_pages(&others, 0..ALL);
        })
        .well();
    }
}

/// The store of the other region is what the child cannot have.
#[test]
fn a_child_without_the_regions_keeps_nothing_in_their_stores() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let store = Arc::new(file_store());
        let mut region = numbered(&domain, Trap::Worker, store.clone());
        let _other = numbered(&domain, Trap::Worker, not_for_children());
        region.flush(0, ALL * PAGE).unwrap();
        let (ends, end) = io::pipe().unwrap();
        let mut end = Some(end);
        let child = fork(|| {
            // It lives until the parent closes the last copy.
            drop(end.take());
            io::read_to_string(&ends).is_ok()
        });
        assert_eq!(store.taken_bloks(), ALL as u64);
        region.discard(0, ALL * PAGE).unwrap();
        store.reclaim_dead();
        assert_eq!(store.taken_bloks(), 0);
        drop(end);
        assert_eq!(child.wait(), 0);
    })
    .well();
}

/// The one that has the store ends first, and is begun anew.
#[test]
fn a_child_without_the_regions_does_not_keep_their_store_from_others() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("store");
        let (ends, end) = io::pipe().unwrap();
        let mut end = Some(end);
        let program = fork(|| {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let store = FileStore::create(&path, (4 * ALL * PAGE) as u64).unwrap();
            let _region = numbered(&domain, Trap::Worker, Arc::new(store));
            let _other = numbered(&domain, Trap::Worker, not_for_children());
            let _child = fork(|| {
                // It lives until the test closes the last copy.
                drop(end.take());
                io::read_to_string(&ends).is_ok()
            });
            // SAFETY: test: ends as one that is killed does, with nothing dropped.
            unsafe { libc::_exit(0) }
        });
        assert_eq!(program.wait(), 0);
        let again = FileStore::create(&path, 1 << 20);
        drop(end);
        again.expect("who had it has ended");
    })
    .well();
}

#[test]
fn a_child_without_the_regions_is_told_that_their_store_is_none_for_its_own() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let [store, unused] = [(); 2].map(|()| Arc::new(file_store()));
        let _region = numbered(&domain, Trap::Worker, store.clone());
        let _other = numbered(&domain, Trap::Worker, not_for_children());
        forked(|| {
            let own = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let why = own.region(PAGE).stored_in(store.clone()).expect_err("it is the parent's").to_string();
            let before_forks = [store, unused].map(|store| store.check_fork(0).unwrap_err().to_string());
            let is_told = |why: &String| why.contains("an ancestor's") && why.contains("one of its own");
            assert!(is_told(&why) && before_forks.iter().all(is_told), "{why}, and {before_forks:?}");
        });
    })
    .well();
}

/// What a snapshot or a sample has kept of it is nothing that a child has.
#[test]
fn a_region_that_went_before_the_fork_leaves_its_place_to_the_child() {
    in_child(here!(), "", || {
        let dir = tempfile::tempdir().unwrap();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let regions = [(); 2].map(|()| numbered(&domain, Trap::Worker, Arc::new(file_store())));
        let places = regions.each_ref().map(|region| region.as_ptr().addr());
        let sample = regions[1].sample(Sampling::Whole).unwrap();
        let snapshots = Snapshots::of(&[&regions[0]], dir.path().join("snapshot")).unwrap();
        drop(regions);
        forked(|| {
            let page = |place, page| std::ptr::with_exposed_provenance_mut::<u8>(place + page * PAGE);
            // What the library has mapped for the child may be there as well.
            let own = places.map(|place| (0..ALL).map(|number| page(place, number)).find(|at| map_at(*at)).unwrap());
            drop((snapshots, sample));
            // SAFETY: test: mapped by the child.
            own.iter().for_each(|at| unsafe { at.write_volatile(1) });
        });
    })
    .well();
}

/// Standard error has a lock of std's, which the child has taken, and nobody there who would let go of it.
#[test]
fn a_child_without_the_regions_says_so_whoever_else_was_saying_something() {
    in_child(here!(), "stderr", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let _region = numbered(&domain, Trap::Worker, not_for_children());
        let (tell, told) = channel();
        let (end, ends) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let _saying = io::stderr().lock();
                tell.send(()).unwrap();
                let _ = ends.recv();
            });
            told.recv().unwrap();
            forked(|| {});
            drop(end);
        });
    })
    .well();
}

#[test]
fn part_of_a_region_is_the_programs_own() {
    for (trap, name) in TRAPS {
        for what in ["nothing", "memory", "file"] {
            in_child(here!(), &format!("{name}-{what}"), || {
                tried::catch();
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let region = numbered(&domain, trap, Arc::new(MemoryStore::new((4 * ALL * PAGE) as u64).unwrap()));
                // Pages on both sides are in core, and others are not.
                let (first, count) = (ALL - 16, 8);
                check_pages(&region, ALL - 24..ALL);
                let place = region.as_ptr().wrapping_add(first * PAGE);
                let file = tempfile::tempfile().unwrap();
                file.set_len((count * PAGE) as u64).unwrap();
                let (flags, fd) = match what {
                    "file" => (libc::MAP_SHARED, std::os::fd::AsRawFd::as_raw_fd(&file)),
                    _ => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
                };
                // SAFETY: test: the program's own memory in place of the region's.
                unsafe {
                    assert_eq!(libc::munmap(place.cast(), count * PAGE), 0);
                    if what != "nothing" {
                        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_FIXED);
                        let own = libc::mmap(place.cast(), count * PAGE, rights, flags, fd, 0);
                        assert_eq!(own, place.cast());
                    }
                }
                let own = |page: usize| place.wrapping_add(page * PAGE).cast::<u64>();
                if what != "nothing" {
                    // The last page of it is touched by the child alone.
                    (0..count - 1).for_each(|page| assert_eq!(tried::write(own(page), 99), Ok(())));
                }
                let right = || {
                    for _ in 0..3 {
                        check_pages(&region, (0..first).chain(first + count..ALL));
                    }
                    // Where there is nothing, the kernel may put whatever is mapped next.
                    let expected = |page| if page == count - 1 { 0 } else { 99 };
                    if what != "nothing" {
                        (0..count)
                            .for_each(|page| assert_eq!(tried::read(own(page)), Ok(expected(page)), "page {page}"));
                    }
                };
                for _ in 0..2 {
                    forked(right);
                    right();
                }
                drop(region);
            })
            .well();
        }
    }
}

#[test]
fn regions_of_two_domains_in_one_store() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let store: Arc<dyn BackingStore> = Arc::new(file_store());
            let domains = [(); 2].map(|()| Domain::with_frames(FRAMES * PAGE).build().unwrap());
            let mut regions = domains.each_ref().map(|domain| numbered(domain, trap, store.clone()));
            forked(|| {
                for region in &mut regions {
                    check_pages(region, 0..pages(region));
                    region.as_mut_slice::<u64>().fill(7);
                    assert!(region.as_slice::<u64>().iter().all(|word| *word == 7));
                }
            });
            regions.iter().for_each(|region| check_pages(region, 0..pages(region)));
        })
        .well();
    }
}

#[test]
fn a_child_that_may_no_longer_serve_system_calls_says_so() {
    in_child(here!(), "", || {
        if !is_root() {
            return skip("root", "only root can become nobody");
        }
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let region = numbered(&domain, Trap::Worker, Arc::new(MemoryStore::new((4 * ALL * PAGE) as u64).unwrap()));
        drop_rights();
        if everybody_serves_system_calls() || !domain.serves_system_calls() {
            return skip("unprivileged", "this machine lets everybody serve the kernel's faults, or nobody");
        }
        forked(|| {
            assert!(!domain.serves_system_calls());
            check_pages(&region, 0..ALL);
        });
        assert!(domain.serves_system_calls());
    })
    .well();
}

/// The stack, the program's name and what it is called with are on absent pages, and a child of vfork reads and writes some more.
#[test]
fn a_child_that_shares_the_memory_until_it_becomes_another_program() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        if !domain.serves_system_calls() {
            return skip("root", "the kernel's own faults are not served: the parameters of exec are on absent pages");
        }
        let mut region = numbered(&domain, Trap::Worker, Arc::new(file_store()));
        let (at, words) = (region.as_mut_slice::<u8>().as_mut_ptr(), [c"/bin/sh", c"-c", c"exit 7"]);
        let place = |index: usize| at.wrapping_add(index * PAGE + 64).cast::<libc::c_char>();
        let out = |region: &Region| {
            region.evict(0, region.len_bytes()).unwrap();
            region.flush(0, region.len_bytes()).unwrap();
            check_pages(region, ALL / 2..ALL);
        };
        for (index, word) in words.iter().enumerate() {
            // SAFETY: test: within the page.
            unsafe { place(index).copy_from(word.as_ptr(), word.count_bytes() + 1) };
        }
        let (arguments, environment) = (place(3).cast::<*const libc::c_char>(), place(4).cast::<*const libc::c_char>());
        // SAFETY: test: within their pages, and aligned.
        unsafe {
            (0..3).for_each(|index| arguments.add(index).write(place(index)));
            arguments.add(3).write(std::ptr::null());
            environment.write(std::ptr::null());
        }
        let ended = |pid: libc::pid_t| {
            let mut status = 0;
            // SAFETY: test: waits for a child.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status), "{status:#x}");
            libc::WEXITSTATUS(status)
        };
        out(&region);
        let mut pid = 0;
        // SAFETY: test: all is on pages of the region, which lives on.
        let spawned = unsafe {
            let none = std::ptr::null();
            libc::posix_spawn(&mut pid, place(0), none, std::ptr::null(), arguments.cast(), environment.cast())
        };
        assert_eq!((spawned, ended(pid)), (0, 7));
        out(&region);
        // SAFETY: test: the child touches the region, becomes another program or ends, and calls nothing else.
        let pid = unsafe { child_that_shares(place(0), arguments, environment, at.wrapping_add(5 * PAGE + 64)) };
        assert_eq!(ended(pid), 7);
        // What the child wrote is there: it was the parent's memory.
        assert_eq!(region.as_slice::<u8>()[5 * PAGE + 64], 1);
        check_pages(&region, 0..ALL);
    })
    .well();
}

/// A child by vfork, which writes to `mark` and becomes another program.
///
/// # Safety
/// As exec has it; `mark` is writable.
#[inline(never)]
unsafe fn child_that_shares(
    program: *const libc::c_char,
    arguments: *const *const libc::c_char,
    environment: *const *const libc::c_char,
    mark: *mut u8,
) -> libc::pid_t {
    // SAFETY: test: as promised; the child does not return from here.
    unsafe {
        #[expect(deprecated, reason = "it is what is tried")]
        let pid = libc::vfork();
        if pid == 0 {
            mark.write_volatile(1);
            libc::execve(program, arguments, environment);
            libc::_exit(1);
        }
        pid
    }
}

/// In an upcall region a child of vfork traps on its own, with the handlers of its parent.
#[test]
fn a_child_that_shares_the_memory_of_an_upcall_region() {
    in_child(here!(), "", || {
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let mut region = numbered(&domain, Trap::Upcall, Arc::new(file_store()));
        let arguments = [c"/bin/sh".as_ptr(), c"-c".as_ptr(), c"exit 7".as_ptr(), std::ptr::null()];
        let environment = [std::ptr::null()];
        for round in 0..20 {
            let mark = region.as_mut_slice::<u8>().as_mut_ptr().wrapping_add(round * PAGE + 64);
            region.evict(0, region.len_bytes()).unwrap();
            // SAFETY: test: as above.
            let pid = unsafe { child_that_shares(arguments[0], arguments.as_ptr(), environment.as_ptr(), mark) };
            let mut status = 0;
            // SAFETY: test: waits for a child.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
            assert_eq!(region.as_slice::<u8>()[round * PAGE + 64], 1);
        }
        check_pages(&region, 0..ALL);
    })
    .well();
}

/// Where mappings are that came with a domain.
static PLACES: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn mappings() -> Vec<usize> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = |line: &str| usize::from_str_radix(line.split_once('-').unwrap().0, 16).unwrap();
    maps.lines().map(start).collect()
}

extern "C" fn map_everywhere() {
    for at in PLACES.lock().unwrap().iter() {
        map_at(std::ptr::with_exposed_provenance_mut(*at));
    }
}

/// The child's memory is free where its pool is to be, until it is mapped anew.
#[test]
fn a_handler_of_forks_that_maps_memory_before_the_pool_is_there() {
    in_child(here!(), "", || {
        // SAFETY: test: a handler that maps memory where there is none.
        unsafe { libc::pthread_atfork(None, None, Some(map_everywhere)) };
        let before = mappings();
        let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
        let _region = numbered(&domain, Trap::Worker, Arc::new(file_store()));
        *PLACES.lock().unwrap() = mappings().into_iter().filter(|start| !before.contains(start)).collect();
        // SAFETY: test: the child ends in its handlers.
        let child = unsafe { libc::fork() };
        let mut status = 0;
        // SAFETY: test: waits for a child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "{status:#x}");
        std::process::abort();
    })
    .by(
        libc::SIGABRT,
        &["selfpage: a forked child cannot go on: ", "a pool of 64 frames: File exists", "after attend_forks"],
    );
}

#[test]
fn what_a_filter_refuses_a_child_is_named() {
    const LOCK: Call = Call::with(libc::SYS_fcntl, 1, libc::F_OFD_SETLK as u32);
    const FLAGS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let anonymous = Call::with(libc::SYS_mmap, 3, FLAGS as u32);
    for (call, name, ends) in [(anonymous, "mmap", true), (LOCK, "fcntl", false)] {
        for errno in [libc::EPERM, libc::ENOSYS] {
            in_child(here!(), &format!("{name} {errno}"), || {
                let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
                let _region = numbered(&domain, Trap::Worker, Arc::new(file_store()));
                call.fails_everywhere(errno).unwrap();
                // SAFETY: test: a child that ends at once, in its handlers or here.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: test: no destructors in the child.
                    unsafe { libc::_exit(0) };
                }
                let mut status = 0;
                // SAFETY: test: waits for a child.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(libc::WIFSIGNALED(status), ends, "{status:#x}");
                std::process::abort();
            })
            .by(libc::SIGABRT, &["selfpage: ", &format!("allow {name}")]);
        }
    }
}

/// There is no more to be done than to say what would help.
#[test]
fn a_region_that_cannot_be_kept_from_children_names_the_remedy() {
    const NOT_INHERITED: Call = Call::with(libc::SYS_madvise, 2, libc::MADV_DONTFORK as u32);
    for (errno, remedy) in [
        (libc::EAGAIN, "EAGAIN; raise the limit on mappings (sysctl -w vm.max_map_count)"),
        (libc::EACCES, "EACCES; let the filter"),
    ] {
        in_child(here!(), remedy, || {
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let _region = domain.region(PAGE).name("heap").stored(MemoryStore::new(1 << 20).unwrap()).unwrap();
            NOT_INHERITED.fails_everywhere(errno).unwrap();
            forked(|| ());
        })
        .by(libc::SIGABRT, &["MADV_DONTFORK", remedy, "region heap"]);
    }
}
