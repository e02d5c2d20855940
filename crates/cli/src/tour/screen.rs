//! What the visitor sees: text, and one live line while something works. Without a terminal, or on one whose
//! cursor stays where it is, the live line becomes a plain line now and then.

use std::io;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

const LIVE_EVERY: Duration = Duration::from_millis(100);
const PLAIN_EVERY: Duration = Duration::from_secs(1);

/// Standard output.
pub struct Screen {
    /// The live line, on a terminal that can show one.
    bar: Option<ProgressBar>,
    every: Duration,
    next: Instant,
    /// What came of printing so far.
    printed: io::Result<()>,
}

impl Screen {
    /// Standard output, whatever it is.
    pub fn new() -> Screen {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stdout());
        let bar =
            (!bar.is_hidden()).then(|| match ProgressStyle::with_template("  {bar:10} {percent:>3} %  {wide_msg}") {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            });
        let every = if bar.is_some() { LIVE_EVERY } else { PLAIN_EVERY };
        Screen { bar, every, next: Instant::now(), printed: Ok(()) }
    }

    /// Text that stays. The live line is gone until it is next shown: what it says may be over.
    pub fn say(&mut self, text: &str) {
        self.clear();
        let printed = output::write(&format!("{text}\n"));
        if self.printed.is_ok() {
            self.printed = printed;
        }
    }

    /// Something of `total` parts begins.
    pub fn begin(&mut self, total: usize) {
        self.clear();
        if let Some(bar) = &self.bar {
            bar.set_length(total as u64);
        }
        self.next = Instant::now() + self.every;
    }

    /// Whether the live line should be shown again. Costs a look at the clock.
    pub fn is_due(&self) -> bool {
        Instant::now() >= self.next
    }

    /// `done` parts are done, and this is how it looks.
    pub fn show(&mut self, done: usize, line: &str) {
        match &self.bar {
            Some(bar) => {
                // While it is not there nothing is drawn.
                bar.set_message(line.to_string());
                if bar.is_finished() {
                    bar.reset();
                }
                bar.set_position(done as u64);
            }
            None => self.say(&format!("  {line}")),
        }
        self.next = Instant::now() + self.every;
    }

    /// What came of printing all of it.
    pub fn printed(self) -> io::Result<()> {
        self.printed
    }

    /// Takes the live line away.
    pub fn clear(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
