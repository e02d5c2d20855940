//! A closure's own page tables, from within: it reads them, and asks its handler to change them.

use std::ptr::with_exposed_provenance;

use selfpage_core::addr::{PageNo, PageRange, VirtAddr};
use selfpage_core::capability::{self, Kernel, Rights, Space};
use selfpage_core::tables::{AddressSpace, ENTRIES, Entries, Entry, PageSize, Range, index};

use crate::entry::Call;
use crate::guest::{Parts, handler_call};

/// Calls of a program's own have smaller numbers.
const PROTECT: u64 = 1 << 63;
const CLEAR_DIRTY: u64 = PROTECT + 1;

const PAGE: u64 = 4096;
const PAGES_IN_TABLE: u64 = ENTRIES as u64;

/// Page tables where a closure can read them: accessed and dirty bits without a call.
///
/// # Examples
/// Which of 64 pages a closure wrote to:
///
/// ```no_run
/// use selfpage_core::addr::{PageNo, PageRange, VirtAddr};
/// use selfpage_core::capability::{Handle, Object, Rights, Type};
/// use selfpage_core::fault::{Fault, Outcome};
/// use selfpage_core::tables::{Entry, PageSize, Range};
/// use selfpage_guest::{Call, Guest, Handler, Machine, Parts, answer, clear_dirty_bits};
///
/// struct Tables(Parts<'static>);
///
/// impl Handler for Tables {
///     fn fault(&mut self, _fault: Fault) -> Outcome {
///         Outcome::NotOurs
///     }
///     fn answer(&mut self, call: Call) -> u64 {
///         let Parts { kernel, space, tables, .. } = &mut self.0;
///         answer(kernel, space, tables, call).unwrap_or(u64::MAX)
///     }
/// }
///
/// let machine = Box::leak(Box::new(Machine::new(16 << 20, 1 << 20)?));
/// let (guest, mut parts) = Guest::new(machine)?;
/// let pages = PageRange { first: PageNo(0x1_2345_6789), count: 64 };
/// let frames = Handle::at_root(parts.first_place);
/// let object = Object { kind: Type::Frame, size_bits: 18 };
/// parts.kernel.retype(&parts.space, parts.ram, object, 1, parts.root, parts.first_place).unwrap();
/// let range = Range { at: pages.first.addr(), len_bytes: 1 << 18, pages: PageSize::Small4KiB };
/// parts.tables.map(&mut parts.kernel, range, frames, 0, Rights::READ | Rights::WRITE).unwrap();
/// let view = parts.show_tables(pages, VirtAddr(0x2345_6789_a000)).unwrap();
/// // SAFETY: nothing is made of what the guest has for itself; the closure touches pages that are mapped.
/// let dirty = unsafe {
///     guest.run(Tables(parts), |_| 0, move || {
///         clear_dirty_bits(pages);
///         std::ptr::with_exposed_provenance_mut::<u64>(pages.first.addr().0).write_volatile(7);
///         pages.pages().filter(|page| view.entry(*page).is_some_and(Entry::is_dirty)).count()
///     })
/// };
/// assert_eq!(dirty.unwrap(), 1);
/// # Ok::<(), selfpage_guest::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TableView {
    at: VirtAddr,
    of: PageRange,
}

impl TableView {
    /// The entry of a page as the CPU has it now; `None`: the page is not in the range that is shown.
    ///
    /// # Safety
    /// *guest-view*: a closure, or its handler, of the guest runs this whose tables are shown.
    pub unsafe fn entry(&self, page: PageNo) -> Option<Entry> {
        if !self.of.contains(page) {
            return None;
        }
        let in_view = page.0 - self.of.first.0 / PAGES_IN_TABLE * PAGES_IN_TABLE;
        let word = with_exposed_provenance::<u64>(self.at.0 + in_view as usize * size_of::<u64>());
        // SAFETY: guest-view: a word of a table, which the CPU may write at any time.
        Some(Entry(unsafe { word.read_volatile() }))
    }
}

