//! Closing gates that somebody is inside of, perhaps for long.

use std::time::Duration;

use selfpage_core::mmu::Mmu;
use selfpage_core::sync::{Gate, Unclosed};

/// How long a gate is kept closed at first.
const FIRST_US: u32 = 20_000;
/// And at most where nobody leaves meanwhile: a device may never answer, and then others get in at times.
const LONGEST_US: u32 = 256 * FIRST_US;
/// And at most where some leave late: a device takes so long and answers, and all do so in time if it is long enough.
const LONGEST_LEAVING_US: u32 = 16 * LONGEST_US;
/// This share of the time that it was closed in vain it is open then.
const OPEN_SHARE: u32 = 8;
/// When to try again where somebody else had it closed.
const BY_ANOTHER_US: u32 = 200;

/// One who closes gates, and tries again where it must.
///
/// A gate that cannot be closed opens for a while, since one inside may wait for a kernel lock whose holder waits to get in. All who
/// waited begin something then, which may take longer than the gate was closed: were that always as long, they could leave one after the other,
/// never to be all outside. So it is twice as long each time; and open in proportion, which the holder of that lock may need.
#[derive(Clone, Copy)]
pub(crate) struct Closer {
    closed_us: u32,
    open_us: u32,
}

impl Default for Closer {
    fn default() -> Closer {
        Closer { closed_us: FIRST_US, open_us: BY_ANOTHER_US }
    }
}

impl Closer {
    /// Closes a domain's gate, unless somebody is inside all the time.
    pub(crate) fn close(&mut self, gate: &Gate, mmu: &dyn Mmu) -> Result<(), Unclosed> {
        let closed = gate.close(mmu, self.closed_us);
        self.open_us = BY_ANOTHER_US;
        if let Err(Unclosed::InUse { left_late }) = closed {
            let longest_us = if left_late { LONGEST_LEAVING_US } else { LONGEST_US };
            self.open_us = self.closed_us / OPEN_SHARE;
            self.closed_us = longest_us.min(2 * self.closed_us);
        }
        closed
    }

    /// Time for those who wait at the gate to get in, before the next try.
    pub(crate) fn pause(self) {
        std::thread::sleep(Duration::from_micros(self.open_us.into()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    use selfpage_core::addr::{Frame, PageBytes, PageNo};
    use selfpage_core::mmu::{Partial, Refusal, Trap};
    use selfpage_core::sync::Inside;

    use super::*;

    const SECOND_US: u64 = 1_000_000;
    /// A device that never answers.
    const NEVER_US: u64 = u64::MAX / 2;

    /// A machine on which time passes only as somebody sleeps, and whoever is inside a gate leaves it at a time of its own.
    #[derive(Default)]
    struct Script {
        now_us: AtomicU64,
        inside: Mutex<Vec<(u64, Inside<'static>)>>,
    }

    impl Script {
        fn now_us(&self) -> u64 {
            self.now_us.load(Ordering::Relaxed)
        }

        fn first_end_us(&self) -> u64 {
            self.inside.lock().unwrap().iter().map(|(end_us, _)| *end_us).min().unwrap_or(NEVER_US)
        }

        fn pass_until(&self, time_us: u64) {
            self.now_us.store(time_us, Ordering::Relaxed);
            self.inside.lock().unwrap().retain(|(end_us, _)| *end_us > time_us);
        }
    }

    impl Mmu for Script {
        fn sleep(&self, _: &AtomicU32, _: u32, timeout_us: u32) {
            self.pass_until(self.first_end_us().min(self.now_us() + u64::from(timeout_us)));
        }
        fn rouse(&self, _: &AtomicU32, _: u32) {}
        fn now_ns(&self) -> u64 {
            self.now_us() * 1000
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

    /// Readers that go through a gate one fill after the other, and who closes it.
    struct Play {
        script: Script,
        gate: &'static Gate,
        fill_us: u64,
        closer: Closer,
    }

    impl Play {
        fn new(fill_us: u64) -> Play {
            Play { script: Script::default(), gate: Box::leak(Box::default()), fill_us, closer: Closer::default() }
        }

        /// One reader more goes inside, to leave after so long.
        fn enter(&self, after_us: u64) {
            let inside = self.gate.try_enter(Box::leak(Box::<Script>::default())).unwrap();
            self.script.inside.lock().unwrap().push((self.script.now_us() + after_us, inside));
        }

        /// Closes the gate, of so many readers, in at most so many tries. Before the next try it is open as long as the closer says.
        fn closes(&mut self, readers: usize, tries: usize) -> bool {
            (0..tries).any(|_| {
                if self.closer.close(self.gate, &self.script).is_ok() {
                    return true;
                }
                let end_us = self.script.now_us() + u64::from(self.closer.open_us);
                loop {
                    while self.script.inside.lock().unwrap().len() < readers {
                        self.enter(self.fill_us);
                    }
                    let next_us = self.script.first_end_us().min(end_us);
                    self.script.pass_until(next_us);
                    if next_us == end_us {
                        return false;
                    }
                }
            })
        }
    }

    #[test]
    fn a_gate_closes_beside_readers_who_would_take_turns_at_being_inside() {
        for fill_us in [SECOND_US, 6_400_000, 8 * SECOND_US, 10 * SECOND_US] {
            for tenths_apart in 1..10 {
                let mut play = Play::new(fill_us);
                play.enter(fill_us);
                play.enter(fill_us * tenths_apart / 10);
                assert!(play.closes(2, 50), "fills of {fill_us} us, {tenths_apart} tenths of one apart");
            }
        }
    }

    #[test]
    fn a_gate_is_not_closed_for_longer_where_a_device_never_answers() {
        let mut play = Play::new(NEVER_US);
        play.enter(NEVER_US);
        assert!(!play.closes(1, 50));
        assert_eq!(play.closer.closed_us, LONGEST_US);
        // One has left late, and then nobody does.
        play.closer.closed_us = LONGEST_LEAVING_US;
        play.enter(u64::from(LONGEST_LEAVING_US) / 2);
        assert!(!play.closes(1, 1));
        assert_eq!(play.closer.closed_us, LONGEST_LEAVING_US);
        assert!(!play.closes(1, 1));
        assert_eq!(play.closer.closed_us, LONGEST_US);
    }

    #[test]
    fn nor_where_others_answer_soon_beside_it() {
        let mut play = Play::new(1_000);
        play.enter(NEVER_US);
        for _ in 0..50 {
            assert!(!play.closes(2, 1));
            assert!(play.closer.closed_us <= LONGEST_US);
        }
    }
}
