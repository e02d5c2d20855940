//! Copies that stand in for a move, where the kernel moves no page.

use super::{LinuxMmu, drop_contents, dropped, load, traps_writes};
use crate::addr::{PAGE_BYTES, PageNo, VirtAddr};
use crate::linux::errno::Errno;
use crate::linux::memory::{self, Advice};
use crate::linux::pagemap::Categories;
use crate::linux::uffd::{Uffd, Waiters, Writing};
use crate::mmu::{Mmu, Partial, Refusal, Trap};

impl LinuxMmu {
    /// Copies `count` populated slots in, and empties them.
    pub(super) fn copy_in(
        &self,
        uffd: Uffd,
        page: usize,
        slot: usize,
        count: u32,
        waiters: Waiters,
        writing: Writing,
    ) -> Result<(), Partial> {
        if count == 0 {
            return Ok(());
        }
        // SAFETY: pool-owned, region-owned: the caller holds the frames, and the pages are absent or the kernel refuses.
        let copied = unsafe { uffd.copy(page, slot, count as usize * PAGE_BYTES, waiters, writing) };
        let done_bytes = copied.map_or_else(|stopped| stopped.done_bytes, |()| count as usize * PAGE_BYTES);
        if done_bytes > 0 {
            drop_contents(slot, done_bytes);
        }
        copied.map_err(|stopped| {
            let why = match stopped.why {
                // The slots were just seen: what is missing is the region.
                Errno::NOENT => Refusal::Foreign,
                why => self.refusal(why, page.wrapping_add(done_bytes), slot.wrapping_add(done_bytes)),
            };
            Partial { done: (done_bytes / PAGE_BYTES) as u32, why }
        })
    }

    pub(super) fn copy_and_drop(&self, page: usize, slot: usize) -> Result<(), Refusal> {
        let known = self.categories(page);
        if known.is_some_and(|known| !known.populated()) {
            return Err(Refusal::Hole);
        }
        // Nobody can write to a page that traps, and this thread must not.
        if known.is_some_and(traps_writes) {
            return self.copy_and_drop_fixed(page, slot);
        }
        // SAFETY: region-owned: a populated page keeps its contents.
        if unsafe { memory::advise(page, PAGE_BYTES, Advice::PopulateWrite) } != Err(Errno::INVAL) {
            // The program may write it, and something else keeps it from moving (execute rights, locking, a key): what a device
            // writes between the copy and the drop would be lost.
            return Err(Refusal::Pinned);
        }
        if known.is_some_and(|known| known.contains(Categories::NOTED)) {
            // Writes to a protected page are noted there, and do not wait.
            return self.copy_and_drop_fixed(page, slot);
        }
        // The program may write it again at any moment. Any userfaultfd protects pages of all of them.
        self.copy_and_drop_held(Trap::Worker, VirtAddr(page).page(), slot)
    }

    /// Copies a page that nobody wants protected while every write to it waits, and drops it.
    pub(super) fn copy_and_drop_held(&self, trap: Trap, page: PageNo, slot: usize) -> Result<(), Refusal> {
        self.set_writing(trap, page, 1, Writing::Protected).map_err(|partial| partial.why)?;
        let copied = self.copy_and_drop_fixed(page.addr().0, slot);
        if copied.is_err() {
            let _ = self.set_writing(trap, page, 1, Writing::Allowed);
        }
        copied
    }

    /// Copies a page that nobody can write into its frame's slot, whatever is there, and drops it.
    pub(super) fn copy_and_drop_fixed(&self, page: usize, slot: usize) -> Result<(), Refusal> {
        // SAFETY: pool-owned: the caller holds the frame.
        unsafe { memory::advise(slot, PAGE_BYTES, Advice::PopulateWrite) }.map_err(|_| Refusal::NoMemory)?;
        let copied = self.read(page, slot).and_then(|()| {
            // The kernel drops nothing that is sealed and may not be written: what stays mapped stays in its frame.
            if dropped(page, PAGE_BYTES) { Ok(()) } else { Err(Refusal::Pinned) }
        });
        if copied.is_err() {
            drop_contents(slot, PAGE_BYTES);
        }
        copied
    }

    /// Copies a page, whoever may read it, into a populated slot.
    pub(super) fn read(&self, page: usize, slot: usize) -> Result<(), Refusal> {
        // SAFETY: pool-owned: the caller holds the frame, and no reference to the slot lives while it is filled.
        match unsafe { load(&self.memory).read_at(slot, PAGE_BYTES, page) } {
            Ok(PAGE_BYTES) => Ok(()),
            Err(Errno::BADF) => Err(Refusal::NoDescriptor),
            _ if self.absent(page) => Err(Refusal::Hole),
            // It is there: whoever took it for dropped would take its contents for zeros.
            _ => Err(Refusal::Denied),
        }
    }
}
