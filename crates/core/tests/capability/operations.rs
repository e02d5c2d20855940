//! Calls and their answers, as values.

use selfpage_core::capability::{Capability, Derived, Handle, Object as Shape, Progress, Rights};
use selfpage_core::physical::PhysAddr;
use selfpage_core::tables::Entries;

/// A call.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    Retype {
        source: Handle,
        to: Shape,
        count: u8,
        into: Handle,
        first: u8,
    },
    Copy {
        source: Handle,
        into: Handle,
        at: u8,
        rights: Rights,
    },
    Mint {
        source: Handle,
        into: Handle,
        at: u8,
        guard: Handle,
    },
    Delete {
        handle: Handle,
    },
    Revoke {
        handle: Handle,
        most: u64,
    },
    Map {
        entries: Entries,
        from: Handle,
        offset_bytes: u64,
        rights: Rights,
    },
    Unmap {
        entries: Entries,
    },
    ModifyFlags {
        entries: Entries,
        rights: Rights,
    },
    ClearDirtyBits {
        entries: Entries,
    },
    Identify {
        handle: Handle,
    },
    Derived {
        handle: Handle,
    },
    RootTable {
        handle: Handle,
    },
    /// The CNode that a handle names becomes the root of another holder.
    Enter {
        as_whom: usize,
        root: Handle,
    },
}

/// What a call answers that is not refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    Revoked(Progress),
    Dirty(u32),
    Capability(Capability),
    Derived(Derived),
    Root(PhysAddr),
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Retype { .. } => "retype",
            Operation::Copy { .. } => "copy",
            Operation::Mint { .. } => "mint",
            Operation::Delete { .. } => "delete",
            Operation::Revoke { .. } => "revoke",
            Operation::Map { .. } => "map",
            Operation::Unmap { .. } => "unmap",
            Operation::ModifyFlags { .. } => "modify_flags",
            Operation::ClearDirtyBits { .. } => "clear_dirty_bits",
            Operation::Identify { .. } => "identify",
            Operation::Derived { .. } => "derived",
            Operation::RootTable { .. } => "root_table",
            Operation::Enter { .. } => "space",
        }
    }

    /// Whether it may take away what somebody could reach.
    pub fn removes(&self) -> bool {
        matches!(
            self,
            Operation::Delete { .. }
                | Operation::Revoke { .. }
                | Operation::Unmap { .. }
                | Operation::ModifyFlags { .. }
                | Operation::ClearDirtyBits { .. }
        )
    }

    /// The place into which it puts a capability.
    pub fn puts(&self) -> Option<(Handle, u8)> {
        match *self {
            Operation::Retype { into, first, count: 1.., .. } => Some((into, first)),
            Operation::Copy { into, at, .. } | Operation::Mint { into, at, .. } => Some((into, at)),
            _ => None,
        }
    }
}
