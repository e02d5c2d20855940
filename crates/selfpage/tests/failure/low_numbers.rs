//! Pagers of the program's own that write to whatever number there is in the pager threads' table.

use std::io;

use selfpage::pager::UserPager;
use selfpage::store::FileStore;
use selfpage::{DescriptorTable, Domain};
use selfpage_core::addr::PageBytes;

use crate::scenario::{PAGE, check_pages, here, in_child, number_pages};

const FRAMES: usize = 64;
const TABLES: [DescriptorTable; 2] = [DescriptorTable::Shared, DescriptorTable::Private];

/// Says eight bytes to each of the low numbers, as a `println!` of a short line does to one of them.
struct Says;

impl UserPager for Says {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        for number in 0..=20 {
            // SAFETY: test: eight bytes.
            unsafe { libc::write(number, [1u64].as_ptr().cast(), 8) };
        }
        println!("page {index:2}");
        bytes[..8].copy_from_slice(&(index + 1).to_ne_bytes());
        bytes[PAGE - 8..].copy_from_slice(&(!(index + 1) + 1).to_ne_bytes());
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

fn says_with(table: DescriptorTable, closed: &[i32]) {
    for number in closed {
        // SAFETY: test: nobody reads from it, nor writes to it, that would mind.
        assert_eq!(unsafe { libc::close(*number) }, 0);
    }
    let domain = Domain::with_frames(FRAMES * PAGE).descriptor_table(table).workers(2).build().unwrap();
    // One whose reads and writes are many at a time.
    let store = FileStore::unnamed_in("/var/tmp", (16 * FRAMES * PAGE) as u64).unwrap();
    let mut stored = domain.region(4 * FRAMES * PAGE).stored(store).unwrap();
    let says = domain.region(2 * FRAMES * PAGE).user(Says).unwrap();
    for _ in 0..3 {
        number_pages(&mut stored);
        for (index, page) in says.as_slice::<[u64; 512]>().iter().enumerate() {
            assert_eq!((page[0], page[511]), (index as u64 + 1, 0u64.wrapping_sub(index as u64 + 1)));
        }
        check_pages(&stored, 0..4 * FRAMES);
    }
    drop(says);
    check_pages(&stored, 0..4 * FRAMES);
}

#[test]
fn a_pager_that_writes_to_low_numbers() {
    for table in TABLES {
        in_child(here!(), &format!("{table:?}"), || says_with(table, &[])).well();
    }
}

#[test]
fn a_pager_that_writes_to_streams_that_are_closed() {
    for table in TABLES {
        for closed in [&[1][..], &[0, 1], &[0, 1, 2]] {
            in_child(here!(), &format!("{table:?}-{}", closed.len()), || says_with(table, closed)).well();
        }
    }
}
