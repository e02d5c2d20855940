//! The few instructions that a closure begins with, and those that take its exceptions: each one writes to a port, and the
//! process sees to the rest.

use std::arch::{asm, global_asm};

use selfpage_core::addr::VirtAddr;

/// Exception n writes to this port plus n.
pub const FIRST_PORT: u16 = 0x20;
/// Exceptions of the architecture.
pub const VECTORS: usize = 32;

// rbx: a function, rdi: its argument. `selfpage_guest_end` is reached when it returns.
global_asm!(
    ".pushsection .text",
    // Whoever uses them may be compiled apart from this.
    ".globl selfpage_guest_begin, selfpage_guest_end, selfpage_guest_resume",
    ".globl selfpage_guest_exceptions, selfpage_guest_system_call",
    ".globl selfpage_guest_host_call, selfpage_guest_return",
    ".balign 16",
    "selfpage_guest_begin:",
    "call rbx",
    "selfpage_guest_end:",
    "ud2",
    // The way back from an exception with an error code.
    "selfpage_guest_resume:",
    "add rsp, 8",
    // And from one without.
    "selfpage_guest_return:",
    "iretq",
    // The process puts the answer into rax, and goes on behind the exception.
    "selfpage_guest_host_call:",
    "ud2",
    "ret",
    ".balign 16",
    "selfpage_guest_exceptions:",
    ".set guest_vector, 0",
    ".rept 32",
    // out 0x20 + vector, al; hlt
    ".byte 0xe6, 0x20 + guest_vector, 0xf4, 0xf4",
    ".set guest_vector, guest_vector + 1",
    ".endr",
    // An exception like any other: not every KVM takes this for ring 0 yet, which alone may write to ports.
    "selfpage_guest_system_call:",
    "ud2",
    ".popsection",
);

unsafe extern "C" {
    static selfpage_guest_begin: u8;
    static selfpage_guest_end: u8;
    static selfpage_guest_resume: u8;
    static selfpage_guest_exceptions: u8;
    static selfpage_guest_system_call: u8;
    static selfpage_guest_return: u8;
    fn selfpage_guest_host_call(number: u64, first: u64, second: u64, third: u64) -> u64;
}

/// Asks the process, from within a guest.
///
/// # Safety
/// *guest-host-call*: it runs in a guest.
pub unsafe fn ask(call: HostCall) -> u64 {
    let [first, second, third] = call.arguments;
    // SAFETY: guest-host-call: the process answers in rax and changes nothing else.
    unsafe { selfpage_guest_host_call(call.number, first, second, third) }
}

/// What a closure asks of the process that it belongs to. What a number means they agree upon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostCall {
    /// Which call.
    pub number: u64,
    /// What it takes.
    pub arguments: [u64; 3],
}

/// The exception by which a closure asks.
pub fn host_call() -> VirtAddr {
    VirtAddr((selfpage_guest_host_call as *const ()).addr())
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

/// Where it goes on after a page fault.
pub fn resume() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_resume).addr())
}

/// Where system calls go.
pub fn system_call() -> VirtAddr {
    VirtAddr((&raw const selfpage_guest_system_call).addr())
}

/// Where each exception goes.
pub fn exceptions() -> [VirtAddr; VECTORS] {
    std::array::from_fn(|vector| VirtAddr((&raw const selfpage_guest_exceptions).addr() + 4 * vector))
}

/// The vector registers that the system lets this process use: what XGETBV says. `None`: there is no such instruction.
pub fn vectors() -> Option<u64> {
    if !std::is_x86_feature_detected!("xsave") {
        return None;
    }
    let (low, high): (u32, u32);
    // SAFETY: guest-xgetbv: it reads a register.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)) };
    // x87, SSE, AVX, AVX-512: what KVM takes without a permission of its own.
    Some((u64::from(high) << 32 | u64::from(low)) & 0xe7)
}
