//! A policy of the program's own decides which pages go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Frame, Kind, PageNo, Policy, Region, Use};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;
const FRAMES: usize = 1024;
const GOES: usize = 512;
const STAYS: usize = 128;
/// With the frames that are kept free, fewer pages have to go than there are that may.
const MORE: usize = 448;

/// Pages of one region go first, whatever was used when; the others in the order in which they came.
struct OneFirst {
    first_page: Arc<AtomicU64>,
    of_the_one: Vec<Frame>,
    others: Vec<Frame>,
}

impl Policy for OneFirst {
    fn admitted(&mut self, frame: Frame, page: PageNo, _priority: u8, _used: Use) {
        self.of_the_one.retain(|listed| *listed != frame);
        self.others.retain(|listed| *listed != frame);
        let first = self.first_page.load(SeqCst);
        if (first..first + GOES as u64).contains(&page.0) {
            self.of_the_one.push(frame);
        } else {
            self.others.push(frame);
        }
    }

    fn victim(&mut self) -> Option<Frame> {
        let list = if self.of_the_one.is_empty() { &mut self.others } else { &mut self.of_the_one };
        (!list.is_empty()).then(|| list.remove(0))
    }
}

fn region(domain: &Domain, pages: usize) -> Region {
    let store = MemoryStore::new((2 * pages * PAGE) as u64).unwrap();
    domain.region(pages * PAGE).stored(store).unwrap()
}

fn number(region: &mut Region) {
    let pages = region.as_mut_slice::<[u64; PAGE / 8]>();
    pages.iter_mut().enumerate().for_each(|(at, page)| page[0] = at as u64 + 1);
}

fn in_core(region: &Region) -> usize {
    region.residency().iter().filter(|page| page.load(SeqCst) == 1).count()
}

#[test]
fn the_pages_that_it_names_go_and_the_others_stay() {
    let first_page = Arc::new(AtomicU64::new(0));
    let policy = OneFirst { first_page: first_page.clone(), of_the_one: Vec::new(), others: Vec::new() };
    let domain = match Domain::with_frames(FRAMES * PAGE).own_policy(Box::new(policy)).build() {
        Err(error) if error.kind() == Kind::Unsupported => return skip::skip("uffd", &error.to_string()),
        domain => domain.unwrap(),
    };
    let (mut stays, mut goes, mut more) = (region(&domain, STAYS), region(&domain, GOES), region(&domain, MORE));
    first_page.store((goes.as_ptr() as usize / PAGE) as u64, SeqCst);
    // What stays is the oldest, so that any other order would have it go first.
    for region in [&mut stays, &mut goes] {
        number(region);
        // Then none of them has to be saved first: while it is, more would go.
        region.flush(0, region.len_bytes()).unwrap();
    }
    number(&mut more);
    assert_eq!((in_core(&stays), in_core(&more)), (STAYS, MORE), "of {GOES} that go {} stayed", in_core(&goes));
    assert!(in_core(&goes) <= FRAMES - STAYS - MORE, "{} pages in {FRAMES} frames", in_core(&goes));
    // What went is in the store.
    let pages = goes.as_slice::<[u64; PAGE / 8]>();
    assert!(pages.iter().enumerate().all(|(at, page)| page[0] == at as u64 + 1));
}
