//! Simulated pagers: one with a store that fails, one with none. They also hold core to its side of the bargain.

use std::sync::Mutex;

use selfpage_core::addr::PageBytes;
use selfpage_core::pager::{Context, FillPage, Kept as HandedOn, Pager, PagerError, SavePage, Verdict};

use crate::dice;
use crate::machine::{Halves, halves, set_half};
use crate::scheduler;
use crate::weather::Weather;

/// What is behind a pager.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Backing {
    /// A store.
    Store,
    /// Nothing: pages are zero at first, and stay once they are not.
    Nothing,
}

/// What the store has of a page.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kept {
    /// Nothing: it reads as zeros.
    Nothing,
    Contents(Halves),
    /// A save failed half way.
    Ruins,
}

/// What one pager tells the other of a page that it had in ruins.
const RUINS: u64 = 1;
/// And of one that it had with contents, added to their first half.
const CONTENTS: u64 = 2;

/// What is known of a page.
#[derive(Clone)]
pub struct Page {
    kept: Kept,
    busy: Option<&'static str>,
    /// When a fill of it last failed.
    failed_ns: u64,
}

/// A pager of a region.
pub struct SimPager {
    backing: Backing,
    fills_in: Context,
    reads_ahead: bool,
    pages: Mutex<Vec<Page>>,
    weather: &'static Weather,
}

impl SimPager {
    pub fn new(backing: Backing, fills_in: Context, pages: u64, weather: &'static Weather) -> SimPager {
        let page = |_| Page { kept: Kept::Nothing, busy: None, failed_ns: 0 };
        SimPager {
            backing,
            fills_in,
            reads_ahead: dice::once_in(2),
            pages: Mutex::new((0..pages).map(page).collect()),
            weather,
        }
    }

    pub fn backing(&self) -> Backing {
        self.backing
    }

    fn with<R>(&self, index: u64, work: impl FnOnce(&mut Page) -> R) -> R {
        work(&mut self.pages.try_lock().expect("one thread at a time")[index as usize])
    }

    /// What a fill would bring. `None`: nothing that may be used.
    pub fn kept(&self, index: u64) -> Option<Halves> {
        self.with(index, |page| match page.kept {
            Kept::Nothing => Some([0; 2]),
            Kept::Contents(halves) => Some(halves),
            Kept::Ruins => None,
        })
    }

    /// All pages, as they are.
    pub fn pages(&self) -> Vec<Page> {
        self.pages.try_lock().expect("one thread at a time").clone()
    }

    /// Is as it was.
    pub fn set_pages(&self, pages: Vec<Page>) {
        *self.pages.try_lock().expect("one thread at a time") = pages;
    }

    /// When a fill of the page last failed.
    pub fn failed_ns(&self, index: u64) -> u64 {
        self.with(index, |page| page.failed_ns)
    }

    /// One call for one page at a time.
    fn enter(&self, index: u64, call: &'static str) {
        self.with(index, |page| {
            assert_eq!(page.busy, None, "page {index}: {call} while another call works on it");
            page.busy = Some(call);
        });
    }

    fn leave(&self, index: u64) {
        self.with(index, |page| page.busy = None);
    }
}

/// A pager may be the program's own code, which knows no limits.
fn not_in_a_trap(call: &str) {
    assert!(scheduler::role() != scheduler::Role::Trap, "{call} is called in a trap");
}

impl Pager for SimPager {
    fn fills_in(&self) -> Context {
        self.fills_in
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        1 + dice::below(u64::from(want)) as u32
    }

    fn reads_ahead(&self) -> bool {
        self.reads_ahead
    }

