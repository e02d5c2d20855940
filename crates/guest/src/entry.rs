//! The few instructions that a closure begins with, and those that take its exceptions: a page fault goes to the handler, each
//! other one writes to a port, and the process sees to the rest; a step is counted.

use std::arch::{asm, global_asm};

use selfpage_core::addr::VirtAddr;

/// Exception n writes to this port plus n, and one of the handler to the 32 ports behind.
pub const FIRST_PORT: u16 = 0x20;
/// Exceptions of the architecture.
pub const VECTORS: usize = 32;
/// A step.
const DEBUG: usize = 1;
/// An invalid instruction.
pub const UNDEFINED: usize = 6;
/// No translation, or none for this access.
pub const PAGE_FAULT: usize = 14;

/// Where the descriptors' page has words for the instructions of ring 0: the root of the handler's tables, and the frame with which
/// it begins at ring 3. The closure can read them, and not write.
pub const HANDLER_ROOT: u64 = 0x800;
/// rip, cs, rflags, rsp, ss.
pub const HANDLER_FRAME: u64 = 0x808;
/// Where ring 0 leaves what it was interrupted in, in bytes below the end of its stack, which lies a page behind the descriptors:
/// the address of the fault, rax, and what the CPU pushes.
pub const INTERRUPTED: u64 = 64;
/// What follows the end of the handler's own stack of ring 0: the address of all that, and the closure's root.
pub const INTERRUPTED_WORDS: u64 = 16;
/// Where each of the two stacks of ring 0 has a count of steps, in bytes below its end: nothing else comes so deep.
pub const STEPS: u64 = 1024;
/// What the CPU pushes for an exception without an error code.
const PUSHED_BYTES: u64 = 40;
/// Where the handler's stack ends its page of vector registers begins; at its end are the function to call and its argument.
pub const VECTORS_BYTES: u64 = 4096;
/// What is saved there, and may be used: x87, SSE, AVX, AVX-512, which KVM takes without a permission of its own. By name, and not all that there
/// is: under some hypervisors a guest has the process's tiles too, which a page has no room for.
const VECTOR_STATES: u32 = 0xe7;

// `selfpage_guest_begin`: rbx is a function, rdi its argument. `selfpage_guest_end` is reached when it returns.
//
// A page fault of the closure goes to `selfpage_guest_page_fault`, at ring 0: on to the handler's tables, and to ring 3. The
// handler ends at `selfpage_guest_handled`, an exception like any other of its own, but that ring 0 goes back from there. A load of
// the root makes the CPU forget all translations, so nothing else has to tell it of changed entries.
global_asm!(
    ".pushsection .text",
    // Whoever uses them may be compiled apart from this.
    ".globl selfpage_guest_begin, selfpage_guest_end",
    ".globl selfpage_guest_exceptions, selfpage_guest_handler_exceptions, selfpage_guest_system_call",
    ".globl selfpage_guest_host_call, selfpage_guest_return, selfpage_guest_stop",
    ".globl selfpage_guest_handler, selfpage_guest_handled",
    ".globl selfpage_guest_handler_call, selfpage_guest_handler_called, selfpage_guest_step",
    ".balign 16",
    "selfpage_guest_begin:",
    "call rbx",
    "selfpage_guest_end:",
    "ud2",
    // The way back from an exception without an error code.
    "selfpage_guest_return:",
    "iretq",
    // The process puts the answer into rax, and goes on behind the exception.
    "selfpage_guest_host_call:",
    "ud2",
    "ret",
    // A write to the program always faults. The handler puts the answer into rax, and goes on behind it.
    "selfpage_guest_handler_call:",
    "mov byte ptr [rip + selfpage_guest_handler_call], al",
    "selfpage_guest_handler_called:",
    "ret",
    "selfpage_guest_stop:",
    "ud2",
    ".balign 16",
    "selfpage_guest_handler:",
    "push r11",
    "push r10",
    "push r9",
    "push r8",
    "push rdi",
    "push rsi",
    "push rdx",
    "push rcx",
    "mov eax, {states}",
    "xor edx, edx",
    "xsave64 [rsp + 64]",
    "fninit",
    "push 0x1f80",
    "ldmxcsr [rsp]",
    "add rsp, 8",
    "mov rsi, rsp",
    "mov rdi, [rsp + 64 + {vectors} - 8]",
    "call [rsp + 64 + {vectors} - 16]",
    "mov eax, {states}",
    "xor edx, edx",
    "xrstor64 [rsp + 64]",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop r8",
    "pop r9",
    "pop r10",
    "pop r11",
    "selfpage_guest_handled:",
    "ud2",
    ".balign 16",
    "selfpage_guest_exceptions:",
    ".set guest_vector, 0",
    ".rept 32",
    // out 0x20 + vector, al; hlt
    ".byte 0xe6, 0x20 + guest_vector, 0xf4, 0xf4",
    ".set guest_vector, guest_vector + 1",
    ".endr",
    "selfpage_guest_handler_exceptions:",
    ".rept 32",
    // out 0x40 + vector, al; hlt
    ".byte 0xe6, 0x20 + guest_vector, 0xf4, 0xf4",
    ".set guest_vector, guest_vector + 1",
    ".endr",
    // An exception like any other: not every KVM takes this for ring 0 yet, which alone may write to ports.
    "selfpage_guest_system_call:",
    "ud2",
    ".balign 16",
    "selfpage_guest_step:",
    "inc qword ptr [rsp - {to_steps}]",
    "iretq",
    ".popsection",
    vectors = const VECTORS_BYTES,
    states = const VECTOR_STATES,
    to_steps = const STEPS - PUSHED_BYTES,
);

