//! Bad input and failure: a clear error, no hang, and no wrong or lost data.

mod apart;
mod behind;
mod cancelled;
#[path = "../child/mod.rs"]
mod child;
mod cloned;
mod descriptors;
#[path = "../disk/mod.rs"]
mod disk;
mod failing_disk;
#[path = "../../../../tests/filter.rs"]
mod filter;
mod filtered;
mod forked;
mod forks_within;
#[path = "../disk/formatted.rs"]
mod formatted;
mod given_up;
mod held;
mod imaged;
mod input;
mod inspected;
mod lent;
mod lent_over_forks;
mod lifetime;
#[path = "../../../../tests/limited_group.rs"]
mod limited_group;
mod locked_file;
mod locking;
mod low_numbers;
mod managed_stack;
mod mapped_over;
mod moved;
mod no_mappings;
mod not_given_up;
mod other_children;
mod outlived;
#[path = "../../../../tests/over_memory.rs"]
mod over_memory;
mod own_code;
mod own_fault;
mod own_file;
mod own_stack;
mod places;
mod rights;
mod scenario;
mod sealed;
mod signals;
#[path = "../../../../tests/skip.rs"]
mod skip;
mod sparse;
mod stopped;
mod store;
mod streams;
#[path = "../../../../tests/swap.rs"]
mod swap;
mod swapped;
mod taken_numbers;
mod tried;
mod unbuilt;
mod unsaved;
mod within;
