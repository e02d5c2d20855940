//! `cargo xtask test`: which steps there are, in which order, and the summary at the end.

use crate::steps::{Report, Step, cargo};
use crate::tally::{Skip, Tally};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much of the suite runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    Quick,
    Full,
}

/// A step, or why it cannot be taken on this machine.
enum Plan {
    Take(Step),
    Skip(Skip),
}

/// The packages that are built in release.
const RELEASE: &str = "--release --workspace --exclude xtask";

/// Those of the release tests that only compute.
const TIMELESS: [&str; 4] = ["sim", "states", "layouts", "capability"];

const MINUTE: Duration = Duration::from_secs(60);

/// Steps that are done before the next phase begins.
struct Phase {
    in_turn: Vec<Plan>,
    /// Beside those, each list in turn: none of them looks at the clock.
    beside: Vec<Vec<Plan>>,
}

/// Runs the suite and prints the summary. False if anything failed.
pub fn run(root: &Path, extent: Extent) -> bool {
    let began = Instant::now();
    let required = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
    let phases = plan(root, extent);
    let steps = phases.iter().map(Phase::steps).sum();
    let summary = Mutex::new(Summary { required, steps, ..Summary::default() });
    phases.into_iter().for_each(|phase| phase.run(&summary));
    let summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.print();
    println!("{:.0} s in all", began.elapsed().as_secs_f64());
    println!("{}", summary.all.summary());
    summary.all.failed == 0
}

impl Phase {
    fn steps(&self) -> usize {
        self.in_turn.len() + self.beside.iter().map(Vec::len).sum::<usize>()
    }

    fn run(self, summary: &Mutex<Summary>) {
        std::thread::scope(|scope| {
            for plans in self.beside {
                scope.spawn(|| plans.into_iter().for_each(|plan| plan.run_aside(summary)));
            }
            for plan in self.in_turn {
                let begun = lock(summary).begin(&plan);
                let report = plan.run(&mut std::io::stdout());
                lock(summary).end(&begun, report);
            }
        });
    }
}

fn lock(summary: &Mutex<Summary>) -> MutexGuard<'_, Summary> {
    summary.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plan {
    fn name(&self) -> &str {
        match self {
            Plan::Take(step) => &step.name,
            Plan::Skip(skip) => &skip.name,
        }
    }

    /// The same, in time that nobody else wants: whatever sleeps runs as soon as it is woken.
    fn in_idle_time(self) -> Plan {
        let chrt = |command: Command| {
            let mut idle = Command::new("chrt");
            idle.args(["--idle", "0"]).arg(command.get_program()).args(command.get_args());
            command.get_current_dir().map(|dir| idle.current_dir(dir));
            idle.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            idle
        };
        match self {
            Plan::Take(step) => Plan::Take(Step { commands: step.commands.into_iter().map(chrt).collect(), ..step }),
            skip => skip,
        }
    }

    /// What it says is shown in one piece when it has ended.
    fn run_aside(self, summary: &Mutex<Summary>) {
        let begun = lock(summary).begin(&self);
        let mut said = Vec::new();
        let report = self.run(&mut said);
        let mut summary = lock(summary);
        println!("{}", String::from_utf8_lossy(&said));
        summary.end(&begun, report);
    }

    fn run(self, out: &mut impl Write) -> Report {
        match self {
            Plan::Take(step) => step.run(out),
            Plan::Skip(skip) => Report { skips: vec![skip], ..Report::default() },
        }
    }
}

/// What the steps came to so far.
#[derive(Default)]
struct Summary {
    /// Names that may not be skipped.
    required: String,
    steps: usize,
    begun: usize,
    all: Tally,
    skips: Vec<Skip>,
    panics: Vec<String>,
    failures: Vec<String>,
}

/// A step that runs.
struct Begun {
    number: usize,
    name: String,
    at: Instant,
}

impl Summary {
    fn begin(&mut self, plan: &Plan) -> Begun {
        self.begun += 1;
        println!("[{}/{}] {} …", self.begun, self.steps, plan.name());
        Begun { number: self.begun, name: plan.name().into(), at: Instant::now() }
    }

    fn end(&mut self, Begun { number, name, at }: &Begun, report: Report) {
        let verdict = judge(&report, &self.required);
        let word = if verdict.failure.is_some() { "FAILED" } else { "done" };
        println!("[{number}/{}] {name}: {word} after {:.1} s\n", self.steps, at.elapsed().as_secs_f64());
        self.all += verdict.tally;
        self.skips.extend(report.skips);
        self.panics.extend(report.panics.lines.into_iter().map(|line| format!("{name}: {line}")));
        self.failures.extend(report.failed_tests.iter().map(|test| format!("FAILED {name}: test {test}")));
        self.failures.extend(verdict.failure.map(|why| format!("FAILED {name}: {why}")));
    }

