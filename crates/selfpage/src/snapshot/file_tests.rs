//! Files with snapshots: cut short, damaged, and restored.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use xxhash_rust::xxh3::xxh3_128;

use super::file::{Snapshot, data_at, newest, slot_at};
use super::format::{Current, ENTRY_BYTES, Entry, Header, PAGE, RUN_BYTES, Run, SavedRegion, Trailer};
use super::place::{Place, files};
use super::take::{MOST_IN_A_FILE, Snapshots};
use super::writing::Target;
use crate::store::{Descriptor, MemoryStore};
use crate::{Domain, Error, Kind, skip};

fn regions() -> Vec<SavedRegion> {
    vec![SavedRegion { name: "left".into(), size_pages: 40 }, SavedRegion { name: "right".into(), size_pages: 1 << 30 }]
}

fn contents(page: u64, version: u64) -> PageBytes {
    let mut bytes = [0; PAGE_BYTES];
    bytes[..8].copy_from_slice(&(page * 1000 + version).to_le_bytes());
    bytes[4088..].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Writes `pages` with the contents of `version`.
fn add(target: &mut Target, pages: impl Iterator<Item = u64>, version: u64) {
    let mut writing = target.begin();
    pages.for_each(|page| writing.page(page, &contents(page, version)).unwrap());
    writing.finish(&[Run { first: 30, count: 20 }]).unwrap();
}

/// What version page `page` has in the snapshot; 0: it is zero.
fn version(snapshot: &Snapshot, page: u64) -> u64 {
    let mut bytes = [1; PAGE_BYTES];
    let (region, index) = if page < 40 { (0, page) } else { (1, page - 40) };
    snapshot.read_page(region, index, &mut bytes).unwrap();
    let version = u64::from_le_bytes(bytes[4088..].try_into().unwrap());
    assert!(bytes == if version == 0 { [0; PAGE_BYTES] } else { contents(page, version) }, "page {page}");
    version
}

fn target(path: &Path) -> Target {
    let mut target = Target::at(path, regions()).unwrap();
    target.begin_file().unwrap();
    target
}

fn made(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("one.snap");
    let mut target = target(&path);
    assert!(!path.exists(), "it has no snapshot yet");
    add(&mut target, 0..100, 1);
    add(&mut target, (0..100).step_by(3), 2);
    let mut writing = target.begin();
    writing.page(7, &contents(7, 3)).unwrap();
    writing.page(8, &[0; PAGE_BYTES]).unwrap();
    writing.zero(9, 5).unwrap();
    writing.finish(&[]).unwrap();
    path
}

#[test]
fn the_newest_of_several_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = Snapshot::open(made(dir.path())).unwrap();
    assert_eq!((snapshot.sequence(), snapshot.regions().len()), (3, 2));
    for page in 0..200 {
        let expected = match page {
            7 => 3,
            8..14 => 0,
            _ if page >= 100 => 0,
            _ if page % 3 == 0 => 2,
            _ => 1,
        };
        assert_eq!(version(&snapshot, page), expected, "page {page}");
    }
    snapshot.verify().unwrap();
    assert_eq!(snapshot.pages(), 94);
    assert!(snapshot.read_page(2, 0, &mut [0; PAGE_BYTES]).is_err());
    assert!(snapshot.read_page(0, 40, &mut [0; PAGE_BYTES]).is_err());
}

