//! What forked children change of a file, which is their parent's to write.

use std::os::unix::fs::FileExt;

use selfpage::{Domain, FileAccess, Kind, Region};

use crate::child::forked;
use crate::own_file::{FRAMES, TRAPS, numbered};
use crate::scenario::{PAGE, here, in_child, pages};

/// Writes `value` into a word of each page.
fn write(region: &mut Region, word: usize, value: u64) {
    region.as_mut_slice::<[u64; 512]>().iter_mut().for_each(|page| page[word] = value);
}

/// Whether each page has its number, and these values in those words.
fn has(region: &Region, values: &[(usize, u64)]) -> bool {
    let is_right = |(index, page): (usize, &[u64; 512])| {
        page[0] == index as u64 + 1 && values.iter().all(|(word, value)| page[*word] == *value)
    };
    region.as_slice::<[u64; 512]>().iter().enumerate().all(is_right)
}

/// Its frames are full of pages that its parent had changed and not saved: none of them could go to the file, and none may be lost.
#[test]
fn a_child_goes_on_with_what_its_parent_had_not_saved() {
    for (trap, name) in TRAPS {
        in_child(here!(), name, || {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let path = numbered(&dir, 4 * FRAMES);
            let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
            let mut region = domain.region(0).trap(trap).file(&path, 0, FileAccess::ReadWrite).unwrap();
            write(&mut region, 1, 77);
            forked(|| {
                assert!(has(&region, &[(1, 77)]));
                write(&mut region, 2, 5);
                forked(|| {
                    assert!(has(&region, &[(1, 77), (2, 5)]));
                    write(&mut region, 2, 6);
                    assert!(has(&region, &[(1, 77), (2, 6)]));
                });
                assert!(has(&region, &[(1, 77), (2, 5)]));
                assert_eq!(region.flush(0, PAGE).unwrap_err().kind(), Kind::Held);
                let len = region.len_bytes();
                region.discard(0, len).unwrap();
                // The file's: what the parent had saved, or has saved since.
                assert!(has(&region, &[]) && region.as_slice::<[u64; 512]>().iter().all(|page| page[2] == page[0]));
                region.flush(0, len).unwrap();
            });
            assert!(has(&region, &[(1, 77)]));
            region.flush(0, region.len_bytes()).unwrap();
            let file = std::fs::File::open(&path).unwrap();
            for index in 0..pages(&region) as u64 {
                let mut words = [0; 24];
                file.read_exact_at(&mut words, index * PAGE as u64).unwrap();
                let words: Vec<_> = words.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
                assert_eq!(words, [index + 1, 77, index + 1], "page {index} of the file");
            }
        })
        .well();
    }
}
