use std::collections::BTreeSet;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use proptest::prelude::*;

use super::*;

impl Bloks {
    /// The same bloks as another member of the family sees them.
    fn as_member(&self, member: u32) -> Bloks {
        let other = Bloks {
            map: Arc::clone(&self.map),
            count: self.count,
            bitmap_pages: self.bitmap_pages,
            me: Mapping::new(1, Sharing::Own).unwrap(),
            hint: 1.into(),
            patience: 0.into(),
            no_space: false.into(),
            sweeps: Mapping::new(1, Sharing::Own).unwrap(),
        };
        other.adopt(member);
        other
    }
}

#[derive(Debug, Clone)]
enum Step {
    Claim(u32),
    /// Gives the n-th run back (of those held, counted round), or its first half, or its second.
    Release(usize, u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => prop_oneof![1..5_u32, 60..70_u32, 1..400_u32].prop_map(Step::Claim),
        2 => (any::<usize>(), 0..3_u8).prop_map(|(run, part)| Step::Release(run, part)),
    ];
    prop::collection::vec(step, 1..200)
}

fn longest_free_run(count: u32, taken: &BTreeSet<u32>) -> u32 {
    let (mut longest, mut len) = (0, 0);
    for blok in 1..count {
        len = if taken.contains(&blok) { 0 } else { len + 1 };
        longest = longest.max(len);
    }
    longest
}

proptest! {
    #[test]
    fn claims_agree_with_a_set(count in prop_oneof![2..70_u32, 60..600_u32, Just(4000)], steps in steps()) {
        let bloks = Bloks::private(count).unwrap();
        let mut taken = BTreeSet::new();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for step in steps {
            match step {
                Step::Claim(want) => match bloks.claim(want) {
                    Ok((Blok(first), len)) => {
                        prop_assert!((1..=want).contains(&len));
                        prop_assert!(first >= 1 && first + len <= count);
                        // These stores are so small that a search sees all below the mark, once from the hint on.
                        let longest = longest_free_run(bloks.mark(), &taken).min(want);
                        prop_assert!(len * 2 >= longest, "{len} of {want}, there were {longest}");
                        for blok in first..first + len {
                            prop_assert!(taken.insert(blok), "blok {blok} was given out twice");
                        }
                        runs.push((first, len));
                    }
                    Err(error) => {
                        prop_assert_eq!(error, PagerError::Full);
                        prop_assert_eq!(taken.len() as u32, count - 1);
                    }
                },
                Step::Release(_, _) if runs.is_empty() => {}
                Step::Release(run, part) => {
                    let at = run % runs.len();
                    let (first, len) = runs.swap_remove(at);
                    let half = len / 2;
                    let (give, keep) = match part {
                        0 => ((first, len), (0, 0)),
                        1 => ((first, half), (first + half, len - half)),
                        _ => ((first + half, len - half), (first, half)),
                    };
                    bloks.release(Blok(give.0), give.1);
                    (give.0..give.0 + give.1).for_each(|blok| assert!(taken.remove(&blok)));
                    if keep.1 > 0 {
                        runs.push(keep);
                    }
                }
            }
            prop_assert_eq!(bloks.taken_count(), taken.len() as u64);
        }
    }
}

#[test]
fn claims_are_neighbours_of_the_last() {
    let bloks = Bloks::private(10_000).unwrap();
    assert_eq!(bloks.claim(10), Ok((Blok(1), 10)));
    assert_eq!(bloks.claim(200), Ok((Blok(11), 200)));
    bloks.release(Blok(5), 3);
    assert_eq!(bloks.claim(1), Ok((Blok(211), 1)));
}

#[test]
fn a_full_store_says_so_and_takes_bloks_back() {
    let bloks = Bloks::private(130).unwrap();
    assert_eq!(bloks.claim(u32::MAX), Ok((Blok(1), 129)));
    assert_eq!(bloks.claim(1), Err(PagerError::Full));
    bloks.release(Blok(63), 2);
    assert_eq!(bloks.claim(5), Ok((Blok(63), 2)));
    assert_eq!(bloks.claim(5), Err(PagerError::Full));
}

#[test]
#[should_panic(expected = "not all held")]
fn a_blok_given_back_twice_is_noticed() {
    let bloks = Bloks::private(100).unwrap();
    let (first, _) = bloks.claim(4).unwrap();
    bloks.release(first, 4);
    bloks.release(first, 1);
}