/// A part has a table of 16 entries here.
#[test]
fn a_table_does_not_grow_with_its_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("parts.snap");
    let mut target = target(&path);
    let mut take = |pages: u64, version: u64| {
        let mut writing = target.begin();
        // Each second one becomes zero: an entry of its own.
        for page in 0..pages {
            writing.page(page, &if page % 2 == 0 { contents(page, version) } else { [0; PAGE_BYTES] }).unwrap();
        }
        writing.finish(&[]).unwrap()
    };
    let (few, many, again) = (take(3, 1), take(1000, 2), take(16, 3));
    assert_eq!(few.buffer_bytes, many.buffer_bytes);
    assert_eq!(again.buffer_bytes, many.buffer_bytes);
    // 63 parts, the last of them with 8 entries, and each with a page for the table and one for the trailer.
    assert_eq!(many.bytes, (500 + 2 * 63) * PAGE);
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!((snapshot.sequence(), snapshot.pages()), (3, 500));
    for page in 0..1100 {
        let expected = if page % 2 == 1 || page >= 1000 { 0 } else { 2 + u64::from(page < 16) };
        assert_eq!(version(&snapshot, page), expected, "page {page}");
    }
}

#[test]
fn zero_pages_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("zero.snap");
    let mut target = target(&path);
    let mut writing = target.begin();
    writing.zero(0, 1 << 30).unwrap();
    writing.page(5, &[0; PAGE_BYTES]).unwrap();
    // A page for the trailer.
    assert_eq!(writing.finish(&[]).unwrap().bytes, PAGE);
}

#[test]
fn pages_that_became_zero_cost_a_reader_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cleared.snap");
    let mut target = target(&path);
    add(&mut target, 0..100, 1);
    let mut writing = target.begin();
    // More than there is memory for, were each of them kept.
    writing.zero(10, 1 << 30).unwrap();
    writing.finish(&[]).unwrap();
    add(&mut target, 20..22, 3);
    let snapshot = Snapshot::open(&path).unwrap();
    let versions: Vec<u64> = (8..24).map(|page| version(&snapshot, page)).collect();
    assert_eq!(versions, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0]);
    assert_eq!(snapshot.pages(), 12);
}

/// What a file is at each moment of the next snapshot: nobody ever reads a mixture.
#[test]
fn whenever_it_stops_a_whole_snapshot_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let mut target = target(&path);
    add(&mut target, 0..20, 1);
    add(&mut target, 0..20, 2);
    let before = std::fs::read(&path).unwrap();
    add(&mut target, 0..20, 3);
    let after = std::fs::read(&path).unwrap();
    // Two pages, which say the same.
    let slots = before.iter().zip(&after).take_while(|(old, new)| old == new).count() / 4096 * 4096;
    let torn = dir.path().join("torn.snap");
    let version_of = |bytes: &[u8]| {
        std::fs::write(&torn, bytes).unwrap();
        let snapshot = Snapshot::open(&torn).unwrap();
        snapshot.verify().unwrap();
        let found = version(&snapshot, 0);
        assert!((0..20).all(|page| version(&snapshot, page) == found));
        found
    };
    // New data at any length, and the place for the newest still as it was.
    for len in (before.len()..=after.len()).step_by(1000) {
        let mut bytes = after[..len].to_vec();
        bytes[slots..slots + 8192].copy_from_slice(&before[slots..slots + 8192]);
        assert_eq!(version_of(&bytes), 2);
    }
    // All data, and a part of those places, the second after the first.
    for done in [0, 8, 32, 40, 4080, 4095, 4096, 4097, 4136, 8191, 8192] {
        let mut bytes = after.clone();
        bytes[slots + done..slots + 8192].copy_from_slice(&before[slots + done..slots + 8192]);
        assert_eq!(version_of(&bytes), if done >= 4096 { 3 } else { 2 });
    }
    // What is given up leaves nothing.
    drop(target.begin());
    let mut writing = target.begin();
    (0..600).for_each(|page| writing.page(page, &contents(page, 4)).unwrap());
    drop(writing);
    assert!(std::fs::read(&path).unwrap() == after);
}

