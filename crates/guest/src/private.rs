//! What a guest's handler has for itself: memory that no capability stands for, and page tables that the rules do not make, since
//! they let it write what the rules keep from everybody else, the closure's page tables.

use std::cell::Cell;
use std::ptr::NonNull;

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::Rights;
use selfpage_core::frame::Table;
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::index;

use crate::descriptors::{Descriptors, RING3_CODE, RING3_DATA};
use crate::entry::{self, HANDLER_FRAME, INTERRUPTED_WORDS, VECTORS_BYTES};
use crate::error::{Error, Kind, Result};
use crate::memory::Memory;
use crate::steps::{FLAGS, Stepping};
use crate::vm::Vm;

/// Below RAM.
const PRIVATE: PhysAddr = PhysAddr(0x1000_0000);
const MOST_BYTES: usize = 0x2000_0000;
const TABLES: PhysAddr = PhysAddr(0x3000_0000);
/// Taken as they are used: enough to map some 30 GiB.
const TABLES_BYTES: usize = 64 << 20;

const PAGE: u64 = 4096;
/// What lies where: descriptors, the stack of ring 0, a gap, the stack of ring 3, vector registers; then what was asked for.
const RING0_STACK_END: u64 = 2 * PAGE - INTERRUPTED_WORDS;
const GAP: u64 = 2 * PAGE;
const STACK_BYTES: u64 = 64 * PAGE;
const STACK_END: u64 = GAP + PAGE + STACK_BYTES;
const FIRST_FREE: u64 = STACK_END + VECTORS_BYTES;

/// Bits of an entry: present, for ring 3.
const USABLE: u64 = 1 | 1 << 2;
const WRITABLE: u64 = 1 << 1;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Memory that a guest's handler and the process share, at the same addresses, and the closure does not have.
///
/// The process keeps things in it, before the guest runs or when it is asked: the handler cannot, as it has no memory to note that in.
pub struct Private {
    memory: Memory,
    tables: Memory,
    tables_used: Cell<u64>,
    used: Cell<u64>,
}

impl Private {
    pub(crate) fn new(len_bytes: usize) -> Result<Private> {
        if len_bytes < 2 * FIRST_FREE as usize || len_bytes > MOST_BYTES {
            let cause = format!("{len_bytes} bytes for its handler: it takes 1 MiB to 512 MiB");
            return Err(Error::new(Kind::Invalid, "make a machine", cause));
        }
        let (memory, tables) = (Memory::new(PRIVATE, len_bytes)?, Memory::new(TABLES, TABLES_BYTES)?);
        // The root is there from the beginning.
        let private = Private { memory, tables, tables_used: Cell::new(PAGE), used: Cell::new(FIRST_FREE) };
        private.map(private.address(0), PRIVATE, GAP, Rights::READ | Rights::WRITE)?;
        let behind = GAP + PAGE;
        private.map(
            private.address(behind),
            PRIVATE.plus(behind),
            len_bytes as u64 - behind,
            Rights::READ | Rights::WRITE,
        )?;
        Ok(private)
    }

    /// Moves a value to where the handler can use it. It is never dropped.
    ///
    /// # Errors
    /// [`Kind::OutOfSpace`].
    #[allow(clippy::mut_from_ref)]
    pub fn keep<T>(&self, value: T) -> Result<&mut T> {
        let place = self.place::<T>(1)?;
        // SAFETY: guest-private: large enough, aligned, and handed out this once.
        unsafe {
            place.write(value);
            Ok(&mut *place.as_ptr())
        }
    }

    /// So many values, next to each other. They are never dropped.
    ///
    /// # Errors
    /// [`Kind::OutOfSpace`].
    #[allow(clippy::mut_from_ref)]
    pub fn keep_each<T>(&self, len: usize, mut make: impl FnMut() -> T) -> Result<&mut [T]> {
        let place = self.place::<T>(len)?;
        for index in 0..len {
            // SAFETY: guest-private: large enough for all, and aligned.
            unsafe { place.add(index).write(make()) };
        }
        // SAFETY: guest-private: all are written, and handed out this once.
        Ok(unsafe { std::slice::from_raw_parts_mut(place.as_ptr(), len) })
    }

    /// A table for core, of entries that are what they are at first.
    ///
    /// # Errors
    /// [`Kind::OutOfSpace`].
    pub fn table<T: Default>(&'static self, len: usize) -> Result<Table<T>> {
        let entries = self.keep_each(len, T::default)?;
        // SAFETY: table-memory: they stay as long as the process, and are used through the table alone.
        Ok(unsafe { Table::new(NonNull::from(entries).cast(), len) })
    }

    fn place<T>(&self, len: usize) -> Result<NonNull<T>> {
        let at = self.used.get().next_multiple_of(align_of::<T>() as u64);
        let end = size_of::<T>().checked_mul(len).and_then(|len_bytes| at.checked_add(len_bytes as u64));
        // The mapping begins at a page.
        match end {
            Some(end) if end <= self.memory.physical().len_bytes() && align_of::<T>() as u64 <= PAGE => {
                self.used.set(end);
                // SAFETY: guest-private: within the mapping.
                Ok(unsafe { self.memory.host().add(at as usize) }.cast())
            }
            _ => Err(Error::new(Kind::OutOfSpace, "keep a value for a handler", "its memory is used up")),
        }
    }