/// Instructions of ring 0 behind a name, and how many they are; what stands after `else` is not among them.
macro_rules! ring0 {
    ($count:ident, $name:literal, [$($instruction:literal),* $(,)?] else [$($other:literal),*] $(, $operand:ident = const $value:expr)*) => {
        global_asm!(
            ".pushsection .text",
            concat!(".globl ", $name),
            ".balign 16",
            concat!($name, ":"),
            $($instruction,)*
            $($other,)*
            ".popsection",
            $($operand = const $value,)*
        );
        const $count: u64 = [$($instruction),*].len() as u64;
    };
}

ring0!(
    TO_HANDLER,
    "selfpage_guest_page_fault",
    [
        "push rax",
        "mov rax, cr2",
        "push rax",
        "mov rax, [rsp - {to_root}]",
        "mov cr3, rax",
        // The handler has other descriptors at the same address.
        "lea rsp, [rsp - {to_frame}]",
        "iretq",
    ] else [],
    to_root = const 2 * 4096 - INTERRUPTED - HANDLER_ROOT,
    to_frame = const 2 * 4096 - INTERRUPTED - HANDLER_FRAME
);

ring0!(
    FROM_HANDLER,
    "selfpage_guest_handler_undefined",
    [
        "lea rax, [rip + selfpage_guest_handled]",
        "cmp rax, [rsp]",
        "jne 2f",
        // Five words were pushed; then come the two that are always there.
        "mov rax, [rsp + 48]",
        "mov rsp, [rsp + 40]",
        "mov cr3, rax",
        "add rsp, 8",
        "pop rax",
        "add rsp, 8",
        "iretq",
    ] else [
        "2:",
        // out 0x40 + 6, al; hlt
        ".byte 0xe6, 0x46, 0xf4"
    ]
);

/// Instructions of ring 0 that a fault of a closure takes, or a question to its handler: to the handler and back.
pub const RING0_INSTRUCTIONS: u64 = TO_HANDLER + FROM_HANDLER;

unsafe extern "C" {
    static selfpage_guest_begin: u8;
    static selfpage_guest_end: u8;
    static selfpage_guest_exceptions: u8;
    static selfpage_guest_handler_exceptions: u8;
    static selfpage_guest_system_call: u8;
    static selfpage_guest_return: u8;
    static selfpage_guest_page_fault: u8;
    static selfpage_guest_handler: u8;
    static selfpage_guest_handler_undefined: u8;
    static selfpage_guest_handler_called: u8;
    static selfpage_guest_step: u8;
    fn selfpage_guest_host_call(number: u64, first: u64, second: u64, third: u64) -> u64;
    fn selfpage_guest_handler_call(number: u64, first: u64, second: u64, third: u64) -> u64;
    fn selfpage_guest_stop() -> !;
}

