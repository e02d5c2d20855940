//! A table of keys and values that takes snapshots while it serves, and goes on from the newest one after a crash.
//!
//! `kv_snapshot serve FILE` works until it is killed; `kv_snapshot check FILE` restores, and compares every key with what it must
//! be at that point in time.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::store::FileStore;
use selfpage::{Domain, Region, Result};

const KEYS: u64 = 1 << 16;
/// Keys lie apart, so that the table has many pages.
const WORDS_OF_KEY: usize = 8;
/// The first page has the number of the last operation.
const WORDS_BEFORE: usize = 512;
const WORDS: usize = WORDS_BEFORE + KEYS as usize * WORDS_OF_KEY;
/// Half of what the table has.
const FRAMES_BYTES: usize = 2 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", file] => serve(Path::new(file), &AtomicBool::new(false)),
        ["check", file] => {
            println!("right, after {} operations", check(Path::new(file))?);
            Ok(())
        }
        _ => {
            eprintln!("usage: kv_snapshot serve FILE | kv_snapshot check FILE");
            std::process::exit(2)
        }
    }
}

/// Puts values, one after the other, until `stop`; another thread takes snapshots, and says of each how many operations it has
/// at least.
pub fn serve(file: &Path, stop: &AtomicBool) -> Result<()> {
    let domain = Domain::with_frames(FRAMES_BYTES).build()?;
    let mut table = table(&domain, file)?;
    let mut snapshots = Snapshots::of(&[&table], file)?;
    let words = table.as_mut_slice::<u64>();
    let done = AtomicU64::new(words[0]);
    std::thread::scope(|scope| {
        let snapshots = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let at_least = done.load(Ordering::Acquire);
                let taken = snapshots.take()?;
                println!("snapshot of {at_least} operations or more: {} pages in {:?}", taken.pages, taken.total);
                let _ = std::io::stdout().flush();
            }
            Ok(())
        });
        while !snapshots.is_finished() {
            let operation = words[0] + 1;
            let key = key_of(operation);
            let place = WORDS_BEFORE + key as usize * WORDS_OF_KEY;
            words[place] = operation;
            words[place + 1] = checksum(key, operation);
            words[0] = operation;
            done.store(operation, Ordering::Release);
        }
        snapshots.join().expect("the thread that takes snapshots does not panic")
    })
}

/// Restores the newest snapshot, and compares it with all operations up to its own. Returns how many there were.
pub fn check(file: &Path) -> Result<u64> {
    let domain = Domain::with_frames(FRAMES_BYTES).build()?;
    let table = table(&domain, file)?;
    let words = table.as_slice::<u64>();
    let done = words[0];
    let mut expected = vec![0; KEYS as usize];
    (1..=done).for_each(|operation| expected[key_of(operation) as usize] = operation);
    // The next one may have been at work.
    let next = key_of(done + 1);
    for key in (0..KEYS).filter(|key| *key != next) {
        let place = WORDS_BEFORE + key as usize * WORDS_OF_KEY;
        let (operation, sum) = (words[place], words[place + 1]);
        assert_eq!(operation, expected[key as usize], "key {key} after {done} operations");
        assert!(operation == 0 || sum == checksum(key, operation), "key {key} after {done} operations: its checksum");
    }
    Ok(done)
}

/// The table as the newest snapshot has it, or an empty one.
fn table(domain: &Domain, file: &Path) -> Result<Region> {
    let store = FileStore::unnamed_in("/var/tmp", 64 << 20)?;
    if file.exists() {
        return domain.region(0).restored(&Snapshot::open(file)?, 0, store);
    }
    domain.region(WORDS * 8).name("table").stored(store)
}

/// Operation `number` is a put of this key.
fn key_of(number: u64) -> u64 {
    mixed(number) % KEYS
}

fn checksum(key: u64, value: u64) -> u64 {
    mixed(key ^ mixed(value))
}

fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 29)
}
