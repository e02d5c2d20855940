//! Progress on stderr: a bar on a terminal that can show one, plain lines elsewhere.

use std::fmt::Write;
use std::io;
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};

use crate::output;

/// How far the run is.
pub enum Progress {
    /// A terminal watches, which can have its cursor moved.
    Bar(ProgressBar),
    /// A file or a pipe, or a terminal that shows what comes and no more (`TERM=dumb`).
    Lines { done: u64, total: u64 },
}

impl Progress {
    /// A run of `total` jobs.
    pub fn new(total: u64) -> Progress {
        let bar = ProgressBar::new(total);
        if bar.is_hidden() {
            return Progress::Lines { done: 0, total };
        }
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed}{left}: {wide_msg}") {
            let left = |state: &ProgressState, out: &mut dyn Write| {
                let _ = out.write_str(&left(state.pos(), state.eta())); // What is shown cannot fail.
            };
            bar.set_style(style.with_key("left", left));
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

    /// Prints a result, which a bar would stand in front of.
    pub fn print(&self, result: &str) -> io::Result<()> {
        match self {
            Progress::Bar(bar) => bar.suspend(|| output::write(result)),
            Progress::Lines { .. } => output::write(result),
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// How long it will take. Nobody knows before the first job has ended, and 0 would be said then.
fn left(done: u64, time: Duration) -> String {
    if done == 0 { String::new() } else { format!(", {:#} left", HumanDuration(time)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_of_the_time_before_a_job_has_ended() {
        assert_eq!(left(0, Duration::ZERO), "");
        assert_eq!(left(1, Duration::from_secs(7)), ", 7s left");
    }
}
