//! A pager of one's own: a table of squares that nobody stores. Pages are computed when they are first read, and only what the
//! program changes is kept, in a map.
//!
//! Run it with `cargo run --example own_pager -p selfpage`.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use selfpage::pager::UserPager;
use selfpage::{Domain, PAGE_BYTES};

const WORDS: usize = PAGE_BYTES / 8;

/// The pages that were changed.
#[derive(Clone, Default)]
struct Squares(Arc<Mutex<HashMap<u64, Box<[u8; PAGE_BYTES]>>>>);

impl UserPager for Squares {
    fn fill(&self, index: u64, bytes: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
        if let Some(kept) = self.0.lock().unwrap().get(&index) {
            *bytes = **kept;
            return Ok(());
        }
        for (number, word) in (index * WORDS as u64..).zip(bytes.chunks_exact_mut(8)) {
            word.copy_from_slice(&(number * number).to_ne_bytes());
        }
        Ok(())
    }

    fn save(&self, index: u64, bytes: &[u8; PAGE_BYTES]) -> io::Result<()> {
        self.0.lock().unwrap().insert(index, Box::new(*bytes));
        Ok(())
    }

    fn forget(&self, index: u64) {
        self.0.lock().unwrap().remove(&index);
    }
}

fn main() -> selfpage::Result<()> {
    let squares = Squares::default();
    let domain = Domain::with_frames(4 << 20).build()?;
    let mut region = domain.region(64 << 20).name("squares").user(squares.clone())?;

    let table = region.as_mut_slice::<u64>();
    assert!(table.iter().enumerate().all(|(number, square)| *square == (number * number) as u64));
    table[1000] = 42;
    // Far away, so that page of 1000 loses its frame, and is saved first.
    assert_eq!(table.iter().rev().take(1 << 20).filter(|square| **square == 42).count(), 0);
    assert_eq!(table[1000], 42);
    region.flush(0, region.len_bytes())?;

    let kept = squares.0.lock().unwrap().len();
    assert_eq!(kept, 1);
    println!("{} MiB of squares in {} MiB of frames; {kept} page was changed, and kept", 64, 4);

    region.discard(0, region.len_bytes())?;
    assert_eq!(region.as_slice::<u64>()[1000], 1_000_000);
    println!("discarded: 1000 squared is {} again", region.as_slice::<u64>()[1000]);
    Ok(())
}
