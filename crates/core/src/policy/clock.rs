//! A hand goes round over the pages. It passes a page that was used since it last came by, and takes one that was not.
//!
//! A page that came back from the standby list was used; it stays for one round more than under [`super::lru`].
//!
//! # Source
//! Corbató 1968, "A paging experiment with the Multics system".

use super::Policy;
use super::links::{Link, Links};
use crate::addr::{Frame, PageNo};
use crate::frame::{Table, Use};

/// In 1/256 of the frames: only as many as it takes to learn which pages are used.
const LEARNING_SHARE: u8 = 8;

/// The policy with a reference bit.
pub struct Clock {
    /// The oldest is the one that the hand points at; a frame that it passes becomes the newest. The mark is the
    /// reference bit.
    links: Links<1>,
}

impl Clock {
    /// No frames yet; the table is zeroed.
    pub const fn new(links: Table<Link>) -> Clock {
        Clock { links: Links::new(links) }
    }
}

impl Policy for Clock {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, used: Use) {
        if used == Use::First || self.links.list_of(frame).is_none() {
            self.links.push_newest(0, frame);
        }
        if used == Use::Again {
            self.links.mark(frame);
        }
    }

    fn victim(&mut self) -> Option<Frame> {
        // Each turn takes a mark away, so it ends.
        loop {
            let frame = self.links.oldest(0)?;
            if !self.links.marked(frame) {
                self.links.unlink(frame);
                return Some(frame);
            }
            self.links.push_newest(0, frame);
        }
    }

    fn standby_share(&self) -> u8 {
        LEARNING_SHARE
    }
}
