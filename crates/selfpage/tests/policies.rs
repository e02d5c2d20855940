//! Policies by what they save, through the whole library. Tests that count pages run one at a time: an evictor that gets no processor gives
//! no second chance.

use std::sync::atomic::Ordering::Relaxed;

use selfpage::store::MemoryStore;
use selfpage::{Domain, FileAccess, Kind, Trap};

#[path = "../../../tests/alone.rs"]
mod alone;
#[path = "../../../tests/skip.rs"]
mod skip;

use alone::alone;

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
    for turn in 0..200_000 {
        if turn % 64 == 0 {
            // On a busy machine the evictor needs a moment in which nobody else wants its processor.
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
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
    let _alone = alone();
    let (Some(fifo), Some(lru)) = (rereads_of_hot_and_cold("fifo"), rereads_of_hot_and_cold("lru")) else { return };
    println!("pages read: fifo {fifo}, lru {lru}");
    assert!(fifo > 1000, "the trace does not page");
    assert!(2 * lru <= fifo, "lru {lru}, fifo {fifo}");
}

#[test]
fn pages_get_a_second_chance_after_many_that_were_taken_by_name() {
    let _alone = alone();
    const FRAMES: usize = 1024;
    const FEW: usize = FRAMES / 32 * PAGE;
    let Some(domain) = domain(FRAMES, "lru") else { return };
    let store = MemoryStore::new((FRAMES * PAGE) as u64).unwrap();
    let mut region = domain.region(FRAMES * PAGE).trap(Trap::Upcall).stored(store).unwrap();
    region.as_mut_slice::<u64>().iter_mut().step_by(WORDS).for_each(|word| *word = 1);
    for _ in 0..4 {
        // Out, saved, onto the standby list; and off it again, for good.
        region.evict(0, region.len_bytes()).unwrap();
        region.flush(0, region.len_bytes()).unwrap();
        region.evict(0, region.len_bytes()).unwrap();
        assert!(region.as_slice::<u64>().iter().step_by(WORDS).take(FRAMES / 2).all(|word| *word == 1));
    }

    let few = |region: &selfpage::Region| {
        region.as_slice::<u64>().iter().step_by(WORDS).take(FEW / PAGE).all(|word| *word == 1)
    };
    assert!(few(&region));
    region.evict(0, FEW).unwrap();
    assert!(domain.stats().frames_standby as usize >= FEW / PAGE, "the list has no place for them");
    let filled = || domain.stats().counts.bytes_filled;
    let mut filled_before = filled();
    // What was read ahead of the passes over the half may still be on its way.
    loop {
        std::thread::sleep(std::time::Duration::from_millis(50));
        let now = filled();
        if std::mem::replace(&mut filled_before, now) == now {
            break;
        }
    }
    assert!(few(&region));
    assert_eq!(filled(), filled_before);
}

#[test]
fn pages_of_the_region_that_matters_less_go_first() {
    let _alone = alone();
    const FRAMES: usize = 1024;
    const LEN: usize = FRAMES / 2 * PAGE;
    for changed in [false, true] {
        let Some(domain) = domain(FRAMES, "priority") else { return };
        let touch = |region: &selfpage::Region| {
            assert!(region.as_slice::<u64>().iter().step_by(WORDS).all(|word| *word == 0));
        };
        let region = |priority: u8| {
            let store = MemoryStore::new(LEN as u64).unwrap();
            domain.region(LEN).trap(Trap::Upcall).priority(if changed { 7 } else { priority }).stored(store).unwrap()
        };
        let (less, more) = (region(1), region(200));
        if changed {
            less.set_priority(1);
            more.set_priority(200);
        }
        // The one that matters is the older one in core.
        touch(&more);
        let store = MemoryStore::new((2 * LEN) as u64).unwrap();
        let passing = domain.region(2 * LEN).trap(Trap::Upcall).priority(100).stored(store).unwrap();
        touch(&less);
        // Not written: what waits for its save is no victim, and those that matter more may have to go meanwhile.
        touch(&passing);
        let in_core =
            |region: &selfpage::Region| region.residency().iter().filter(|byte| byte.load(Relaxed) != 0).count();
        let (less, more) = (in_core(&less), in_core(&more));
        println!("in core: {less} pages that matter less, {more} that matter more");
        assert_eq!(more, FRAMES / 2, "changed: {changed}");
        assert!(less < FRAMES / 8, "changed: {changed}: {less} that matter less are in core");
    }
}

/// A file that goes when the test ends, however it ends.
struct Scratch(std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What one more pass over a file of 4/3 of the frames reads of it, in percent: of a few passes, the one in the middle, since an
/// evictor that gets no processor for a while takes what was just read ahead. `word` is what the file holds, by the number of
/// the word; a few words of each page are checked.
fn rereads_of_a_pass(policy: &str, trap: Trap, frames: usize, file: &Scratch, word: fn(u64) -> u64) -> Option<u64> {
    let domain = domain(frames, policy)?;
    let region = domain.region(0).trap(trap).file(&file.0, 0, FileAccess::Read).unwrap();
    let mut reads = Vec::new();
    for pass in 0..6 {
        let before = domain.stats().counts.bytes_filled;
        for (at, seen) in region.as_slice::<u64>().iter().enumerate().step_by(WORDS / 4) {
            assert_eq!(*seen, word(at as u64));
        }
        if pass > 0 {
            let read = domain.stats().counts.bytes_filled - before;
            reads.push(read * 100 / region.len_bytes() as u64);
        }
    }
    reads.sort_unstable();
    Some(reads[reads.len() / 2])
}

#[test]
fn mru_keeps_most_of_a_file_that_is_scanned_again_and_again() {
    let _alone = alone();
    const FRAMES: usize = 6144;
    let file = Scratch(format!("/var/tmp/selfpage-cyclic-{}", std::process::id()).into());
    std::fs::write(&file.0, (0..FRAMES / 3 * 4 * WORDS).flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>())
        .unwrap();
    for trap in [Trap::Worker, Trap::Upcall] {
        let rereads = |policy| rereads_of_a_pass(policy, trap, FRAMES, &file, |at| at);
        let (Some(mru), Some(lru)) = (rereads("mru"), rereads("lru")) else { return };
        println!("{trap:?}: read again in a pass: mru {mru} %, lru {lru} %");
        // The reserve and what is read ahead are a larger part of few frames than of many.
        assert!(mru <= 36, "mru read {mru} % again");
        assert!(lru >= 90, "lru read {lru} % again: the scan fits the frames");
    }
}

#[test]
fn mru_reads_at_most_30_percent_again_in_512_mib_of_frames() {
    let _alone = alone();
    const FRAMES: usize = 131_072;
    let file = Scratch(format!("/var/tmp/selfpage-cyclic-large-{}", std::process::id()).into());
    // A hole: nothing is written, and what is read is zero.
    std::fs::File::create(&file.0).unwrap().set_len((FRAMES / 3 * 4 * PAGE) as u64).unwrap();
    let Some(mru) = rereads_of_a_pass("mru", Trap::Upcall, FRAMES, &file, |_| 0) else { return };
    println!("read again in a pass: mru {mru} %");
    assert!(mru <= 30, "mru read {mru} % again");
}
