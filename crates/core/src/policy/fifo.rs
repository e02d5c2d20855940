//! First in, first out: the page that came in first goes first, used or not. The yardstick for the others.

use super::Policy;
use super::links::{Link, Links};
use crate::addr::{Frame, PageNo};
use crate::frame::{Table, Use};

/// The policy that learns nothing.
pub struct Fifo {
    links: Links<1>,
}

impl Fifo {
    /// No frames yet; the table is zeroed.
    pub const fn new(links: Table<Link>) -> Fifo {
        Fifo { links: Links::new(links) }
    }
}

impl Policy for Fifo {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, used: Use) {
        if used == Use::First || self.links.list_of(frame).is_none() {
            self.links.push_newest(0, frame);
        }
    }

    fn victim(&mut self) -> Option<Frame> {
        self.links.pop_oldest(0)
    }
}
