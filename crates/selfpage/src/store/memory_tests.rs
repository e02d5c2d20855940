use std::sync::atomic::AtomicBool;

use super::*;

fn save(store: &MemoryStore, blok: u32, fill: u8) {
    let mut write = [WriteBlok { blok: Blok(blok), bytes: &[fill; PAGE_BYTES], outcome: Err(PagerError::NoStore) }];
    store.write(&mut write);
    assert_eq!(write[0].outcome, Ok(()));
}

fn load(store: &MemoryStore, blok: u32) -> Vec<u8> {
    let mut bytes = [0xee; PAGE_BYTES];
    store.read(Context::Trap, &mut [ReadBlok { blok: Blok(blok), bytes: &mut bytes }]).unwrap();
    bytes.to_vec()
}

#[test]
fn pages_come_back() {
    let store = MemoryStore::new(1 << 20).unwrap();
    assert_eq!(store.claim(256), Ok((Blok(1), 256)));
    assert_eq!(store.claim(1), Err(PagerError::Full));
    (1..=256).for_each(|blok| save(&store, blok, blok as u8));
    (1..=256).for_each(|blok| assert!(load(&store, blok).iter().all(|&byte| byte == blok as u8)));
}

#[test]
fn a_sweep_gives_memory_back_and_spares_what_is_held() {
    let store = MemoryStore::new(8 << 20).unwrap();
    store.claim(2048).unwrap();
    (1..=2048).for_each(|blok| save(&store, blok, 7));
    (1..=1900).for_each(|blok| store.release(Blok(blok), 1));
    let empty = (1..=1900).filter(|&blok| load(&store, blok) == [0; PAGE_BYTES]).count();
    assert!(empty >= 1100, "only {empty} of 1900 free bloks gave their memory back");
    (1901..=2048).for_each(|blok| assert_eq!(load(&store, blok), [7; PAGE_BYTES]));
    assert_eq!(store.taken_bloks(), 148);
    assert_eq!(store.claim(1900).unwrap().1, 1900);
}

/// What was saved at a time, once, is no reason to keep memory.
#[test]
fn memory_follows_what_is_saved_whatever_the_capacity() {
    const MOST: u32 = 10_000;
    let store = MemoryStore::new(1 << 30).unwrap();
    let mut saved = Vec::new();
    while saved.len() < MOST as usize {
        let (first, len) = store.claim(1).unwrap();
        assert_eq!(len, 1);
        save(&store, first.0, 7);
        saved.push(first);
    }
    saved.drain(..9000).for_each(|blok| store.release(blok, 1));
    let kept = (1..=MOST).filter(|&blok| load(&store, blok) != [0; PAGE_BYTES]).count();
    assert!(kept <= 2 * 1000 + 600, "{kept} bloks have memory, for 1000 that are saved");
}

#[test]
fn a_store_that_is_swept_is_not_full() {
    let store = MemoryStore::new(64 << PAGE_BYTES.ilog2()).unwrap();
    // One blok is free but for the moments in which a sweep holds it.
    store.claim(64).unwrap();
    store.release(Blok(9), 1);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20_000 {
                store.bloks.sweep(|first, len| store.discard(first, len));
            }
            ended.store(true, Ordering::Relaxed);
        });
        while !ended.load(Ordering::Relaxed) {
            assert_eq!(store.bloks.claim(1), Ok((Blok(9), 1)));
            store.bloks.release(Blok(9), 1);
            std::hint::spin_loop();
        }
    });
}

#[test]
fn a_long_release_gives_memory_back_at_once() {
    let store = MemoryStore::new(1 << 20).unwrap();
    store.claim(256).unwrap();
    (1..=256).for_each(|blok| save(&store, blok, 7));
    store.release(Blok(1), 64);
    assert_eq!(load(&store, 64), [0; PAGE_BYTES]);
    assert_eq!(load(&store, 65), [7; PAGE_BYTES]);
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for (capacity_bytes, says) in [(4095, "holds no page"), (u64::MAX, "too large"), (1 << 44, "too large")] {
        let error = MemoryStore::new(capacity_bytes).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
    let most = (1 << 44) - 2 * PAGE_BYTES as u64;
    assert!(blok_count("", most).is_ok());
    let error = blok_count("", most + PAGE_BYTES as u64).unwrap_err();
    assert!(error.remedy.contains("16 TiB - 8 KiB"), "{error}");
}
