//! The tool.
#![deny(unsafe_code)]

mod bench;
mod run;

use clap::{Parser, Subcommand};

/// A program owns its memory: its frames, its pager, its policy, its store.
#[derive(Parser)]
#[command(name = "selfpage", version)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Bench(bench::Args),
    Run(run::Args),
}

fn main() {
    let status = match Cli::parse().command {
        Verb::Bench(args) => bench::run(args),
        Verb::Run(args) => run::run(args),
    };
    std::process::exit(status);
}
