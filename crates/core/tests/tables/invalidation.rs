//! What the CPU is told to forget, in each of the three ways, and what it goes on with where it does not hear that.

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Handle, Kernel, Object, Rights, Type};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::walk::Access;
use selfpage_core::tables::{AddressSpace, Entries, Invalidation, PageSize, Range, Tlb, index};

use super::machine::{Cpu, memory};
use super::{Machine, ROOT, RW, blocks, frame};

const MODES: [Invalidation; 3] = [Invalidation::Full, Invalidation::Selective, Invalidation::Adaptive];
const AT: usize = 0x7000_0000;

fn range(pages: u32) -> Range {
    Range { at: VirtAddr(AT), len_bytes: u64::from(pages) * 4096, pages: PageSize::Small4KiB }
}

fn page(number: u32) -> VirtAddr {
    VirtAddr(AT + number as usize * 4096)
}

/// What a call tells that changes neighbouring pages: all, so often; or these pages.
fn expected(mode: Invalidation, pages: u32) -> (u32, Vec<VirtAddr>) {
    let one_by_one = match mode {
        Invalidation::Full => false,
        Invalidation::Selective => true,
        Invalidation::Adaptive => pages <= 33,
    };
    if one_by_one { (0, (0..pages).map(page).collect()) } else { (1, Vec::new()) }
}

#[test]
fn each_mode_tells_as_much_as_it_should() {
    for mode in MODES {
        let mut machine = Machine::new(21, &[]);
        let (aspace, root) = machine.address_space();
        let Machine { memory, cpu, mut kernel, space, data, .. } = machine;
        kernel.set_invalidation(mode);
        for pages in [1, 2, 33, 34, 512] {
            let all = range(pages);
            aspace.map(&mut kernel, all, data, 0, RW).unwrap();
            assert_eq!(cpu.told.take(), (0, Vec::new()), "nobody knows what was not there");
            for number in 0..pages {
                cpu.access(memory, root, page(number), Access::Write).unwrap();
            }
            let table = aspace.table(&kernel, all.at, 1).unwrap();
            let entries = Entries { table, first: index(all.at, 1), count: pages as u16 };
            assert_eq!(kernel.clear_dirty_bits(&space, entries), Ok(pages));
            assert_eq!(cpu.told.take(), expected(mode, pages), "{mode:?}: {pages} dirty bits");
            assert_eq!(kernel.clear_dirty_bits(&space, entries), Ok(0));
            assert_eq!(cpu.told.take(), (0, Vec::new()), "nothing has changed");
            aspace.protect(&mut kernel, all, Rights::READ).unwrap();
            assert_eq!(cpu.told.take(), expected(mode, pages), "{mode:?}: {pages} pages protected");
            aspace.unmap(&mut kernel, all).unwrap();
            assert_eq!(cpu.told.take(), expected(mode, pages), "{mode:?}: {pages} pages unmapped");
        }
    }
}

/// A table is copied to be read, or to stand in a second place; or it stands in none.
#[test]
fn the_places_of_a_table_say_what_is_forgotten() {
    for mode in MODES {
        let mut machine = Machine::new(21, &[]);
        let (aspace, _) = machine.address_space();
        let Machine { cpu, mut kernel, space, ram, data, .. } = machine;
        kernel.set_invalidation(mode);
        let at = Handle::at_root;
        let entry = |table, first| Entries { table, first, count: 1 };
        aspace.map(&mut kernel, range(2), data, 0, RW).unwrap();
        let (table, above) = (aspace.table(&kernel, page(0), 1).unwrap(), aspace.table(&kernel, page(0), 2).unwrap());
        let copy = |kernel: &mut Kernel<'_>, place| kernel.copy(&space, table, ROOT, place, Rights::ALL).unwrap();
        let told = |kernel: &mut Kernel<'_>| {
            aspace.protect(kernel, range(2), Rights::READ).unwrap();
            cpu.told.take()
        };
        copy(&mut kernel, 41);
        assert_eq!(told(&mut kernel), expected(mode, 2), "{mode:?}, a copy that stands nowhere");
        kernel.map(&space, entry(table, 9), at(41), 0, Rights::READ).unwrap();
        assert_eq!(told(&mut kernel), expected(mode, 2), "{mode:?}, a copy to be read");
        copy(&mut kernel, 42);
        kernel.map(&space, entry(above, 7), at(42), 0, Rights::READ).unwrap();
        assert_eq!(told(&mut kernel), (1, Vec::new()), "{mode:?}, a copy to be walked");
        kernel.delete(&space, at(42)).unwrap();
        cpu.told.take();
        assert_eq!(told(&mut kernel), expected(mode, 2), "{mode:?}, no longer");
        (42..50).for_each(|place| copy(&mut kernel, place));
        assert_eq!(told(&mut kernel), (1, Vec::new()), "{mode:?}, too many copies to look at");
        // In no hierarchy.
        kernel.retype(&space, ram, Object::of(Type::Pt), 1, ROOT, 55).unwrap();
        kernel.copy(&space, data, ROOT, 56, RW).unwrap();
        kernel.map(&space, entry(at(55), 0), at(56), 0, RW).unwrap();
        kernel.unmap(&space, entry(at(55), 0)).unwrap();
        assert_eq!(cpu.told.take(), (0, Vec::new()), "{mode:?}");
    }
}

