//! `selfpage plot`: a kept run of `selfpage bench` as a picture, value by case.

mod picture;
mod record;
mod scale;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{output, svg};
use record::Record;

const EXAMPLES: &str = "\
Examples:
  selfpage bench page-alloc --save run
  selfpage plot run -o run/plot.svg
  selfpage plot papers/arxiv11-umpa/runs/2026-11-22-vm2-page-alloc > plot.svg

Exit status: 0 done, 1 the picture could not be written, 2 the run cannot be used.";

/// Draw a run that `selfpage bench --save` kept as an SVG: the value of each case, for each system, on a logarithmic scale.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The directory of the run, with raw.jsonl in it.
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// Where the picture goes; standard output (`-`) unless stated otherwise.
    #[arg(short, long, value_name = "SVG")]
    output: Option<PathBuf>,
}

/// Draws. The status to end with.
pub fn run(args: &Args) -> i32 {
    // Who names the file means its directory.
    let raw = if args.run.ends_with("raw.jsonl") { args.run.clone() } else { args.run.join("raw.jsonl") };
    match draw(&raw) {
        Ok(picture) => svg::put("plot", &picture, &raw, args.output.as_deref()),
        Err(why) => {
            output::tell(format_args!("selfpage plot: {}: {why}", args.run.display()));
            2
        }
    }
}

fn draw(raw: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(raw).map_err(|why| match why.kind() {
        ErrorKind::NotFound => format!("raw.jsonl: {why}; name a directory that `selfpage bench --save` was given"),
        _ => format!("raw.jsonl: {why}"),
    })?;
    if text.trim().is_empty() {
        return Err("raw.jsonl is empty: the run kept nothing".into());
    }
    let records = Record::parse(&text)?;
    // `.` has no name of its own.
    let full = raw.canonicalize().unwrap_or_default();
    let name = full.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    picture::draw(&records, &name).ok_or_else(|| "no case has a value above zero: there is nothing to draw".into())
}