/// Saves `pages` pages over and over, `batch` at a time and each in a blok of its own, as a region does that is written at random. Returns
/// how long a run was in the mean.
fn rewrite(bloks: &Bloks, pages: usize, batch: u32, saves: usize) -> f64 {
    let mut saved: Vec<Option<Blok>> = vec![None; pages];
    let (mut random, mut claims, mut done) = (batch as u64 + 1, 0, 0);
    while done < saves {
        let mut left = batch;
        while left > 0 {
            let (first, len) = bloks.claim(left).unwrap();
            claims += 1;
            for blok in first.0..first.0 + len {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if let Some(old) = saved[(random >> 33) as usize % pages].replace(Blok(blok)) {
                    bloks.release(old, 1);
                }
            }
            left -= len;
        }
        done += batch as usize;
    }
    saved.into_iter().flatten().for_each(|blok| bloks.release(blok, 1));
    done as f64 / claims as f64
}

#[test]
fn little_that_is_saved_over_and_over_stays_within_little() {
    const PAGES: usize = 5000;
    for batch in 1..=64 {
        let bloks = Bloks::private(1 << 24).unwrap();
        let mean = rewrite(&bloks, PAGES, batch, 16_000);
        let most = 2 * (PAGES as u32 + batch) + SPARE_BLOKS as u32;
        assert!(
            bloks.mark() <= most + step(most) as u32,
            "{} bloks for {PAGES} pages, {batch} at a time",
            bloks.mark()
        );
        assert!(mean > f64::from(batch) / 6.0, "runs of {mean} in the mean, {batch} at a time");
    }
}

#[test]
fn what_is_saved_in_order_lies_in_long_runs() {
    let bloks = Bloks::private(1 << 24).unwrap();
    for _ in 0..50 {
        let mut saved: Vec<(Blok, u32)> = (0..40).map(|_| bloks.claim(256).unwrap()).collect();
        let long = saved.iter().filter(|(_, len)| *len >= 128).count();
        assert!(long > 35, "{long} of 40");
        saved.drain(..).for_each(|(first, len)| bloks.release(first, len));
    }
    assert!(bloks.mark() < 2 * 40 * 256 + 2000, "{}", bloks.mark());
}

#[test]
fn members_go_round_below_one_mark() {
    const PAGES: usize = 2000;
    let parent = Bloks::family(1 << 20).unwrap();
    rewrite(&parent, PAGES, 64, 20_000);
    for child in [7, 255] {
        parent.hand_to(child);
        rewrite(&parent.as_member(child), PAGES, 64, 20_000);
    }
    let most = 2 * (PAGES + 64) as u32 + SPARE_BLOKS as u32;
    assert!(parent.mark() <= most + step(most) as u32, "{} bloks for {PAGES} pages at a time", parent.mark());
    assert_eq!(parent.taken_count(), 0);
}

#[test]
fn where_there_is_no_space_what_was_written_goes_first() {
    let bloks = Bloks::private(1 << 20).unwrap();
    let (first, len) = bloks.claim(100).unwrap();
    (first.0..first.0 + 60).for_each(|blok| bloks.wrote(Blok(blok)));
    bloks.release(first, len);
    bloks.found_no_space();
    assert_eq!(bloks.claim(64), Ok((first, 60)));
    // None is left: there may be space again.
    assert_eq!(bloks.claim(64), Ok((Blok(first.0 + 60), 64)));
}

#[test]
fn where_there_is_no_space_short_runs_in_a_crowd_go_first() {
    const WRITTEN: u32 = 2000;
    let bloks = Bloks::private(1 << 20).unwrap();
    bloks.claim(WRITTEN).unwrap();
    (1..=WRITTEN).for_each(|blok| bloks.wrote(Blok(blok)));
    let (unwritten, len) = bloks.claim(100).unwrap();
    bloks.release(unwritten, len);
    let gaps: BTreeSet<u32> = (10..=WRITTEN).step_by(10).collect();
    gaps.iter().for_each(|&gap| bloks.release(Blok(gap), 1));
    bloks.found_no_space();
    let claimed: BTreeSet<u32> = gaps.iter().map(|_| bloks.claim(64).unwrap().0.0).collect();
    assert_eq!(claimed, gaps);
}

