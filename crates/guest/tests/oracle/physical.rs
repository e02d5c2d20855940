//! The memory of a machine beside the recorder's.

use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::PageSize;
use selfpage_guest::{Memory, Vm};

/// Where RAM is: not at 0, so that a number that is no address shows; and with 4 MiB at a multiple of that.
pub const FIRST: PhysAddr = PhysAddr(0x4020_0000);
pub const RAM_BYTES: usize = 6 << 20;
/// Where the memory of pages of 1 GiB is: a device to the rules, since no more than a few places of it are ever looked at.
pub const HUGE: PhysAddr = PhysAddr(2 << 30);
pub const HUGE_BITS: u8 = 30;

pub struct Physical {
    ram: Memory,
    /// Where the CPU has pages of 1 GiB.
    huge: Option<Memory>,
}

impl Physical {
    pub fn new(largest_page: PageSize) -> Physical {
        let huge = (largest_page == PageSize::Huge1GiB).then(|| Memory::new(HUGE, 1 << HUGE_BITS).unwrap());
        Physical { ram: Memory::new(FIRST, RAM_BYTES).unwrap(), huge }
    }

    /// What tables and Frames are made of.
    pub fn ram(&self) -> &PhysMemory {
        self.ram.physical()
    }

    /// The memory that an address lies in.
    pub fn around(&self, at: PhysAddr) -> &PhysMemory {
        match &self.huge {
            Some(huge) if at >= HUGE => huge.physical(),
            _ => self.ram(),
        }
    }

    /// Gives a machine all of it.
    pub fn lend<'m>(&'m self, vm: &mut Vm<'m>) {
        vm.add(&self.ram).unwrap();
        if let Some(huge) = &self.huge {
            vm.add(huge).unwrap();
        }
    }
}
