//! What the fault path needs from the outside: nothing. `cargo xtask link` links this with no library under it; a call that
//! cannot be resolved, or a panic that can be reached, is a link error.
//!
//! To put more of core under the check, call it from [`selfpage_trapcheck`] with values that the optimizer cannot know.
#![no_std]

use selfpage_core::addr::{Frame, VirtAddr};
use selfpage_core::mmu::{Mmu, Trap};
use selfpage_core::pager::Pager;
use selfpage_core::policy::Policy;

/// All that the fault path is given.
pub struct Given<'a> {
    mmu: &'a dyn Mmu,
    pager: &'a dyn Pager,
    policy: &'a mut dyn Policy,
    addr: VirtAddr,
    frame: Frame,
}

/// The path of a fault as far as core has one.
#[unsafe(no_mangle)]
pub extern "C" fn selfpage_trapcheck(given: &mut Given<'_>) -> u32 {
    let page = given.addr.page();
    let want = given.pager.extent(page.0, 16);
    let frame = given.policy.victim().unwrap_or(given.frame);
    let mapped = given.mmu.map(Trap::Upcall, page, frame, want);
    #[cfg(feature = "broken")]
    let want = [1, 2, 3][want as usize];
    mapped.map_or_else(|partial| partial.done, |()| want)
}

unsafe extern "C" {
    /// Defined nowhere: a panic that can be reached is a link error.
    safe fn selfpage_core_can_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    selfpage_core_can_panic()
}
