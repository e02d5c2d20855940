//! Contents that a handler gives, which are those that a pager last filled or saved: what it knew of them then says nothing now.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use selfpage::pager::UserPager;
use selfpage::{Answer, Domain, FaultHandler, FaultKind, FileAccess, MemoryFault, PageBytes};

use crate::{PAGE, TRAPS, take_frame, word};

/// It gives pages of this byte while it is told to.
#[derive(Clone)]
struct Gives(u8, Arc<AtomicBool>);

impl FaultHandler for Gives {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        if fault.kind() != FaultKind::Missing || !self.1.load(SeqCst) {
            return Answer::Pass;
        }
        // SAFETY: test: nobody refers to the page.
        unsafe { fault.map(&[self.0; PAGE]) }.unwrap();
        Answer::Handled
    }

    fn asks_first(&self) -> bool {
        true
    }
}

/// A pager of the program's own that keeps what it saves.
#[derive(Clone, Default)]
struct Keeps(Arc<Mutex<HashMap<u64, PageBytes>>>);

impl UserPager for Keeps {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        if let Some(kept) = self.0.lock().unwrap().get(&index) {
            *bytes = *kept;
        }
        Ok(())
    }

    fn save(&self, index: u64, bytes: &PageBytes) -> io::Result<()> {
        self.0.lock().unwrap().insert(index, *bytes);
        Ok(())
    }

    fn forget(&self, index: u64) {
        self.0.lock().unwrap().remove(&index);
    }
}

#[test]
fn what_a_pager_of_the_programs_own_has_forgotten_is_saved_when_it_is_given_again() {
    for (trap, name) in TRAPS {
        let gives = Gives(7, Arc::new(true.into()));
        let domain = Domain::with_frames(256 * PAGE).build().unwrap();
        let builder = domain.region(16 * PAGE).trap(trap).handler(gives.clone());
        let mut region = builder.user(Keeps::default()).unwrap();
        // SAFETY: test: a word of the region.
        let read = |region: &selfpage::Region| unsafe { region.as_ptr().read_volatile() };
        assert_eq!(read(&region), 7, "{name}");
        take_frame(&region, 0);
        region.discard(0, PAGE).unwrap();
        assert_eq!(read(&region), 7, "{name}: given again");
        take_frame(&region, 0);
        gives.1.store(false, SeqCst);
        assert_eq!(read(&region), 7, "{name}: from its pager");
    }
}

#[test]
fn what_a_file_has_no_more_is_saved_when_it_is_given() {
    for (trap, name) in TRAPS {
        let gives = Gives(5, Arc::default());
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        std::fs::write(file.path(), [5; 4 * PAGE]).unwrap();
        let domain = Domain::with_frames(256 * PAGE).build().unwrap();
        let builder = domain.region(0).trap(trap).handler(gives.clone());
        let region = builder.file(file.path(), 0, FileAccess::ReadWrite).unwrap();
        // SAFETY: test: a word of the region.
        let read = || unsafe { region.as_ptr().read_volatile() };
        assert_eq!(read(), 5, "{name}");
        take_frame(&region, 0);
        file.as_file().write_all_at(&[6; PAGE], 0).unwrap();
        gives.1.store(true, SeqCst);
        assert_eq!(read(), 5, "{name}: given");
        region.flush(0, PAGE).unwrap();
        let mut saved = [0; PAGE];
        file.as_file().read_exact_at(&mut saved, 0).unwrap();
        assert!(saved == [5; PAGE], "{name}: the file has {}", saved[0]);
    }
}

/// What is appended to a file behind the page's contents is no part of them.
#[test]
fn what_is_appended_behind_given_contents_stays() {
    let gives = Gives(5, Arc::new(true.into()));
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    std::fs::write(file.path(), [6; PAGE + 8]).unwrap();
    let domain = Domain::with_frames(256 * PAGE).build().unwrap();
    let region = domain.region(0).handler(Ends(gives)).file(file.path(), 0, FileAccess::ReadWrite).unwrap();
    // SAFETY: test: a word of the region.
    assert_eq!(unsafe { word(&region, 1).read_volatile() }, 0x0505_0505_0505_0505);
    file.as_file().write_all_at(&[8; PAGE - 8], PAGE as u64 + 8).unwrap();
    region.flush(0, region.len_bytes()).unwrap();
    let mut saved = [0; PAGE];
    file.as_file().read_exact_at(&mut saved, PAGE as u64).unwrap();
    assert!(saved[..8] == [5; 8] && saved[8..] == [8; PAGE - 8], "{saved:?}");
}

/// It gives what a page of eight bytes at the end of a file has.
struct Ends(Gives);

impl FaultHandler for Ends {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        let mut contents = [0; PAGE];
        contents[..8].fill(self.0.0);
        // SAFETY: test: nobody refers to the page.
        unsafe { fault.map(&contents) }.unwrap();
        Answer::Handled
    }

    fn asks_first(&self) -> bool {
        true
    }
}
