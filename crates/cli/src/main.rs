//! The tool.
#![deny(unsafe_code, clippy::print_stderr)]

mod bench;
mod disk;
mod doctor;
mod heatmap;
mod identity;
mod loader;
mod output;
mod plot;
mod process;
mod run;
#[cfg(test)]
#[path = "../../../tests/skip.rs"]
mod skip;
mod stack;
mod svg;
mod tour;
mod trace;

use std::ffi::OsString;
use std::sync::Arc;

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use signal_hook::consts::SIGXFSZ;

const EXAMPLES: &str = "\
Examples:
  selfpage tour                   what this is about, in some seconds
  selfpage run --frames 64M -- python3 script.py
  selfpage heatmap trace -o trace.svg
  selfpage trace trace            what happened to which page, line by line
  selfpage doctor                 whether this machine can do it, and what to change if not
  selfpage bench paging --quick   how fast it is here
  selfpage plot run -o run.svg    a run that `bench --save run` kept, as a picture

Exit status: 0 done, 1 failed, 2 bad usage.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  selfpage doctor           a line for each thing that selfpage needs of the machine, with the remedy
  selfpage doctor --json    one JSON object a line: {\"feature\",\"state\",\"why\",\"remedy\"}

Exit status: 0 the library can run here, 1 it cannot. `selfpage run --frames` also wants faults inside system calls served.";

/// A program owns its memory: its frames, its pager, its policy, its store.
#[derive(Parser)]
#[command(name = "selfpage", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Tour(tour::Args),
    /// Examine the machine: what selfpage needs of it, whether it is there, and the remedy if it is not.
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor {
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
    },
    Bench(bench::Args),
    Run(run::Args),
    Trace(trace::Args),
    Heatmap(heatmap::Args),
    Plot(plot::Args),
}

fn main() {
    hear_of_long_files();
    let status = match stack::lack() {
        Some(why) => {
            output::tell(format_args!("selfpage: {why}"));
            1
        }
        None => obey(),
    };
    std::process::exit(status);
}

/// Does what the arguments ask for. The status to end with.
// Not within `main`, which would take as much stack at its first instruction.
#[inline(never)]
fn obey() -> i32 {
    let cli = Cli::try_parse().unwrap_or_else(|error| std::process::exit(refuse(&error)));
    match cli.verb {
        Verb::Tour(args) => tour::run(&args),
        Verb::Doctor { json } => doctor::run(if json { doctor::Form::Json } else { doctor::Form::Lines }),
        Verb::Bench(args) => bench::run(args),
        Verb::Run(args) => run::run(args),
        Verb::Trace(args) => trace::run(&args),
        Verb::Heatmap(args) => heatmap::run(&args),
        Verb::Plot(args) => plot::run(&args),
    }
}

/// Has a write beyond `ulimit -f` be an error, which is told, and no signal that ends this process with its files left behind. In programs
/// that it starts nothing changes: no handler outlives an exec, and what our caller ignores stays ignored.
fn hear_of_long_files() {
    if !run::ignored::is(SIGXFSZ) {
        // Without it a write ends us as it would have.
        let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    }
}

/// Says in one line what is wrong with the arguments; or gives the help that was asked for. The status to end with.
fn refuse(error: &clap::Error) -> i32 {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        return match error.print() {
            // A reader that has gone away wanted no more of it.
            Err(why) if !error.use_stderr() && why.kind() != std::io::ErrorKind::BrokenPipe => {
                output::tell(format_args!("selfpage: standard output: {why}"));
                1
            }
            _ => error.exit_code(),
        };
    }
    let said = std::env::args_os().nth(1).filter(|said| Cli::command().find_subcommand(said).is_some());
    let own = said.map_or("selfpage".into(), |verb| format!("selfpage {}", verb.display()));
    // What is wrong ends at the first line that is empty; what follows it, tips included, is for other tools.
    let text = error.render().to_string();
    let what = text.trim_start_matches("error: ").lines().map(str::trim).take_while(|line| !line.is_empty());
    let what = match error.kind() {
        ErrorKind::InvalidUtf8 => unreadable(),
        _ => what.collect::<Vec<_>>().join(" "),
    };
    let meant = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    let meant = meant.into_iter().find_map(|kind| error.get(kind)).map(|meant| format!(" (there is {meant})"));
    output::tell(format_args!("{own}: {what}{}; see `{own} --help`", meant.unwrap_or_default()));
    error.exit_code()
}

/// Names the first argument that is no text, with the option before it.
fn unreadable() -> String {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let Some(at) = arguments.iter().position(|argument| argument.to_str().is_none()) else {
        return "an argument is not UTF-8".into();
    };
    let before = at.checked_sub(1).and_then(|before| arguments[before].to_str());
    let option = before.filter(|before| before.starts_with('-')).map(|before| format!("{before} ")).unwrap_or_default();
    format!("{option}{}: that is not UTF-8", arguments[at].display())
}
