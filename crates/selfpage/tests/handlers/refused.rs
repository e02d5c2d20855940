//! Pages whose mapping refuses what a handler has refused, and when it does so no longer.

use selfpage::{Answer, DescriptorTable, Domain, MemoryFault, Protection, Trap};

use crate::scenario::{here, in_child};
use crate::{PAGE, tried, word};

fn refuse(_: &MemoryFault<'_>) -> Answer {
    Answer::Refuse
}

#[test]
fn what_the_program_has_mapped_over_a_refused_page_stays_closed() {
    for (table, case) in [(DescriptorTable::Shared, "shared"), (DescriptorTable::Private, "private")] {
        in_child(here!(), case, || {
            tried::catch();
            let domain = Domain::with_frames(64 * PAGE).descriptor_table(table).build().unwrap();
            let mut region = domain.region(16 * PAGE).trap(Trap::Worker).handler(refuse).zero().unwrap();
            region.protect(0, 16 * PAGE, Protection::Read).unwrap();
            assert!((2..8).all(|page| tried::write(word(&region, page), 1) == Err(libc::SIGSEGV)));
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            for guard in [3, 6].map(|page| word(&region, page).cast()) {
                // SAFETY: test: a page of the region, which nobody holds a reference into.
                assert_eq!(unsafe { libc::mmap(guard, PAGE, libc::PROT_NONE, flags, -1, 0) }, guard);
            }
            region.protect(0, 5 * PAGE, Protection::ReadWrite).unwrap();
            region.discard(5 * PAGE, 3 * PAGE).unwrap();
            region.protect(5 * PAGE, 3 * PAGE, Protection::ReadWrite).unwrap();
            for page in 2..8 {
                let expected = if [3, 6].contains(&page) { Err(libc::SIGSEGV) } else { Ok(()) };
                assert_eq!(tried::write(word(&region, page), 2), expected, "page {page}");
            }
        })
        .well();
    }
}

#[test]
fn the_program_takes_refusals_back_itself_where_it_gives_access_itself() {
    in_child(here!(), "worker", || {
        tried::catch();
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let builder = domain.region(16 * PAGE).trap(Trap::Worker).handler(refuse).without_access();
        let mut region = builder.zero().unwrap();
        let allow = |at: *mut u64, access| {
            // SAFETY: test: a page of the region, which nobody holds a reference into.
            assert_eq!(unsafe { libc::mprotect(at.cast(), PAGE, access) }, 0);
        };
        let (page, closed) = (word(&region, 3), word(&region, 4));
        for at in [page, closed] {
            allow(at, libc::PROT_READ | libc::PROT_WRITE);
            assert_eq!(tried::write(at, 1), Ok(()));
        }
        region.protect(3 * PAGE, 2 * PAGE, Protection::Read).unwrap();
        assert_eq!([page, closed].map(|at| tried::write(at, 2)), [Err(libc::SIGSEGV); 2]);
        // Whatever is done about the pages, what the program has closed itself since stays closed.
        allow(closed, libc::PROT_NONE);
        region.protect(3 * PAGE, 2 * PAGE, Protection::ReadWrite).unwrap();
        region.pin(3 * PAGE, PAGE).unwrap();
        region.unpin(3 * PAGE, PAGE).unwrap();
        region.discard(4 * PAGE, PAGE).unwrap();
        assert_eq!(tried::read(closed), Err(libc::SIGSEGV));
        assert_eq!((tried::write(page, 2), tried::read(page)), (Err(libc::SIGSEGV), Ok(1)));
        allow(page, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!((tried::write(page, 3), tried::read(page)), (Ok(()), Ok(3)));
    })
    .well();
}
