//! A store of the program's own that gives out the last bloks that there can be.

use std::collections::HashMap;
use std::sync::Mutex;

use selfpage::pager::{Context, PagerError};
use selfpage::store::{BackingStore, Blok, ReadBlok, WriteBlok};
use selfpage::{Domain, Trap};

use crate::scenario::{here, in_child};
use crate::{PAGE, TRAPS, take_frame, word};

/// It gives out bloks from the last one downwards. The first time it says that it has given as many as were asked for, of which there is
/// but one.
#[derive(Default)]
struct High(Mutex<(HashMap<u32, [u8; PAGE]>, u32)>);

impl BackingStore for High {
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        let given = &mut self.0.lock().unwrap().1;
        *given += if *given == 0 { 1 } else { want };
        Ok((Blok(u32::MAX - (*given - 1)), want))
    }

    fn release(&self, _first: Blok, _count: u32) {}

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn read(&self, _context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        let kept = &self.0.lock().unwrap().0;
        for read in bloks {
            *read.bytes = *kept.get(&read.blok.0).ok_or(PagerError::Corrupt)?;
        }
        Ok(())
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        let kept = &mut self.0.lock().unwrap().0;
        for write in bloks {
            kept.insert(write.blok.0, *write.bytes);
            write.outcome = Ok(());
        }
    }
}

#[test]
fn pages_come_back_from_the_last_bloks_that_there_can_be() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || pages_come_back(trap)).well();
    }
}

fn pages_come_back(trap: Trap) {
    let domain = Domain::with_frames(256 * PAGE).build().unwrap();
    let region = domain.region(16 * PAGE).trap(trap).stored(High::default()).unwrap();
    // SAFETY: test: a word of the region.
    (0..8).for_each(|page| unsafe { word(&region, page).write_volatile(page as u64 + 1) });
    region.flush(0, 8 * PAGE).unwrap();
    (0..8).for_each(|page| take_frame(&region, page));
    for page in 0..16 {
        let expected = if page < 8 { page as u64 + 1 } else { 0 };
        // SAFETY: test: as above.
        assert_eq!(unsafe { word(&region, page).read_volatile() }, expected, "page {page}");
    }
}
