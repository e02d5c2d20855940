//! What the program itself forbids with mprotect(2), beside accesses that were refused: only those are allowed again.

use selfpage::store::MemoryStore;
use selfpage::{Domain, Protection, Region};

use crate::scenario::{here, in_child};
use crate::{PAGE, tried, word};

/// A write that is refused, so that the mapping of its page is.
fn have_refused(region: &Region, page: usize) {
    region.protect(page * PAGE, PAGE, Protection::Read).unwrap();
    assert_eq!(tried::write(word(region, page), 1), Err(libc::SIGSEGV));
}

#[test]
fn what_the_program_forbids_stays_forbidden_after_a_refusal_elsewhere() {
    in_child(here!(), "", || {
        tried::catch();
        let domain = Domain::with_frames(256 * PAGE).build().unwrap();
        let mut region = domain.region(256 * PAGE).stored(MemoryStore::new(1 << 21).unwrap()).unwrap();
        region.as_mut_slice::<u8>().fill(7);
        [8, 9, 11, 64, 200].into_iter().for_each(|page| have_refused(&region, page));
        let forbid = |page: usize, count: usize| {
            // SAFETY: test: memory of the region.
            assert_eq!(unsafe { libc::mprotect(word(&region, page).cast(), count * PAGE, libc::PROT_READ) }, 0);
        };
        [(0, 1), (10, 1), (12, 52), (65, 1)].into_iter().for_each(|(page, count)| forbid(page, count));
        // By each of the calls that take refusals back.
        region.pin(0, PAGE).unwrap();
        region.pin(8 * PAGE, 60 * PAGE).unwrap();
        region.unpin(8 * PAGE, 60 * PAGE).unwrap();
        region.protect(8 * PAGE, 60 * PAGE, Protection::ReadWrite).unwrap();
        for page in [0, 10, 12, 63, 65] {
            assert_eq!(tried::write(word(&region, page), 1), Err(libc::SIGSEGV), "page {page}");
        }
        for page in [8, 9, 11, 64] {
            assert_eq!(tried::write(word(&region, page), 1), Ok(()), "page {page} was refused, and is not any more");
        }
        assert_eq!(tried::write(word(&region, 200), 1), Err(libc::SIGSEGV), "nobody has asked for it");
        region.protect(0, region.len_bytes(), Protection::ReadWrite).unwrap();
        assert_eq!(tried::write(word(&region, 200), 1), Ok(()));
        // Refused anew, and allowed anew.
        have_refused(&region, 64);
        region.discard(64 * PAGE, 2 * PAGE).unwrap();
        region.protect(64 * PAGE, PAGE, Protection::ReadWrite).unwrap();
        assert_eq!(tried::write(word(&region, 64), 1), Ok(()));
        assert_eq!(tried::write(word(&region, 65), 1), Err(libc::SIGSEGV));
    })
    .well();
}
