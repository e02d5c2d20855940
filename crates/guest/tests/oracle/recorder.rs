//! What runs inside: a list of accesses at ring 3, and behind faults a few instructions of ring 0 that note the fault and go on
//! after the access.

use std::arch::global_asm;

use selfpage_core::addr::VirtAddr;
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::walk::Access;
use selfpage_guest::{Descriptors, Exit, Memory, Start, Vm};

/// Where its memory is: a device to the rules, so that nothing of it is ever anything else.
pub const DEVICE: PhysAddr = PhysAddr(0x10_0000);
/// log2 of how much it is.
pub const DEVICE_BITS: u8 = 18;
/// How many pages that are.
pub const PAGES: u16 = 1 << (DEVICE_BITS - 12);
/// The entry of the root through which it is mapped.
pub const ROOT_ENTRY: u16 = 7;

const AT: usize = (ROOT_ENTRY as usize) << 39;
const DESCRIPTORS: u64 = 0x1000;
const RING0_STACK_END: u64 = 0x3000;
const RING3_STACK_END: u64 = 0x4000;
const LIST: u64 = 0x4000;
/// How many accesses there is room for.
pub const MOST: usize = (1 << DEVICE_BITS) / RECORD_BYTES as usize - LIST as usize / RECORD_BYTES as usize;
/// To this port a handler writes that knows no way on. So the list ends too.
const END_PORT: u16 = 0x10;

/// The words of an access and its record, in order.
const RECORD_BYTES: u64 = 64;
const ADDRESS: u64 = 0;
const KIND: u64 = 8;
const VALUE: u64 = 16;
const VECTOR: u64 = 24;
const CODE: u64 = 32;
const FAULT_AT: u64 = 40;

// rdi: the list, rdx: how many, rsi: the end of the stack.
global_asm!(
    ".pushsection .text",
    "oracle_begin:",
    "2: mov rbx, [rdi]",
    "mov rcx, [rdi + 8]",
    "mov rax, [rdi + 16]",
    "xor r12d, r12d",
    "xor r13d, r13d",
    "xor r15d, r15d",
    "lea r14, [rip + 9f]",
    "cmp ecx, 1",
    "je 3f",
    "cmp ecx, 2",
    "je 4f",
    "mov rax, [rbx]",
    "jmp 9f",
    "3: mov [rbx], rax",
    "jmp 9f",
    "4: call rbx",
    "9: mov rsp, rsi",
    "mov [rdi + 16], rax",
    "mov [rdi + 24], r12",
    "mov [rdi + 32], r15",
    "mov [rdi + 40], r13",
    "add rdi, 64",
    "dec rdx",
    "jnz 2b",
    "ud2",
    ".balign 16",
    "oracle_page_fault:",
    "pop r15",
    "mov r13, cr2",
    "mov r12d, 14",
    "mov [rsp], r14",
    "iretq",
    ".balign 16",
    "oracle_protection_fault:",
    "pop r15",
    "mov r12d, 13",
    "mov [rsp], r14",
    "iretq",
    ".balign 16",
    "oracle_other:",
    "out 0x10, al",
    "jmp oracle_other",
    "oracle_end:",
    ".popsection",
);

unsafe extern "C" {
    static oracle_begin: u8;
    static oracle_page_fault: u8;
    static oracle_protection_fault: u8;
    static oracle_other: u8;
    static oracle_end: u8;
}

/// Offset of a symbol in the code.
fn offset(of: *const u8) -> usize {
    of as usize - &raw const oracle_begin as usize
}

/// An access to be made.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub at: VirtAddr,
    pub access: Access,
    /// What is written.
    pub value: u64,
}

/// What became of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// What was read or written; of code nothing.
    Done(u64),
    PageFault {
        code: u64,
        at: u64,
    },
    ProtectionFault {
        code: u64,
    },
}

/// The memory with code, descriptors, stacks and list.
pub struct Recorder {
    memory: Memory,
    descriptors: Descriptors,
}

impl Recorder {
    pub fn new() -> Recorder {
        let memory = Memory::new(DEVICE, 1 << DEVICE_BITS).unwrap();
        // SAFETY: the assembler put that much code between the two symbols.
        let code = unsafe { std::slice::from_raw_parts(&raw const oracle_begin, offset(&raw const oracle_end)) };
        for (index, bytes) in code.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            memory.physical().store(DEVICE.plus(index as u64 * 8), u64::from_le_bytes(word));
        }
        let handler = |of| VirtAddr(AT + offset(of));
        let mut handlers = [handler(&raw const oracle_other); 32];
        handlers[13] = handler(&raw const oracle_protection_fault);
        handlers[14] = handler(&raw const oracle_page_fault);
        let descriptors = Descriptors {
            at: VirtAddr(AT + DESCRIPTORS as usize),
            handlers,
            stack: VirtAddr(AT + RING0_STACK_END as usize),
        };
        descriptors.write(memory.physical(), DEVICE.plus(DESCRIPTORS));
        Recorder { memory, descriptors }
    }

    /// Has a machine make the accesses one after the other.
    pub fn run<'m>(&'m self, vm: &mut Vm<'m>, root: PhysAddr, planned: &[Planned]) -> Vec<Outcome> {
        assert!(!planned.is_empty() && planned.len() <= MOST);
        let memory = self.memory.physical();
        let record = |index: usize| DEVICE.plus(LIST + index as u64 * RECORD_BYTES);
        for (index, planned) in planned.iter().enumerate() {
            let kind = match planned.access {
                Access::Read => 0,
                Access::Write => 1,
                Access::Execute => 2,
            };
            memory.store(record(index).plus(ADDRESS), planned.at.0 as u64);
            memory.store(record(index).plus(KIND), kind);
            memory.store(record(index).plus(VALUE), planned.value);
        }
        vm.add(&self.memory).unwrap();
        let stack = VirtAddr(AT + RING3_STACK_END as usize);
        vm.begin(&self.descriptors, Start { root, code: VirtAddr(AT), stack, fs_base: 0 }).unwrap();
        let mut registers = vm.registers().unwrap();
        (registers.rdi, registers.rsi) = ((AT as u64) + LIST, stack.0 as u64);
        registers.rdx = planned.len() as u64;
        vm.set_registers(&registers).unwrap();
        let exit = loop {
            match vm.run().unwrap() {
                Exit::Interrupted => {}
                exit => break exit,
            }
        };
        let registers = vm.registers().unwrap();
        let done = planned.len() - registers.rdx as usize;
        assert!(
            exit == Exit::Port(END_PORT) && registers.rdx == 0,
            "{exit:?} at {:?}, {registers:x?}",
            planned.get(done)
        );
        let read = |index: usize, word: u64| memory.load(record(index).plus(word));
        (0..planned.len())
            .map(|index| match read(index, VECTOR) {
                13 => Outcome::ProtectionFault { code: read(index, CODE) },
                14 => Outcome::PageFault { code: read(index, CODE), at: read(index, FAULT_AT) },
                _ => Outcome::Done(read(index, VALUE)),
            })
            .collect()
    }
}
