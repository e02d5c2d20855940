//! What a revocation reaches, and what it leaves alone.

use selfpage_core::capability::{Derived, Error, Handle, Kernel, Object, Progress, Rights, Type};

use super::machine::{Cpu, memory};
use super::{Machine, ROOT, blocks, frame};

#[test]
fn what_a_cnode_holds_goes_and_relatives_elsewhere_stay() {
    // Capability by capability, where each call begins anew; and all in one.
    for (most, calls) in [(1, 10), (u64::MAX, 1)] {
        let Machine { mut kernel, space, ram, data, .. } = Machine::new(12, &[]);
        let node = Handle::at_root(50);
        let copy = |kernel: &mut Kernel<'_>, source, into, at| {
            kernel.copy(&space, source, into, at, Rights::ALL).unwrap();
        };
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
    let Machine { mut kernel, space, ram, data, .. } = Machine::new(12, &[]);
    kernel.retype(&space, ram, Object::of(Type::CNode), 1, ROOT, 50).unwrap();
    let (first, node) = (data, Handle::at_root(50));
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

/// Whoever lends CNodes gets them back capability by capability, whatever the borrower does meanwhile.
#[test]
fn a_revocation_in_steps_ends_while_a_holder_adds_what_it_can() {
    let Machine { mut kernel, space, frames, ram, data, .. } = Machine::new(12, &[]);
    let at = Handle::at_root;
    let (lent, own, inner, outside) = (at(41), at(42), at(43), at(44));
    let retype = |kernel: &mut Kernel<'_>, ram, object, into, place| {
        kernel.retype(&space, ram, object, 1, into, place).unwrap();
    };
    retype(&mut kernel, ram, Object::of(Type::CNode), ROOT, 41);
    retype(&mut kernel, frames, Object::of(Type::CNode), ROOT, 42);
    // In the CNode that was lent: one made from other memory, and a capability of the holder's. It has copies of both elsewhere.
    retype(&mut kernel, frames, Object::of(Type::CNode), lent, 20);
    let rest = [(lent.then(20), ROOT, 43), (data, lent, 1), (lent.then(1), ROOT, 44)];
    for (from, into, at) in rest {
        kernel.copy(&space, from, into, at, Rights::ALL).unwrap();
    }

    let mut calls = 0;
    let mut added = 0;
    while kernel.revoke(&space, ram, 1) == Ok(Progress::More) {
        calls += 1;
        assert!(calls < 1000, "{added} capabilities were added, and there is no end");
        let mut add = |source, into| {
            let added = (1..64).any(|at| kernel.copy(&space, source, into, at, Rights::ALL).is_ok());
            u32::from(added)
        };
        for (source, into) in [(data, lent), (data, inner), (outside, own), (lent.then(1), own)] {
            added += add(source, into);
        }
    }
    println!("{calls} calls, {added} capabilities added meanwhile");
    for gone in [lent, inner, outside] {
        assert_eq!(kernel.identify(&space, gone), Err(Error::NoCapability));
    }
    assert_eq!(kernel.derived(&space, data), Ok(Derived::default()));
}

/// What a holder may not add to while a revocation is under way.
#[test]
fn what_goes_takes_nothing_in_and_gives_nothing_out() {
    let Machine { mut kernel, space, frames, ram, data, .. } = Machine::new(12, &[]);
    let (lent, copy) = (Handle::at_root(41), Handle::at_root(42));
    kernel.retype(&space, ram, Object::of(Type::CNode), 1, ROOT, 41).unwrap();
    kernel.copy(&space, lent, ROOT, 42, Rights::ALL).unwrap();
    kernel.copy(&space, data, lent, 1, Rights::ALL).unwrap();
    kernel.copy(&space, lent.then(1), ROOT, 43, Rights::ALL).unwrap();
    // To the copy of the CNode and no further.
    assert_eq!(kernel.revoke(&space, ram, 1), Ok(Progress::More));
    assert_eq!(kernel.identify(&space, copy), Err(Error::NoCapability));
    let all = Rights::ALL;
    let refused = Err(Error::RevokeInProgress);
    assert_eq!(kernel.copy(&space, data, lent, 2, all), refused);
    assert_eq!(kernel.retype(&space, frames, frame(12), 1, lent, 2), refused);
    assert_eq!(kernel.mint(&space, ROOT, lent, 2, Handle { bits: 0, len: 1 }), refused);
    assert_eq!(kernel.copy(&space, lent.then(1), ROOT, 44, all), refused);
    assert_eq!(kernel.copy(&space, Handle::at_root(43), ROOT, 44, all), refused);
    // That its holder revokes it by itself does not bring it back.
    assert_eq!(kernel.revoke(&space, lent.then(1), u64::MAX), Ok(Progress::Done));
    assert_eq!(kernel.copy(&space, lent.then(1), ROOT, 44, all), refused);
    kernel.copy(&space, data, ROOT, 44, all).unwrap();
    assert_eq!(kernel.revoke(&space, ram, u64::MAX), Ok(Progress::Done));
    assert_eq!(kernel.derived(&space, data), Ok(Derived { copies: 1, objects: 0 }));
    kernel.retype(&space, ram, Object::of(Type::CNode), 1, ROOT, 41).unwrap();
    kernel.copy(&space, data, lent, 2, all).unwrap();
}

