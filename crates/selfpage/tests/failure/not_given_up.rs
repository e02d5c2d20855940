//! A page that is about to be given up, and is not after all.

use std::fs::{DirEntry, read_to_string};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, MemoryFault, Protection};

use crate::no_mappings::use_up_mappings;
use crate::scenario::{PAGE, here, in_child, number_pages, number_what_fits, until};
use crate::tried;

const FRAMES: usize = 64;
const PAGES: usize = 8;

/// The thread of this process that waits in a write: to standard error, by whichever number.
fn telling() -> Option<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let at = |task: &DirEntry, what| read_to_string(task.path().join(what)).unwrap_or_default();
    let writes = |task: &DirEntry| at(task, "syscall").starts_with(&format!("{} ", libc::SYS_write));
    // The same system call is said of one that is through with it, and has no CPU to go on.
    let sleeps = |task: &DirEntry| at(task, "stat").rsplit(')').next().is_some_and(|rest| rest.starts_with(" S"));
    let task = tasks.into_iter().find(|task| writes(task) && sleeps(task))?;
    task.file_name().to_str()?.parse().ok()
}

/// Standard error as a pipe with room for one line, whatever that is. To be made before there are pager threads, which have what this process
/// has there.
struct OneLine {
    from: PipeReader,
    into: PipeWriter,
    before: i32,
}

impl OneLine {
    fn new() -> OneLine {
        let (from, into) = std::io::pipe().unwrap();
        // SAFETY: test: a flag and the size of our own pipe, a descriptor that nobody has, and one that nobody writes to now.
        let before = unsafe {
            assert_eq!(libc::fcntl(into.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT), 0);
            assert_eq!(libc::fcntl(into.as_raw_fd(), libc::F_SETPIPE_SZ, PAGE), PAGE as i32);
            let before = libc::dup(2);
            libc::dup2(into.as_raw_fd(), 2);
            before
        };
        OneLine { from, into, before }
    }

    /// Whether there is a line.
    fn is_full(&self) -> bool {
        let mut bytes = 0;
        // SAFETY: test: the kernel fills it in.
        assert_eq!(unsafe { libc::ioctl(self.into.as_raw_fd(), libc::FIONREAD, &mut bytes) }, 0);
        bytes > 0
    }

    /// Standard error is what it was, for what this thread says.
    fn end(&self) {
        // SAFETY: test: as above.
        unsafe { libc::dup2(self.before, 2) };
    }
}

/// The line that says so waits for whoever reads it.
#[test]
fn a_page_that_may_be_written_to_again_before_it_is_given_up_stays() {
    for handler in [true, false] {
        in_child(here!(), &format!("{handler}"), || {
            tried::catch();
            let mut told = OneLine::new();
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut builder = domain.region(PAGES * PAGE).name("heap");
            if handler {
                builder = builder.handler(|_: &MemoryFault<'_>| Answer::Refuse);
            }
            let mut region = builder.zero().unwrap();
            number_pages(&mut region);
            region.protect(PAGE, PAGE, Protection::Read).unwrap();
            static BEGINS: AtomicBool = AtomicBool::new(false);
            let last = tried::word(&region, 2).addr() - size_of::<u64>();
            let writer = std::thread::spawn(move || {
                until("no mapping is left", || BEGINS.load(Ordering::Acquire));
                tried::write(last as *mut u64, 6)
            });
            if !use_up_mappings(0) {
                return;
            }
            told.into.write_all(b".").unwrap();
            BEGINS.store(true, Ordering::Release);
            until("the line is written", || telling().is_some());
            let tells = telling().unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert_eq!(tried::write(tried::word(&region, 1), 9), Ok(()));
            let mut line = [0; PAGE];
            until("the line is there", || {
                let count = told.from.read(&mut line).unwrap();
                line[..count].contains(&b'\n')
            });
            told.end();
            until("who told it waits for the next fault", || {
                let at = read_to_string(format!("/proc/self/task/{tells}/syscall")).unwrap_or_default();
                !at.starts_with("running") && !at.starts_with(&format!("{} ", libc::SYS_write))
            });
            assert_eq!(writer.join().unwrap(), Ok(()));
            assert_eq!(tried::read(tried::word(&region, 1)), Ok(9));
            region.pin(PAGE, PAGE).unwrap();
        })
        .well();
    }
}

/// What becomes of a page of a clone that could not have it, while the line waits that says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Meanwhile {
    /// There is a frame, and the program writes to it.
    Had,
    /// The page of the source that it is to have may be written to again.
    NotWanted,
}

#[test]
fn a_page_of_a_clone_stays_that_need_not_be_given_up_any_more() {
    let cases = [Meanwhile::Had, Meanwhile::NotWanted].into_iter();
    for (meanwhile, handler) in cases.flat_map(|meanwhile| [true, false].map(|handler| (meanwhile, handler))) {
        in_child(here!(), &format!("{meanwhile:?} {handler}"), || {
            static BEGINS: AtomicBool = AtomicBool::new(false);
            static GOES_ON: AtomicBool = AtomicBool::new(false);
            tried::catch();
            let told = OneLine::new();
            let domain = Domain::with_frames(FRAMES * PAGE).workers(2).build().unwrap();
            let mut builder = domain.region(PAGES * PAGE).name("heap");
            if handler {
                builder = builder.handler(|_: &MemoryFault<'_>| Answer::Refuse);
            }
            let mut source = builder.zero().unwrap();
            number_pages(&mut source);
            let clone = source.cow_clone(MemoryStore::new(1 << 20).unwrap()).unwrap();
            source.protect(PAGE, PAGE, Protection::Read).unwrap();
            // What has no store stays in its frame.
            let mut held = domain.region(2 * FRAMES * PAGE).zero().unwrap();
            assert!(number_what_fits(&mut held) > 0);
            let at = tried::word(&source, 1).addr();
            let writer = std::thread::spawn(move || {
                until("no mapping is left", || BEGINS.load(Ordering::Acquire));
                tried::write(at as *mut u64, 6)
            });
            // They take a mapping, too.
            let mut from = told.from.try_clone().unwrap();
            std::thread::spawn(move || {
                until("the line may go on", || GOES_ON.load(Ordering::Acquire));
                while from.read(&mut [0; PAGE]).is_ok() {}
            });
            if !use_up_mappings(0) {
                return;
            }
            BEGINS.store(true, Ordering::Release);
            until("the clone's line waits behind the source's", || told.is_full() && telling().is_some());
            held.discard(0, PAGE).unwrap();
            match meanwhile {
                Meanwhile::Had => assert_eq!(tried::write(tried::word(&clone, 1), 9), Ok(())),
                Meanwhile::NotWanted => source.protect(PAGE, PAGE, Protection::ReadWrite).unwrap(),
            }
            GOES_ON.store(true, Ordering::Release);
            let written = writer.join().unwrap();
            told.end();
            assert_eq!(written.is_ok(), meanwhile == Meanwhile::NotWanted);
            // Whether its source has the page, and what is in the clone's.
            let (has, word) = match meanwhile {
                Meanwhile::Had => (false, 9),
                Meanwhile::NotWanted => (true, 2),
            };
            assert_eq!(source.pin(PAGE, PAGE).is_ok(), has);
            assert_eq!(tried::read(tried::word(&clone, 1)), Ok(word));
            clone.pin(PAGE, PAGE).unwrap();
        })
        .well();
    }
}
