//! Layouts that `AddressSpace` builds and changes.

use std::cell::Cell;

use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Error, Handle, Object, Rights, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::{AddressSpace, PageSize, Range, is_canonical};

use crate::chance::{one_of, part_of, piece, rights};
use crate::dice::{below, next, once_in};
use crate::target::Target;
use crate::{Holder, ROOT, block, for_seeds, see};

/// Compares at the edges of every page, just outside, and anywhere.
fn walk(memory: &PhysMemory, root: PhysAddr, target: &Target) {
    let see = |at| see(memory, root, at, target.leads(VirtAddr(at as usize)));
    for (first, last) in target.edges() {
        see(first);
        see(last);
        see(first.wrapping_sub(1));
        see(last.wrapping_add(1));
        see(first + below(last - first));
    }
    for _ in 0..200 {
        let at = next();
        see(at);
        // One that is canonical.
        see(((at << 16) as i64 >> 16) as u64);
        see(below(1 << 33));
    }
}

#[test]
fn what_there_is_memory_for_is_built() {
    let (built, refused) = (Cell::new(0), Cell::new(0));
    for_seeds(3000, |memory| {
        let mut holder = Holder::new(memory);
        let order = one_of(&[4, 5, 6, 7, 8, 9, 11, 11, 11]);
        let ram = block(order);
        let aspace = AddressSpace::new(&mut holder.kernel, holder.space, ram, ROOT, 50).unwrap();
        let root = holder.kernel.root_table(&holder.space, aspace.pml4()).unwrap();
        let mut target = Target::default();
        for _ in 0..1 + below(30) {
            let piece = piece(&holder.sources);
            if target.overlaps(piece.range) {
                continue;
            }
            let mut wanted = target.clone();
            wanted.map(piece.range, piece.base(), piece.rights).unwrap();
            let (least, most) = wanted.need();
            let result =
                aspace.map(&mut holder.kernel, piece.range, piece.from.handle, piece.offset_bytes, piece.rights);
            let Err(stopped) = result else {
                assert!(least <= 1 << order, "{least} pages of tables in {}", 1 << order);
                target = wanted;
                built.set(built.get() + 1);
                continue;
            };
            assert_eq!(stopped.why, Error::OutOfMemory);
            assert!(most > 1 << order, "{most} pages of tables do fit in {}", 1 << order);
            // What was done stands, and so does all that was there before.
            target.map(Range { len_bytes: stopped.done_bytes, ..piece.range }, piece.base(), piece.rights).unwrap();
            refused.set(refused.get() + 1);
            break;
        }
        walk(memory, root, &target);
        // Parts of it change, even where no more can be built.
        for range in target.mappings() {
            let (part, rights, kernel) = (part_of(range), rights(), &mut holder.kernel);
            match below(3) {
                0 => assert_eq!((aspace.unmap(kernel, range), target.unmap(range)), (Ok(()), Ok(()))),
                1 => assert_eq!((aspace.protect(kernel, part, rights), target.protect(part, rights)), (Ok(()), Ok(()))),
                _ => {}
            }
        }
        walk(memory, root, &target);
        holder.end(ram, &[root]);
    });
    println!("{} ranges built, {} times out of memory", built.get(), refused.get());
}

#[test]
fn layouts_change_as_asked() {
    for_seeds(3000, |memory| {
        let mut holder = Holder::new(memory);
        let ram = block(11);
        let aspace = AddressSpace::new(&mut holder.kernel, holder.space, ram, ROOT, 50).unwrap();
        let root = holder.kernel.root_table(&holder.space, aspace.pml4()).unwrap();
        let mut target = Target::default();
        for _ in 0..30 {
            // Where something is, or anywhere; in pages of its size, or of another.
            let mut piece = piece(&holder.sources);
            let mappings = target.mappings();
            let mut range = if mappings.is_empty() || once_in(8) { piece.range } else { one_of(&mappings) };
            // What was mapped in several calls, side by side.
            for next in &mappings {
                let end = range.at.0.wrapping_add(range.len_bytes as usize);
                if next.pages == range.pages && next.at.0 == end && end != 0 {
                    range.len_bytes += next.len_bytes;
                }
            }
            if once_in(3) {
                range = part_of(range);
            }
            if once_in(8) {
                let len_bytes = PageSize::Large2MiB.len_bytes();
                let at = VirtAddr(range.at.0 & !(len_bytes as usize - 1));
                range = Range { at, len_bytes, pages: PageSize::Large2MiB };
            }
            let kernel = &mut holder.kernel;
            match below(5) {
                0 => {
                    let (mut result, shall) = (aspace.unmap(kernel, range), target.unmap(range));
                    // Both may be true of a run of large pages; who has tables at hand sees one first.
                    if let (Err(result), Err(shall)) = (&mut result, &shall)
                        && range.pages != PageSize::Small4KiB
                        && result.why == Error::NotMapped
                    {
                        result.why = shall.why;
                    }
                    assert_eq!(result, shall, "unmap {range:x?}");
                }
                1 => {
                    let rights = rights();
                    let (result, shall) = (aspace.protect(kernel, range, rights), target.protect(range, rights));
                    assert_eq!(result, shall, "protect {range:x?}");
                }
                act => {
                    // Anywhere, where something is already, or right behind that.
                    let len_bytes = range.len_bytes.min(8 * range.pages.len_bytes());
                    let behind = range.at.0.wrapping_add(range.len_bytes as usize);
                    let last = behind.checked_add(len_bytes as usize - 1).map(VirtAddr);
                    if act == 3 && last.is_some_and(is_canonical) && is_canonical(VirtAddr(behind)) && behind != 0 {
                        range = Range { at: VirtAddr(behind), len_bytes, ..range };
                    }
                    let fits = range.len_bytes <= piece.from.len_bytes - piece.offset_bytes;
                    if act != 4 && fits && piece.offset_bytes.is_multiple_of(range.pages.len_bytes()) {
                        piece.range = range;
                    }
                    let result = aspace.map(kernel, piece.range, piece.from.handle, piece.offset_bytes, piece.rights);
                    let shall = target.map(piece.range, piece.base(), piece.rights);
                    assert_eq!(result, shall, "map {:x?}", piece.range);
                }
            }
        }
        walk(memory, root, &target);
        for range in target.mappings() {
            aspace.unmap(&mut holder.kernel, range).unwrap();
        }
        walk(memory, root, &Target::default());
        holder.end(ram, &[root]);
    });
}