    /// Whoever keeps only the end of what was printed still reads what failed.
    fn print(&self) {
        self.skips.iter().for_each(|skip| println!("{skip}"));
        self.panics.iter().for_each(|line| println!("{line}"));
        self.failures.iter().for_each(|failure| println!("{failure}"));
    }
}

/// What a step adds to the summary.
struct Verdict {
    tally: Tally,
    failure: Option<String>,
}

fn judge(report: &Report, required: &str) -> Verdict {
    let (forbidden, allowed): (Vec<&Skip>, Vec<&Skip>) =
        report.skips.iter().partition(|skip| skip.forbidden_by(required));
    let failure = report.failure.clone().or_else(|| {
        let skip = forbidden.first()?;
        Some(format!("{skip}, and SELFPAGE_REQUIRE names {}", skip.name))
    });
    let failure = failure.or_else(|| (report.tests.failed > 0).then(|| "a test failed".into()));
    let ran_nothing = report.tests == Tally::default() && !allowed.is_empty();
    let skipped = Skip::count(&allowed);
    let mut tally = report.tests;
    // The harness counts a test that skipped as passed.
    tally.passed = tally.passed.saturating_sub(skipped);
    tally.skipped += skipped;
    match failure {
        Some(_) => tally.failed += 1,
        // A step that is itself skipped is the one skip counted above.
        None if ran_nothing => {}
        None => tally.passed += 1,
    }
    Verdict { tally, failure }
}

fn plan(root: &Path, extent: Extent) -> Vec<Phase> {
    let own = std::env::current_exe().unwrap_or_else(|_| "xtask".into());
    let check = |verb: &str| {
        let mut command = Command::new(&own);
        command.arg(verb).current_dir(root);
        command
    };
    let mut rustfmt = Command::new("rustfmt");
    rustfmt.current_dir(root).args(["--check", "--edition", "2024", "xtask/trapcheck/src/lib.rs"]);

    let in_turn = vec![
        take("format", 2, [cargo(root, "fmt --all -- --check"), rustfmt]),
        take("clippy", 15, clippy(root)),
        take("style", 2, [check("style")]),
        take("link", 10, [check("link")]),
        // What tests of whole programs start, in the profile that they start it in.
        take("build", 15, [cargo(root, "build --workspace")]),
        take("test", 20, [cargo(root, "test --workspace --no-fail-fast -- --show-output")]),
    ];
    if extent == Extent::Quick {
        return vec![Phase { in_turn, beside: vec![] }];
    }
    let tests = release_tests(root);
    // The tests at once: of the same packages as each step below, else what they use is compiled again with other features.
    let build_tests = cargo(root, &format!("test {RELEASE} --no-run{}", as_targets(&tests)));
    let build = take("build, release", 30, [cargo(root, &format!("build {RELEASE}")), build_tests]);
    let run = |test: &String| {
        let arguments = format!("test {RELEASE} --test {test} --no-fail-fast -- --show-output");
        take(&format!("release test {test}"), 30, [cargo(root, &arguments)])
    };
    let (timeless, others): (Vec<String>, Vec<String>) =
        tests.iter().cloned().partition(|test| TIMELESS.contains(&test.as_str()));
    let mut in_release = vec![build];
    in_release.extend(timeless.iter().map(run));
    // Tests wait for much, and leave CPUs idle.
    let in_idle_time = |plans: Vec<Plan>| plans.into_iter().map(Plan::in_idle_time).collect();
    let beside = [vec![loom(root)], vec![miri(root)], in_release].map(in_idle_time).into();
    let debug = Phase { in_turn, beside };

    let mut doc = cargo(root, "doc --workspace --lib --no-deps");
    doc.env("RUSTDOCFLAGS", "-D warnings");
    let mut in_turn: Vec<Plan> = others.iter().map(run).collect();
    in_turn.push(take("doc", 10, [doc]));
    in_turn.push(take("examples", 10, [cargo(root, "build --workspace --examples"), check("examples")]));
    // By itself it says what it skips for want of: qemu, or a network to fetch a kernel from.
    let mut keys = check("qemu-test");
    keys.arg("--keys");
    let release = Phase { in_turn, beside: vec![vec![take("qemu, keys", 15, [keys])]] };
    vec![debug, release]
}

fn take(name: &str, limit_minutes: u32, commands: impl Into<Vec<Command>>) -> Plan {
    Plan::Take(Step { name: name.into(), limit: MINUTE * limit_minutes, commands: commands.into() })
}

/// `--all-targets` leaves out the tests that run in release alone.
fn clippy(root: &Path) -> [Command; 2] {
    let targets = [" --all-targets".to_string(), as_targets(&release_tests(root))];
    targets.map(|targets| cargo(root, &format!("clippy --workspace{targets} -- -D warnings")))
}

fn as_targets(tests: &[String]) -> String {
    tests.iter().map(|test| format!(" --test {test}")).collect()
}

/// The test targets that run in release only: their sections in Cargo.toml say `test = false`.
fn release_tests(root: &Path) -> Vec<String> {
    let manifests = crates(root).into_iter().filter_map(|dir| std::fs::read_to_string(dir.join("Cargo.toml")).ok());
    manifests.flat_map(|manifest| release_tests_of(&manifest)).collect()
}

