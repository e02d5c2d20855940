//! Most recently used first: right for a scan that is repeated over more pages than there are frames. What has been in core
//! longest is what the next pass needs first.
//!
//! Of `P` pages scanned in a circle over `F` frames, each pass reads `P - F` and as many again as are guarded.

use super::Policy;
use super::links::{Link, Links};
use crate::addr::{Frame, PageNo};
use crate::domain::MOST_AHEAD;
use crate::frame::{Table, Use};
use crate::stream::DEPTH;

/// What a stream has in front of it: the chunk that the program is in, and those that were asked for after it.
const MOST_GUARDED: u32 = (DEPTH + 1) * MOST_AHEAD;
/// Those chunks are 1/32 of the frames at most. One part in 24 leaves room for frames that are not
/// listed: with less, what is evicted unused is read again, which evicts what is next unused, and so on.
const GUARDED_PART: u32 = 24;

const GUARDED: usize = 0;
const SETTLED: usize = 1;

/// The policy for cyclic scans.
pub struct Mru {
    links: Links<2>,
}

impl Mru {
    /// No frames yet; the table is zeroed.
    pub const fn new(links: Table<Link>) -> Mru {
        Mru { links: Links::new(links) }
    }

    /// The last few admitted may have been read ahead and not used yet: those are guarded, the rest has settled.
    fn settle(&mut self) {
        let listed = self.links.len(GUARDED) + self.links.len(SETTLED);
        while self.links.len(GUARDED) > MOST_GUARDED.min(listed / GUARDED_PART)
            && let Some(frame) = self.links.oldest(GUARDED)
        {
            self.links.push_newest(SETTLED, frame);
        }
    }
}

impl Policy for Mru {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, _used: Use) {
        self.links.push_newest(GUARDED, frame);
        self.settle();
    }

    fn victim(&mut self) -> Option<Frame> {
        // Less than the whole is guarded, so something has settled if anything is listed.
        let victim = self.links.pop_newest(SETTLED);
        self.settle();
        victim
    }
}