/// How much memory a mapping has.
fn touched_bytes(bloks: &Bloks) -> usize {
    let status = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", bloks.map.words().as_ptr().addr());
    let mine = status.lines().skip_while(|line| !line.starts_with(&start));
    let rss = mine.into_iter().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn members_of_a_large_store_take_memory_for_what_was_claimed() {
    let parent = Bloks::family(1 << 28).unwrap();
    let (first, len) = parent.claim(100_000).unwrap();
    parent.hand_to(1);
    parent.release(first, len);
    assert_eq!(parent.taken_count(), len.into());
    let touched = touched_bytes(&parent);
    assert!(touched < 1 << 20, "{touched} bytes");
    parent.forget(1);
    assert_eq!(parent.taken_count(), 0);
    parent.forget(2);
    let touched = touched_bytes(&parent);
    assert!(touched < 1 << 20, "{touched} bytes");
}

#[test]
fn members_that_are_gone_leave_no_memory_behind() {
    let parent = Bloks::family(1 << 28).unwrap();
    let mut left = 1 << 20;
    while left > 0 {
        left -= parent.claim(left).unwrap().1;
    }
    parent.hand_to(1);
    let one = touched_bytes(&parent);
    (2..=200).for_each(|member| parent.hand_to(member));
    assert!(touched_bytes(&parent) > 20 * one);
    let others: Vec<u32> = parent.others().collect();
    others.iter().rev().for_each(|member| parent.forget(*member));
    // To look at one has the kernel find memory for it.
    assert_eq!(parent.taken_count(), 1 << 20);
    let touched = touched_bytes(&parent);
    assert!(touched <= one, "{touched} bytes, and {one} with one member");
    assert_eq!(parent.others().count(), 0);
}

/// Claims and releases until `rounds` are over, and notes in `owners` who has what.
fn churn(bloks: &Bloks, owners: &[AtomicU8], rounds: u32, seed: u32) {
    let mut held: Vec<(Blok, u32)> = Vec::new();
    let mut random = seed;
    for _ in 0..rounds {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if (random >> 16).is_multiple_of(2) && !held.is_empty() {
            let (first, len) = held.swap_remove((random >> 20) as usize % held.len());
            (first.0..first.0 + len).for_each(|blok| assert_eq!(owners[blok as usize].fetch_sub(1, SeqCst), 1));
            bloks.release(first, len);
        } else if let Ok((first, len)) = bloks.claim(1 + (random >> 20) % 80) {
            for blok in first.0..first.0 + len {
                assert_eq!(owners[blok as usize].fetch_add(1, SeqCst), 0, "blok {blok} was given out twice");
            }
            held.push((first, len));
        }
    }
    for (first, len) in held {
        (first.0..first.0 + len).for_each(|blok| assert_eq!(owners[blok as usize].fetch_sub(1, SeqCst), 1));
        bloks.release(first, len);
    }
}

#[test]
fn threads_and_members_never_share_a_claim() {
    const COUNT: u32 = 700;
    let bloks = Bloks::family(COUNT).unwrap();
    bloks.hand_to(1);
    bloks.hand_to(2);
    let family = [bloks.as_member(0), bloks.as_member(1), bloks.as_member(2)];
    let owners: Vec<AtomicU8> = (0..COUNT).map(|_| 0.into()).collect();
    thread::scope(|scope| {
        for thread in 0..6 {
            let (bloks, owners) = (&family[thread as usize % 3], &owners);
            scope.spawn(move || churn(bloks, owners, 30_000, thread));
        }
    });
    assert_eq!(bloks.taken_count(), 0);
}

/// Two members hand a blok to and fro, so it is never free. Whoever looks at the bitmaps passes the one first and the other
/// last, with all others in between.
#[test]
fn a_blok_on_its_way_between_members_is_never_free() {
    const LAST: u32 = MEMBERS - 1;
    let bloks = Bloks::family(64).unwrap();
    let (passed, _) = bloks.claim(1).unwrap();
    for member in [LAST, 100] {
        bloks.hand_to(member);
        bloks.as_member(member).release(passed, 1);
    }
    let thief = bloks.as_member(100);
    thread::scope(|scope| {
        let passing = scope.spawn(|| {
            for round in 0..50_000 {
                let (from, to) = if round % 2 == 0 { (0, LAST) } else { (LAST, 0) };
                bloks.as_member(from).hand_to(to);
                bloks.as_member(from).release(passed, 1);
            }
        });
        while !passing.is_finished() {
            assert_eq!(thief.take(Run { first: passed.0, len: 1 }), 0, "a blok in use was claimed");
        }
    });
}

#[test]
fn a_blok_is_free_when_the_last_member_lets_go() {
    let parent = Bloks::family(1000).unwrap();
    let (first, len) = parent.claim(999).unwrap();
    parent.hand_to(1);
    let child = parent.as_member(1);
    parent.release(first, len);
    assert_eq!(parent.claim(1), Err(PagerError::Full));
    child.release(first, 100);
    assert_eq!(parent.taken_count(), 899);
    parent.forget(1);
    assert_eq!(parent.taken_count(), 0);
    assert_eq!(parent.claim(999).unwrap().1, 999);
}

#[test]
fn a_new_member_has_nothing_of_the_one_before() {
    let parent = Bloks::family(1000).unwrap();
    parent.hand_to(1);
    parent.as_member(1).claim(500).unwrap();
    let (first, len) = parent.claim(7).unwrap();
    parent.hand_to(1);
    parent.release(first, len);
    assert_eq!(parent.taken_count(), 7);
    parent.as_member(1).release(first, len);
}