    fn fill(&self, context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        assert!(context >= self.fills_in);
        scheduler::step_aside("fill");
        if context == Context::Trap && dice::once_in(self.weather.wrong_context_once_in.get()) {
            return Err(PagerError::WrongContext);
        }
        pages.iter().for_each(|page| self.enter(page.index, "fill"));
        let mut result = Ok(0);
        for page in pages.iter_mut() {
            if page.zeroed {
                assert_eq!(halves(page.bytes.get()), [0; 2], "page {}: its frame is not zero", page.index);
            }
            let contents = self.kept(page.index).unwrap_or_else(|| panic!("page {}: a fill from ruins", page.index));
            for (half, value) in contents.into_iter().enumerate() {
                if self.backing == Backing::Store {
                    scheduler::step_aside("fill");
                }
                if !(page.zeroed && value == 0) {
                    set_half(page.bytes.get_mut(), half, value);
                }
            }
            if self.backing == Backing::Store && dice::once_in(self.weather.fill_fails_once_in.get()) {
                self.with(page.index, |page| page.failed_ns = scheduler::now_ns());
                result = Err(if dice::once_in(2) { PagerError::Io(5) } else { PagerError::Corrupt });
            }
        }
        pages.iter().for_each(|page| self.leave(page.index));
        scheduler::step_aside("fill");
        result
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        not_in_a_trap("changed");
        self.enter(index, "changed");
        let before = halves(bytes);
        scheduler::step_aside("changed");
        assert_eq!(before, halves(bytes), "page {index} was written while unmapped");
        self.leave(index);
        match self.backing {
            _ if self.kept(index) == Some(before) => Verdict::Clean,
            Backing::Store => Verdict::Changed,
            Backing::Nothing => Verdict::Stays,
        }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        not_in_a_trap("save");
        pages.iter().for_each(|page| self.enter(page.index, "save"));
        for page in pages.iter_mut() {
            let before = halves(page.bytes);
            scheduler::step_aside("save");
            assert_eq!(before, halves(page.bytes), "page {} was written while being saved", page.index);
            let fails = dice::once_in(self.weather.save_fails_once_in.get());
            page.outcome = match self.backing {
                Backing::Nothing => Err(PagerError::NoStore),
                Backing::Store if fails && dice::once_in(2) => Err(PagerError::Full),
                Backing::Store if fails => {
                    self.with(page.index, |page| page.kept = Kept::Ruins);
                    Err(PagerError::Io(5))
                }
                Backing::Store => {
                    self.with(page.index, |page| page.kept = Kept::Contents(before));
                    Ok(())
                }
            };
        }
        pages.iter().for_each(|page| self.leave(page.index));
        scheduler::step_aside("save");
    }

    /// All that have a store have the same one.
    fn keeps_in(&self) -> Option<usize> {
        Some(usize::from(self.backing == Backing::Store))
    }

    fn keeps(&self, index: u64) -> bool {
        not_in_a_trap("keeps");
        scheduler::step_aside("keeps");
        self.with(index, |page| !matches!(page.kept, Kept::Nothing))
    }

    fn hand_out(&self, index: u64) -> HandedOn {
        not_in_a_trap("hand_out");
        self.enter(index, "hand_out");
        scheduler::step_aside("hand_out");
        let kept = self.with(index, |page| std::mem::replace(&mut page.kept, Kept::Nothing));
        self.leave(index);
        match kept {
            Kept::Nothing => HandedOn::default(),
            Kept::Ruins => HandedOn { place: RUINS, check: 0 },
            Kept::Contents([first, second]) => HandedOn { place: first + CONTENTS, check: second },
        }
    }

    fn take_in(&self, index: u64, kept: HandedOn) {
        not_in_a_trap("take_in");
        self.enter(index, "take_in");
        scheduler::step_aside("take_in");
        let kept = match kept.place {
            0 => Kept::Nothing,
            RUINS => Kept::Ruins,
            first => Kept::Contents([first - CONTENTS, kept.check]),
        };
        self.with(index, |page| page.kept = kept);
        self.leave(index);
    }

    fn forget(&self, index: u64, count: u64) {
        not_in_a_trap("forget");
        for index in index..index + count {
            self.enter(index, "forget");
            scheduler::step_aside("forget");
            self.with(index, |page| page.kept = Kept::Nothing);
            self.leave(index);
        }
        scheduler::step_aside("forget");
    }
}
