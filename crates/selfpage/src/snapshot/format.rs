//! The bytes of a snapshot file. docs/snapshots.md draws them.
//!
//! All numbers are little-endian. Each structure ends with the 128-bit xxh3 of what stands before it.

use xxhash_rust::xxh3::xxh3_128;

pub(super) const PAGE: u64 = 4096;
const VERSION: u32 = 1;
pub(super) const MAGIC: [u8; 8] = *b"SELFSNAP";
const CURRENT: [u8; 8] = *b"CURRENT\n";
const TRAILER: [u8; 8] = *b"TRAILER\n";
const HASH_BYTES: usize = 16;
/// Before the regions in a header.
const FIXED_BYTES: usize = 44;
/// The most that a header may take: as many regions as a domain can have, with long names.
const MOST_HEADER_BYTES: u64 = 4 << 20;
/// Pages of all regions together: 2^52 bytes, more than a process has addresses for.
const MOST_PAGES: u64 = 1 << 40;
pub(super) const ENTRY_BYTES: usize = 32;
pub(super) const RUN_BYTES: usize = 16;

/// A region as a snapshot knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedRegion {
    /// The name that the program gave it.
    pub name: String,
    /// How long it is.
    pub size_pages: u64,
}

/// The first bytes of a file: what it is, and of which regions. They never change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Random, so that one file is never taken for another.
    pub(super) identity: [u8; 16],
    pub(super) regions: Vec<SavedRegion>,
}

impl Header {
    pub(super) fn size_pages(&self) -> u64 {
        self.regions.iter().map(|region| region.size_pages).sum()
    }

    /// As many whole pages as it takes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let names: usize = self.regions.iter().map(|region| 10 + name_of(region).len()).sum();
        let len_bytes = (FIXED_BYTES + names + HASH_BYTES).next_multiple_of(PAGE as usize);
        let mut bytes = Vec::with_capacity(len_bytes);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((PAGE as u32).to_le_bytes());
        bytes.extend(self.identity);
        bytes.extend((len_bytes as u64).to_le_bytes());
        bytes.extend((self.regions.len() as u32).to_le_bytes());
        for region in &self.regions {
            bytes.extend(region.size_pages.to_le_bytes());
            bytes.extend((name_of(region).len() as u16).to_le_bytes());
            bytes.extend(name_of(region));
        }
        sealed(bytes, len_bytes)
    }

    /// How long the header is that begins with these bytes. `None`: this is no snapshot file.
    pub(super) fn len_bytes(front: &[u8; PAGE as usize]) -> Option<u64> {
        let mut reader = Reader(front);
        let known = reader.take::<8>()? == MAGIC && reader.u32()? == VERSION && reader.u32()? == PAGE as u32;
        reader.take::<16>()?;
        let len_bytes = reader.u64()?;
        (known && len_bytes.is_multiple_of(PAGE) && (PAGE..=MOST_HEADER_BYTES).contains(&len_bytes))
            .then_some(len_bytes)
    }

    /// `None`: it is damaged.
    pub(super) fn decode(bytes: &[u8]) -> Option<Header> {
        let mut reader = Reader(unsealed(bytes)?);
        reader.take::<16>()?;
        let identity = reader.take()?;
        reader.u64()?;
        let count = reader.u32()?;
        let mut regions = Vec::new();
        for _ in 0..count {
            let size_pages = reader.u64()?;
            let name_bytes = u16::from_le_bytes(reader.take()?).into();
            let name = String::from_utf8(reader.some(name_bytes)?.to_vec()).ok()?;
            regions.push(SavedRegion { name, size_pages });
        }
        let mut pages = 0u64;
        for region in &regions {
            pages = pages.checked_add(region.size_pages).filter(|pages| *pages <= MOST_PAGES)?;
        }
        Some(Header { identity, regions })
    }
}

/// Names are cut where a header has no room for them.
fn name_of(region: &SavedRegion) -> &[u8] {
    let end = (0..=region.name.len().min(255)).rev().find(|end| region.name.is_char_boundary(*end)).unwrap_or(0);
    &region.name.as_bytes()[..end]
}

/// Which snapshot of a file is the one to restore. There are two places for it, in pages of their own: the second is written when the
/// first is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Current {
    pub(super) sequence: u64,
    pub(super) trailer_at: u64,
}

impl Current {
    /// There is none yet.
    pub(super) const NONE: Current = Current { sequence: 0, trailer_at: 0 };

    pub(super) fn encode(&self, identity: &[u8; 16]) -> Vec<u8> {
        let mut bytes = [&CURRENT[..], identity].concat();
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(self.trailer_at.to_le_bytes());
        sealed(bytes, PAGE as usize)
    }

    pub(super) fn decode(bytes: &[u8], identity: &[u8; 16]) -> Option<Current> {
        let mut reader = Reader::past([&CURRENT[..], identity], bytes)?;
        Some(Current { sequence: reader.u64()?, trailer_at: reader.u64()? })
    }
}

