//! Which page goes when a frame is needed.
//!
//! A policy only suggests. Core checks each suggestion against the page word, so a policy that lies costs time and
//! nothing else.
//!
//! # Source
//! AVM §3 (replacement policy belongs to the application); Nemesis §6.6.

use crate::addr::{Frame, PageNo};

/// Chooses victims among the frames that hold resident pages.
///
/// # Context
/// PagerThread: one evictor calls it, so it needs no lock. It must not touch managed memory.
pub trait Policy: Send {
    /// `frame` holds `page` now. A frame that the policy still lists under an older page is listed anew: that is also how
    /// a policy learns of a second use, when a page comes back from the standby list (`again`).
    fn admitted(&mut self, frame: Frame, page: PageNo, priority: u8, again: bool);

    /// The frame that should go next; it is no longer listed. `None`: nothing is listed.
    fn victim(&mut self) -> Option<Frame>;

    /// The part of the frames, in 1/256, that is kept unmapped with contents intact, so that a second use is seen
    /// (a soft fault). 0: no standby list.
    fn standby_share(&self) -> u8 {
        0
    }
}
