//! Panics of a preloaded library, which are bugs of ours: the process ends with one line.

use std::io::Write;
use std::panic::PanicHookInfo;

/// From now on they end so, after `tell` has said why. Rust's own way out maps files to name what is on the stack, and takes memory: it
/// would wait for ever for a lock of ours that the panicking thread holds.
pub fn end_after(tell: impl Fn(&str) + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |panic| end(panic, &tell)));
}

fn end(panic: &PanicHookInfo<'_>, tell: &impl Fn(&str)) -> ! {
    let payload = panic.payload();
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    let message = payload.downcast_ref::<&str>().copied().or(owned).unwrap_or_default();
    let mut text = [0; 400];
    let mut rest = &mut text[..];
    // What there is no room for is left out.
    let _ = match panic.location() {
        Some(place) => write!(rest, "a bug of ours: {place}: {message}"),
        None => write!(rest, "a bug of ours: {message}"),
    };
    let len = 400 - rest.len();
    let first = text[..len].split(|byte| *byte == b'\n').next().unwrap_or_default();
    tell(std::str::from_utf8(first).unwrap_or("a bug of ours"));
    std::process::abort()
}
