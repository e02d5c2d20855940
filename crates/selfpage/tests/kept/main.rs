//! What must be kept: contents, and what the program has forbidden itself.

#[path = "../../../../tests/filter.rs"]
mod filter;
#[path = "../../../../tests/over_memory.rs"]
mod over_memory;
#[allow(dead_code)]
#[path = "../failure/scenario.rs"]
mod scenario;
#[path = "../../../../tests/skip.rs"]
mod skip;
#[path = "../failure/tried.rs"]
mod tried;

mod denied;
mod forbidden;
mod given;
mod high;
mod undefined;

use selfpage::{Region, Trap};

use tried::word;

const PAGE: usize = 4096;
const TRAPS: [(Trap, &str); 2] = [(Trap::Worker, "worker"), (Trap::Upcall, "upcall")];

/// Takes a page's frame, and has it used for another: the page is with its pager alone then.
fn take_frame(region: &Region, page: usize) {
    scenario::until("the page is out of core", || {
        // The second time finds it saved, and takes its frame.
        let _ = region.evict(page * PAGE, PAGE);
        let _ = region.flush(page * PAGE, PAGE);
        region.evict(page * PAGE, PAGE).is_ok_and(|gone| gone == 0)
    });
}
