//! What backs regions: contents of pages, made, kept or fetched.
//!
//! # Source
//! Nemesis §6.6: stretch drivers. Ours are [`Zero`] with pinned pages (nailed), [`Physical`], `Stored` (paged), and two that
//! stock Linux suggests: [`Zero`] without pins for anonymous memory, `File` for files; and `Restored`, over a snapshot.

mod apart;
mod custom;
mod file;
mod noted;
mod physical;
mod restored;
mod stored;
mod zero;

pub(crate) use custom::Custom;
pub use custom::{UserPager, error_of};
pub(crate) use file::{File, Opened};
pub(crate) use noted::Noted;
pub use physical::Physical;
pub(crate) use restored::Restored;
pub use selfpage_core::pager::{Context, FillPage, Kept, Pager, PagerError, SavePage, Verdict};
pub(crate) use stored::Stored;
pub use zero::Zero;

use xxhash_rust::xxh3::xxh3_64_with_secret;

use selfpage_core::addr::PageBytes;

use crate::error::{Error, Result};

/// The secret of a domain's page hashes: contents cannot be made to collide from outside.
pub(crate) struct PageHash([u8; 192]);

impl PageHash {
    /// # Errors
    /// The kernel gives no random bytes.
    pub(crate) fn new() -> Result<PageHash> {
        let mut secret = [0; 192];
        let mut filled = 0;
        while filled < secret.len() {
            match rustix::rand::getrandom(&mut secret[filled..], rustix::rand::GetRandomFlags::empty()) {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(why) => {
                    return Err(Error::system("choose", "a secret for hashes of pages", why).if_filtered("getrandom"));
                }
            }
        }
        Ok(PageHash(secret))
    }

    /// The hash of a page.
    ///
    /// # Context
    /// Trap.
    pub(crate) fn of(&self, bytes: &PageBytes) -> u64 {
        xxh3_64_with_secret(bytes, &self.0)
    }
}

/// Whether a page is all zero. The first word decides for most that are not.
pub(crate) fn is_zero(bytes: &PageBytes) -> bool {
    bytes.iter().as_slice().chunks_exact(64).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}
