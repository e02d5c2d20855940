//! GUPS: random updates of a table, by the same loop in a guest and on the host.

use std::time::{Duration, Instant};

use selfpage_core::tables::{Invalidation, PageSize};

use super::super::error::Error;
use super::super::raw::{Mapping, Memory, WORDS};
use super::extent::Watch;
use super::inside::{self, OnFault, Plan, Ran, Scene};

/// What is stepped through: of a small table, as no update knows how large it is.
pub const STEPPED_UPDATES: u64 = 500;
const STEPPED_BYTES: u64 = 2 << 20;

/// In a guest, whose pages are mapped as they are touched first. The table's checksum.
///
/// # Errors
/// There is no KVM, or the host's loop leaves another table.
pub fn in_guest(len_bytes: u64, pages: PageSize, updates: u64) -> Result<Ran<u64>, Error> {
    let plan = plan(len_bytes, pages, Watch::Unwatched);
    let ran = inside::run(plan, move |scene| {
        scene.begin();
        fill(scene.memory());
        scene.begin_time();
        update(scene.memory(), updates);
        scene.end();
        checksum(scene.memory())
    })?;
    let (expected, _) = on_host(len_bytes, pages, updates)?;
    if ran.result != expected {
        return Err(Error::Failed(format!(
            "the guest's table sums up to {:#x}, the host's to {expected:#x}",
            ran.result
        )));
    }
    Ok(ran)
}

/// In a guest, stepped through once all pages are mapped.
///
/// # Errors
/// There is no KVM.
pub fn stepped(pages: PageSize) -> Result<Ran<()>, Error> {
    let plan = plan(STEPPED_BYTES, pages, Watch::Stepped);
    inside::run(plan, move |scene: &Scene| {
        fill(scene.memory());
        scene.begin();
        update(scene.memory(), STEPPED_UPDATES);
        scene.end();
    })
}

/// On the host, in its large pages if the guest's are. The table's checksum, and the time of the updates.
///
/// # Errors
/// There is not enough memory.
pub fn on_host(len_bytes: u64, pages: PageSize, updates: u64) -> Result<(u64, Duration), Error> {
    let mapping = match pages {
        PageSize::Small4KiB => Mapping::anonymous(len_bytes as usize),
        _ => Mapping::huge(len_bytes as usize),
    };
    let mapping = mapping.map_err(|error| Error::Failed(format!("map {len_bytes} bytes: {error}")))?;
    let memory = mapping.memory();
    fill(memory);
    let begun = Instant::now();
    update(memory, updates);
    let took = begun.elapsed();
    Ok((checksum(memory), took))
}

const fn plan(len_bytes: u64, pages: PageSize, watch: Watch) -> Plan {
    Plan { len_bytes, pages, on_fault: OnFault::Map, watch, invalidation: Invalidation::Adaptive }
}

fn fill(table: Memory) {
    for page in 0..table.size_pages() {
        (0..WORDS).for_each(|word| table.write(page, word, (page * WORDS + word) as u64));
    }
}

fn update(table: Memory, updates: u64) {
    let words = table.size_pages() * WORDS;
    let mut dice = 0x5eed_u64;
    for _ in 0..updates {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        let at = dice as usize % words;
        table.write(at / WORDS, at % WORDS, table.read(at / WORDS, at % WORDS) ^ dice);
    }
}

/// Of so few bits that a figure of a bench holds it.
fn checksum(table: Memory) -> u64 {
    let words = (0..table.size_pages()).flat_map(|page| (0..WORDS).map(move |word| table.read(page, word)));
    words.fold(0_u64, |sum, word| sum.rotate_left(5) ^ word) >> 16
}
