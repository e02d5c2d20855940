//! Lines removed from core, one at a time, to see that the simulation still notices.
//!
//! A patch in [`BREAKS`] is one break. Its first line says which seed noticed it, and how: `seed 7: two calls at once`. A change of
//! core may move such a line, and a change of the simulation changes what a seed does: both are found here.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};

use crate::steps::{cargo_program, output};

const BREAKS: &str = "crates/core/tests/sim/breaks";
/// When a run is ended. It shows nothing then: the simulation has words of its own for a run that goes on for ever, and this one may have
/// had a slow machine.
const LIMIT_SECONDS: &str = "120";
/// As long for all seeds: a break that none of them notices has the simulation run to its end.
const LIMIT_OF_ALL_SECONDS: &str = "900";
/// How timeout(1) says that the time was up.
const TIME_IS_UP: i32 = 124;
/// The test that tries seeds of its own, whatever it is told.
const OF_ITS_OWN: &str = "a_cut_without_the_stop_is_caught";

/// Tries each break in a copy of the tree. Whether the seed of each fails, and all of them pass without it.
pub fn run(root: &Path) -> bool {
    let tried = Bench::new(root).and_then(|bench| {
        let mut patches: Vec<PathBuf> =
            fs::read_dir(root.join(BREAKS))?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        patches.sort();
        let mut seeds = Vec::new();
        let mut missed = 0;
        for patch in &patches {
            let seed = seed_of(patch)?;
            let name = patch.file_stem().unwrap_or_default().display();
            let noticed = bench.notices(patch, &seed);
            missed += usize::from(noticed.is_err());
            match noticed {
                Ok(report) => println!("break {name}: noticed: {report}"),
                // The others are tried all the same.
                Err(why) => println!("break {name}: {why}"),
            }
            seeds.push(seed);
        }
        let sound = bench.sound(&seeds)?;
        println!("{} breaks, {missed} not noticed", patches.len());
        // Where there are none nothing is shown.
        Ok(sound && missed == 0 && !patches.is_empty())
    });
    tried.unwrap_or_else(|why| {
        eprintln!("breaks: {why}");
        false
    })
}

/// # Errors
/// The first line of the patch is none of ours.
fn seed_of(patch: &Path) -> io::Result<String> {
    let text = fs::read_to_string(patch)?;
    let seed = text.strip_prefix("seed ").and_then(|rest| rest.split_once(':')).map(|(seed, _)| seed.to_owned());
    seed.ok_or_else(|| io::Error::other(format!("{} does not begin with `seed NUMBER: `", patch.display())))
}

/// A copy of what git knows of the tree, with a target folder of its own.
struct Bench {
    folder: PathBuf,
}

impl Bench {
    fn new(root: &Path) -> io::Result<Bench> {
        let bench = Bench { folder: root.join("target/breaks") };
        // What git has removed since is not to be built.
        match fs::remove_dir_all(bench.tree()) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
        let listed = output(git(root).args(["ls-files", "-z"])).map_err(io::Error::other)?;
        for path in listed.split_terminator('\0') {
            let (from, to) = (root.join(path), bench.tree().join(path));
            fs::create_dir_all(to.parent().unwrap_or(root))?;
            match fs::copy(from, to) {
                // Removed, and git has not been told yet.
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
                copied => drop(copied?),
            }
        }
        Ok(bench)
    }

    fn tree(&self) -> PathBuf {
        self.folder.join("tree")
    }

    /// What the seed reports of the break.
    ///
    /// # Errors
    /// It does not notice it. What a seed does changes with core: another that notices it, to be named in the patch, is looked for and told.
    fn notices(&self, patch: &Path, seed: &str) -> io::Result<String> {
        self.apply(&[], patch)?;
        let noticed = self.build().and_then(|()| match self.simulate(Some(seed))? {
            Some(report) => Ok(report),
            None => {
                let others = self
                    .simulate(None)?
                    .map_or("NOR DO ALL OTHERS".to_owned(), |report| format!("another does: {report}"));
                Err(io::Error::other(format!("seed {seed} DOES NOT NOTICE IT; {others}")))
            }
        });
        self.apply(&["--reverse"], patch)?;
        noticed
    }

