//! A machine in memory: what the rules work on, and a CPU that remembers translations until it is told to forget them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr::NonNull;

use selfpage_core::addr::VirtAddr;
use selfpage_core::frame::Table;
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::sync::AtomicU64;
use selfpage_core::tables::Tlb;
use selfpage_core::tables::walk::{self, Access, Translation, WalkFault};

/// Where physical memory begins: not at 0, so that a number that is no address shows.
pub const FIRST: PhysAddr = PhysAddr(0x4000_0000);

/// Memory that lives as long as the process.
pub fn memory(len_bytes: usize) -> PhysMemory {
    let words: Vec<AtomicU64> = (0..len_bytes / 8).map(|_| AtomicU64::new(0)).collect();
    let words = words.leak();
    // SAFETY: leaked, and from now on used through the table alone.
    let table = unsafe { Table::new(NonNull::from(&mut words[0]), words.len()) };
    PhysMemory::new(FIRST, table)
}

/// A CPU and its memory of translations, by page.
#[derive(Default)]
pub struct Cpu {
    /// Roots that it must not translate by any more, until they are roots again.
    pub left: RefCell<Vec<PhysAddr>>,
    /// By root and page.
    pub known: RefCell<HashMap<(PhysAddr, usize), Translation>>,
    /// How often all was forgotten, and which single pages were.
    pub told: RefCell<(u32, Vec<VirtAddr>)>,
}

impl Cpu {
    /// An access at ring 3, through what it remembers if it remembers the page.
    pub fn access(
        &self,
        memory: &PhysMemory,
        root: PhysAddr,
        at: VirtAddr,
        access: Access,
    ) -> Result<PhysAddr, WalkFault> {
        let key = (root, at.0 >> 12);
        let needs = match access {
            Access::Read => selfpage_core::capability::Rights::READ,
            Access::Write => selfpage_core::capability::Rights::WRITE,
            Access::Execute => selfpage_core::capability::Rights::EXECUTE,
        };
        if let Some(known) = self.known.borrow().get(&key)
            && known.rights.contain(needs)
        {
            return Ok(PhysAddr(known.at.0 & !4095 | at.0 as u64 & 4095));
        }
        let found = walk::access(memory, root, at, access)?;
        if let Some(translation) = walk::translate(memory, root, at) {
            self.known.borrow_mut().insert(key, translation);
        }
        Ok(found)
    }
}

impl Tlb for Cpu {
    fn forget_all(&self) {
        self.known.borrow_mut().clear();
        self.told.borrow_mut().0 += 1;
    }

    fn forget(&self, page: VirtAddr) {
        // A page of 2 MiB or 1 GiB is remembered in pieces here.
        self.known
            .borrow_mut()
            .retain(|(_, known), translation| known >> (translation.size_bits - 12) != page.0 >> translation.size_bits);
        self.told.borrow_mut().1.push(page);
    }

    fn leave(&self, root: PhysAddr) {
        self.known.borrow_mut().retain(|(known, _), _| *known != root);
        self.left.borrow_mut().push(root);
    }
}