/// What a CPU hears.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hears {
    Everything,
    /// Only of single pages.
    OnlyPages,
    /// Only that all is to be forgotten.
    OnlyAll,
    /// Of single pages every other.
    EveryOther,
}

/// A CPU behind a broken wire.
struct Wire {
    cpu: Cpu,
    hears: Hears,
}

impl Tlb for Wire {
    fn forget_all(&self) {
        if self.hears != Hears::OnlyPages {
            self.cpu.forget_all();
        }
    }

    fn forget(&self, page: VirtAddr) {
        let is_heard = match self.hears {
            Hears::Everything | Hears::OnlyPages => true,
            Hears::OnlyAll => false,
            Hears::EveryOther => page.0 >> 12 & 1 == 1,
        };
        if is_heard {
            self.cpu.forget(page);
        }
    }

    fn leave(&self, root: PhysAddr) {
        self.cpu.leave(root);
    }
}

/// How many of so many pages can still be written after they were protected against it.
fn still_writable(hears: Hears, mode: Invalidation, pages: u32) -> usize {
    let memory = memory(8 << 20);
    let wire = Wire { cpu: Cpu::default(), hears };
    let (mut kernel, space) = Kernel::boot(&memory, &wire, &[]).unwrap();
    let [frames, ram, ..] = blocks(&kernel, &space, Type::Ram)[..] else { panic!("too few blocks") };
    kernel.retype(&space, frames, frame(21), 1, ROOT, 40).unwrap();
    kernel.set_invalidation(mode);
    let aspace = AddressSpace::new(&mut kernel, space, ram, ROOT, 50).unwrap();
    let root = kernel.root_table(&space, aspace.pml4()).unwrap();
    aspace.map(&mut kernel, range(pages), Handle::at_root(40), 0, RW).unwrap();
    let writable = || {
        let writes = (0..pages).filter(|number| wire.cpu.access(&memory, root, page(*number), Access::Write).is_ok());
        writes.count()
    };
    assert_eq!(writable(), pages as usize);
    aspace.protect(&mut kernel, range(pages), Rights::READ).unwrap();
    writable()
}

#[test]
fn an_invalidation_that_is_lost_is_found() {
    use Hears::{EveryOther, Everything, OnlyAll, OnlyPages};
    use Invalidation::{Adaptive, Full, Selective};
    for (hears, mode, pages, expected) in [
        (Everything, Full, 20, 0),
        (Everything, Selective, 20, 0),
        (Everything, Adaptive, 20, 0),
        (Everything, Adaptive, 100, 0),
        (OnlyPages, Full, 20, 20),
        (OnlyPages, Selective, 100, 0),
        (OnlyPages, Adaptive, 20, 0),
        (OnlyPages, Adaptive, 100, 100),
        (OnlyAll, Full, 100, 0),
        (OnlyAll, Selective, 100, 100),
        (OnlyAll, Adaptive, 20, 20),
        (OnlyAll, Adaptive, 100, 0),
        (EveryOther, Selective, 100, 50),
        (EveryOther, Adaptive, 20, 10),
    ] {
        assert_eq!(still_writable(hears, mode, pages), expected, "{hears:?}, {mode:?}, {pages} pages");
    }
}
