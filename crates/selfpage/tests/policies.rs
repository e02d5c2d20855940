//! Policies by what they save, through the whole library.

use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Rights, Trap};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

fn domain(frames: usize, policy: &str) -> Option<Domain> {
    match Domain::with_frames(frames * PAGE).policy(policy).build() {
        Ok(domain) => Some(domain),
        Err(error) if error.kind() == Kind::Unsupported => {
            skip::skip("uffd", &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Pages read again while nine of ten accesses go to a quarter as many pages as there are frames, and the rest to pages that
/// are used once.
fn rereads_of_hot_and_cold(policy: &str) -> Option<u64> {
    const FRAMES: usize = 2048;
    const HOT: u64 = FRAMES as u64 / 4;
    // A prime, and far more than are touched.
    const COLD: u64 = 30_011;
    let domain = domain(FRAMES, policy)?;
    let pages = (HOT + COLD) as usize;
    let store = MemoryStore::new((pages * PAGE) as u64).unwrap();
    let mut region = domain.region(pages * PAGE).trap(Trap::Upcall).stored(store).unwrap();
    // Cold pages have no contents, and are no read.
    for (page, words) in region.as_mut_slice::<u64>().chunks_mut(WORDS).take(HOT as usize).enumerate() {
        words[0] = page as u64;
    }
    let words = region.as_slice::<u64>();
    let mut dice = 7u64;
    let mut below = |end: u64| {
        dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (dice >> 33) % end
    };
    let mut cold = 0;
    for _ in 0..200_000 {
        if below(10) == 0 {
            // Scattered: no stream to read ahead of.
            cold += 1;
            assert_eq!(words[(HOT + cold * 10_007 % COLD) as usize * WORDS], 0);
        } else {
            let page = below(HOT);
            assert_eq!(words[page as usize * WORDS], page);
        }
    }
    Some(domain.stats().counts.bytes_filled / PAGE as u64)
}

#[test]
fn lru_reads_at_most_half_again_of_what_fifo_does() {
    let (Some(fifo), Some(lru)) = (rereads_of_hot_and_cold("fifo"), rereads_of_hot_and_cold("lru")) else { return };
    println!("pages read: fifo {fifo}, lru {lru}");
    assert!(fifo > 1000, "the trace does not page");
    assert!(2 * lru <= fifo, "lru {lru}, fifo {fifo}");
}

/// What one more pass over a file of 4/3 of the frames reads of it, in percent: of a few passes, the worst.
fn rereads_of_a_pass(policy: &str, trap: Trap) -> Option<u64> {
    const FRAMES: usize = 6144;
    const PAGES: usize = FRAMES * 4 / 3;
    let file = std::path::PathBuf::from(format!("/var/tmp/selfpage-{policy}-{trap:?}-{}", std::process::id()));
    std::fs::write(&file, (0..PAGES * WORDS).flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>()).unwrap();
    let domain = domain(FRAMES, policy);
    let region = domain.as_ref().map(|domain| domain.region(0).trap(trap).file(&file, 0, Rights::Read).unwrap());
    std::fs::remove_file(&file).unwrap();
    let (domain, region) = (domain?, region?);
    let mut worst = 0;
    for pass in 0..5 {
        let before = domain.stats().counts.bytes_filled;
        for (at, word) in region.as_slice::<u64>().iter().enumerate() {
            assert_eq!(*word, at as u64);
        }
        let percent = (domain.stats().counts.bytes_filled - before) * 100 / (PAGES * PAGE) as u64;
        if pass > 0 {
            worst = worst.max(percent);
        }
    }
    Some(worst)
}

#[test]
fn mru_keeps_most_of_a_file_that_is_scanned_again_and_again() {
    for trap in [Trap::Worker, Trap::Upcall] {
        let (Some(mru), Some(lru)) = (rereads_of_a_pass("mru", trap), rereads_of_a_pass("lru", trap)) else { return };
        println!("{trap:?}: read again in a pass: mru {mru} %, lru {lru} %");
        assert!(mru <= 30, "mru read {mru} % again");
        assert!(lru >= 90, "lru read {lru} % again: the scan fits the frames");
    }
}
