//! Whose file stands at a number that is lent, in a forked child: what runs there first opens and closes files of its own.

use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use selfpage::pager::UserPager;
use selfpage_core::addr::PageBytes;

use crate::child::forked;
use crate::descriptors::close_all;
use crate::lent::{ByFile, CASES, PAGES, domain, numbered_file};
use crate::scenario::{PAGE, check_pages, here, in_child};

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
