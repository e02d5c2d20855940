//! Chance from a seed.

#[derive(Clone, Copy)]
pub struct Dice(pub u64);

impl Dice {
    /// # Source
    /// Steele, Lea, Flood: Fast splittable pseudorandom number generators (SplitMix64).
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        if all.is_empty() { None } else { Some(all[self.below(all.len() as u64) as usize]) }
    }
}
