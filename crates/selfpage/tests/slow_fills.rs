//! What waits until nobody is inside a domain's gate ends, also beside a pager that keeps threads there for long.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use selfpage::Domain;
use selfpage::pager::UserPager;
use selfpage_core::addr::PageBytes;

mod child;

const PAGE: usize = 4096;
const PAGES: usize = 2048;
const READERS: usize = 16;
const FILL: Duration = Duration::from_secs(1);
/// When a reader begins after the one before: none of their fills end together.
const APART: Duration = Duration::from_millis(100);
/// How long one call may take before it hangs. Until then there are frames for all that is read.
const LIMIT: Duration = Duration::from_secs(60);

/// Takes its time over each page, which holds its number.
struct Slow;

impl UserPager for Slow {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        std::thread::sleep(FILL);
        bytes[..8].copy_from_slice(&index.to_ne_bytes());
        Ok(())
    }
    fn save(&self, _index: u64, _bytes: &PageBytes) -> io::Result<()> {
        unreachable!("nothing is written")
    }
}

/// Tells the readers to end, also where a panic does: the scope waits for them.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn calls_that_close_the_gate_end_beside_slow_fills() {
    let domain = Domain::with_frames(PAGES * PAGE).workers(READERS as u32).build().unwrap();
    let region = domain.region(PAGES * PAGE).user(Slow).unwrap();
    let words = region.as_slice::<u64>();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&is_over);
        for number in 0..READERS {
            let is_over = &is_over;
            scope.spawn(move || {
                std::thread::sleep(APART * number as u32);
                // Each page once, in an order that no reading ahead follows.
                for turn in (number..PAGES).step_by(READERS).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                    let page = turn * 7919 % PAGES;
                    assert_eq!(words[page * PAGE / 8], page as u64);
                }
            });
        }
        while domain.stats().counts.fills_total < READERS as u64 {
            std::thread::yield_now();
        }
        let (tell, told) = channel();
        let (domain, region) = (&domain, &region);
        scope.spawn(move || {
            drop(domain.region(PAGE).zero().unwrap());
            tell.send(()).unwrap();
            region.while_still(|| ()).unwrap();
            tell.send(()).unwrap();
            assert_eq!(child::in_child(|| true), 0);
            tell.send(()).unwrap();
        });
        for call in ["the end of a region", "while_still", "fork"] {
            told.recv_timeout(LIMIT).unwrap_or_else(|_| panic!("{call} has not ended after {LIMIT:?}"));
            assert!(domain.stats().counts.fills_total < PAGES as u64, "the readers came to their end first");
        }
    });
}
