//! What the fault path needs from the outside: nothing. `cargo xtask link` links this with no library under it; a call that
//! cannot be resolved, or a panic that can be reached, is a link error.
//!
//! To put more of core under the check, call it from [`selfpage_trapcheck`] with values that the optimizer cannot know.
#![no_std]

use core::hint::black_box;

use selfpage_core::domain::DomainState;
use selfpage_core::fault::{self, Fault, Outcome, Request};
use selfpage_core::linux::mmu::LinuxMmu;
use selfpage_core::mmu::Mmu;
use selfpage_core::pager::Context;
use selfpage_core::region::Serial;
use selfpage_core::stream::Chunk;

/// All that the fault path is given.
pub struct Given<'a> {
    domain: &'a DomainState,
    fault: Fault,
    serial: Serial,
    chunk: Chunk,
    mmu: &'a LinuxMmu,
}

/// The path of a fault, from the trap to the last system call, with whatever pager stands behind its trait.
#[unsafe(no_mangle)]
pub extern "C" fn selfpage_trapcheck(given: &mut Given<'_>) -> u32 {
    // Every function of the machine, whether core calls it or not.
    let mmu: &dyn Mmu = black_box(given.mmu);
    let outcome = fault::resolve(given.domain, Context::Trap, given.fault);
    let handed = fault::request(given.domain, Request::Ahead(given.fault.addr.page(), given.serial, given.chunk));
    #[cfg(feature = "broken")]
    let outcome = [outcome][given.fault.addr.0];
    u32::from(outcome == Outcome::Resolved) + u32::from(handed) + u32::from(mmu.present(given.fault.addr.page()))
}

unsafe extern "C" {
    /// Defined nowhere: a panic that can be reached is a link error.
    safe fn selfpage_core_can_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    selfpage_core_can_panic()
}
