//! Least recently used, as far as it can be known without looking at every access: the oldest page is unmapped but keeps
//! its frame for a while. If it is used in that time it starts over as the youngest.
//!
//! # Source
//! The second chance of VAX/VMS's free and modified page lists (Levy & Lipman 1982), for the same reason: no reference bits.

use super::links::{Link, Links};
use super::{Policy, SECOND_CHANCE_SHARE};
use crate::addr::{Frame, PageNo};
use crate::frame::{Table, Use};

/// The policy for programs that use some pages more than others.
pub struct Lru {
    links: Links<1>,
}

impl Lru {
    /// No frames yet; the table is zeroed.
    pub const fn new(links: Table<Link>) -> Lru {
        Lru { links: Links::new(links) }
    }
}

impl Policy for Lru {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, _used: Use) {
        self.links.push_newest(0, frame);
    }

    fn victim(&mut self) -> Option<Frame> {
        self.links.pop_oldest(0)
    }

    fn standby_share(&self) -> u8 {
        SECOND_CHANCE_SHARE
    }
}
