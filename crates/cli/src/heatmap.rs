//! `selfpage heatmap`: a trace as a picture, address over time.

mod grid;
mod picture;

use std::path::{Path, PathBuf};

use selfpage::trace::Trace;

use crate::run::traces;
use crate::{output, svg};

const EXAMPLES: &str = "\
Examples:
  selfpage run --frames 64M --trace t -- python3 script.py
  selfpage heatmap t -o t.svg     faults by address and time, and the working set below
  selfpage heatmap t > t.svg

Exit status: 0 done, 1 the picture could not be written, 2 the trace cannot be used.";

/// Draw a trace of `selfpage run --trace` as an SVG: faults by address and time.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The trace.
    #[arg(value_name = "FILE")]
    trace: PathBuf,
    /// Where the picture goes; standard output (`-`) unless stated otherwise.
    #[arg(short, long, value_name = "SVG")]
    output: Option<PathBuf>,
}

/// Draws. The status to end with.
pub fn run(args: &Args) -> i32 {
    // Whoever traces a program that starts others draws the wrong one's easily.
    let larger = traces::larger_beside(&args.trace)
        .map(|other| format!("the trace of another process is larger: {}", other.display()));
    let trace = args.trace.display();
    match draw(&args.trace) {
        Ok(picture) => {
            let status = svg::put("heatmap", &picture, &args.trace, args.output.as_deref());
            if let (0, Some(larger)) = (status, larger) {
                output::tell(format_args!("selfpage heatmap: {trace} is drawn; {larger}"));
            }
            status
        }
        Err(why) => {
            let larger = larger.map(|larger| format!("; {larger}")).unwrap_or_default();
            output::tell(format_args!("selfpage heatmap: {trace}: {why}{larger}"));
            2
        }
    }
}

fn draw(path: &Path) -> Result<String, String> {
    let trace = Trace::read(path).map_err(|why| why.to_string())?;
    let grid = grid::Grid::of(&trace).ok_or("it has no faults: there is nothing to draw")?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    Ok(picture::draw(&trace, &grid, &name))
}
