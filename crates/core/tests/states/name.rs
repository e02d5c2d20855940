//! What a state is called, whatever its places and entries are called.

use selfpage_core::capability::Rights;

use crate::seen::{ENTRIES, Place, Seen};

/// Two sums over the words of a state, 128 bits together: that two states of a run of millions share it is as good as impossible.
#[derive(Clone, Copy)]
struct Sum(u64, u64);

impl Sum {
    fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        self.1 = (self.1.rotate_left(23) ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.0 ^= self.1 >> 32;
    }
}

/// The name of a state: the same for two states exactly if renaming makes one the other. What is renamed:
/// - places: a capability is called by its way down the derivation tree, in the order in which revocation goes;
/// - entries of a table: by the order in which that walk comes to them;
/// - the second and the third table.
pub fn name(seen: &Seen, roots: [u64; 7]) -> u128 {
    let one = walk(seen, roots.into_iter(), [0, 1, 2, 3]);
    let [first, second, third, others @ ..] = roots;
    let kind = |at| seen.at(at).map(|place| place.kind);
    if kind(second) != kind(third) && kind(second).is_some() && kind(third).is_some() {
        return one;
    }
    let exchanged = [first, third, second].into_iter().chain(others);
    one.min(walk(seen, exchanged, [0, 2, 1, 3]))
}

fn walk(seen: &Seen, roots: impl Iterator<Item = u64>, tables: [u64; 4]) -> u128 {
    let mut walk = Walk { seen, tables, sum: Sum(1, 2), met: [[None; ENTRIES]; 4] };
    for root in roots {
        match seen.at(root) {
            Some(place) => walk.down(place),
            None => walk.sum.add(0),
        }
    }
    u128::from(walk.sum.0) << 64 | u128::from(walk.sum.1)
}

struct Walk<'a> {
    seen: &'a Seen,
    /// What tables are called.
    tables: [u64; 4],
    sum: Sum,
    /// Of each table, the entries that the walk came to, in order.
    met: [[Option<usize>; ENTRIES]; 4],
}

impl Walk<'_> {
    fn down(&mut self, place: &Place) {
        let right = |right, bit| u64::from(place.rights.contain(right)) << bit;
        let rights = right(Rights::READ, 8) | right(Rights::WRITE, 9) | right(Rights::EXECUTE, 10);
        let flags = u64::from(place.is_copy) << 11 | u64::from(place.is_being_revoked) << 12;
        let children = self.seen.children(place).count() as u64;
        self.sum.add(place.kind as u64 | rights | flags | u64::from(place.size_bits) << 16 | children << 24);
        self.sum.add(place.carved);
        self.mapping(place);
        for child in self.seen.children(place) {
            self.down(child);
        }
    }

    fn mapping(&mut self, place: &Place) {
        let Some((mapping, (table, seen))) =
            place.mapping.and_then(|mapping| Some((mapping, self.seen.table_of(mapping.table)?)))
        else {
            return self.sum.add(0);
        };
        let end = (mapping.first + mapping.count).min(ENTRIES);
        // Of the address, what is more than that of the capability.
        let mut words = [0; ENTRIES];
        for (word, entry) in words.iter_mut().zip(&seen.entries[mapping.first..end]) {
            *word = entry.wrapping_sub(place.base);
        }
        let called = if mapping.count == 1 {
            let met = &mut self.met[table];
            let known = met.iter().position(|met| *met == Some(mapping.first));
            known.or_else(|| met.iter().position(Option::is_none)).inspect(|at| met[*at] = Some(mapping.first))
        } else {
            // All entries that steps name.
            words.iter_mut().zip(0..).for_each(|(word, step)| *word = word.wrapping_sub(step * 4096));
            words[..mapping.count].sort_unstable();
            None
        };
        let called = called.map_or(15, |at| at as u64);
        self.sum.add((1 + self.tables[table]) | called << 8 | (mapping.count as u64) << 16);
        words[..mapping.count].iter().for_each(|word| self.sum.add(*word));
    }
}
