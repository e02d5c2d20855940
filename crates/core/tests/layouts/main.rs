//! Every layout that x86-64 permits, and that the holder has memory for, can be built: random layouts are built and walked.
//!
//! `through_address_space.rs` builds them by `AddressSpace`, and changes them, beside a plain list of pages (`target.rs`).
//! `by_raw_calls.rs` makes each table and each entry by itself, with tables that two roots share, or that one root has twice, and
//! tables that are mapped to be read.
//!
//! A failure prints its seed. To see it again:
//! `SELFPAGE_LAYOUTS_SEED=123 cargo test --release -p selfpage-core --test layouts`.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod by_raw_calls;
mod chance;
#[allow(dead_code)]
#[path = "../sim/dice.rs"]
mod dice;
#[allow(dead_code)]
#[path = "../tables/machine.rs"]
mod machine;
mod target;
mod through_address_space;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use chance::Source;
use selfpage_core::addr::VirtAddr;
use selfpage_core::capability::{Derived, Handle, Kernel, Object, Progress, Space, Type};
use selfpage_core::physical::{PhysAddr, PhysMemory};
use selfpage_core::tables::walk::{Translation, translate};
use selfpage_core::tables::{Tlb, is_canonical};

/// The holder's root, in a place of its own.
const ROOT: Handle = Handle::at_root(1);
const MEMORY_BYTES: usize = 16 << 20;
/// Memory of a device, far from all else: nobody has to have it to map it.
const DEVICES: [(PhysAddr, u8); 2] = [(PhysAddr(1 << 40), 34), (PhysAddr(1 << 45), 21)];

/// Nobody translates but the walk.
struct NoCpu;

impl Tlb for NoCpu {
    fn forget_all(&self) {}
    fn forget(&self, _: VirtAddr) {}
    fn leave(&self, _: PhysAddr) {}
}

/// A holder of all the memory of a machine.
struct Holder<'m> {
    memory: &'m PhysMemory,
    kernel: Kernel<'m>,
    space: Space,
    sources: Vec<Source>,
}

/// The block of RAM of 4,096 << `order` bytes, as the machine's memory is divided.
const fn block(order: u8) -> Handle {
    Handle::at_root(2 + order)
}

impl<'m> Holder<'m> {
    fn new(memory: &'m PhysMemory) -> Holder<'m> {
        let (mut kernel, space) = Kernel::boot(memory, &NoCpu, &DEVICES).unwrap();
        let data = Object { kind: Type::Frame, size_bits: 22 };
        kernel.retype(&space, block(10), data, 1, ROOT, 40).unwrap();
        let handles = [Handle::at_root(40), Handle::at_root(14), Handle::at_root(15)];
        let source = |handle| {
            let found = kernel.identify(&space, handle).unwrap();
            Source { handle, base: found.base, len_bytes: found.len_bytes() }
        };
        let sources = handles.map(source).to_vec();
        Holder { memory, kernel, space, sources }
    }

    /// Takes all back that came of some RAM, and sees that nothing is left of it.
    fn end(mut self, ram: Handle, roots: &[PhysAddr]) {
        let whole = self.kernel.identify(&self.space, ram).unwrap();
        assert_eq!(self.kernel.revoke(&self.space, ram, u64::MAX), Ok(Progress::Done));
        for source in &self.sources {
            assert_eq!(self.kernel.derived(&self.space, source.handle), Ok(Derived::default()));
        }
        for root in roots {
            let words = (0..512).map(|entry| self.memory.load(root.plus(entry * 8)));
            assert!(words.into_iter().all(|word| word == 0), "a root that is gone has entries");
        }
        let all = Object { kind: Type::Frame, size_bits: whole.size_bits };
        self.kernel.retype(&self.space, ram, all, 1, ROOT, 41).unwrap();
    }
}

/// Walks to an address, and compares.
fn see(memory: &PhysMemory, root: PhysAddr, at: u64, shall: Option<Translation>) {
    let at = VirtAddr(at as usize);
    let shall = shall.filter(|_| is_canonical(at));
    assert_eq!(translate(memory, root, at), shall, "at {at:x?}");
}

/// Runs a test for many seeds, or for the one in `SELFPAGE_LAYOUTS_SEED`.
fn for_seeds(count: u64, test: impl Fn(&PhysMemory)) {
    let memory = machine::memory(MEMORY_BYTES);
    let one = std::env::var("SELFPAGE_LAYOUTS_SEED").ok().map(|seed| seed.parse().unwrap());
    let seeds = one.map_or(0..count, |seed: u64| seed..seed + 1);
    for seed in seeds {
        dice::seed(seed);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(&memory))) {
            println!("again: SELFPAGE_LAYOUTS_SEED={seed} cargo test --release -p selfpage-core --test layouts");
            resume_unwind(panic);
        }
    }
}
