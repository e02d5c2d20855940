//! Advice to pager threads waits where a program does.

use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use selfpage::pager::UserPager;
use selfpage::{Domain, Trap};
use selfpage_core::addr::PageBytes;

const PAGE: usize = 4096;
/// So few that a piece of advice is one page.
const FRAMES: usize = 32;
/// The page of which there is no advice.
const TOUCHED: u64 = 63;

/// How far it has come.
#[derive(Default)]
struct Course {
    /// Somebody has touched [`TOUCHED`], and waits.
    is_awaited: bool,
    /// [`TOUCHED`] is filled, or that was given up.
    is_over: bool,
    /// Advised pages that were begun before [`TOUCHED`], and after.
    before: u32,
    after: u32,
}

/// A store that is slow in its way: what is advised takes until the page that somebody waits for is there.
#[derive(Clone, Default)]
struct Slow(Arc<(Mutex<Course>, Condvar)>);

impl Slow {
    fn step(&self, step: impl FnOnce(&mut Course)) {
        step(&mut self.0.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.1.notify_all();
    }

    fn wait(&self, until: impl Fn(&Course) -> bool) {
        let course = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(course, |course| !until(course)).unwrap_or_else(PoisonError::into_inner));
    }
}

impl UserPager for Slow {
    fn fill(&self, index: u64, _bytes: &mut PageBytes) -> io::Result<()> {
        if index == TOUCHED {
            self.step(|course| course.is_over = true);
            return Ok(());
        }
        let mut begun_before = false;
        self.step(|course| {
            begun_before = !course.is_awaited;
            if begun_before { course.before += 1 } else { course.after += u32::from(!course.is_over) }
        });
        // What was begun before ends when somebody waits: its thread then has to choose what to do next.
        self.wait(|course| course.is_over || (begun_before && course.is_awaited));
        Ok(())
    }

    fn save(&self, _index: u64, _bytes: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

/// Whether the thread sleeps.
fn sleeps(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().starts_with('S')
}

/// How many pager threads there are: the only test here has the only domain.
fn pagers() -> u32 {
    let names = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path().join("comm"));
    names.filter(|name| std::fs::read_to_string(name).is_ok_and(|name| name == "selfpage-pager\n")).count() as u32
}

/// Lets the pager end, whatever becomes of the test.
struct OverOnDrop<'a>(&'a Slow);

impl Drop for OverOnDrop<'_> {
    fn drop(&mut self) {
        self.0.step(|course| course.is_over = true);
    }
}

#[test]
fn a_fault_that_was_handed_over_is_served_before_advice() {
    let domain = Domain::with_frames(FRAMES * PAGE).build().unwrap();
    let pager = Slow::default();
    let region = domain.region(64 * PAGE).trap(Trap::Upcall).user(pager.clone()).unwrap();
    region.prefetch(0, FRAMES * PAGE).unwrap();
    let pagers = pagers();
    assert!(pagers > 0);
    pager.wait(|course| course.before == pagers);
    let (served_is, served) = channel();
    std::thread::scope(|scope| {
        let _over = OverOnDrop(&pager);
        let (thread_is, thread) = channel();
        let region = &region;
        scope.spawn(move || {
            thread_is.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            std::hint::black_box(region.as_slice::<u64>()[TOUCHED as usize * PAGE / 8]);
            served_is.send(()).unwrap();
        });
        let thread = thread.recv().unwrap();
        while !sleeps(thread) {
            std::thread::yield_now();
        }
        pager.step(|course| course.is_awaited = true);
        let served = served.recv_timeout(Duration::from_secs(30));
        let after = pager.0.0.lock().unwrap().after;
        assert!(served.is_ok(), "{after} pieces of advice were begun, and nobody took the fault");
    });
}