impl Parts<'_> {
    /// Shows a closure the tables for a range of 4 KiB pages, at an address where nothing is: one page for each 2 MiB that
    /// the range touches. Tables that are missing are made, empty.
    ///
    /// # Errors
    /// [`capability::Error::EntryTaken`], [`capability::Error::OutOfMemory`], [`capability::Error::NotCanonical`], …
    pub fn show_tables(&mut self, of: PageRange, at: VirtAddr) -> Result<TableView, capability::Error> {
        let mut shown = at;
        let mut page = of.first;
        while of.contains(page) {
            if self.tables.table(&self.kernel, page.addr(), 1).is_err() {
                // There is no other way to have one made than to use it.
                let once = pages(page, 1);
                self.tables.map(&mut self.kernel, once, self.own, 0, Rights::READ).map_err(|stopped| stopped.why)?;
                self.tables.unmap(&mut self.kernel, once).map_err(|stopped| stopped.why)?;
            }
            let table = self.tables.table(&self.kernel, page.addr(), 1)?;
            let range = Range { at: shown, len_bytes: PAGE, pages: PageSize::Small4KiB };
            self.tables.map(&mut self.kernel, range, table, 0, Rights::READ).map_err(|stopped| stopped.why)?;
            shown = VirtAddr(shown.0 + PAGE as usize);
            page = page.plus(PAGES_IN_TABLE - page.0 % PAGES_IN_TABLE);
        }
        Ok(TableView { at, of })
    }
}

/// Does in the handler what a closure asked for by [`protect`] or [`clear_dirty_bits`], under the rules: no page is ever given more
/// rights than the capability has that it was mapped with. `None`: it asked for something else. For
/// [`Handler::answer`](crate::Handler::answer).
pub fn answer(kernel: &mut Kernel<'_>, space: &Space, tables: &AddressSpace, call: Call) -> Option<u64> {
    let [first, count, rights] = call.arguments;
    let range = PageRange { first: PageNo(first), count };
    match call.number {
        PROTECT => {
            let done = tables.protect(kernel, pages(range.first, count), decoded(rights));
            Some(done.map_or_else(|stopped| stopped.done_bytes / PAGE, |()| count))
        }
        CLEAR_DIRTY => Some(clear(kernel, space, tables, range)),
        _ => None,
    }
}

fn clear(kernel: &mut Kernel<'_>, space: &Space, tables: &AddressSpace, range: PageRange) -> u64 {
    let mut cleared = 0;
    let mut done = 0;
    while done < range.count {
        let at = VirtAddr((range.first.0.wrapping_add(done) as usize).wrapping_mul(PAGE as usize));
        let first = index(at, 1);
        let count = u64::from(ENTRIES - first).min(range.count - done) as u16;
        let entries = tables.table(kernel, at, 1).map(|table| Entries { table, first, count });
        // Where there is no table no page is dirty.
        cleared += entries.and_then(|entries| kernel.clear_dirty_bits(space, entries)).map_or(0, u64::from);
        done += u64::from(count);
    }
    cleared
}

/// Changes what can be done with pages of one's own, from within a closure whose handler answers with [`answer()`]. How many pages were
/// changed, from the first on: at those behind something is not mapped, or was mapped with fewer rights. Those of one table are changed
/// together or not at all.
///
/// # Safety
/// *guest-host-call*: a closure in a guest runs this.
pub unsafe fn protect(range: PageRange, rights: Rights) -> u64 {
    // SAFETY: guest-host-call: as the caller promises.
    unsafe { handler_call(PROTECT, [range.first.0, range.count, coded(rights)]) }
}

/// Clears the dirty bits of pages, so that the next write to each sets its bit again; from within a closure whose handler answers
/// with [`answer()`]. How many were set.
///
/// # Safety
/// *guest-host-call*: a closure in a guest runs this.
pub unsafe fn clear_dirty_bits(range: PageRange) -> u64 {
    // SAFETY: guest-host-call: as the caller promises.
    unsafe { handler_call(CLEAR_DIRTY, [range.first.0, range.count, 0]) }
}

const ALL: [Rights; 3] = [Rights::READ, Rights::WRITE, Rights::EXECUTE];

fn coded(rights: Rights) -> u64 {
    ALL.iter().enumerate().map(|(bit, right)| u64::from(rights.contain(*right)) << bit).sum()
}

fn decoded(code: u64) -> Rights {
    let has = |bit: usize| code >> bit & 1 == 1;
    (0..ALL.len()).filter(|bit| has(*bit)).fold(Rights::NONE, |rights, bit| rights | ALL[bit])
}

const fn pages(first: PageNo, count: u64) -> Range {
    let at = VirtAddr((first.0 as usize).wrapping_mul(PAGE as usize));
    // Too long a range is refused.
    Range { at, len_bytes: count.saturating_mul(PAGE), pages: PageSize::Small4KiB }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_survive_a_call() {
        for rights in [Rights::NONE, Rights::READ, Rights::READ | Rights::WRITE, Rights::EXECUTE, Rights::ALL] {
            assert_eq!(decoded(coded(rights)), rights);
        }
    }
}
