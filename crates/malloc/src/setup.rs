//! What happens when the library is loaded, before the program's first line: the environment is read, and no thread started.

use std::ffi::CStr;

use crate::{stats, sys};

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let wishes = Wishes::read();
    selfpage_heap::begin(wishes.retain_bytes);
    if wishes.verbose {
        match wishes.retain_bytes {
            Some(bytes) => sys::say(format_args!("selfpage: retains {bytes} bytes of freed memory\n")),
            None => sys::say(format_args!("selfpage: retains a quarter of what is live, of freed memory\n")),
        }
    }
    if wishes.show_stats || wishes.verbose {
        stats::show_at_exit();
    }
}

struct Wishes {
    show_stats: bool,
    verbose: bool,
    retain_bytes: Option<usize>,
}

/// A variable of the environment, in place.
fn value(name: &'static CStr) -> Option<&'static str> {
    // SAFETY: c-library: the name ends with NUL; before the program's first line nobody changes the environment.
    let found = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: c-library: what is found is a string.
    if found.is_null() { None } else { Some(unsafe { CStr::from_ptr(found) }.to_str().unwrap_or("?")) }
}

impl Wishes {
    fn read() -> Wishes {
        Wishes {
            show_stats: is_on(c"SELFPAGE_SHOW_STATS"),
            verbose: is_on(c"SELFPAGE_VERBOSE"),
            retain_bytes: value(c"SELFPAGE_RETAIN").and_then(|said| {
                let bytes = size(said);
                if bytes.is_none() {
                    sys::say(format_args!(
                        "selfpage: SELFPAGE_RETAIN={said}: a size is a number, with K, M or G behind it if you like; ignored\n"
                    ));
                }
                bytes
            }),
        }
    }
}

fn is_on(name: &'static CStr) -> bool {
    match value(name) {
        None | Some("" | "0" | "no" | "false" | "off") => false,
        Some("1" | "yes" | "true" | "on") => true,
        Some(said) => {
            let name = name.to_str().unwrap_or("?");
            sys::say(format_args!("selfpage: {name}={said}: 1 or 0, please; ignored\n"));
            false
        }
    }
}

fn size(said: &str) -> Option<usize> {
    let digits = said.trim_end_matches(|unit: char| unit.is_ascii_alphabetic());
    let unit = match said.get(digits.len()..)? {
        "" => 1,
        "K" | "k" => 1 << 10,
        "M" | "m" => 1 << 20,
        "G" | "g" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}
