//! What happens when the library is loaded, before the program's first line: the environment is read, and no thread started; that comes later, where
//! it pays.

use std::ffi::CStr;

use crate::{maps, stats, sys};

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    selfpage_heap::panics::end_after(|why| sys::say(format_args!("selfpage: {why}\n")));
    let wishes = Wishes::read();
    // Known from now on: by its first object the program may have forbidden itself to open files.
    selfpage_heap::medium::are_allowed();
    selfpage_heap::begin(wishes.retain_bytes);
    if wishes.checked {
        selfpage_heap::trap_on_use_after_free();
        selfpage_heap::check_pointers();
    }
    if wishes.keeper {
        selfpage_heap::keep();
    }
    if !wishes.maps {
        maps::pass_on();
    }
    if wishes.verbose {
        match wishes.retain_bytes {
            Some(bytes) => sys::say(format_args!("selfpage: retains {bytes} bytes of freed memory\n")),
            None => sys::say(format_args!(
                "selfpage: retains freed memory, up to 1.25 times what was live at most lately with what is live\n"
            )),
        }
        if !wishes.keeper {
            sys::say(format_args!("selfpage: starts no thread\n"));
        }
        if !wishes.maps {
            sys::say(format_args!("selfpage: leaves what the program maps itself to the kernel\n"));
        }
        if wishes.checked {
            sys::say(format_args!(
                "selfpage: stops the use of larger blocks that were freed, and looks at each pointer into objects\n"
            ));
        }
    }
    if wishes.show_stats || wishes.verbose {
        stats::show_at_exit();
    }
}

struct Wishes {
    show_stats: bool,
    verbose: bool,
    keeper: bool,
    checked: bool,
    maps: bool,
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
            show_stats: is_on(c"SELFPAGE_SHOW_STATS").unwrap_or(false),
            verbose: is_on(c"SELFPAGE_VERBOSE").unwrap_or(false),
            keeper: is_on(c"SELFPAGE_KEEPER").unwrap_or(true),
            checked: is_on(c"SELFPAGE_CHECKED").unwrap_or(false),
            maps: is_on(c"SELFPAGE_MAPS").unwrap_or(true),
            retain_bytes: value(c"SELFPAGE_RETAIN").filter(|said| !said.is_empty()).and_then(|said| {
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

/// `None`: it is not said.
fn is_on(name: &'static CStr) -> Option<bool> {
    match value(name)? {
        "" => None,
        "0" | "no" | "false" | "off" => Some(false),
        "1" | "yes" | "true" | "on" => Some(true),
        said => {
            let name = name.to_str().unwrap_or("?");
            sys::say(format_args!("selfpage: {name}={said}: 1 or 0, please; ignored\n"));
            None
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
