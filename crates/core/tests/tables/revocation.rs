//! What a revocation reaches, and what it leaves alone.

use selfpage_core::capability::{Derived, Error, Handle, Kernel, Object, Progress, Rights, Type};

use super::machine::{Cpu, memory};
use super::{ROOT, blocks, frame};

#[test]
fn what_a_cnode_holds_goes_and_relatives_elsewhere_stay() {
    // Capability by capability, where each call begins anew; and all in one.
    for (most, calls) in [(1, 10), (u64::MAX, 1)] {
        let memory = memory(16 << 20);
        let cpu = Cpu::default();
        let (mut kernel, space) = Kernel::boot(&memory, &cpu, &[]).unwrap();
        let [frames, ram, ..] = blocks(&kernel, &space)[..] else { panic!("too few blocks") };
        let data = Handle::at_root(40);
        let node = Handle::at_root(50);
        let copy = |kernel: &mut Kernel<'_>, source, into, at| {
            kernel.copy(&space, source, into, at, Rights::ALL).unwrap();
        };
        kernel.retype(&space, frames, frame(12), 1, ROOT, 40).unwrap();
        kernel.retype(&space, ram, Object::of(Type::CNode), 1, ROOT, 50).unwrap();
        kernel.retype(&space, ram, Object::of(Type::CNode), 1, node, 20).unwrap();
        copy(&mut kernel, data, ROOT, 41);
        // A line of copies in the CNode, one in the CNode within, and one of that outside again.
        copy(&mut kernel, data, node, 1);
        (1..6).for_each(|at| copy(&mut kernel, node.then(at), node, at + 1));
        copy(&mut kernel, data, node.then(20), 1);
        copy(&mut kernel, node.then(20).then(1), ROOT, 43);
        copy(&mut kernel, data, ROOT, 42);
        assert_eq!(kernel.derived(&space, data), Ok(Derived { copies: 10, objects: 0 }));

        let progress: Vec<_> = (0..calls).map(|_| kernel.revoke(&space, ram, most).unwrap()).collect();
        assert!(progress[..calls - 1].iter().all(|progress| *progress == Progress::More), "{progress:?}");
        assert_eq!(progress[calls - 1], Progress::Done);
        assert_eq!(kernel.derived(&space, data), Ok(Derived { copies: 2, objects: 0 }));
        assert_eq!(kernel.identify(&space, Handle::at_root(43)), Err(Error::NoCapability));
        for kept in [41, 42] {
            kernel.identify(&space, Handle::at_root(kept)).unwrap();
        }
    }
}

#[test]
fn a_long_line_of_copies_is_revoked_step_by_step() {
    let memory = memory(16 << 20);
    let cpu = Cpu::default();
    let (mut kernel, space) = Kernel::boot(&memory, &cpu, &[]).unwrap();
    let [frames, ram, ..] = blocks(&kernel, &space)[..] else { panic!("too few blocks") };
    kernel.retype(&space, frames, frame(12), 1, ROOT, 40).unwrap();
    kernel.retype(&space, ram, Object::of(Type::CNode), 1, ROOT, 50).unwrap();
    let (first, node) = (Handle::at_root(40), Handle::at_root(50));
    kernel.copy(&space, first, node, 1, Rights::ALL).unwrap();
    (1..63).for_each(|at| kernel.copy(&space, node.then(at), node, at + 1, Rights::ALL).unwrap());
    // From the middle: what came before stays.
    assert_eq!(kernel.revoke(&space, node.then(20), u64::MAX), Ok(Progress::Done));
    assert_eq!(kernel.derived(&space, first), Ok(Derived { copies: 20, objects: 0 }));
    assert_eq!(kernel.revoke(&space, first, 5), Ok(Progress::More));
    assert_eq!(kernel.derived(&space, first), Ok(Derived { copies: 15, objects: 0 }));
    assert_eq!(kernel.revoke(&space, first, u64::MAX), Ok(Progress::Done));
    assert_eq!(kernel.derived(&space, first), Ok(Derived::default()));
}
