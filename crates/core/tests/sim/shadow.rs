//! What every page must contain. It is told of each write at the moment of the write, so a read is right or wrong, never
//! perhaps.

use std::sync::Mutex;

use crate::machine::Halves;

/// What is true of a page.
#[derive(Clone, Copy, Default)]
pub struct Page {
    now: Halves,
    /// It is being discarded, or given other contents: it turns to these some time, once.
    fading: Option<Halves>,
    /// It may be zero instead: whoever looks first sees which.
    doubtful: bool,
    pins: u32,
    /// How often it was dropped behind core's back.
    losses: u32,
    /// A pin or unpin of it is on its way.
    pinning: bool,
}

impl Page {
    /// What it may hold in the place of what it holds.
    fn others(&self) -> [Option<Halves>; 2] {
        [self.fading, self.doubtful.then_some([0; 2])]
    }
}

/// The truth, page by page.
pub struct Shadow(Mutex<Vec<Page>>);

impl Shadow {
    pub fn new(pages: usize) -> Shadow {
        Shadow(Mutex::new(vec![Page::default(); pages]))
    }

    /// All pages, as they are.
    pub fn pages(&self) -> Vec<Page> {
        self.0.try_lock().expect("one thread at a time").clone()
    }

    /// Is as it was.
    pub fn set_pages(&self, pages: Vec<Page>) {
        *self.0.try_lock().expect("one thread at a time") = pages;
    }

    fn with<R>(&self, at: usize, work: impl FnOnce(&mut Page) -> R) -> R {
        work(&mut self.0.try_lock().expect("one thread at a time")[at])
    }

    /// Somebody sees the page so. Whether that is right.
    #[must_use]
    pub fn agrees(&self, at: usize, seen: Halves) -> bool {
        self.with(at, |page| {
            if page.fading == Some(seen) || page.doubtful && seen == [0; 2] {
                page.now = seen;
            }
            page.doubtful = false;
            page.now == seen
        })
    }

    /// Somebody could see the page so, and has not.
    #[must_use]
    pub fn may_be(&self, at: usize, seen: Halves) -> bool {
        self.with(at, |page| page.now == seen || page.others().contains(&Some(seen)))
    }

    pub fn now(&self, at: usize) -> Halves {
        self.with(at, |page| page.now)
    }

    pub fn write(&self, at: usize, half: usize, value: u64) {
        self.with(at, |page| page.now[half] = value);
    }

    /// The page was dropped behind core's back.
    pub fn lose(&self, at: usize) {
        self.with(at, |page| page.losses += 1);
    }

    /// Begins an image: what every page holds now, what it may hold as well, and how often it was dropped.
    pub fn image(&self) -> Vec<(Halves, [Option<Halves>; 2], u32)> {
        let pages = self.0.try_lock().expect("one thread at a time");
        pages.iter().map(|page| (page.now, page.others(), page.losses)).collect()
    }

    /// How often the page was dropped behind core's back.
    pub fn losses(&self, at: usize) -> u32 {
        self.with(at, |page| page.losses)
    }

    /// The page is so from now on.
    pub fn turn(&self, at: usize, into: Halves) {
        self.with(at, |page| *page = Page { now: into, fading: None, doubtful: false, ..*page });
    }

    pub fn fade(&self, at: usize, into: Halves) {
        self.with(at, |page| page.fading = Some(into));
    }

    /// It has turned to what it was to turn to.
    pub fn finish(&self, at: usize) {
        self.turn(at, self.with(at, |page| page.fading.unwrap_or(page.now)));
    }

    /// What it was to turn to it has not, and will not.
    pub fn stay(&self, at: usize) {
        self.with(at, |page| page.fading = None);
    }

    /// Whether somebody is discarding it.
    pub fn fading(&self, at: usize) -> bool {
        self.with(at, |page| page.fading.is_some())
    }

    /// The pages from `clone` on hold what those from `source` on do, at this instant.
    pub fn inherit(&self, source: usize, clone: usize, count: usize) {
        let pages = &mut *self.0.try_lock().expect("one thread at a time");
        for at in 0..count {
            let Page { now, fading, doubtful, .. } = pages[source + at];
            pages[clone + at] = Page { now, doubtful: fading.is_some() || doubtful, ..pages[clone + at] };
        }
    }

    /// What the page was to get was dropped behind core's back: it may be zero instead.
    pub fn doubt(&self, at: usize) {
        self.with(at, |page| page.doubtful = true);
        self.lose(at);
    }

    /// Whether nobody knows what it holds.
    pub fn doubtful(&self, at: usize) -> bool {
        self.with(at, |page| page.doubtful)
    }

    pub fn pins(&self, at: usize) -> u32 {
        self.with(at, |page| page.pins)
    }

    pub fn set_pins(&self, at: usize, pins: u32) {
        self.with(at, |page| page.pins = pins);
    }

    pub fn set_pinning(&self, at: usize, pinning: bool) {
        self.with(at, |page| page.pinning = pinning);
    }

    /// Whether the page may have so many pins just now.
    pub fn may_have_pins(&self, at: usize, pins: u32) -> bool {
        self.with(at, |page| page.pinning || page.fading.is_some() || page.pins == pins)
    }
}
