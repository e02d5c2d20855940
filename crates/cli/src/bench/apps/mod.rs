//! `apps`: real programs with selfpage's allocator and with others, against the C library's, in turns.
//!
//! One program does a fixed piece of work; the whole of it is timed, with the processes that it starts. Systems take turns within a
//! repetition, so that a drift of the machine meets all of them, and ratios are taken within a repetition.

mod programs;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::json;

use super::Args;
use super::raw::{self, ChildUsage};
use programs::Program;

/// An allocator: its name, and what is preloaded for it.
struct System {
    name: &'static str,
    library: Option<PathBuf>,
}

/// What one run took.
#[derive(Clone, Copy, Debug)]
struct Taken {
    wall_s: f64,
    usage: ChildUsage,
}

/// The packages that have the others, as Debian names the files.
const OTHERS: [(&str, &str, &str); 3] = [
    ("mimalloc", "libmimalloc.so.2", "libmimalloc2.0"),
    ("jemalloc", "libjemalloc.so.2", "libjemalloc2"),
    ("tcmalloc", "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
];

/// The names of all systems.
pub fn systems() -> Vec<&'static str> {
    ["glibc", "selfpage"].into_iter().chain(OTHERS.map(|other| other.0)).collect()
}

/// The names of all programs.
pub fn cases() -> Vec<&'static str> {
    programs::ALL.iter().map(|program| program.name).collect()
}

/// Runs the bench; the exit status as for the others.
pub fn run(args: &Args) -> i32 {
    for (known, asked) in [(cases(), &args.cases), (systems(), &args.systems)] {
        if let Some(bad) = asked.iter().find(|name| !known.contains(&name.as_str())) {
            eprintln!("selfpage bench: unknown '{bad}' of apps: there are {}", known.join(", "));
            return 2;
        }
    }
    match measure(args) {
        Ok(()) => 0,
        Err(why) => {
            eprintln!("selfpage bench: {why}");
            1
        }
    }
}

fn measure(args: &Args) -> Result<(), String> {
    let systems = present(args)?;
    let scratch = args.dir.join(format!("selfpage-apps-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).map_err(|cause| format!("{}: {cause}", scratch.display()))?;
    let result = compare(args, &systems, &scratch);
    let _ = std::fs::remove_dir_all(&scratch);
    result
}

fn compare(args: &Args, systems: &[System], scratch: &std::path::Path) -> Result<(), String> {
    let mut ratios: Vec<Vec<f64>> = systems.iter().map(|_| Vec::new()).collect();
    for program in programs::ALL.iter().filter(|program| wanted(&args.cases, program.name)) {
        if let Some(missing) = program.missing() {
            println!("SKIP({}: {missing})", program.name);
            continue;
        }
        (program.prepare)(scratch, args.quick).map_err(|cause| format!("{}: {cause}", program.name))?;
        let mut taken: Vec<Vec<Taken>> = systems.iter().map(|_| Vec::new()).collect();
        for _ in 0..args.reps {
            for (system, taken) in systems.iter().zip(&mut taken) {
                taken.push(once(program, system, scratch)?);
            }
        }
        tell(args, program.name, systems, &taken, &mut ratios);
    }
    for (system, ratios) in systems.iter().zip(&ratios).skip(1).filter(|(_, ratios)| !ratios.is_empty()) {
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        if args.json {
            println!("{}", json!({"bench": "apps", "system": system.name, "wall_geometric_mean_to_glibc": mean}));
        } else {
            println!("{:<10} geometric mean of wall time to glibc's: {mean:.3}", system.name);
        }
    }
    Ok(())
}

fn wanted(list: &[String], name: &str) -> bool {
    list.is_empty() || list.iter().any(|item| item == name)
}

/// The systems that are asked for and are there, glibc first: the others are compared with it.
fn present(args: &Args) -> Result<Vec<System>, String> {
    let own = std::env::current_exe().map_err(|cause| format!("cannot tell where I am: {cause}"))?;
    let library = own.with_file_name("libselfpage_malloc.so");
    if !library.is_file() {
        return Err(format!(
            "{} is missing; build it with `cargo build --release -p selfpage-malloc`",
            library.display()
        ));
    }
    let mut systems =
        vec![System { name: "glibc", library: None }, System { name: "selfpage", library: Some(library) }];
    for (name, file, package) in OTHERS.into_iter().filter(|other| wanted(&args.systems, other.0)) {
        let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"].map(|dir| PathBuf::from(dir).join(file));
        match places.into_iter().find(|path| path.is_file()) {
            Some(path) => systems.push(System { name, library: Some(path) }),
            None => println!("SKIP({name}: {file} is not installed: apt-get install {package})"),
        }
    }
    systems.retain(|system| system.name == "glibc" || wanted(&args.systems, system.name));
    Ok(systems)
}

fn once(program: &Program, system: &System, scratch: &std::path::Path) -> Result<Taken, String> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", program.script]).current_dir(scratch).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).env_remove("LD_PRELOAD").env("ALLOCATOR", "");
    if let Some(library) = &system.library {
        command.env("ALLOCATOR", library);
    }
    let began = Instant::now();
    let child = command.spawn().map_err(|cause| format!("cannot start {}: {cause}", program.name))?;
    let usage = raw::wait_with_usage(child.id()).map_err(|cause| format!("{}: {cause}", program.name))?;
    if !usage.well {
        return Err(format!("{} with {} failed", program.name, system.name));
    }
    Ok(Taken { wall_s: began.elapsed().as_secs_f64(), usage })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Prints what a program took with each system; remembers the ratios to the first system's.
fn tell(args: &Args, program: &str, systems: &[System], taken: &[Vec<Taken>], ratios: &mut [Vec<f64>]) {
    let base = &taken[0];
    for ((system, taken), ratios) in systems.iter().zip(taken).zip(ratios) {
        let paired = |of: fn(&Taken) -> f64| median(taken.iter().zip(base).map(|(own, base)| of(own) / of(base)));
        let (wall, cpu, peak) =
            (paired(|one| one.wall_s), paired(|one| one.usage.cpu_s), paired(|one| one.usage.peak_bytes as f64));
        ratios.push(wall);
        let absolute = |of: fn(&Taken) -> f64| median(taken.iter().map(of));
        let (wall_s, cpu_s) = (absolute(|one| one.wall_s), absolute(|one| one.usage.cpu_s));
        let peak_bytes = absolute(|one| one.usage.peak_bytes as f64);
        if args.json {
            let runs: Vec<_> =
                taken.iter().map(|one| json!([one.wall_s, one.usage.cpu_s, one.usage.peak_bytes])).collect();
            println!(
                "{}",
                json!({"bench": "apps", "case": program, "system": system.name, "wall_s": wall_s, "cpu_s": cpu_s,
                    "peak_bytes": peak_bytes, "wall_to_glibc": wall, "cpu_to_glibc": cpu, "peak_to_glibc": peak,
                    "runs_wall_cpu_peak": runs})
            );
        } else {
            println!(
                "{program:<14} {:<9} wall {wall_s:>7.3} s {wall:>6.3}  cpu {cpu_s:>7.3} s {cpu:>6.3}  peak {:>6.1} MiB {peak:>6.3}",
                system.name,
                peak_bytes / 1_048_576.0
            );
        }
    }
}
