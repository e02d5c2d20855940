//! A pager over a store in memory.

use std::sync::Mutex;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};

/// The contents of pages while they are not in frames. What was never saved is zero.
pub struct Store {
    kept: Mutex<Vec<Option<Box<PageBytes>>>>,
    /// Pages whose contents the domain has lost since somebody last asked.
    forgotten: Mutex<Vec<u64>>,
    /// What happens in the middle of the next call.
    before_save: Mutex<Option<Event>>,
    before_look: Mutex<Option<Event>>,
}

type Event = Box<dyn FnOnce() + Send>;

impl Store {
    pub fn new(pages: u64) -> Store {
        let kept = Mutex::new(vec![None; pages as usize]);
        Store { kept, forgotten: Mutex::default(), before_save: Mutex::default(), before_look: Mutex::default() }
    }

    pub fn before_next_save(&self, event: impl FnOnce() + Send + 'static) {
        *self.before_save.lock().unwrap() = Some(Box::new(event));
    }

    pub fn before_next_look(&self, event: impl FnOnce() + Send + 'static) {
        *self.before_look.lock().unwrap() = Some(Box::new(event));
    }

    /// The first word of a page, as it was saved.
    pub fn word(&self, index: u64) -> u64 {
        let kept = self.kept.lock().unwrap();
        kept[index as usize].as_ref().map_or(0, |contents| u64::from_le_bytes(contents[..8].try_into().unwrap()))
    }

    /// The same as `forgotten`, in order, and to be asked for again.
    pub fn lost_so_far(&self) -> Vec<u64> {
        let mut lost = self.forgotten.lock().unwrap().clone();
        lost.sort_unstable();
        lost
    }

    pub fn forgotten(&self) -> Vec<u64> {
        std::mem::take(&mut *self.forgotten.lock().unwrap())
    }
}

impl Pager for Store {
    fn fills_in(&self) -> Context {
        Context::Trap
    }

    fn extent(&self, _index: u64, want: u32) -> u32 {
        want
    }

    fn reads_ahead(&self) -> bool {
        true
    }

    fn fill(&self, _context: Context, pages: &mut [FillPage<'_>]) -> Result<u64, PagerError> {
        let kept = self.kept.lock().unwrap();
        for page in pages.iter_mut() {
            match &kept[page.index as usize] {
                Some(contents) => *page.bytes.get_mut() = **contents,
                None => page.bytes.clear(),
            }
        }
        Ok((pages.len() * PAGE_BYTES) as u64)
    }

    fn changed(&self, index: u64, bytes: &PageBytes) -> Verdict {
        if let Some(event) = self.before_look.lock().unwrap().take() {
            event();
        }
        match &self.kept.lock().unwrap()[index as usize] {
            Some(contents) if **contents == *bytes => Verdict::Clean,
            None if bytes.iter().all(|byte| *byte == 0) => Verdict::Clean,
            _ => Verdict::Changed,
        }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        if let Some(event) = self.before_save.lock().unwrap().take() {
            event();
        }
        let mut kept = self.kept.lock().unwrap();
        for page in pages {
            kept[page.index as usize] = Some(Box::new(*page.bytes));
            page.outcome = Ok(());
        }
    }

    fn forget(&self, index: u64, count: u64) {
        for index in index..index + count {
            self.kept.lock().unwrap()[index as usize] = None;
            self.forgotten.lock().unwrap().push(index);
        }
    }
}
