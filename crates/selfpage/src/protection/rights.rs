//! What a protection domain may do with memory.

use std::fmt;
use std::ops::BitOr;

/// A set of rights: `Rights::READ | Rights::WRITE`.
///
/// # Source
/// Nemesis §6.1: "a mapping from the set of valid stretches to a subset of { read, write, execute, meta }".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rights(u8);

impl Rights {
    /// None at all.
    pub const NONE: Rights = Rights(0);
    /// To read.
    pub const READ: Rights = Rights(1);
    /// To write. No machine has this right without [`Rights::READ`].
    pub const WRITE: Rights = Rights(2);
    /// To execute what lies there.
    pub const EXECUTE: Rights = Rights(4);
    /// To change rights on the memory, and its mappings.
    pub const META: Rights = Rights(8);

    /// Whether these include those.
    pub const fn contains(self, those: Rights) -> bool {
        self.0 & those.0 == those.0
    }

    /// What both have.
    pub const fn and(self, those: Rights) -> Rights {
        Rights(self.0 & those.0)
    }

    /// The bits of mprotect(2).
    pub(super) const fn prot(self) -> u32 {
        let read = if self.contains(Rights::READ) { libc::PROT_READ } else { 0 };
        let write = if self.contains(Rights::WRITE) { libc::PROT_WRITE } else { 0 };
        let execute = if self.contains(Rights::EXECUTE) { libc::PROT_EXEC } else { 0 };
        (read | write | execute) as u32
    }

    /// Those that a register of protection keys can tell apart.
    pub(super) const fn keyed(self) -> Rights {
        self.and(Rights(Rights::READ.0 | Rights::WRITE.0))
    }
}

impl BitOr for Rights {
    type Output = Rights;
    fn bitor(self, other: Rights) -> Rights {
        Rights(self.0 | other.0)
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words =
            [(Rights::READ, "read"), (Rights::WRITE, "write"), (Rights::EXECUTE, "execute"), (Rights::META, "meta")];
        let mut held = words.iter().filter(|(right, _)| self.contains(*right)).map(|(_, word)| *word).peekable();
        if held.peek().is_none() {
            return f.write_str("nothing");
        }
        f.write_str(&held.collect::<Vec<_>>().join(", "))
    }
}

impl fmt::Debug for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rights({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_have_words_and_bits() {
        let rights = Rights::READ | Rights::META;
        assert_eq!(rights.to_string(), "read, meta");
        assert_eq!(Rights::NONE.to_string(), "nothing");
        assert_eq!(rights.prot(), libc::PROT_READ as u32);
        assert!(rights.contains(Rights::META) && !rights.contains(Rights::WRITE | Rights::META));
    }
}
