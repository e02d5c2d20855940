//! `selfpage tour`: a newcomer's first minute. Every figure that it shows was measured a moment before.

mod array;
mod passes;
mod scratch;
mod screen;
mod verbs;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use selfpage::{Domain, Kind};

use crate::output::{self, mib};
use screen::Screen;

const MIB: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;

const EXAMPLES: &str = "\
Examples:
  selfpage tour                    the whole tour; needs neither root nor data
  selfpage tour /data/index.bin    loop over a file of yours (read-only) with LRU and with MRU
  selfpage tour --quick            the same with small sizes, in seconds

Exit status: 0 done, 1 failed (`selfpage doctor` says what the machine lacks), 2 the file cannot be used.";

/// See what it means that a program owns its memory, in some seconds.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A file of yours to loop over instead, of 4 MiB at least; it is only read.
    file: Option<PathBuf>,
    /// Small sizes.
    #[arg(long)]
    quick: bool,
}

/// How large everything is.
struct Sizes {
    frames_bytes: usize,
    array_bytes: usize,
    /// Of the user's file, at most this much is looped over.
    file_bytes_max: usize,
    /// Passes over a file after the first.
    passes: usize,
}

const FULL: Sizes = Sizes { frames_bytes: 64 * MIB, array_bytes: 256 * MIB, file_bytes_max: 256 * MIB, passes: 3 };
const QUICK: Sizes = Sizes { frames_bytes: 8 * MIB, array_bytes: 32 * MIB, file_bytes_max: 32 * MIB, passes: 2 };

/// A line of the table at the end.
struct Row {
    step: String,
    figures: String,
    took: Duration,
}

/// Why the tour ended early.
enum Stop {
    /// What the user gave cannot be used.
    BadFile(String),
    /// Something did not work.
    Failed(String),
}

impl From<selfpage::Error> for Stop {
    fn from(error: selfpage::Error) -> Stop {
        let remedy = match error.kind() {
            Kind::Unsupported => {
                "; this machine does not let a program page itself yet: `selfpage doctor` has the remedy"
            }
            _ => "",
        };
        Stop::Failed(format!("{error}{remedy}"))
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::BadFile(line) | Stop::Failed(line) => out.write_str(line),
        }
    }
}

/// Runs the subcommand and returns the exit status.
pub fn run(args: &Args) -> i32 {
    let sizes = if args.quick { QUICK } else { FULL };
    let mut screen = Screen::new();
    let rows = match &args.file {
        Some(path) => passes::of_users_file(&mut screen, path, &sizes),
        None => whole(&mut screen, &sizes),
    };
    screen.clear();
    match rows {
        Ok(rows) => {
            screen.say(&table(&rows));
            output::status("tour", screen.printed())
        }
        Err(stop) => {
            output::tell(format_args!("selfpage tour: {stop}"));
            if matches!(stop, Stop::BadFile(_)) { 2 } else { 1 }
        }
    }
}

fn whole(screen: &mut Screen, sizes: &Sizes) -> Result<Vec<Row>, Stop> {
    // Before any talk: can it be done here at all?
    drop(Domain::with_frames(MIB).build()?);
    // The most that is on disk at a time: the array, and what of it is being saved anew.
    scratch::check_room(sizes.array_bytes + sizes.frames_bytes)?;
    screen.say(
        "This is a normal process, without root and without a daemon. It claims a fixed number of frames (pages of memory),\n\
         uses more memory than that, and answers its own page faults: the kernel does not page for it.\n",
    );
    let mut rows = array::work(screen, sizes)?;
    rows.extend(passes::of_own_file(screen, sizes)?);
    rows.extend(verbs::show(screen, sizes)?);
    Ok(rows)
}

/// The table at the end, aligned.
fn table(rows: &[Row]) -> String {
    let step = rows.iter().map(|row| row.step.chars().count()).fold("step".len(), usize::max);
    let figures = rows.iter().map(|row| row.figures.chars().count()).fold("measured".len(), usize::max);
    let mut text = format!("{:<step$}  {:<figures$}  {:>8}\n", "step", "measured", "time");
    text += &format!("{}\n", "-".repeat(step + figures + 12));
    for row in rows {
        let took = format!("{:.2} s", row.took.as_secs_f64());
        text += &format!("{:<step$}  {:<figures$}  {took:>8}\n", row.step, row.figures);
    }
    text.truncate(text.trim_end().len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned() {
        let row = |step: &str, figures: &str| Row { step: step.into(), figures: figures.into(), took: Duration::ZERO };
        let text = table(&[row("a", "bb"), row("a longer one", "b")]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[2].find("bb"), lines[3].rfind("b   "), "{text}");
        assert!(lines.iter().skip(2).all(|line| line.len() == lines[0].len()), "{text}");
    }
}
