//! A policy of one's own: pages with even numbers go first. It is a joke, but the counters show that it is obeyed; and a
//! policy that lies does no harm, since each suggestion is checked.
//!
//! Run it with `cargo run --example own_policy -p selfpage`.

use std::sync::atomic::Ordering;

use selfpage::store::MemoryStore;
use selfpage::{Domain, Frame, PAGE_BYTES, PageNo, Policy, Use};

const FRAMES: usize = 1024;

/// The frames that hold pages, by whether the page has an even number.
#[derive(Default)]
struct EvenFirst {
    even: Vec<Frame>,
    odd: Vec<Frame>,
}

impl Policy for EvenFirst {
    fn admitted(&mut self, frame: Frame, page: PageNo, _priority: u8, _used: Use) {
        // A frame that is still listed under an older page is listed anew.
        self.even.retain(|listed| *listed != frame);
        self.odd.retain(|listed| *listed != frame);
        if page.0.is_multiple_of(2) { self.even.push(frame) } else { self.odd.push(frame) }
    }

    fn victim(&mut self) -> Option<Frame> {
        self.even.pop().or_else(|| self.odd.pop())
    }
}

fn main() -> selfpage::Result<()> {
    let domain = Domain::with_frames(FRAMES * PAGE_BYTES).own_policy(Box::new(EvenFirst::default())).build()?;
    let store = MemoryStore::new((8 * FRAMES * PAGE_BYTES) as u64)?;
    let mut region = domain.region(FRAMES * 5 / 4 * PAGE_BYTES).stored(store)?;
    for (number, page) in region.as_mut_slice::<u8>().chunks_mut(PAGE_BYTES).enumerate() {
        page[0] = number as u8;
    }

    let first = region.as_ptr() as usize / PAGE_BYTES;
    let in_core = |parity: usize| {
        let pages = region.residency().iter().enumerate();
        pages.filter(|(index, page)| (first + index) % 2 == parity && page.load(Ordering::Relaxed) == 1).count()
    };
    let (even, odd) = (in_core(0), in_core(1));
    println!("in core: {even} pages with even numbers, {odd} with odd ones");
    assert!(even < odd && even + odd <= FRAMES);
    assert!(region.as_slice::<u8>().chunks(PAGE_BYTES).enumerate().all(|(number, page)| page[0] == number as u8));
    Ok(())
}