    /// Maps memory for the handler. What was mapped there no longer is.
    pub(crate) fn map(&self, at: VirtAddr, to: PhysAddr, len_bytes: u64, rights: Rights) -> Result<()> {
        let writable = if rights.contain(Rights::WRITE) { WRITABLE } else { 0 };
        let no_execute = if rights.contain(Rights::EXECUTE) { 0 } else { NO_EXECUTE };
        for offset in (0..len_bytes).step_by(PAGE as usize) {
            let at = VirtAddr(at.0 + offset as usize);
            let mut table = TABLES;
            for level in (2..=4).rev() {
                table = self.below(table.plus(u64::from(index(at, level)) * 8))?;
            }
            let page = to.plus(offset).0 | USABLE | writable | no_execute;
            self.tables.physical().store(table.plus(u64::from(index(at, 1)) * 8), page);
        }
        Ok(())
    }

    /// The table that an entry leads to; it is made if there is none.
    fn below(&self, entry: PhysAddr) -> Result<PhysAddr> {
        let tables = self.tables.physical();
        if tables.load(entry) == 0 {
            let made = self.tables_used.get();
            if made == TABLES_BYTES as u64 {
                return Err(Error::new(Kind::OutOfSpace, "map memory for a handler", "too much RAM for its tables"));
            }
            self.tables_used.set(made + PAGE);
            tables.store(entry, TABLES.plus(made).0 | USABLE | WRITABLE);
        }
        Ok(PhysAddr(tables.load(entry) & ADDRESS))
    }

    /// Where descriptors, and the handler with its argument, are to be written.
    pub(crate) fn prepare(&self, descriptors: &Descriptors, interrupted: VirtAddr, closure_root: PhysAddr) {
        let physical = self.memory.physical();
        let put = |offset: u64, word: u64| physical.store(PRIVATE.plus(offset), word);
        let own =
            Descriptors { handlers: entry::handler_exceptions(), stack: self.address(RING0_STACK_END), ..*descriptors };
        own.write(physical, PRIVATE);
        let frame =
            [entry::handler().0 as u64, RING3_CODE.into(), FLAGS, self.address(STACK_END).0 as u64, RING3_DATA.into()];
        for (step, word) in frame.into_iter().enumerate() {
            put(HANDLER_FRAME + step as u64 * 8, word);
        }
        put(RING0_STACK_END, interrupted.0 as u64);
        put(RING0_STACK_END + 8, closure_root.0);
    }

    /// What the handler calls, and with what.
    pub(crate) fn set_handler(&self, function: u64, argument: u64) {
        let physical = self.memory.physical();
        physical.store(PRIVATE.plus(FIRST_FREE - 16), function);
        physical.store(PRIVATE.plus(FIRST_FREE - 8), argument);
    }

    /// Whether the handler steps from now on.
    pub(crate) fn step(&self, stepping: Stepping) {
        const FLAGS_IN_FRAME: u64 = 16;
        self.memory.physical().store(PRIVATE.plus(HANDLER_FRAME + FLAGS_IN_FRAME), stepping.applied_to(FLAGS));
    }

    /// What the CPU pushed when the handler met an exception: the word so many bytes below the end of its stack of ring 0.
    pub(crate) const fn ring0_stack(&self) -> (&PhysMemory, PhysAddr) {
        (self.memory.physical(), PRIVATE.plus(RING0_STACK_END))
    }

    pub(crate) const fn descriptors(&self) -> PhysAddr {
        PRIVATE
    }

    pub(crate) const fn root(&self) -> PhysAddr {
        TABLES
    }

    /// Gives a machine all of it.
    pub(crate) fn lend<'m>(&'m self, vm: &mut Vm<'m>) -> Result<()> {
        vm.add(&self.memory)?;
        vm.add(&self.tables)
    }

    fn address(&self, offset: u64) -> VirtAddr {
        VirtAddr(self.memory.host().as_ptr().expose_provenance() + offset as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_kept_apart_until_there_is_no_room() {
        let private = Private::new(1 << 20).unwrap();
        let (byte, word) = (private.keep(7u8).unwrap(), private.keep(9u64).unwrap());
        let words = private.keep_each(3, || 5u32).unwrap();
        (*byte, words[2]) = (8, 6);
        assert_eq!((*byte, *word, &*words), (8, 9, &[5, 5, 6][..]));
        let refused = private.keep_each(1 << 20, || 0u8).err().map(|error| error.kind());
        assert_eq!(refused, Some(Kind::OutOfSpace));
        assert_eq!(*private.keep(1u8).unwrap(), 1);
    }

    #[test]
    fn too_little_or_too_much_is_refused() {
        for len_bytes in [0, 64 << 10, 1 << 30] {
            assert_eq!(Private::new(len_bytes).err().map(|error| error.kind()), Some(Kind::Invalid));
        }
    }
}
