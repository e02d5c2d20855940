//! Progress on stderr: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

/// How far the run is.
pub enum Progress {
    /// A terminal watches.
    Bar(ProgressBar),
    /// A file or a pipe.
    Lines { done: u64, total: u64 },
}

impl Progress {
    /// A run of `total` jobs.
    pub fn new(total: u64) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress::Lines { done: 0, total };
        }
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed}, {eta} left: {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(std::time::Duration::from_millis(200));
        Progress::Bar(bar)
    }

    /// What runs now.
    pub fn begin(&mut self, what: String) {
        if let Progress::Bar(bar) = self {
            bar.set_message(what);
        }
    }

    /// How it ended.
    pub fn end(&mut self, what: &str) {
        match self {
            Progress::Bar(bar) => bar.inc(1),
            Progress::Lines { done, total } => {
                *done += 1;
                output::tell(format_args!("[{done}/{total}] {what}"));
            }
        }
    }

    /// Something that must not be overlooked.
    pub fn say(&mut self, line: &str) {
        match self {
            Progress::Bar(bar) => bar.suspend(|| output::tell(format_args!("{line}"))),
            Progress::Lines { .. } => output::tell(format_args!("{line}")),
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
