//! A page that is about to be given up, and is not after all.

use std::fs::DirEntry;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use selfpage::{Answer, Domain, MemoryFault, Protection};

use crate::no_mappings::use_up_mappings;
use crate::scenario::{PAGE, here, in_child, number_pages, until};
use crate::tried;

const FRAMES: usize = 64;
const PAGES: usize = 8;

/// The thread of this process that waits in a write: to standard error, by whichever number.
fn telling() -> Option<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let at = |task: &DirEntry| std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
    let task = tasks.into_iter().find(|task| at(task).starts_with(&format!("{} ", libc::SYS_write)))?;
    task.file_name().to_str()?.parse().ok()
}

/// The line that says so waits for whoever reads it.
#[test]
fn a_page_that_may_be_written_to_again_before_it_is_given_up_stays() {
    for handler in [true, false] {
        in_child(here!(), &format!("{handler}"), || {
            tried::catch();
            // Before there are pager threads, which have what this process has there.
            let (mut from, into) = std::io::pipe().unwrap();
            let blocks = |blocks: bool| {
                let flags = if blocks { 0 } else { libc::O_NONBLOCK };
                // SAFETY: test: flags of a pipe's.
                unsafe { libc::fcntl(into.as_raw_fd(), libc::F_SETFL, flags) };
            };
            // SAFETY: test: a descriptor that nobody has.
            let before = unsafe { libc::dup(2) };
            // SAFETY: test: nobody writes there now.
            unsafe { libc::dup2(into.as_raw_fd(), 2) };
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
            blocks(false);
            while (&into).write(&[b'.'; PAGE]).is_ok() {}
            while (&into).write(b".").is_ok() {}
            blocks(true);
            BEGINS.store(true, Ordering::Release);
            until("the line is written", || telling().is_some());
            let tells = telling().unwrap();
            region.protect(PAGE, PAGE, Protection::ReadWrite).unwrap();
            assert_eq!(tried::write(tried::word(&region, 1), 9), Ok(()));
            let mut told = [0; PAGE];
            until("the line is there", || {
                let count = from.read(&mut told).unwrap();
                told[..count].contains(&b'\n')
            });
            // SAFETY: test: as above.
            unsafe { libc::dup2(before, 2) };
            until("who told it waits for the next fault", || {
                let at = std::fs::read_to_string(format!("/proc/self/task/{tells}/syscall")).unwrap_or_default();
                !at.starts_with("running") && !at.starts_with(&format!("{} ", libc::SYS_write))
            });
            assert_eq!(writer.join().unwrap(), Ok(()));
            assert_eq!(tried::read(tried::word(&region, 1)), Ok(9));
            region.pin(PAGE, PAGE).unwrap();
        })
        .well();
    }
}