/// A mark that is in no count is not seen: so nobody has walked up the line that a copy comes of.
#[test]
fn a_copy_of_a_copy_does_not_look_at_its_ancestors() {
    let Machine { memory, mut kernel, space, ram, data, .. } = Machine::new(12, &[]);
    kernel.retype(&space, ram, Object::of(Type::CNode), 1, ROOT, 50).unwrap();
    let node = Handle::at_root(50);
    kernel.copy(&space, data, node, 1, Rights::ALL).unwrap();
    (1..10).for_each(|at| kernel.copy(&space, node.then(at), node, at + 1, Rights::ALL).unwrap());
    let head = kernel.identify(&space, node).unwrap().base.plus(64);
    let is_being_revoked = 1 << 25;
    memory.store(head, memory.load(head) | is_being_revoked);
    kernel.copy(&space, node.then(10), node, 11, Rights::ALL).unwrap();
    // While something is being revoked, wherever, they are looked at.
    kernel.copy(&space, node, ROOT, 51, Rights::ALL).unwrap();
    assert_eq!(kernel.revoke(&space, node, 0), Ok(Progress::More));
    assert_eq!(kernel.copy(&space, node.then(11), ROOT, 52, Rights::ALL), Err(Error::RevokeInProgress));
}

/// What the thread has used of the CPU: others may run beside it.
fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in a structure that outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CNodes in CNodes, with six other capabilities in each. How long it takes to revoke them, for each of them.
fn revoke_nested(depth: u32) -> u64 {
    let memory = memory(16 << 20);
    let cpu = Cpu::default();
    let (mut kernel, space) = Kernel::boot(&memory, &cpu, &[]).unwrap();
    let [ram, frames, ..] = blocks(&kernel, &space, Type::Ram)[..] else { panic!("too few blocks") };
    kernel.retype(&space, frames, frame(12), 1, ROOT, 40).unwrap();
    // The others are made from other memory: they go because of where they lie, and for nothing else.
    kernel.retype(&space, frames, Object::of(Type::CNode), 1, ROOT, 41).unwrap();
    kernel.copy(&space, Handle::at_root(41), ROOT, 50, Rights::ALL).unwrap();
    // The innermost is known by a copy, in one of two places by turns.
    for level in 0..depth {
        let (here, next) = if level % 2 == 0 { (50, 51) } else { (51, 50) };
        let node = Handle::at_root(here);
        for at in [1, 2, 3, 40, 41, 42] {
            kernel.copy(&space, Handle::at_root(40), node, at, Rights::ALL).unwrap();
        }
        kernel.retype(&space, ram, Object::of(Type::CNode), 1, node, 20).unwrap();
        kernel.copy(&space, node.then(20), ROOT, next, Rights::ALL).unwrap();
        kernel.delete(&space, node).unwrap();
    }
    let begin = cpu_ns();
    assert_eq!(kernel.revoke(&space, frames, u64::MAX), Ok(Progress::Done));
    let took = cpu_ns() - begin;
    assert_eq!(kernel.derived(&space, ram), Ok(Derived::default()));
    took / u64::from(depth * 7)
}

#[test]
fn cnodes_deep_in_cnodes_take_no_longer_for_each_capability() {
    let least = |depth| (0..3).map(|_| revoke_nested(depth)).min().unwrap();
    let (shallow, deep) = (least(60), least(2000));
    println!("{shallow} ns a capability in 60 CNodes, {deep} ns in 2000");
    // Gone down anew for each, thirty times as deep would take thirty times as long.
    assert!(deep < 10 * shallow.max(1), "{shallow} ns became {deep} ns");
}
