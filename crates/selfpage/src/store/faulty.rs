//! A store that fails as told, for tests of those who stand on one.

use std::sync::Mutex;

use selfpage_core::pager::{Context, PagerError};

use super::{BackingStore, Blok, MemoryStore, ReadBlok, WriteBlok};

/// What goes wrong.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Every read fails with this.
    pub(crate) read: Option<PagerError>,
    /// Every write to this blok and those after it fails with this.
    pub(crate) write: Option<(Blok, PagerError)>,
    /// Every read of this blok finds its first bit flipped.
    pub(crate) flipped: Option<Blok>,
}

/// A [`MemoryStore`] with [`Faults`].
pub(crate) struct FaultyStore {
    pub(crate) store: MemoryStore,
    pub(crate) faults: Mutex<Faults>,
}

impl FaultyStore {
    pub(crate) fn new(capacity_bytes: u64) -> FaultyStore {
        FaultyStore { store: MemoryStore::new(capacity_bytes).unwrap(), faults: Mutex::default() }
    }

    pub(crate) fn set(&self, faults: Faults) {
        *self.faults.lock().unwrap() = faults;
    }
}

impl BackingStore for FaultyStore {
    fn claim(&self, want: u32) -> Result<(Blok, u32), PagerError> {
        self.store.claim(want)
    }

    fn release(&self, first: Blok, count: u32) {
        self.store.release(first, count);
    }

    fn reads_in_trap(&self) -> bool {
        false
    }

    fn read(&self, context: Context, bloks: &mut [ReadBlok<'_>]) -> Result<(), PagerError> {
        let faults = *self.faults.lock().unwrap();
        faults.read.map_or(Ok(()), Err)?;
        self.store.read(context, bloks)?;
        for read in bloks.iter_mut().filter(|read| Some(read.blok) == faults.flipped) {
            read.bytes[0] ^= 1;
        }
        Ok(())
    }

    fn write(&self, bloks: &mut [WriteBlok<'_>]) {
        let faults = *self.faults.lock().unwrap();
        self.store.write(bloks);
        if let Some((from, error)) = faults.write {
            bloks.iter_mut().filter(|write| write.blok >= from).for_each(|write| write.outcome = Err(error));
        }
    }
}
