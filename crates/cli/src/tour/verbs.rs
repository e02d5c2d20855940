//! What a program can say of its pages: evict, discard, prefetch.

use std::time::{Duration, Instant};

use selfpage::{Counts, Domain, Region, Trap};

use super::array::in_core_bytes;
use super::screen::Screen;
use super::{PAGE_BYTES, Row, Sizes, Stop, mib, scratch};

const WORDS: usize = PAGE_BYTES / 8;
const PATIENCE: Duration = Duration::from_secs(10);

/// What one call did.
struct Deed {
    core_before: u64,
    core_after: u64,
    counts_before: Counts,
    counts_after: Counts,
    took: Duration,
}

impl Deed {
    fn of<T>(
        domain: &Domain,
        region: &mut Region,
        call: impl FnOnce(&mut Region) -> Result<T, Stop>,
    ) -> Result<Deed, Stop> {
        let (core_before, counts_before) = (in_core_bytes(region), domain.stats().counts);
        let began = Instant::now();
        call(region)?;
        let took = began.elapsed();
        let (core_after, counts_after) = (in_core_bytes(region), domain.stats().counts);
        Ok(Deed { core_before, core_after, counts_before, counts_after, took })
    }

    fn saved_bytes(&self) -> u64 {
        self.counts_after.bytes_saved - self.counts_before.bytes_saved
    }

    fn faults(&self) -> u64 {
        self.counts_after.faults_total - self.counts_before.faults_total
    }

    fn row(&self, step: &str) -> Row {
        let figures = format!(
            "in core {} -> {}, {} saved, {} faults",
            mib(self.core_before),
            mib(self.core_after),
            mib(self.saved_bytes()),
            self.faults()
        );
        Row { step: step.into(), figures, took: self.took }
    }
}

/// Evicts, prefetches and discards, and shows what each did.
pub fn show(screen: &mut Screen, sizes: &Sizes) -> Result<Vec<Row>, Stop> {
    let len_bytes = sizes.frames_bytes / 2;
    screen.say(&format!(
        "3. What a program can say of its pages, on {} of new data that fit the frames.",
        mib(len_bytes as u64)
    ));
    let domain = Domain::with_frames(sizes.frames_bytes).build()?;
    let store = scratch::store(2 * len_bytes)?;
    let mut region = domain.region(len_bytes).name("the tour's pages").trap(Trap::Upcall).stored(store)?;
    region.as_mut_slice::<u64>().chunks_mut(WORDS).enumerate().for_each(|(page, words)| words[0] = page as u64 + 1);

    let evicted = Deed::of(&domain, &mut region, |region| {
        region.evict(0, len_bytes)?;
        // Evicted pages are on their way to the store; this waits until they are there.
        Ok(region.flush(0, len_bytes)?)
    })?;
    screen.say(&format!(
        "   evict:    in core {} -> {}; {} went to the store. The frames are free for something better.",
        mib(evicted.core_before),
        mib(evicted.core_after),
        mib(evicted.saved_bytes())
    ));
    let fetched = Deed::of(&domain, &mut region, |region| {
        region.prefetch(0, len_bytes)?;
        wait_for(screen, region, len_bytes as u64)
    })?;
    let read = Deed::of(&domain, &mut region, |region| check(region, |page| page as u64 + 1))?;
    screen.say(&format!(
        "   prefetch: in core {} -> {} in the background; reading all of it then took {} faults.",
        mib(fetched.core_before),
        mib(fetched.core_after),
        read.faults()
    ));
    // Changed once more, so that evicting it would cost a save.
    region.as_mut_slice::<u64>().chunks_mut(WORDS).for_each(|words| words[0] = 7);
    let discarded = Deed::of(&domain, &mut region, |region| Ok(region.discard(0, len_bytes)?))?;
    check(&mut region, |_| 0)?;
    screen.say(&format!(
        "   discard:  in core {} -> {}; {} went to the store, although all of it had changed. It was garbage, and only\n             \
         the program could know. It reads as zero now.\n",
        mib(discarded.core_before),
        mib(discarded.core_after),
        mib(discarded.saved_bytes())
    ));
    Ok(vec![
        evicted.row("evict"),
        fetched.row("prefetch"),
        read.row("read what was prefetched"),
        discarded.row("discard"),
    ])
}

fn wait_for(screen: &mut Screen, region: &Region, wanted_bytes: u64) -> Result<(), Stop> {
    let deadline = Instant::now() + PATIENCE;
    screen.begin(wanted_bytes as usize);
    loop {
        let now = in_core_bytes(region);
        if now >= wanted_bytes {
            return Ok(());
        }
        if Instant::now() > deadline {
            let why =
                format!("a prefetch brought {} of {} within {} s", mib(now), mib(wanted_bytes), PATIENCE.as_secs());
            return Err(Stop::Failed(why));
        }
        if screen.is_due() {
            screen.show(now as usize, &format!("prefetch: {} of {}", mib(now), mib(wanted_bytes)));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn check(region: &mut Region, expected: impl Fn(usize) -> u64) -> Result<(), Stop> {
    match region.as_slice::<u64>().chunks(WORDS).enumerate().find(|(page, words)| words[0] != expected(*page)) {
        None => Ok(()),
        Some((page, _)) => Err(Stop::Failed(format!("page {page} has the wrong contents: this is a bug of selfpage"))),
    }
}
