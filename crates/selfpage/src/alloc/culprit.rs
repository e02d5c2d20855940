//! What is said before the end, when the program gives a pointer that is no block.

use std::fmt::Write;

use arrayvec::ArrayString;

/// What a pointer is that is no block: of this allocator's, or of one that stands on it or beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Culprit {
    /// Not from this allocator.
    Foreign,
    /// A block that was freed.
    Freed,
    /// An item of a batch, or within one: no block of its own.
    Item,
    /// Within a block.
    Inside {
        /// Where that begins.
        block: usize,
        /// And how long it is.
        len_bytes: usize,
    },
}

impl Culprit {
    /// Names the pointer that was passed to `call`, says what it is, and ends the process.
    ///
    /// # Context
    /// As for [`super::allocate`].
    #[cold]
    pub fn die(self, call: &str, addr: usize) -> ! {
        // There is no allocator to take memory from.
        let mut line = ArrayString::<160>::new();
        let _ = match self {
            Culprit::Foreign => write!(line, "{call}({addr:#x}): no block of this allocator"),
            Culprit::Freed => write!(line, "{call}({addr:#x}): a block that was freed already"),
            Culprit::Item => write!(line, "{call}({addr:#x}): of a batch's items, which are no blocks of their own"),
            Culprit::Inside { block, len_bytes } => {
                write!(line, "{call}({addr:#x}): inside of the block at {block:#x}, which is {len_bytes} bytes long")
            }
        };
        crate::die(&line)
    }
}
