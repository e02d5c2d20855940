//! A machine for models.

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Condvar, Mutex};
use selfpage_core::addr::{Frame, PageBytes, PageNo};
use selfpage_core::mmu::{Mmu, Partial, Refusal, Trap};

/// What it takes to sleep on a word until somebody says that it changed: a futex.
pub struct Bed {
    lock: Mutex<()>,
    woken: Condvar,
}

impl Bed {
    pub fn new() -> Bed {
        Bed { lock: Mutex::new(()), woken: Condvar::new() }
    }

    pub fn sleep_while(&self, same: impl FnOnce() -> bool) {
        let guard = self.lock.lock().unwrap();
        if same() {
            drop(self.woken.wait(guard).unwrap());
        }
    }

    pub fn rouse(&self) {
        let _guard = self.lock.lock().unwrap();
        self.woken.notify_all();
    }
}

/// A machine that can only put threads to sleep, and on which no time passes.
pub struct Sleeping(pub Bed);

impl Mmu for Sleeping {
    fn sleep(&self, word: &AtomicU32, expected: u32, _timeout_us: u32) {
        self.0.sleep_while(|| word.load(Ordering::SeqCst) == expected);
    }
    fn rouse(&self, _word: &AtomicU32, _count: u32) {
        self.0.rouse();
    }
    fn now_ns(&self) -> u64 {
        0
    }
    fn map(&self, _: Trap, _: PageNo, _: Frame, _: u32) -> Result<(), Partial> {
        unreachable!()
    }
    fn unmap(&self, _: PageNo, _: Frame, _: u32) -> Result<(), Partial> {
        unreachable!()
    }
    fn copy_out(&self, _: PageNo, _: Frame) -> Result<(), Refusal> {
        unreachable!()
    }
    fn present(&self, _: PageNo) -> bool {
        unreachable!()
    }
    fn drop_pages(&self, _: PageNo, _: u32) {
        unreachable!()
    }
    fn wake_faulters(&self, _: Trap, _: PageNo, _: u32) -> bool {
        unreachable!()
    }
    fn poison(&self, _: Trap, _: PageNo) -> bool {
        unreachable!()
    }
    fn populate(&self, _: Frame, _: u32) -> Result<(), Partial> {
        unreachable!()
    }
    fn release(&self, _: Frame, _: u32) {
        unreachable!()
    }
    fn bytes(&self, _: Frame) -> *mut PageBytes {
        unreachable!()
    }
}
