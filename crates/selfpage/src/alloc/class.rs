//! The classes of packed slots: the lengths they have, four to a doubling, from a page to 1 MiB.

use selfpage_core::addr::{PAGE_BYTES, PAGE_SHIFT};

/// How many classes there are.
pub(super) const CLASSES: usize = 28;
/// Lengths for each doubling.
const STEPS: usize = 4;
/// Bits of the reciprocals: enough for as many pages as a class can have.
const RECIPROCAL_BITS: u32 = 34;

/// How long the slots of a class are, and how to divide by that.
#[derive(Clone, Copy)]
struct Class {
    bytes: usize,
    shift: u32,
    reciprocal: u64,
}

static TABLE: [Class; CLASSES] = table();

const fn table() -> [Class; CLASSES] {
    let mut table = [Class { bytes: 0, shift: 0, reciprocal: 0 }; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        // Pages are `factor << doublings`, where the factor has one digit.
        let (step, few) = (class + 1, class + 1 < STEPS);
        let (factor, doublings) = if few { (step, 0) } else { (STEPS + step % STEPS, step / STEPS - 1) };
        table[class] = Class {
            bytes: factor << doublings << PAGE_SHIFT,
            shift: doublings as u32 + PAGE_SHIFT,
            reciprocal: (1 << RECIPROCAL_BITS) / factor as u64 + 1,
        };
        class += 1;
    }
    table
}

/// Numbers lengths by their pages, to two binary digits after the first, rounded down.
pub(super) const fn step(pages: usize) -> usize {
    if pages < STEPS {
        return pages;
    }
    let log = pages.ilog2() as usize;
    (log - 1) * STEPS + (pages >> (log - 2)) % STEPS
}

/// The class for `len_bytes`, whole pages; `None`: it is too long for all of them.
pub(super) fn class_for(len_bytes: usize) -> Option<usize> {
    let class = step((len_bytes - PAGE_BYTES) >> PAGE_SHIFT);
    (class < CLASSES).then_some(class)
}

/// How long the slots of a class are.
pub(super) fn class_bytes(class: usize) -> usize {
    TABLE[class].bytes
}

/// Which slot lies around `offset`, from the beginning of the first.
pub(super) fn index(class: usize, offset: usize) -> usize {
    let class = &TABLE[class];
    (((offset >> class.shift) as u64 * class.reciprocal) >> RECIPROCAL_BITS) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_length_has_the_shortest_class_that_it_fits_into() {
        for pages in 1..=256 {
            let class = class_for(pages << PAGE_SHIFT).unwrap();
            assert!(class_bytes(class) >= pages << PAGE_SHIFT, "{pages}");
            assert!(class == 0 || class_bytes(class - 1) < pages << PAGE_SHIFT, "{pages}");
        }
        assert_eq!((class_bytes(0), class_bytes(CLASSES - 1)), (PAGE_BYTES, 1 << 20));
        assert_eq!(class_for(257 << PAGE_SHIFT), None);
    }

    #[test]
    fn an_offset_is_in_the_slot_that_a_division_says() {
        for class in 0..CLASSES {
            let bytes = class_bytes(class);
            let last = (64 << 30) / bytes;
            for index in (0..10_000).chain(last - 10_000.min(last)..last) {
                assert_eq!(super::index(class, index * bytes), index);
                assert_eq!(super::index(class, index * bytes + bytes - 1), index);
            }
        }
    }
}
