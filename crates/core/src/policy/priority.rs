//! Frames of regions that matter less go first; among equals, the least recently used.

use super::links::{Link, Links};
use super::{Policy, SECOND_CHANCE_SHARE};
use crate::addr::{Frame, PageNo};
use crate::frame::{Table, Use};

const CLASSES: usize = 256;

/// The policy that heeds the priority of regions.
pub struct Priority {
    links: Links<CLASSES>,
    /// A bit for each class that has frames.
    classes: [u64; CLASSES / 64],
}

impl Priority {
    /// No frames yet; the table is zeroed.
    pub const fn new(links: Table<Link>) -> Priority {
        Priority { links: Links::new(links), classes: [0; CLASSES / 64] }
    }

    fn lowest(&self) -> Option<usize> {
        let (group, bits) = self.classes.iter().enumerate().find(|(_, bits)| **bits != 0)?;
        Some(group * 64 + bits.trailing_zeros() as usize)
    }

    fn note(&mut self, class: usize) {
        let bit = 1 << (class % 64);
        let empty = self.links.is_empty(class);
        if let Some(bits) = self.classes.get_mut(class / 64) {
            *bits = if empty { *bits & !bit } else { *bits | bit };
        }
    }
}

impl Policy for Priority {
    fn admitted(&mut self, frame: Frame, _page: PageNo, priority: u8, _used: Use) {
        let before = self.links.list_of(frame);
        self.links.push_newest(usize::from(priority), frame);
        self.note(usize::from(priority));
        before.into_iter().for_each(|class| self.note(class));
    }

    fn victim(&mut self) -> Option<Frame> {
        let class = self.lowest()?;
        let victim = self.links.pop_oldest(class);
        self.note(class);
        victim
    }

    fn standby_share(&self) -> u8 {
        SECOND_CHANCE_SHARE
    }
}