#[test]
fn a_flipped_bit_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path());
    let sum = |snapshot: &Snapshot| (0..200).map(|page| version(snapshot, page)).sum::<u64>();
    let expected = sum(&Snapshot::open(&path).unwrap());
    let whole = std::fs::read(path).unwrap();
    let path = dir.path().join("flipped.snap");
    let (mut pages, mut tables) = (0, 0);
    // Everywhere, and closely in the places that say which is the newest, and in the last table and trailer.
    let closely = (4096..3 * 4096).step_by(7).chain((whole.len() - 8192..whole.len()).step_by(7));
    for at in (0..whole.len()).step_by(1237).chain(closely) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(&path, bytes).unwrap();
        match Snapshot::open(&path).and_then(|snapshot| snapshot.verify().map(|()| snapshot)) {
            // A page that a later snapshot has anew, the gap behind a table, one of two places that say the same.
            Ok(snapshot) => assert_eq!((snapshot.sequence(), sum(&snapshot)), (3, expected)),
            Err(error) => {
                assert_eq!(error.kind(), Kind::Lost);
                let said = error.to_string();
                if said.contains("page") && said.contains("of region") { pages += 1 } else { tables += 1 }
            }
        }
    }
    assert!(pages > 50 && tables > 500, "{pages} pages, {tables} tables");
    for len in [0, 1, 4096, 8192, whole.len() / 2, whole.len() - 4096] {
        std::fs::write(&path, &whole[..len]).unwrap();
        let opened = Snapshot::open(&path).and_then(|snapshot| snapshot.verify());
        assert!(opened.is_err(), "cut to {len} bytes");
    }
}

/// Hashes are no signatures: a file may say anything, and have the right hash of it.
#[test]
fn a_table_that_points_outside_of_the_data_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    add(&mut target(&path), 0..4, 1);
    let whole = std::fs::read(&path).unwrap();
    let (header, current) = newest(&path, &File::open(&path).unwrap()).unwrap();
    let (trailer_at, first) = (current.trailer_at as usize, data_at(&header));
    let trailer = Trailer::decode(&whole[trailer_at..], &header.identity).unwrap();
    let table_at = trailer.table_at as usize;
    let opened = |place: u64| {
        let len_bytes = trailer.entries as usize * ENTRY_BYTES + trailer.runs as usize * RUN_BYTES;
        let (mut bytes, mut table) = (whole.clone(), whole[table_at..][..len_bytes].to_vec());
        table[8..16].copy_from_slice(&place.to_le_bytes());
        bytes[table_at..][..table.len()].copy_from_slice(&table);
        let trailer = Trailer { table_hash: xxh3_128(&table), ..trailer };
        bytes[trailer_at..].copy_from_slice(&trailer.encode(&header.identity));
        std::fs::write(&path, bytes).unwrap();
        Snapshot::open(&path).map(|_| ()).map_err(|error| error.kind())
    };
    assert_eq!(opened(first), Ok(()));
    assert_eq!(opened(first + 3 * PAGE), Ok(()));
    for place in
        [1, first - PAGE, trailer.table_at, current.trailer_at, whole.len() as u64, 1 << 63, u64::MAX - PAGE + 1]
    {
        assert_eq!(opened(place), Err(Kind::Lost), "{place}");
    }
}

/// Has `trailer`, at this place, be that of the newest snapshot.
fn put_newest(file: &File, header: &Header, trailer: Trailer, trailer_at: u64) {
    let newest = Current { sequence: trailer.sequence, trailer_at }.encode(&header.identity);
    file.write_all_at(&trailer.encode(&header.identity), trailer_at).unwrap();
    [0, 1].into_iter().for_each(|place| file.write_all_at(&newest, slot_at(header, place)).unwrap());
}