fn release_tests_of(manifest: &str) -> Vec<String> {
    let value = |section: &str, key: &str| {
        section.lines().find_map(|line| {
            let (found, value) = line.split_once('=')?;
            (found.trim() == key).then(|| value.split('#').next().unwrap_or("").trim().trim_matches('"').to_string())
        })
    };
    manifest
        .split("\n[")
        .filter(|section| section.starts_with("[test]]") && value(section, "test").as_deref() == Some("false"))
        .filter_map(|section| value(section, "name"))
        .collect()
}

fn crates(root: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> =
        std::fs::read_dir(root.join("crates")).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    dirs.sort();
    dirs
}

fn loom(root: &Path) -> Plan {
    let mut models =
        cargo(root, "test --release -p selfpage-core --test loom --target-dir target/loom -- --show-output");
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    models.env("RUSTFLAGS", format!("{flags} --cfg loom").trim());
    take("loom", 30, [models])
}

fn miri(root: &Path) -> Plan {
    // By way of rustup: $CARGO is one toolchain's own, and knows no others.
    let nightly = |program: &str, arguments: &str| {
        let mut command = Command::new(program);
        command.current_dir(root).arg("+nightly").args(arguments.split(' '));
        command
    };
    let succeeds = |mut command: Command| command.output().ok().filter(|output| output.status.success());
    let sysroot =
        succeeds(nightly("rustc", "--print sysroot")).map(|said| String::from_utf8_lossy(&said.stdout).into_owned());
    let source = sysroot.map(|sysroot| Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library"));
    if !source.is_some_and(|source| source.exists()) || succeeds(nightly("cargo", "miri --version")).is_none() {
        let reason = "no nightly Miri; `rustup toolchain install nightly -c miri -c rust-src` brings it";
        return Plan::Skip(Skip { name: "miri".into(), reason: reason.into(), test: None });
    }
    let mut test = nightly("cargo", "miri test -p selfpage-core --lib --target-dir target/miri -- --show-output");
    test.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    take("miri", 30, [nightly("cargo", "miri setup --target-dir target/miri"), test])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(passed: u64, failed: u64, skipped: u64) -> Tally {
        Tally { passed, failed, skipped }
    }

    fn report(tests: Tally, skips: &[&str]) -> Report {
        let skips = skips.iter().map(|name| Skip { name: (*name).into(), reason: "no".into(), test: None }).collect();
        Report { tests, skips, ..Report::default() }
    }

    #[test]
    fn a_step_counts_as_one() {
        assert_eq!(judge(&report(tally(0, 0, 0), &[]), "").tally, tally(1, 0, 0));
        assert_eq!(judge(&report(tally(5, 0, 1), &[]), "").tally, tally(6, 0, 1));
        let failed = Report { failure: Some("exit 1".into()), ..report(tally(4, 1, 0), &[]) };
        assert_eq!(judge(&failed, "").tally, tally(4, 2, 0));
    }

    #[test]
    fn a_skip_is_not_a_pass() {
        assert_eq!(judge(&report(tally(5, 0, 0), &["uffd"]), "").tally, tally(5, 0, 1));
        assert_eq!(judge(&report(tally(0, 0, 0), &["miri"]), "").tally, tally(0, 0, 1));
    }

    #[test]
    fn a_required_skip_fails_even_if_the_test_did_not() {
        let verdict = judge(&report(tally(5, 0, 0), &["uffd"]), "move,uffd");
        assert_eq!(verdict.tally, tally(5, 1, 0));
        assert!(verdict.failure.unwrap().contains("uffd"));
        assert_eq!(judge(&report(tally(0, 0, 0), &["miri"]), "miri").tally, tally(0, 1, 0));
    }

    #[test]
    fn a_failed_test_fails_a_step_that_says_it_is_fine() {
        assert_eq!(judge(&report(tally(5, 1, 0), &[]), "").tally, tally(5, 2, 0));
    }

    #[test]
    fn a_step_in_idle_time_does_the_same() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "pwd; echo $LEFT $0; chrt --pid $$", "a b"]).current_dir("/usr").env("LEFT", "right");
        let mut said = Vec::new();
        let report = take("shell", 1, [shell]).in_idle_time().run(&mut said);
        let said = String::from_utf8(said).unwrap();
        assert_eq!(report.failure, None, "{said}");
        assert!(said.starts_with("/usr\nright a b\n") && said.contains("SCHED_IDLE"), "{said}");
    }

    #[test]
    fn finds_the_release_tests() {
        let manifest = "[package]\nname = \"selfpage\"\n\n[[test]]\nname = \"storm\" # long\ntest = false\n\n\
                        [[test]]\nname = \"small\"\n\n[dependencies]\nx = { version = \"1\" }\n";
        assert_eq!(release_tests_of(manifest), ["storm"]);
    }
}
