//! What a program is told that is executed: all, but for this library where that would keep it from running. Nothing is allocated:
//! after `vfork` this is our parent's memory.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use crate::process::Strings;
use crate::program::{self, Entry};

const MOST_STRINGS: usize = 1024;
const MOST_BYTES: usize = 4096;
const NAME: &[u8] = b"LD_PRELOAD=";

/// Executes a program with what its environment is to be.
///
/// # Safety
/// *c-library*: `env` is as for execve(2).
pub unsafe fn of(entry: Entry, env: Strings, exec: impl FnOnce(Strings) -> c_int) -> c_int {
    if entry == Entry::Harmless || env.is_null() {
        return exec(env);
    }
    // SAFETY: c-library: passed on from our caller.
    unsafe { without_library(env, exec) }
}

/// With LD_PRELOAD less this library. An environment for which there is no room stays as it is.
///
/// # Safety
/// *c-library*: `env` ends with null, and what comes before are strings.
#[inline(never)]
unsafe fn without_library(env: Strings, exec: impl FnOnce(Strings) -> c_int) -> c_int {
    let mut strings = [ptr::null::<c_char>(); MOST_STRINGS];
    let mut list = [0u8; MOST_BYTES];
    let mut count = 0;
    // SAFETY: c-library: it ends with null.
    let given = (0..).map(|index| unsafe { *env.add(index) }).take_while(|string| !string.is_null());
    for string in given {
        // The last one stays null.
        if count + 1 == MOST_STRINGS {
            return exec(env);
        }
        strings[count] = string;
        // SAFETY: c-library: our caller's string.
        if let Some(names) = unsafe { CStr::from_ptr(string) }.to_bytes().strip_prefix(NAME) {
            let Some(len) = write_others(names, &mut list) else { return exec(env) };
            strings[count] = list.as_ptr().cast();
            // Nothing is left: the program gets no such variable.
            if len == 0 {
                continue;
            }
        }
        count += 1;
    }
    strings[count] = ptr::null();
    exec(strings.as_ptr())
}

/// LD_PRELOAD with all names but this library's, and how many bytes of names that is; `None` if there is no room.
fn write_others(names: &[u8], list: &mut [u8; MOST_BYTES]) -> Option<usize> {
    *list = [0; MOST_BYTES];
    let (name_of_list, others) = list.split_at_mut(NAME.len());
    name_of_list.copy_from_slice(NAME);
    let mut len = 0;
    for name in program::preloaded(names).filter(|name| !name.is_empty() && !program::is_own(name)) {
        if len > 0 {
            others[len] = b':';
            len += 1;
        }
        others.get_mut(len..len + name.len())?.copy_from_slice(name);
        len += name.len();
        // What ends the string, or another name's colon.
        if len == others.len() {
            return None;
        }
    }
    Some(len)
}
