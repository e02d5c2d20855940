//! The worker trap: pager threads read faults from the userfaultfd and resolve them. System calls on absent pages work.

use std::sync::Arc;

use selfpage_core::addr::VirtAddr;
use selfpage_core::fault::{self, Fault, Outcome};
use selfpage_core::linux::thread::{self as this_thread, CpuSet};
use selfpage_core::linux::uffd::{Message, Uffd};
use selfpage_core::mmu::Trap;
use selfpage_core::pager::Context;
use selfpage_core::region::Access;

use super::thread;
use crate::domain::Inner;

/// Every so many faults a worker looks where the faulting thread runs, and goes there: the hand-over is twice as fast on
/// one CPU.
const FOLLOW_EVERY: u32 = 64;

/// Reads and resolves faults until the domain ends.
pub(crate) fn serve(inner: &Arc<Inner>, uffd: Uffd) {
    let mut messages = [Message::EMPTY; 8];
    let mut follow = Follow::default();
    loop {
        let count = match uffd.read(&mut messages) {
            Ok(count) => count,
            Err(rustix::io::Errno::AGAIN) => {
                if !inner.wait_for_fault(uffd) {
                    return;
                }
                continue;
            }
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => crate::die("a worker cannot read its userfaultfd"),
        };
        for message in &messages[..count] {
            let Some(fault) = message.fault() else { continue };
            if thread::is_pager_thread(fault.thread) {
                crate::die("a pager thread touched managed memory");
            }
            follow.thread(fault.thread);
            let access = if fault.write { Access::Write } else { Access::Read };
            answer(inner, Fault { addr: VirtAddr(fault.addr), access });
        }
    }
}

/// Every fault ends in a map, a wake, or a wake by whoever is at the page.
fn answer(inner: &Arc<Inner>, fault: Fault) {
    let state = inner.state();
    let page = fault.addr.page();
    match fault::resolve(state, Context::PagerThread, fault) {
        Outcome::Resolved | Outcome::Retry => {}
        // The region went while the thread waited: its access meets whatever is there now.
        Outcome::NotOurs => state.mmu.wake_faulters(Trap::Worker, page, 1),
        Outcome::Violation => inner.guard(page),
        Outcome::Failed(failure) => {
            inner.report(page, failure);
            state.mmu.poison(Trap::Worker, page);
        }
    }
}

/// Keeps a worker on the CPU of the thread that it serves.
#[derive(Default)]
struct Follow {
    thread: u32,
    count: u32,
    cpu: Option<u32>,
}

impl Follow {
    fn thread(&mut self, thread: u32) {
        self.count += 1;
        if thread == self.thread && self.count < FOLLOW_EVERY {
            return;
        }
        (self.thread, self.count) = (thread, 0);
        let Some(cpu) = last_cpu(thread) else { return };
        if self.cpu != Some(cpu) && CpuSet::only(cpu).bind(this_thread::id()).is_ok() {
            self.cpu = Some(cpu);
        }
    }
}

/// The CPU that a thread of this process ran on last.
fn last_cpu(thread: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    // The name is in brackets and may hold anything; field 39 is the 37th after it.
    stat.rsplit_once(") ")?.1.split(' ').nth(36)?.parse().ok()
}
