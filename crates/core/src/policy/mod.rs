//! Which page goes when a frame is needed.
//!
//! A policy only suggests. Core checks each suggestion against the page word, so a policy that lies costs time and
//! nothing else.
//!
//! A program brings its own policy by implementing [`Policy`] and giving the library a `Box<dyn Policy>`. To give it a name
//! that the tool and the configuration know, put it into a file here and add its line to the registry below.
//!
//! # Source
//! AVM §3 (replacement policy belongs to the application); Nemesis §6.6.
//!
//! # Examples
//! A policy of one's own: last in, first out.
//! ```
//! use selfpage_core::addr::{Frame, PageNo};
//! use selfpage_core::policy::{Policy, Use};
//!
//! struct Lifo(Vec<Frame>);
//!
//! impl Policy for Lifo {
//!     fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, _used: Use) {
//!         // A frame that is still listed under an older page is listed anew.
//!         self.0.retain(|listed| *listed != frame);
//!         self.0.push(frame);
//!     }
//!     fn victim(&mut self) -> Option<Frame> {
//!         self.0.pop()
//!     }
//! }
//! let policy: Box<dyn Policy> = Box::new(Lifo(Vec::with_capacity(1024)));
//! ```

use crate::addr::{Frame, PageNo};
use crate::frame::Table;

mod links;
#[cfg(test)]
mod traces;

pub use crate::frame::Use;
pub use links::Link;

/// Chooses victims among the frames that hold resident pages.
///
/// # Context
/// PagerThread: one evictor calls it, so it needs no lock. It must not touch managed memory.
pub trait Policy: Send {
    /// `frame` holds `page` now. A frame that the policy still lists under an older page is listed anew: that is also how
    /// a policy learns of a second use, when a page comes back from the standby list ([`Use::Again`]).
    ///
    /// The calls come when frames run low, in the order in which frames were first given a page since the last of them. What happened to a
    /// frame more often than once in that time is told once, in the first one's place: its page may have come in later.
    fn admitted(&mut self, frame: Frame, page: PageNo, priority: u8, used: Use);

    /// The frame that should go next; it is no longer listed. `None`: nothing is listed.
    fn victim(&mut self) -> Option<Frame>;

    /// The part of the frames, in 1/256, that is kept unmapped with contents intact, so that a second use is seen
    /// (a soft fault). 0: no standby list. The library keeps half of the frames so at most, and asks once.
    fn standby_share(&self) -> u8 {
        0
    }
}

/// The share of frames on standby, in 1/256, that tells used pages from unused ones well and yet costs few soft faults.
const SECOND_CHANCE_SHARE: u8 = 16;

/// Declares each policy's module, and knows it by its name.
macro_rules! registry {
    ($($name:literal: $module:ident::$policy:ident,)*) => {
        $(pub mod $module;)*

        /// The policies that have names.
        pub const NAMES: &[&str] = &[$($name),*];

        /// A policy that has a name.
        #[expect(clippy::large_enum_variant, reason = "a domain has one, and boxes it")]
        pub enum Named {
            $(#[doc = concat!("`", $name, "`")] $policy($module::$policy),)*
        }

        /// The policy called `name`, over a zeroed table of one link for each frame that there can be. `None`: no policy
        /// is called that; see [`NAMES`].
        pub fn by_name(name: &str, links: Table<Link>) -> Option<Named> {
            match name {
                $($name => Some(Named::$policy($module::$policy::new(links))),)*
                _ => None,
            }
        }

        impl Policy for Named {
            fn admitted(&mut self, frame: Frame, page: PageNo, priority: u8, used: Use) {
                match self {
                    $(Named::$policy(policy) => policy.admitted(frame, page, priority, used),)*
                }
            }

            fn victim(&mut self) -> Option<Frame> {
                match self {
                    $(Named::$policy(policy) => policy.victim(),)*
                }
            }

            fn standby_share(&self) -> u8 {
                match self {
                    $(Named::$policy(policy) => policy.standby_share(),)*
                }
            }
        }
    };
}

registry! {
    "fifo": fifo::Fifo,
    "lru": lru::Lru,
    "mru": mru::Mru,
    "clock": clock::Clock,
    "random": random::Random,
    "priority": priority::Priority,
}