/// The end of one snapshot in a file: where its table is, and what it builds on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) sequence: u64,
    /// The trailer of the snapshot before, whose pages hold where this one has none; 0: there is none, and they are zero.
    pub(super) base_at: u64,
    pub(super) table_at: u64,
    /// Entries of the table.
    pub(super) entries: u64,
    /// Runs of pages that were in core, after the entries.
    pub(super) runs: u64,
    /// The hash of entries and runs.
    pub(super) table_hash: u128,
}

impl Trailer {
    pub(super) fn encode(&self, identity: &[u8; 16]) -> Vec<u8> {
        let mut bytes = [&TRAILER[..], identity].concat();
        for number in [self.sequence, self.base_at, self.table_at, self.entries, self.runs] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.table_hash.to_le_bytes());
        sealed(bytes, PAGE as usize)
    }

    pub(super) fn decode(bytes: &[u8], identity: &[u8; 16]) -> Option<Trailer> {
        let mut reader = Reader::past([&TRAILER[..], identity], bytes)?;
        Some(Trailer {
            sequence: reader.u64()?,
            base_at: reader.u64()?,
            table_at: reader.u64()?,
            entries: reader.u64()?,
            runs: reader.u64()?,
            table_hash: u128::from_le_bytes(reader.take()?),
        })
    }
}

/// Where one page is, or that some are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// The page's bytes stand at this offset, and have this hash.
    Page { page: u64, place: u64, hash: u128 },
    /// So many pages from this one on are zero.
    Zero { page: u64, count: u64 },
}

impl Entry {
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        let (page, place, hash) = match *self {
            Entry::Page { page, place, hash } => (page, place, hash),
            Entry::Zero { page, count } => (page, 0, count.into()),
        };
        bytes.extend(page.to_le_bytes());
        bytes.extend(place.to_le_bytes());
        bytes.extend(hash.to_le_bytes());
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Entry> {
        let mut reader = Reader(bytes);
        let (page, place, hash) = (reader.u64()?, reader.u64()?, u128::from_le_bytes(reader.take()?));
        Some(match place {
            0 => Entry::Zero { page, count: u64::try_from(hash).ok()? },
            place => Entry::Page { page, place, hash },
        })
    }
}

/// Neighbouring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) count: u64,
}

impl Run {
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.first.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Run> {
        let mut reader = Reader(bytes);
        Some(Run { first: reader.u64()?, count: reader.u64()? })
    }
}

/// The structure of these bytes, `len_bytes` long.
fn sealed(mut bytes: Vec<u8>, len_bytes: usize) -> Vec<u8> {
    bytes.resize(len_bytes - HASH_BYTES, 0);
    let hash = xxh3_128(&bytes);
    bytes.extend(hash.to_le_bytes());
    bytes
}

fn unsealed(bytes: &[u8]) -> Option<&[u8]> {
    let (bytes, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
    (xxh3_128(bytes).to_le_bytes() == hash).then_some(bytes)
}

/// Takes numbers off the front of bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Of a whole structure that begins with these two.
    fn past(front: [&[u8]; 2], structure: &'a [u8]) -> Option<Reader<'a>> {
        unsealed(structure)?.strip_prefix(&*front.concat()).map(Reader)
    }
    fn some(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.some(N)?.try_into().ok()
    }
    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let region = |name: &str, size_pages| SavedRegion { name: name.into(), size_pages };
        Header { identity: [7; 16], regions: vec![region("table", 100), region("", 3)] }
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = header().encode();
        assert_eq!(Header::len_bytes(bytes[..4096].try_into().unwrap()), Some(bytes.len() as u64));
        assert_eq!(Header::decode(&bytes), Some(header()));
        let current = Current { sequence: 9, trailer_at: 8192 };
        assert_eq!(Current::decode(&current.encode(&[7; 16]), &[7; 16]), Some(current));
        assert_eq!(Current::decode(&current.encode(&[7; 16]), &[8; 16]), None);
        let trailer = Trailer { sequence: 3, base_at: 1, table_at: 2, entries: 4, runs: 5, table_hash: 6 };
        assert_eq!(Trailer::decode(&trailer.encode(&[7; 16]), &[7; 16]), Some(trailer));
        for entry in [Entry::Zero { page: 4, count: 1 << 40 }, Entry::Page { page: 5, place: 4096, hash: u128::MAX }] {
            let mut bytes = Vec::new();
            entry.encode(&mut bytes);
            assert_eq!((bytes.len(), Entry::decode(&bytes)), (ENTRY_BYTES, Some(entry)));
        }
    }

    #[test]
    fn every_flipped_bit_of_a_structure_is_seen() {
        let trailer = Trailer { sequence: 3, base_at: 1, table_at: 2, entries: 4, runs: 5, table_hash: 6 };
        for whole in [header().encode(), trailer.encode(&[7; 16])] {
            for at in 0..whole.len() {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << (at % 8);
                assert!(Header::decode(&bytes).is_none() && Trailer::decode(&bytes, &[7; 16]).is_none(), "byte {at}");
            }
        }
    }

    #[test]
    fn a_header_that_claims_too_much_is_refused() {
        let mut large = header();
        large.regions[0].size_pages = u64::MAX;
        assert_eq!(Header::decode(&large.encode()), None);
        assert_eq!(Header::decode(&[]), None);
    }
}