/// A file of a few pages says that it is longer than there is memory for, and has holes there.
#[test]
fn a_table_that_claims_more_than_there_is_memory_for_is_refused() {
    const LEN_BYTES: u64 = 1 << 42;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    add(&mut target(&path), 0..4, 1);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let (header, current) = newest(&path, &file).unwrap();
    let honest =
        Trailer::decode(&std::fs::read(&path).unwrap()[current.trailer_at as usize..], &header.identity).unwrap();
    let table_at = file.metadata().unwrap().len();
    if let Err(why) = file.set_len(table_at + LEN_BYTES + PAGE) {
        return skip::skip("sparse", &format!("no file of 4 TiB here: {why}; put TMPDIR on ext4 or tmpfs"));
    }
    let (entries, runs) = (LEN_BYTES / ENTRY_BYTES as u64, LEN_BYTES / RUN_BYTES as u64);
    let behind = table_at + LEN_BYTES;
    for (lying, trailer_at) in [
        (Trailer { table_at, entries, runs: 0, ..honest }, behind),
        (Trailer { table_at, entries: 0, runs, ..honest }, behind),
        (Trailer { entries: u64::MAX, ..honest }, current.trailer_at),
        (Trailer { entries: u64::MAX / ENTRY_BYTES as u64, runs: 2, ..honest }, current.trailer_at),
    ] {
        put_newest(&file, &header, lying, trailer_at);
        assert_eq!(Snapshot::open(&path).map(|_| ()).map_err(|error| error.kind()), Err(Kind::Lost), "{lying:?}");
    }
    put_newest(&file, &header, honest, current.trailer_at);
    Snapshot::open(&path).unwrap().verify().unwrap();
}

/// A table that each of many trailers names would be read as often.
#[test]
fn a_table_that_several_trailers_name_is_refused() {
    const TRAILERS: u64 = 1000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    add(&mut target(&path), 0..4, 1);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let (header, _) = newest(&path, &file).unwrap();
    let table_at = file.metadata().unwrap().len();
    let mut table = Vec::new();
    let entries = (1 << 20) / ENTRY_BYTES as u64;
    (0..entries).for_each(|page| Entry::Zero { page, count: 1 }.encode(&mut table));
    file.write_all_at(&table, table_at).unwrap();
    let named = Trailer { sequence: 1, base_at: 0, table_at, entries, runs: 0, table_hash: xxh3_128(&table) };
    let first_at = table_at + table.len() as u64;
    put_newest(&file, &header, named, first_at);
    assert_eq!(Snapshot::open(&path).unwrap().pages(), 0);
    for sequence in 2..=TRAILERS {
        let base_at = first_at + (sequence - 2) * PAGE;
        put_newest(&file, &header, Trailer { sequence, base_at, ..named }, base_at + PAGE);
    }
    assert_eq!(Snapshot::open(&path).map(|_| ()).map_err(|error| error.kind()), Err(Kind::Lost));
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let kind = |result: Result<Place, Error>| result.map(|_| ()).map_err(|error| error.kind());
    let path = dir.path().join("letter.txt");
    std::fs::write(&path, "Dear Sir or Madam").unwrap();
    assert_eq!(kind(Place::take(&path)), Err(Kind::Invalid));
    assert_eq!(kind(Place::take(dir.path())), Err(Kind::Invalid));
    assert_eq!(kind(Place::take(&dir.path().join("none"))), Ok(()));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "what was not finished is gone");
}

#[test]
fn a_place_is_one_writers_from_the_first_moment_to_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path());
    let refused = || Place::take(&path).err().is_some_and(|error| error.kind() == Kind::Held);
    // A file that grew, or failed, is begun anew, again and again; the first has no older one.
    for _ in 0..2 {
        let mut target = target(&path);
        assert!(refused());
        for _ in 0..3 {
            target.begin_file().unwrap();
            assert!(refused());
            target.give_up();
            assert!(refused());
            target.begin_file().unwrap();
            add(&mut target, 0..3, 1);
            assert!(refused());
        }
        drop(target);
        assert!(!refused());
        std::fs::remove_file(&path).unwrap();
    }
    // What another process left when it was killed is nobody's.
    std::fs::write(dir.path().join("one.snap.new"), b"SELFSNAP, half of one").unwrap();
    add(&mut target(&path), 0..3, 1);
    assert_eq!(Snapshot::open(&path).unwrap().pages(), 3);
    // Somebody puts a file there: it is not written over.
    let mut target = target(&path);
    let theirs = dir.path().join("theirs");
    std::fs::write(&theirs, "Dear Sir or Madam").unwrap();
    std::fs::rename(&theirs, &path).unwrap();
    assert!(target.begin().finish(&[]).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"Dear Sir or Madam");
    drop(target);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "what was not finished is gone");
}