    fn sound(&self, seeds: &[String]) -> io::Result<bool> {
        self.build()?;
        for seed in seeds {
            if let Some(report) = self.simulate(Some(seed))? {
                println!("seed {seed} fails with nothing broken: {report}");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn apply(&self, options: &[&str], patch: &Path) -> io::Result<()> {
        let mut git = git(&self.tree());
        // Else it would take the tree for a part of the repository, and leave the patch's files alone.
        let status = git.env("GIT_CEILING_DIRECTORIES", &self.folder).arg("apply").args(options).arg(patch).status()?;
        fine(status, &format!("{} does not apply any more", patch.display()))
    }

    fn build(&self) -> io::Result<()> {
        let status = self.in_tree(&mut Command::new(cargo_program())).arg("--no-run").status()?;
        fine(status, "the simulation does not build")
    }

    /// What one seed reports, or the first of all that has something to report.
    fn simulate(&self, seed: Option<&str>) -> io::Result<Option<String>> {
        let mut limited = Command::new("timeout");
        limited.arg(if seed.is_some() { LIMIT_SECONDS } else { LIMIT_OF_ALL_SECONDS }).arg(cargo_program());
        limited.env_remove("SELFPAGE_SIM_SEED").envs(seed.map(|seed| ("SELFPAGE_SIM_SEED", seed)));
        let output = self.in_tree(&mut limited).args(["--", "--skip", OF_ITS_OWN]).output()?;
        reported(seed, &output)
    }

    /// Has cargo test the simulation.
    fn in_tree<'a>(&self, cargo: &'a mut Command) -> &'a mut Command {
        cargo.env("CARGO_TARGET_DIR", self.folder.join("target")).current_dir(self.tree());
        cargo.args(["test", "--quiet", "--release", "-p", "selfpage-core", "--test", "sim"])
    }
}

/// git on what is in the folder, and not on the repository of a hook that all this is run by.
fn git(folder: &Path) -> Command {
    let mut git = Command::new("git");
    ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"].iter().for_each(|name| _ = git.env_remove(name));
    git.current_dir(folder);
    git
}

fn fine(status: ExitStatus, else_say: &str) -> io::Result<()> {
    if status.success() { Ok(()) } else { Err(io::Error::other(else_say.to_owned())) }
}

/// What the simulation reported of the seed, or of any, or nothing where all is well.
///
/// # Errors
/// It failed, and not by what this seed met, or did not end in time.
fn reported(seed: Option<&str>, output: &Output) -> io::Result<Option<String>> {
    let said = String::from_utf8_lossy(&output.stdout);
    let is_asked = |of: &str| seed.map_or(of.parse::<u64>().is_ok(), |seed| of == seed);
    let is_report = |line: &&str| {
        line.strip_prefix("seed ").and_then(|rest| rest.split_once(": ")).is_some_and(|(of, _)| is_asked(of))
    };
    // A run that goes well has a line of its own, in the same words.
    let report = said.lines().find(is_report).filter(|_| !output.status.success());
    match (output.status.code(), report) {
        (Some(0), _) => Ok(None),
        (_, Some(report)) => Ok(Some(report.to_owned())),
        (Some(TIME_IS_UP), None) => Err(io::Error::other(match seed {
            Some(seed) => format!(
                "seed {seed} DID NOT END in {LIMIT_SECONDS} s: try again where nothing else runs, or find one that says what is wrong"
            ),
            None => format!("all seeds DID NOT END in {LIMIT_OF_ALL_SECONDS} s"),
        })),
        (_, None) => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("the simulation did not run as it should:\n{complaint}{said}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;
    use crate::skip;

    fn of(code: i32, said: &str) -> io::Result<Option<String>> {
        let status = ExitStatus::from_raw(code << 8);
        reported(Some("7"), &Output { status, stdout: said.into(), stderr: Vec::new() })
    }

    #[test]
    fn what_git_has_is_copied_as_far_as_it_is_there() {
        if !skip::has("git") {
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        // Where the folder is within a repository, that is none of ours.
        fs::write(root.join(".git"), "no repository").unwrap();
        let no_repository = Bench::new(root).err().map(|why| why.to_string());
        fs::remove_file(root.join(".git")).unwrap();
        let git = |arguments: &[&str]| output(git(root).args(arguments)).unwrap();
        git(&["init", "--quiet"]);
        ["kept", "removed"].iter().for_each(|name| fs::write(root.join(name), name).unwrap());
        git(&["add", "kept", "removed"]);
        fs::remove_file(root.join("removed")).unwrap();
        let copied = Bench::new(root).map(|bench| fs::read_dir(bench.tree()).unwrap().count());
        assert!(no_repository.is_some_and(|why| why.contains("git")), "without git nothing is known");
        assert_eq!(copied.unwrap(), 1);
    }

    #[test]
    fn only_what_the_seed_met_is_noticed() {
        let failed = "thread 'contents_are_always_right' panicked at main.rs:97:\nseed 7: nobody can run\n  Calm";
        assert_eq!(of(101, failed).unwrap().as_deref(), Some("seed 7: nobody can run"));
        assert_eq!(of(0, "test result: ok").unwrap(), None);
        assert!(of(TIME_IS_UP, "").unwrap_err().to_string().contains("DID NOT END"));
        assert!(of(127, "").is_err());
        assert!(of(101, "seed 70: nobody can run").is_err());
        let of_any = |code: i32, said: &str| {
            reported(None, &Output { status: ExitStatus::from_raw(code << 8), stdout: said.into(), stderr: Vec::new() })
        };
        assert_eq!(
            of_any(101, "10019 seeds\nseed 70: nobody can run").unwrap().as_deref(),
            Some("seed 70: nobody can run")
        );
        assert_eq!(of_any(0, "10019 seeds, 12 yields").unwrap(), None);
    }
}