#[test]
fn revoking_the_memory_unmaps_it_everywhere() {
    for_seeds(500, |memory| {
        let mut holder = Holder::new(memory);
        let ram = block(11);
        let aspace = AddressSpace::new(&mut holder.kernel, holder.space, ram, ROOT, 50).unwrap();
        let root = holder.kernel.root_table(&holder.space, aspace.pml4()).unwrap();
        let (lost, mut left, mut all) = (one_of(&holder.sources), Target::default(), Target::default());
        for _ in 0..20 {
            let piece = piece(&holder.sources);
            if all.overlaps(piece.range) {
                continue;
            }
            all.map(piece.range, piece.base(), piece.rights).unwrap();
            if piece.from.base != lost.base {
                left.map(piece.range, piece.base(), piece.rights).unwrap();
            }
            let kernel = &mut holder.kernel;
            aspace.map(kernel, piece.range, piece.from.handle, piece.offset_bytes, piece.rights).unwrap();
        }
        walk(memory, root, &all);
        holder.kernel.revoke(&holder.space, lost.handle, u64::MAX).unwrap();
        walk(memory, root, &left);
        holder.end(ram, &[root]);
    });
}

#[test]
fn a_home_from_which_handles_would_be_too_long_is_refused() {
    let memory = crate::machine::memory(crate::MEMORY_BYTES);
    let Holder { mut kernel, space, .. } = Holder::new(&memory);
    let node = Object::of(Type::CNode);
    kernel.retype(&space, block(9), node, 1, ROOT, 41).unwrap();
    let one_below = Handle::at_root(41);
    kernel.retype(&space, block(9), node, 1, one_below, 1).unwrap();
    let two_below = one_below.then(1);
    assert_eq!(AddressSpace::new(&mut kernel, space, block(9), two_below, 1).unwrap_err(), Error::DepthOverflow);
    let guard = Handle { bits: 5, len: 3 };
    kernel.mint(&space, one_below, ROOT, 42, guard).unwrap();
    assert_eq!(
        AddressSpace::new(&mut kernel, space, block(9), Handle::at_root(42), 3).unwrap_err(),
        Error::DepthOverflow
    );

    let aspace = AddressSpace::new(&mut kernel, space, block(9), one_below, 2).unwrap();
    let range = Range { at: VirtAddr(0x1000), len_bytes: 4096, pages: PageSize::Small4KiB };
    aspace.map(&mut kernel, range, Handle::at_root(40), 0, Rights::READ).unwrap();
}

#[test]
fn ram_that_nothing_executable_is_made_from_has_layouts_too() {
    let memory = crate::machine::memory(crate::MEMORY_BYTES);
    let Holder { mut kernel, space, .. } = Holder::new(&memory);
    let read_write = Rights::READ | Rights::WRITE;
    kernel.copy(&space, block(9), ROOT, 41, read_write).unwrap();
    let aspace = AddressSpace::new(&mut kernel, space, Handle::at_root(41), ROOT, 50).unwrap();
    let root = kernel.root_table(&space, aspace.pml4()).unwrap();
    let range = Range { at: VirtAddr(0x1000), len_bytes: 4096, pages: PageSize::Small4KiB };
    aspace.map(&mut kernel, range, Handle::at_root(40), 0, Rights::ALL).unwrap();
    let found = selfpage_core::tables::walk::translate(&memory, root, range.at).unwrap();
    assert_eq!(found.rights, read_write);
}

#[test]
fn what_is_refused_takes_no_ram() {
    let memory = crate::machine::memory(crate::MEMORY_BYTES);
    let Holder { mut kernel, space, sources, .. } = Holder::new(&memory);
    let (ram, data) = (block(6), sources[0].handle);
    let aspace = AddressSpace::new(&mut kernel, space, ram, ROOT, 50).unwrap();
    let large = Range { at: VirtAddr(0), len_bytes: 4 << 20, pages: PageSize::Large2MiB };
    aspace.map(&mut kernel, large, data, 0, Rights::READ).unwrap();
    // In the second of two pages that were mapped together.
    let small = |at| Range { at: VirtAddr(at), len_bytes: 4096, pages: PageSize::Small4KiB };
    for _ in 0..100 {
        let stopped = aspace.map(&mut kernel, small(3 << 20), data, 0, Rights::READ).unwrap_err();
        assert_eq!(stopped.why, Error::EntryTaken);
    }
    aspace.map(&mut kernel, small(4 << 20), data, 0, Rights::READ).unwrap();
}