#[test]
fn a_file_that_goes_while_it_is_added_to_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let mut target = target(&path);
    add(&mut target, 0..3, 1);
    let mut writing = target.begin();
    writing.page(1, &contents(1, 2)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(writing.finish(&[]).is_err());
    target.begin_file().unwrap();
    add(&mut target, 0..3, 3);
    assert_eq!(version(&Snapshot::open(&path).unwrap(), 1), 3);
}

/// Has reads from the file of that name fail from now on, and writes succeed.
fn refuse_reads(path: &Path) {
    let anew = Descriptor::new(File::options().write(true).open(path).unwrap().into()).unwrap();
    files().iter().find(|file| matches!(file.has_name(path), Ok(true))).unwrap().go_on_as(anew);
}

#[test]
fn a_file_that_cannot_be_read_back_is_told_as_that() {
    for (snapshots, name) in [(0, "one.snap.new"), (2, "one.snap")] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one.snap");
        let mut target = target(&path);
        (0..snapshots).for_each(|version| add(&mut target, 0..3, version));
        let mut writing = target.begin();
        writing.page(1, &contents(1, 3)).unwrap();
        refuse_reads(&dir.path().join(name));
        let why = writing.finish(&[]).map(drop).unwrap_err();
        let said = why.to_string();
        assert_eq!(why.kind(), Kind::Io, "{said}");
        assert!(said.contains("one.snap: Bad file descriptor") && !said.contains("somebody else"), "{said}");
    }
}

#[test]
fn a_refused_place_leaves_nothing_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("letter.txt");
    std::fs::write(&path, "Dear Sir or Madam").unwrap();
    assert!(Place::take(&path).is_err());
    let open = || {
        let numbers = std::fs::read_dir("/proc/self/fd").unwrap();
        numbers.filter_map(|number| std::fs::read_link(number.unwrap().path()).ok()).any(|name| name == path)
    };
    assert!(!open());
}

#[test]
fn a_new_file_that_another_made_by_mistake_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path());
    let unnamed = dir.path().join("one.snap.new");
    let mut target = Target::at(&path, regions()).unwrap();
    // On a machine that is busy the other may be late, which is not what is asked here.
    let waited = (0..20).any(|_| {
        let other = File::create(&unnamed).unwrap();
        other.lock().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let _ = std::fs::remove_file(&unnamed);
                drop(other);
            });
            target.begin_file().is_ok()
        })
    });
    assert!(waited);
    target.begin().finish(&[]).unwrap();
}

#[test]
fn a_restored_region_has_the_contents_and_goes_its_own_way() {
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path());
    let snapshot = Snapshot::open(&path).unwrap();
    let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
    let store = || MemoryStore::new(4 << 20).unwrap();
    let mut left = domain.region(0).restored(&snapshot, 0, store()).unwrap();
    let right = domain.region(64 * PAGE_BYTES).restored(&snapshot, 1, store()).unwrap();
    assert_eq!(left.len_bytes(), 40 * PAGE_BYTES);
    let whole = |page: u64| {
        let mut bytes = [0; PAGE_BYTES];
        let (region, index) = if page < 40 { (0, page) } else { (1, page - 40) };
        snapshot.read_page(region, index, &mut bytes).unwrap();
        bytes
    };
    for round in 0..3u64 {
        for page in 0..40usize {
            let bytes = &mut left.as_mut_slice::<u8>()[page * PAGE_BYTES..][..PAGE_BYTES];
            let mut expected = whole(page as u64);
            if round > 0 && page % 5 == 0 {
                expected[..8].copy_from_slice(&(round - 1).to_le_bytes());
            }
            if round > 0 && page % 7 == 6 {
                expected = [0; PAGE_BYTES];
            }
            assert!(*bytes == expected, "page {page} in round {round}");
            if page % 5 == 0 {
                bytes[..8].copy_from_slice(&round.to_le_bytes());
            }
            if page % 7 == 6 {
                bytes.fill(0);
            }
        }
        for page in 0..64usize {
            assert!(right.as_slice::<u8>()[page * PAGE_BYTES..][..PAGE_BYTES] == whole(40 + page as u64));
        }
    }
    left.discard(0, 40 * PAGE_BYTES).unwrap();
    assert!(left.as_slice::<u64>().iter().all(|word| *word == 0));
    Snapshot::open(&path).unwrap().verify().unwrap();
    let refused = domain.region(0).restored(&snapshot, 2, store()).err().map(|error| error.kind());
    assert_eq!(refused, Some(Kind::Invalid));
    let refused = domain.region(41 * PAGE_BYTES).restored(&snapshot, 0, store()).err().map(|error| error.kind());
    assert_eq!(refused, Some(Kind::Invalid));
}