/// The registers that a function may change, as the handler finds them; rax lies with what ring 0 leaves.
#[repr(C)]
pub struct Saved {
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
}

/// Asks the process, from within a guest.
///
/// # Safety
/// *guest-host-call*: it runs in a guest.
pub unsafe fn ask_host(call: Call) -> u64 {
    let [first, second, third] = call.arguments;
    // SAFETY: guest-host-call: the process answers in rax and changes nothing else.
    unsafe { selfpage_guest_host_call(call.number, first, second, third) }
}

/// Asks the handler, from within a closure.
///
/// # Safety
/// *guest-host-call*: a closure in a guest runs it.
pub unsafe fn ask_handler(call: Call) -> u64 {
    let [first, second, third] = call.arguments;
    // SAFETY: guest-host-call: the handler answers in rax and changes nothing else.
    unsafe { selfpage_guest_handler_call(call.number, first, second, third) }
}

/// Ends the run, from within a handler.
///
/// # Safety
/// *guest-host-call*: a handler runs it.
pub unsafe fn stop() -> ! {
    // SAFETY: guest-host-call: the process lets nobody go on behind it.
    unsafe { selfpage_guest_stop() }
}

/// What a closure asks of its handler, or of the process that it belongs to. What a number means they agree upon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// Which call.
    pub number: u64,
    /// What it takes.
    pub arguments: [u64; 3],
}

/// The exception by which it asks the process.
pub fn host_call() -> VirtAddr {
    VirtAddr((selfpage_guest_host_call as *const ()).addr())
}

/// The fault by which it asks its handler.
pub fn handler_call() -> VirtAddr {
    VirtAddr((selfpage_guest_handler_call as *const ()).addr())
}

/// Where it goes on after that.
pub fn handler_called() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_handler_called).addr())
}

/// The exception by which a handler ends the run.
pub fn stopped() -> VirtAddr {
    VirtAddr((selfpage_guest_stop as *const ()).addr())
}

/// How long the instruction is that raises it.
pub const UD2_BYTES: usize = 2;

/// Where it goes on after an exception without an error code.
pub fn resume_without_code() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_return).addr())
}

/// Where a closure begins.
pub fn begin() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_begin).addr())
}

/// Where it has ended.
pub fn end() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_end).addr())
}

/// Where the handler begins.
pub fn handler() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_handler).addr())
}

/// Where system calls go.
pub fn system_call() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_system_call).addr())
}

/// Where each exception of a closure goes.
pub fn exceptions() -> [VirtAddr; VECTORS] {
    let mut all = from(&raw const selfpage_guest_exceptions);
    all[DEBUG] = VirtAddr((&raw const selfpage_guest_step).addr());
    all[PAGE_FAULT] = VirtAddr((&raw const selfpage_guest_page_fault).addr());
    all
}

/// Where each exception of a handler goes.
pub fn handler_exceptions() -> [VirtAddr; VECTORS] {
    let mut all = from(&raw const selfpage_guest_handler_exceptions);
    all[DEBUG] = VirtAddr((&raw const selfpage_guest_step).addr());
    all[UNDEFINED] = VirtAddr((&raw const selfpage_guest_handler_undefined).addr());
    all
}

fn from(first: *const u8) -> [VirtAddr; VECTORS] {
    std::array::from_fn(|vector| VirtAddr(first.addr() + 4 * vector))
}

/// The vector registers that the system lets this process use: what XGETBV says. `None`: there is no such instruction.
pub fn vectors() -> Option<u64> {
    if !std::is_x86_feature_detected!("xsave") {
        return None;
    }
    let (low, high): (u32, u32);
    // SAFETY: guest-xgetbv: it reads a register.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)) };
    Some((u64::from(high) << 32 | u64::from(low)) & u64::from(VECTOR_STATES))
}
