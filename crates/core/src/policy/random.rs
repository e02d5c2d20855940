//! Any page. Never the best choice and never the worst: no pattern of use defeats it.

use super::Policy;
use super::links::{Link, get, set};
use crate::addr::{Frame, PageNo};
use crate::frame::{Table, Use};

/// The policy that draws lots.
pub struct Random {
    /// Not lists here, but a bag: `older` of entry `i` is the frame in place `i`, `newer` of entry `f` is the place of
    /// frame `f` plus one.
    bag: Table<Link>,
    len: u32,
    dice: u64,
}

impl Random {
    /// No frames yet; the table is zeroed.
    pub const fn new(links: Table<Link>) -> Random {
        Random { bag: links, len: 0, dice: 0x9e37_79b9_7f4a_7c15 }
    }

    /// The next number of Marsaglia's xorshift64.
    const fn throw(&mut self) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice
    }

    fn put(&self, frame: u32, place: u32) {
        if let (Some(at), Some(of)) = (self.bag.get(place as usize), self.bag.get(frame as usize)) {
            set(&at.older, frame);
            set(&of.newer, place + 1);
        }
    }
}

impl Policy for Random {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, _used: Use) {
        if self.bag.get(frame.0 as usize).is_some_and(|link| get(&link.newer) == 0) {
            self.put(frame.0, self.len);
            self.len += 1;
        }
    }

    fn victim(&mut self) -> Option<Frame> {
        let last = self.len.checked_sub(1)?;
        let place = (self.throw() % u64::from(self.len)) as u32;
        let frame = get(&self.bag.get(place as usize)?.older);
        let moved = get(&self.bag.get(last as usize)?.older);
        self.put(moved, place);
        set(&self.bag.get(frame as usize)?.newer, 0);
        self.len = last;
        Some(Frame(frame))
    }
}