#[test]
fn what_was_in_core_comes_in_before_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let mut target = target(&path);
    add(&mut target, 0..100, 1);
    let snapshot = Snapshot::open(&path).unwrap();
    assert_eq!(
        (snapshot.in_core(0).collect::<Vec<_>>(), snapshot.in_core(1).collect::<Vec<_>>()),
        (vec![(30, 10)], vec![(0, 10)])
    );
    let domain = Domain::with_frames(64 * PAGE_BYTES).build().unwrap();
    let left = domain.region(0).restored(&snapshot, 0, MemoryStore::new(1 << 20).unwrap()).unwrap();
    let resident =
        || left.residency().iter().map(|byte| byte.load(std::sync::atomic::Ordering::Relaxed)).collect::<Vec<_>>();
    let expected: Vec<u8> = (0..40).map(|page| u8::from(page >= 30)).collect();
    let began = std::time::Instant::now();
    while resident() != expected {
        assert!(began.elapsed().as_secs() < 60, "{:?}", resident());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn a_damaged_page_is_refused_by_its_number_and_the_others_come() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let mut target = target(&path);
    add(&mut target, 0..10, 1);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(8).position(|word| word == 3001u64.to_le_bytes()).unwrap();
    bytes[at + 100] ^= 4;
    std::fs::write(&path, bytes).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let domain = Domain::with_frames(64 * PAGE_BYTES).build().unwrap();
    let left = domain.region(0).restored(&snapshot, 0, MemoryStore::new(1 << 20).unwrap()).unwrap();
    for page in 0..10 {
        let pinned = left.pin(page * PAGE_BYTES, 1);
        match page {
            3 => {
                let error = pinned.unwrap_err();
                assert_eq!(error.kind(), Kind::Lost);
                assert!(error.to_string().contains("bytes 12288..16384"), "{error}");
            }
            _ => assert!(pinned.is_ok() && left.as_slice::<u64>()[page * 512] == page as u64 * 1000 + 1),
        }
    }
}

/// Whoever opens a file reads the table of every snapshot in it, whatever changed.
#[test]
fn a_file_of_many_snapshots_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one.snap");
    let domain = Domain::with_frames(512 * PAGE_BYTES).build().unwrap();
    let mut region = domain.region(256 * PAGE_BYTES).stored(MemoryStore::new(2 << 20).unwrap()).unwrap();
    region.as_mut_slice::<u64>().fill(7);
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    let sequences = (0..2 * MOST_IN_A_FILE + 1).map(|_| {
        let taken = snapshots.take().unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        assert_eq!(taken.pages, if snapshot.sequence() == 1 { 256 } else { 0 });
        assert_eq!(snapshot.pages(), 256);
        snapshot.sequence()
    });
    let round = 1..=MOST_IN_A_FILE;
    let expected: Vec<u64> = round.clone().chain(round).chain([1]).collect();
    assert_eq!(sequences.collect::<Vec<_>>(), expected);
}
