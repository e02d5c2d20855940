//! Regions whose first contents are a snapshot's.

use std::io;
use std::sync::Arc;

use selfpage_core::addr::{PAGE_BYTES, PageRange};
use selfpage_core::fault::range;
use selfpage_core::pageset::PageSet;
use selfpage_core::region::Rights;
use selfpage_core::sync::{AtomicU32, AtomicU64};

use super::{Builder, Means, Region};
use crate::arena::Arena;
use crate::error::{Error, Kind, Result};
use crate::pager::{Noted, Restored, Stored};
use crate::snapshot::Snapshot;
use crate::store::{BackingStore, Descriptor};

impl Builder<'_> {
    /// Region number `which` of a snapshot, as it was then; what changes is paged to `store`, and the snapshot's file is only
    /// read. A length of 0 stands for the region's own. Pages come in when they are needed, each compared with its hash; those
    /// that were in core at the time are fetched at once, as many of them as all the frames can hold; a page that is touched meanwhile
    /// comes before them.
    ///
    /// # Errors
    /// The snapshot has no such region, or a smaller one; its file cannot be opened again. Else as for [`Builder::stored_in`].
    pub fn restored(mut self, snapshot: &Snapshot, which: usize, store: impl BackingStore + 'static) -> Result<Region> {
        let object = || format!("region {which} of snapshot {}", snapshot.path().display());
        let saved = snapshot.regions().get(which);
        let saved = saved.ok_or_else(|| {
            let count = snapshot.regions().len();
            Error::new(
                Kind::Invalid,
                "restore",
                object(),
                format!("the snapshot has {count}, numbered from 0: name one of these"),
            )
        })?;
        let saved_bytes = saved.size_pages as usize * PAGE_BYTES;
        if self.len_bytes == 0 {
            self.len_bytes = saved_bytes;
        }
        if self.len_bytes > saved_bytes {
            let cause = format!(
                "{} bytes wanted, and it has {saved_bytes}: ask for no more, or for 0, which stands for all",
                self.len_bytes
            );
            return Err(Error::new(Kind::Invalid, "restore", object(), cause));
        }
        if self.name.is_empty() {
            self.name = saved.name.clone();
        }
        let failed = |cause: io::Error| Error::system("restore", object(), cause);
        let file = Descriptor::new(snapshot.reopened()?.into()).map_err(failed)?;
        let (index, first) = (snapshot.index().clone(), snapshot.first_page(which));
        let store: Arc<dyn BackingStore> = Arc::new(store);
        let means = Means { files: vec![file.numbered()], store: Some(store.clone()), ..Means::default() };
        let region = self.bind_with(Rights::ReadWrite, means, move |len, hash| {
            let words = PageSet::words(len);
            let mut arena = Arena::new(
                Arena::bytes_for::<AtomicU32>(len)
                    + Arena::bytes_for::<AtomicU64>(len)
                    + Arena::bytes_for::<AtomicU64>(words),
            )?;
            // SAFETY: table-memory: the arena goes with the region, after its pager.
            let pager = unsafe {
                let stored = Stored::new(store, arena.table(len), Noted::new(hash, arena.table(len)));
                Restored::new(file, index, first, PageSet::new(arena.table(words)), stored)
            };
            Ok((Box::new(pager), Some(arena)))
        })?;
        region.fetch_first(snapshot.in_core(which));
        Ok(region)
    }
}

impl Region {
    /// Has pager threads bring in what was in core at the time, as runs of pages: the first of it, as far as the frames go.
    fn fetch_first(&self, in_core: impl Iterator<Item = (u64, u64)>) {
        let all = self.core().range;
        let mut room = u64::from(range::room(self.life.inner.state()));
        let mut left_out = 0;
        for (first, count) in in_core {
            // Within the region, which may be shorter.
            let count = count.min(all.count.saturating_sub(first)).min(room);
            if self.advise(PageRange { first: all.first.plus(first), count }) {
                room -= count;
            } else {
                left_out += count;
            }
        }
        if left_out > 0 {
            tracing::warn!(
                region = %self.bound.name,
                pages = left_out,
                "the domain has more to fetch than it can note"
            );
        }
    }
}
