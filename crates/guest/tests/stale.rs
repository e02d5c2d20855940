//! Why the rules tell a CPU what to forget: it goes on with what an entry said before, until INVLPG for that page, or a load of the
//! root. An entry is changed from within, again and again, and the page read before and after.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]
#![cfg(target_arch = "x86_64")]

mod possible;

use std::arch::global_asm;

use selfpage_core::addr::VirtAddr;
use selfpage_core::physical::PhysAddr;
use selfpage_guest::{Descriptors, Exit, Memory, Start, Vm};

/// Pages by what they are used for; all are mapped where they lie.
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const PT: u64 = 0x4000;
const DESCRIPTORS: u64 = 0x5000;
const STACK: u64 = 0x6000;
const CODE: u64 = 0x7000;
/// The page that is read, and the two frames that are behind it by turns.
const PAGE: u64 = 0x8000;
const FRAMES: [u64; 2] = [0x9000, 0xa000];
const MEMORY_BYTES: usize = 0x10000;

const ROUNDS: u64 = 100;

// rbx: the page, rdi: its entry, rsi: what that says, r11: what changes there, rdx: rounds, r10: how often a read found the frame of before.
// Each frame holds what its entry says.
global_asm!(
    ".pushsection .text",
    "stale_begin:",
    "2: mov rax, [rbx]",
    "xor rsi, r11",
    "mov [rdi], rsi",
    "ud2",
    "mov rcx, [rbx]",
    "xor eax, eax",
    "cmp rcx, rsi",
    "setne al",
    "add r10, rax",
    "dec rdx",
    "jnz 2b",
    "hlt",
    ".balign 16",
    "stale_forget_nothing:",
    "add qword ptr [rsp], 2",
    "iretq",
    ".balign 16",
    "stale_forget_page:",
    "invlpg [rbx]",
    "add qword ptr [rsp], 2",
    "iretq",
    ".balign 16",
    "stale_forget_all:",
    "mov rax, cr3",
    "mov cr3, rax",
    "add qword ptr [rsp], 2",
    "iretq",
    ".balign 16",
    "stale_ended:",
    "out 0x10, al",
    "hlt",
    "stale_end:",
    ".popsection",
);

unsafe extern "C" {
    static stale_begin: u8;
    static stale_forget_nothing: u8;
    static stale_forget_page: u8;
    static stale_forget_all: u8;
    static stale_ended: u8;
    static stale_end: u8;
}

fn offset(of: *const u8) -> usize {
    of.addr() - (&raw const stale_begin).addr()
}

/// How many reads found the frame of before, where ring 0 has the CPU forget so between the change and the read. `None`: there is no
/// KVM.
fn stale_reads(forget: *const u8) -> Option<u64> {
    let memory = Memory::new(PhysAddr(0), MEMORY_BYTES).unwrap();
    let put = |at: u64, word: u64| memory.physical().store(PhysAddr(at), word);
    for (table, below) in [(PML4, PDPT), (PDPT, PD), (PD, PT)] {
        put(table, below | 7);
    }
    for page in 0..MEMORY_BYTES as u64 / 4096 {
        put(PT + page * 8, (page * 4096) | 7);
    }
    let entry = PT + PAGE / 4096 * 8;
    put(entry, FRAMES[0] | 7);
    FRAMES.into_iter().for_each(|frame| put(frame, frame | 7));
    // SAFETY: the assembler put that much code between the two symbols.
    let code = unsafe { std::slice::from_raw_parts(&raw const stale_begin, offset(&raw const stale_end)) };
    for (index, bytes) in code.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        put(CODE + index as u64 * 8, u64::from_le_bytes(word));
    }
    let handler = |of| VirtAddr(CODE as usize + offset(of));
    let mut handlers = [handler(&raw const stale_ended); 32];
    handlers[6] = handler(forget);
    let descriptors =
        Descriptors { at: VirtAddr(DESCRIPTORS as usize), handlers, stack: VirtAddr(STACK as usize + 4096) };
    descriptors.write(memory.physical(), PhysAddr(DESCRIPTORS));
    let mut vm = possible::here(Vm::new())?;
    vm.add(&memory).unwrap();
    let (code, stack) = (VirtAddr(CODE as usize), VirtAddr(STACK as usize + 2048));
    vm.begin(&descriptors, Start { root: PhysAddr(PML4), code, stack, fs_base: 0 }).unwrap();
    let mut registers = vm.registers().unwrap();
    (registers.rbx, registers.rdi, registers.rsi) = (PAGE, entry, FRAMES[0] | 7);
    (registers.r11, registers.rdx, registers.r10) = (FRAMES[0] ^ FRAMES[1], ROUNDS, 0);
    vm.set_registers(&registers).unwrap();
    let exit = loop {
        match vm.run().unwrap() {
            Exit::Interrupted => {}
            exit => break exit,
        }
    };
    let registers = vm.registers().unwrap();
    assert!(exit == Exit::Port(0x10) && registers.rdx == 0, "{exit:?}, {registers:x?}");
    Some(registers.r10)
}

#[test]
fn a_cpu_goes_on_with_what_an_entry_said_until_it_is_told() {
    let Some(untold) = stale_reads(&raw const stale_forget_nothing) else { return };
    println!("{untold} of {ROUNDS} reads found the frame of before where nobody told the CPU to forget");
    assert_eq!(stale_reads(&raw const stale_forget_page), Some(0), "after INVLPG");
    assert_eq!(stale_reads(&raw const stale_forget_all), Some(0), "after a load of the root");
    // A CPU may forget by itself, too, as qemu's does. One that is known to remember is a KVM without hardware behind it.
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let has_extension = cpuinfo.split_ascii_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    assert!(untold > 0 || has_extension, "an invalidation that is lost would not be found here");
}
