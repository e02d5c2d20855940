//! A pager over a store in memory.

use std::sync::Mutex;

use selfpage_core::addr::{PAGE_BYTES, PageBytes};
use selfpage_core::pager::{Context, FillPage, Pager, PagerError, SavePage, Verdict};

/// The contents of pages while they are not in frames. What was never saved is zero.
pub struct Store {
    kept: Mutex<Vec<Option<Box<PageBytes>>>>,
    /// Pages whose contents the domain has lost since somebody last asked.
    forgotten: Mutex<Vec<u64>>,
}

impl Store {
    pub fn new(pages: u64) -> Store {
        Store { kept: Mutex::new(vec![None; pages as usize]), forgotten: Mutex::default() }
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
        match &self.kept.lock().unwrap()[index as usize] {
            Some(contents) if **contents == *bytes => Verdict::Clean,
            None if bytes.iter().all(|byte| *byte == 0) => Verdict::Clean,
            _ => Verdict::Changed,
        }
    }

    fn save(&self, pages: &mut [SavePage<'_>]) {
        let mut kept = self.kept.lock().unwrap();
        for page in pages {
            kept[page.index as usize] = Some(Box::new(*page.bytes.get()));
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
