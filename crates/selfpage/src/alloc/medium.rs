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

fn says(setting: &[u8], word: &[u8]) -> bool {
    setting.windows(word.len()).any(|part| part == word)
}

/// What the setting of a size says, or that of all if it follows that: zeros where the size has none. Each is read once: every program
/// reads one of them.
fn of_size(size: &'static CStr, setting: impl Fn(&'static CStr) -> [u8; 32]) -> [u8; 32] {
    let said = setting(size);
    if says(&said, b"[inherit]") { setting(ALL_SIZES) } else { said }
}

/// What the settings of the sizes say.
pub(crate) fn examine() -> Medium {
    read(frames::setting)
}

fn read(setting: impl Fn(&'static CStr) -> [u8; 32]) -> Medium {
    let allowed = |size| {
        let said = of_size(size, &setting);
        says(&said, b"[madvise]") || says(&said, b"[always]")
    };
    // On most machines there is no more to read than this.
    match allowed(MEDIUM) {
        false => Medium::Forbidden,
        true if LARGER.into_iter().any(allowed) => Medium::Outgrown,
        true => Medium::Allowed,
    }
}

/// Whether pages of 2 MiB may come on request. Where nobody says, they may.
pub(super) fn huge_pages_may_come(setting: impl Fn(&'static CStr) -> [u8; 32]) -> bool {
    let own = of_size(HUGE, &setting);
    // Before Linux 6.8 sizes have no settings of their own.
    let said = if own[0] == 0 { setting(ALL_SIZES) } else { own };
    !says(&said, b"[never]")
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
        for (settings, may_come) in [
            (&[("", ALL_MADVISE), ("2048kB", NEVER)][..], false),
            (&[("", ALL_NEVER), ("2048kB", MADVISE)], true),
            (&[("", ALL_NEVER), ("2048kB", ALWAYS)], true),
            (&[("", ALL_NEVER), ("2048kB", INHERIT)], false),
            (&[("", ALL_MADVISE), ("2048kB", INHERIT)], true),
            (&[("", ALL_NEVER), ("64kB", MADVISE)], false),
            (&[("", ALL_MADVISE)], true),
            // Nobody says.
            (&[], true),
            (&[("2048kB", INHERIT)], true),
        ] {
            assert_eq!(huge_pages_may_come(|path| said(settings, path)), may_come, "{settings:?}");
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
