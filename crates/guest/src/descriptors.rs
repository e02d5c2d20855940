//! What an x86-64 CPU in long mode needs beside page tables: segments for ring 0 and ring 3, a task state with stacks for
//! handlers, and a table of handlers.
//!
//! # Source
//! AMD64 Architecture Programmer's Manual, volume 2, §4.8 and §12.2.5.

use selfpage_core::addr::VirtAddr;
use selfpage_core::physical::{PhysAddr, PhysMemory};

/// Selector of the code of handlers.
pub const RING0_CODE: u16 = 0x08;
/// Selector of code at ring 3, as in Linux.
pub const RING3_CODE: u16 = 0x33;
/// Selector of data and stack at ring 3, as in Linux.
pub const RING3_DATA: u16 = 0x2b;
/// Selector of the task state.
pub const TASK: u16 = 0x40;

const SEGMENTS_AT: u64 = 0;
const SEGMENTS: usize = 10;
const TASK_AT: u64 = 0x100;
const TASK_BYTES: u64 = 104;
const HANDLERS_AT: u64 = 0x200;
/// The exceptions of the architecture.
const HANDLERS: usize = 32;

/// A page with all of it: which handler runs for which exception, and on which stack.
#[derive(Clone, Copy, Debug)]
pub struct Descriptors {
    /// Where the page is mapped, for ring 3 or not; the CPU writes to it too.
    pub at: VirtAddr,
    /// One for each exception. They run at ring 0, without interrupts.
    pub handlers: [VirtAddr; HANDLERS],
    /// The end of the stack that all of them start on.
    pub stack: VirtAddr,
}

impl Descriptors {
    /// Writes the page.
    pub fn write(&self, memory: &PhysMemory, page: PhysAddr) {
        memory.clear(page, 4096);
        let put = |offset: u64, word: u64| memory.store(page.plus(offset), word);
        for (index, segment) in self.segments().into_iter().enumerate() {
            put(SEGMENTS_AT + index as u64 * 8, segment);
        }
        // The stack for calls from ring 3 and the first of the seven for handlers, both of which lie across two words.
        let stack = self.stack.0 as u64;
        put(TASK_AT, stack << 32);
        put(TASK_AT + 0x08, stack >> 32);
        put(TASK_AT + 0x20, stack << 32);
        put(TASK_AT + 0x28, stack >> 32);
        // No ports for ring 3: their map would begin behind the end.
        put(TASK_AT + 0x60, TASK_BYTES << 48);
        for (index, handler) in self.handlers.into_iter().enumerate() {
            let at = handler.0 as u64;
            // An interrupt gate of ring 0 with stack 1.
            let gate = 1 << 47 | 0xe << 40 | 1 << 32;
            put(
                HANDLERS_AT + index as u64 * 16,
                at & 0xffff | u64::from(RING0_CODE) << 16 | gate | (at >> 16 & 0xffff) << 48,
            );
            put(HANDLERS_AT + index as u64 * 16 + 8, at >> 32);
        }
    }

    /// Where the segments' descriptors are, and their last byte's offset.
    pub(crate) fn segments_at(&self) -> (u64, u16) {
        (self.at.0 as u64 + SEGMENTS_AT, SEGMENTS as u16 * 8 - 1)
    }

    /// Where the task state is, and its last byte's offset.
    pub(crate) fn task_at(&self) -> (u64, u16) {
        (self.at.0 as u64 + TASK_AT, TASK_BYTES as u16 - 1)
    }

    /// Where the table of handlers is, and its last byte's offset.
    pub(crate) fn handlers_at(&self) -> (u64, u16) {
        (self.at.0 as u64 + HANDLERS_AT, HANDLERS as u16 * 16 - 1)
    }

    fn segments(&self) -> [u64; SEGMENTS] {
        let mut segments = [0; SEGMENTS];
        let (task, limit) = self.task_at();
        let present_task = 0x89 << 40;
        let all = [
            (RING0_CODE, 0x00af_9b00_0000_ffff),
            (RING0_CODE + 8, 0x00cf_9300_0000_ffff),
            (RING3_DATA, 0x00cf_f300_0000_ffff),
            (RING3_CODE, 0x00af_fb00_0000_ffff),
            (TASK, u64::from(limit) | (task & 0xff_ffff) << 16 | present_task | (task >> 24 & 0xff) << 56),
            (TASK + 8, task >> 32),
        ];
        for (selector, segment) in all {
            segments[usize::from(selector / 8)] = segment;
        }
        segments
    }
}
