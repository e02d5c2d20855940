//! Standard output and standard error, which may be pipes that nobody reads any more, or files on a disk that is full.

use std::fmt;
use std::io::{self, ErrorKind, Write};

/// A line on standard error. Where it cannot be written there is nobody to tell, and what is left to do is done all the same: `eprintln!`
/// would panic, and a run end with another status than its program's. What it names may be anything, so it is [`printable`].
pub fn tell(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{}", printable(&line.to_string()));
}

/// An amount of memory, for people.
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// What may be shown of a name: one with control characters would tell a terminal what to do.
pub fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

/// Prints `text` for `verb`. The status to end with.
pub fn print(verb: &str, text: &str) -> i32 {
    status(verb, write(text))
}

/// Writes `text`, at once.
pub fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// What came of printing for `verb`, in a line on standard error if that is an error. The status to end with.
pub fn status(verb: &str, printed: io::Result<()>) -> i32 {
    match printed {
        Ok(()) => 0,
        // A reader that has gone away wanted no more of it.
        Err(why) if why.kind() == ErrorKind::BrokenPipe => 0,
        Err(why) => {
            tell(format_args!("selfpage {verb}: standard output: {why}"));
            1
        }
    }
}
