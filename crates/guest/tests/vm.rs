//! A virtual machine: what it may write to, and how it says what it may not.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]
#![cfg(target_arch = "x86_64")]

use selfpage_core::addr::VirtAddr;
use selfpage_core::physical::PhysAddr;
use selfpage_guest::{Descriptors, Exit, Kind, Memory, Start, Vm, Writing};

mod possible;

/// Pages by what they are used for; all are mapped where they lie.
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const PT: u64 = 0x4000;
const DESCRIPTORS: u64 = 0x5000;
const STACK: u64 = 0x6000;
const CODE: u64 = 0x7000;
const DATA: u64 = 0x8000;
const MEMORY_BYTES: usize = 0x10000;
/// Behind the memory, there is none.
const NOWHERE: u64 = MEMORY_BYTES as u64;
/// Behind that, there is some that cannot be written.
const FIXED: u64 = NOWHERE + 4096;

fn vm<'m>() -> Option<Vm<'m>> {
    possible::here(Vm::new())
}

/// Memory with tables, and code that stores eax where rdi says and then ends.
fn prepared() -> (Memory, Descriptors) {
    let memory = Memory::new(PhysAddr(0), MEMORY_BYTES).unwrap();
    let put = |at: u64, word: u64| memory.physical().store(PhysAddr(at), word);
    for (table, below) in [(PML4, PDPT), (PDPT, PD), (PD, PT)] {
        put(table, below | 7);
    }
    for page in 0..=FIXED / 4096 {
        put(PT + page * 8, (page * 4096) | 7);
    }
    // mov [rdi], eax; ud2
    put(CODE, 0x0b0f_0789);
    // out 0x10, al; jmp back
    put(CODE + 16, 0xfceb_10e6);
    let handlers = [VirtAddr(CODE as usize + 16); 32];
    let descriptors =
        Descriptors { at: VirtAddr(DESCRIPTORS as usize), handlers, stack: VirtAddr(STACK as usize + 4096) };
    descriptors.write(memory.physical(), PhysAddr(DESCRIPTORS));
    (memory, descriptors)
}

fn store(vm: &mut Vm<'_>, descriptors: &Descriptors, at: u64) -> Exit {
    let (code, stack) = (VirtAddr(CODE as usize), VirtAddr(STACK as usize + 2048));
    vm.begin(descriptors, Start { root: PhysAddr(PML4), code, stack, fs_base: 0 }).unwrap();
    let mut registers = vm.registers().unwrap();
    (registers.rdi, registers.rax) = (at, 0x1234_5678);
    vm.set_registers(&registers).unwrap();
    loop {
        match vm.run().unwrap() {
            Exit::Interrupted => {}
            exit => return exit,
        }
    }
}

#[test]
fn a_store_goes_to_memory_or_ends_the_run() {
    let (memory, descriptors) = prepared();
    let fixed = Memory::new(PhysAddr(FIXED), 4096).unwrap();
    for (at, expected) in [
        (DATA, Exit::Port(0x10)),
        (NOWHERE, Exit::Store(PhysAddr(NOWHERE))),
        (FIXED, Exit::Store(PhysAddr(FIXED))),
        // Not mapped: a page fault.
        (FIXED + 4096, Exit::Port(0x10)),
    ] {
        let Some(mut vm) = vm() else { return };
        vm.add(&memory).unwrap();
        // SAFETY: a mapping that outlives the machine, read as atomics.
        unsafe { vm.lend(PhysAddr(FIXED), fixed.host(), 4096, Writing::Reported).unwrap() };
        assert_eq!(store(&mut vm, &descriptors, at), expected, "{at:#x}");
    }
    assert_eq!((memory.physical().load(PhysAddr(DATA)), fixed.physical().load(PhysAddr(FIXED))), (0x1234_5678, 0));
}

#[test]
fn an_address_has_one_memory() {
    let memory = |first, len_bytes| Memory::new(PhysAddr(first), len_bytes).unwrap();
    let (one, overlapping, next) = (memory(0, 8192), memory(4096, 4096), memory(8192, 4096));
    let Some(mut vm) = vm() else { return };
    vm.add(&one).unwrap();
    assert_eq!(vm.add(&overlapping).unwrap_err().kind(), Kind::Invalid);
    vm.add(&next).unwrap();
}

#[test]
fn what_kvm_counts_is_read_by_name() {
    let (memory, descriptors) = prepared();
    let Some(mut vm) = vm() else { return };
    vm.add(&memory).unwrap();
    let Some(statistics) = vm.statistics() else {
        return possible::skip("kvm-statistics", "this KVM has no KVM_GET_STATS_FD; Linux 5.14 has");
    };
    let before = statistics.read("exits").unwrap();
    assert_eq!(store(&mut vm, &descriptors, DATA), Exit::Port(0x10));
    assert!(statistics.read("exits").unwrap() > before);
    assert_eq!(statistics.read("exit"), None);
}
