//! Medium huge pages: 64 KiB that come in one fault, where the machine's owner allows them.
//!
//! Memory that is advised for huge pages gets the largest of all sizes allowed that its mapping has room for. So in a mapping that covers
//! no aligned 2 MiB the medium ones come alone, and only if nothing larger is allowed: a small program would have too much memory. Whether huge
//! pages of 2 MiB may come is read here, too.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering};

use super::frames;

/// Their length.
pub const MEDIUM_BYTES: usize = 64 << 10;

const ALL_SIZES: &CStr = c"/sys/kernel/mm/transparent_hugepage/enabled";
const MEDIUM: &CStr = c"/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled";
const HUGE: &CStr = c"/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled";
/// With these a Python that does nothing has up to 1.22 times glibc's memory, with 64 KiB 1.15, and no fewer faults.
const LARGER: [&CStr; 4] = [
    c"/sys/kernel/mm/transparent_hugepage/hugepages-128kB/enabled",
    c"/sys/kernel/mm/transparent_hugepage/hugepages-256kB/enabled",
    c"/sys/kernel/mm/transparent_hugepage/hugepages-512kB/enabled",
    c"/sys/kernel/mm/transparent_hugepage/hugepages-1024kB/enabled",
];

/// What the machine's owner lets programs have of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Medium {
    /// They come on request.
    Allowed,
    /// They do not.
    Forbidden,
    /// Larger ones, below 2 MiB, would come in their place.
    Outgrown,
}

/// What decides on a size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) file: &'static CStr,
    /// What it says; zeros where nobody does.
    said: [u8; 32],
}

impl Setting {
    fn read(file: &'static CStr, setting: impl Fn(&'static CStr) -> [u8; 32]) -> Setting {
        Setting { file, said: setting(file) }
    }

    /// The word in brackets.
    pub(crate) fn word(&self) -> Option<&str> {
        let text = str::from_utf8(&self.said).ok()?;
        Some(text.split_once('[')?.1.split_once(']')?.0)
    }
}

/// The setting of a size, or that of all if it follows that. Each is read once: every program reads one of them.
fn of_size(size: &'static CStr, setting: impl Fn(&'static CStr) -> [u8; 32]) -> Setting {
    let own = Setting::read(size, &setting);
    if own.word() == Some("inherit") { Setting::read(ALL_SIZES, setting) } else { own }
}

/// What the settings of the sizes say.
pub(crate) fn examine() -> Medium {
    read(frames::setting)
}

fn read(setting: impl Fn(&'static CStr) -> [u8; 32]) -> Medium {
    let allowed = |size| matches!(of_size(size, &setting).word(), Some("madvise" | "always"));
    // On most machines there is no more to read than this.
    match allowed(MEDIUM) {
        false => Medium::Forbidden,
        true if LARGER.into_iter().any(allowed) => Medium::Outgrown,
        true => Medium::Allowed,
    }
}

/// What decides on pages of 2 MiB.
pub(crate) fn of_huge_pages() -> Setting {
    read_of_huge_pages(frames::setting)
}

fn read_of_huge_pages(setting: impl Fn(&'static CStr) -> [u8; 32]) -> Setting {
    let own = of_size(HUGE, &setting);
    // Before Linux 6.8 sizes have no settings of their own.
    if own.said[0] == 0 { Setting::read(ALL_SIZES, setting) } else { own }
}

/// Whether such pages may come on request. Where nobody says, they may.
pub(super) fn huge_pages_may_come() -> bool {
    of_huge_pages().word() != Some("never")
}

/// Whether medium huge pages come on request, as it was when this was first called.
///
/// # Context
/// Any: some small files are read, once, and nothing is allocated.
pub fn are_allowed() -> bool {
    const UNREAD: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(UNREAD);
    match KNOWN.load(Ordering::Relaxed) {
        UNREAD => {
            let allowed = examine() == Medium::Allowed;
            KNOWN.store(if allowed { YES } else { NO }, Ordering::Relaxed);
            allowed
        }
        known => known == YES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: &str = "always inherit madvise [never]\n";
    const MADVISE: &str = "always inherit [madvise] never\n";
    const INHERIT: &str = "always [inherit] madvise never\n";
    const ALWAYS: &str = "[always] inherit madvise never\n";

    /// Sizes that are not said are not in this kernel; `""` is the setting for all.
    fn said(settings: &[(&str, &str)], path: &CStr) -> [u8; 32] {
        let path = path.to_str().unwrap();
        let size = path.rsplit('/').nth(1).unwrap().strip_prefix("hugepages-").unwrap_or("");
        let said = settings.iter().find(|(of, _)| *of == size).map_or("", |(_, said)| said);
        let mut text = [0; 32];
        text[..said.len()].copy_from_slice(said.as_bytes());
        text
    }

    fn found(settings: &[(&str, &str)]) -> Medium {
        read(|path| said(settings, path))
    }

    #[test]
    fn the_setting_of_2_mib_decides_on_them_where_there_is_one() {
        const ALL_NEVER: &str = "always madvise [never]\n";
        const ALL_MADVISE: &str = "always [madvise] never\n";
        for (settings, file, word) in [
            (&[("", ALL_MADVISE), ("2048kB", NEVER)][..], HUGE, Some("never")),
            (&[("", ALL_NEVER), ("2048kB", MADVISE)], HUGE, Some("madvise")),
            (&[("", ALL_NEVER), ("2048kB", ALWAYS)], HUGE, Some("always")),
            (&[("", ALL_NEVER), ("2048kB", INHERIT)], ALL_SIZES, Some("never")),
            (&[("", ALL_MADVISE), ("2048kB", INHERIT)], ALL_SIZES, Some("madvise")),
            (&[("", ALL_NEVER), ("64kB", MADVISE)], ALL_SIZES, Some("never")),
            (&[("", ALL_MADVISE)], ALL_SIZES, Some("madvise")),
            // Nobody says.
            (&[], ALL_SIZES, None),
            (&[("2048kB", INHERIT)], ALL_SIZES, None),
        ] {
            let decides = read_of_huge_pages(|path| said(settings, path));
            assert_eq!((decides.file, decides.word()), (file, word), "{settings:?}");
        }
    }

    #[test]
    fn what_the_owner_allows_is_what_programs_may_ask_for() {
        for (settings, medium) in [
            (&[][..], Medium::Forbidden),
            (&[("", MADVISE), ("64kB", NEVER), ("128kB", MADVISE)], Medium::Forbidden),
            (&[("", "always madvise [never]\n"), ("64kB", INHERIT)], Medium::Forbidden),
            (&[("", "always madvise [never]\n"), ("64kB", MADVISE)], Medium::Allowed),
            (&[("", "always [madvise] never\n"), ("64kB", INHERIT), ("128kB", NEVER)], Medium::Allowed),
            (&[("", "[always] madvise never\n"), ("64kB", INHERIT)], Medium::Allowed),
            (&[("64kB", ALWAYS), ("16kB", ALWAYS), ("2048kB", ALWAYS)], Medium::Allowed),
            (&[("64kB", MADVISE), ("128kB", MADVISE)], Medium::Outgrown),
            (&[("", "always [madvise] never\n"), ("64kB", MADVISE), ("1024kB", INHERIT)], Medium::Outgrown),
        ] {
            assert_eq!(found(settings), medium, "{settings:?}");
        }
    }
}
