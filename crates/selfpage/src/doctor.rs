//! What this machine gives to selfpage, and what to do about the rest.

mod allocator;
pub(crate) mod descriptors;
mod idle;
mod keys;
mod kvm;
pub(crate) mod limits;
mod memory;
mod storage;
pub(crate) mod userfaultfd;

use selfpage_core::linux::Errno;
use selfpage_core::linux::probe::{Answer, Shortfall};

/// How far a feature is to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It works.
    Present,
    /// It works in part, or something else stands in for it.
    Degraded,
    /// The kernel has it and does not let this process use it.
    Refused,
    /// The kernel has it not.
    Absent,
}

impl State {
    /// The state in one lower-case word.
    pub const fn word(self) -> &'static str {
        match self {
            State::Present => "present",
            State::Degraded => "degraded",
            State::Refused => "refused",
            State::Absent => "absent",
        }
    }
}

/// One feature of the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Its name, as the kernel's own documents have it.
    pub feature: &'static str,
    /// How far it is to be had.
    pub state: State,
    /// What was seen, and what it means for a program.
    pub why: String,
    /// The command that makes it better, where there is one and something to better.
    pub remedy: Option<String>,
}

impl Finding {
    fn new(feature: &'static str, state: State, why: impl Into<String>) -> Finding {
        Finding { feature, state, why: why.into(), remedy: None }
    }

    fn remedy(mut self, command: impl Into<String>) -> Finding {
        self.remedy = Some(command.into());
        self
    }
}

/// Asks the machine, by trying each feature on scratch memory and scratch files. Takes some milliseconds.
///
/// # Context
/// Normal.
pub fn examine() -> Vec<Finding> {
    let mut findings = vec![limits::kernel(), limits::proc(), limits::seccomp()];
    findings.extend(userfaultfd::examine());
    findings.extend(descriptors::examine());
    findings.extend(memory::examine());
    findings.extend(allocator::examine());
    findings.extend([idle::examine(), keys::examine(), kvm::examine()]);
    findings.extend(limits::examine());
    findings.extend(storage::examine());
    let amiss = findings.iter().find(|finding| finding.feature == limits::PROC && finding.state != State::Present);
    if let Some(first) = amiss.and_then(|finding| finding.remedy.clone()) {
        // Most trials look there whether what they tried was done.
        let remedies = findings.iter_mut().filter_map(|finding| finding.remedy.as_mut());
        for remedy in remedies.filter(|remedy| !remedy.starts_with(&first)) {
            *remedy = format!("{first}; if it is so even then: {remedy}");
        }
    }
    findings
}

/// Whether selfpage can run at all: some userfaultfd, pages that move, threads with descriptor tables of their own, /proc, and as many open
/// files as a domain takes.
pub fn can_run(findings: &[Finding]) -> bool {
    let states = |feature: &'static str| {
        findings.iter().filter(move |finding| finding.feature == feature).map(|finding| finding.state)
    };
    let is_had = |feature: &'static str| states(feature).any(|state| matches!(state, State::Present | State::Degraded));
    is_had(userfaultfd::UFFD)
        && is_had(limits::FILES)
        && [userfaultfd::MOVE, descriptors::UNSHARE, limits::PROC]
            .iter()
            .all(|feature| states(feature).any(|state| state == State::Present))
}

/// What follows from a probe's answer: `gain` where it works, `loss` where not.
fn probed(feature: &'static str, answer: Answer, gain: &str, loss: &str, remedy: &str) -> Finding {
    let Err(shortfall) = answer else {
        return Finding::new(feature, State::Present, gain);
    };
    let state = state(shortfall);
    Finding::new(feature, state, format!("{}; {loss}", reason(shortfall))).remedy(remedy)
}

fn state(shortfall: Shortfall) -> State {
    match shortfall {
        Shortfall::Refused(Errno::PERM | Errno::ACCESS) => State::Refused,
        Shortfall::Refused(_) => State::Absent,
        Shortfall::Wrong => State::Degraded,
    }
}

fn reason(shortfall: Shortfall) -> String {
    match shortfall {
        Shortfall::Refused(why) => name(why),
        Shortfall::Wrong => "accepted, and not done".to_owned(),
    }
}

/// The error in words.
fn name(why: Errno) -> String {
    let words = std::io::Error::from_raw_os_error(why.raw_os_error()).to_string();
    words.split(" (os error").next().unwrap_or_default().to_owned()
}

/// The first line of a small file of the kernel.
pub(crate) fn setting(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

/// A size for a reader.
fn readable(len_bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = UNITS.iter().find(|(_, unit_bytes)| len_bytes >= *unit_bytes);
    unit.map_or_else(
        || format!("{len_bytes} bytes"),
        |(unit, unit_bytes)| format!("{:.1} {unit}", len_bytes as f64 / *unit_bytes as f64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    fn of<'a>(findings: &'a [Finding], feature: &str) -> &'a Finding {
        findings.iter().find(|finding| finding.feature == feature).expect("a feature without a line")
    }

    fn skip(name: &str, reason: &str) {
        println!("SKIP({name}: {reason})");
        let required = std::env::var("SELFPAGE_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|one| one == name), "{name} is required: {reason}");
    }

    fn each_is_one_line_with_a_remedy_where_something_is_amiss(findings: &[Finding]) {
        let features: HashSet<_> = findings.iter().map(|finding| finding.feature).collect();
        assert_eq!(features.len(), findings.len(), "two lines for one feature");
        for finding in findings {
            assert!(!finding.why.is_empty() && !finding.why.contains('\n'), "{finding:?}");
            let nothing_to_do = finding.state == State::Present || finding.feature == userfaultfd::MOVE_KEEPS_WP;
            assert!(finding.remedy.is_none() == nothing_to_do, "{finding:?}");
        }
    }

    #[test]
    fn a_process_with_the_right_serves_every_fault() {
        const CAP_SYS_PTRACE: u32 = 19;
        let status = std::fs::read_to_string("/proc/self/status").expect("no /proc");
        let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).map(str::trim);
        let capabilities = capabilities.and_then(|set| u64::from_str_radix(set, 16).ok()).expect("no capabilities");
        let findings = examine();
        each_is_one_line_with_a_remedy_where_something_is_amiss(&findings);
        if capabilities >> CAP_SYS_PTRACE & 1 == 0 {
            return skip("root", "this process has no CAP_SYS_PTRACE");
        }
        let uffd = of(&findings, userfaultfd::UFFD);
        assert_ne!(uffd.state, State::Degraded, "{uffd:?}");
    }

    #[test]
    fn pages_move_on_this_machine() {
        let findings = examine();
        let moves = of(&findings, userfaultfd::MOVE);
        if moves.state != State::Present {
            return skip("uffd", &moves.why);
        }
        assert!(can_run(&findings));
        let all = [userfaultfd::UFFD, userfaultfd::MOVE, descriptors::UNSHARE, limits::PROC, limits::FILES];
        for needed in all {
            let without: Vec<_> = findings.iter().filter(|finding| finding.feature != needed).cloned().collect();
            assert!(!can_run(&without), "without {needed}");
        }
    }

    const CHILD: &str = "SELFPAGE_DOCTOR_UNPRIVILEGED";

    #[test]
    fn an_unprivileged_process_is_told_that_it_serves_its_own_faults_only() {
        if std::env::var_os(CHILD).is_some() {
            let findings = examine();
            each_is_one_line_with_a_remedy_where_something_is_amiss(&findings);
            let uffd = of(&findings, userfaultfd::UFFD);
            assert_eq!(uffd.state, State::Degraded, "{uffd:?}");
            assert!(uffd.remedy.as_ref().is_some_and(|remedy| remedy.contains("vm.unprivileged_userfaultfd=1")));
            assert_eq!(of(&findings, userfaultfd::DEVICE).state, State::Refused);
            assert!(can_run(&findings));
            return;
        }
        if !rustix::process::geteuid().is_root() {
            return skip("root", "another user's right cannot be taken");
        }
        let open = setting("/proc/sys/vm/unprivileged_userfaultfd").as_deref() == Some("1");
        if open
            || std::fs::metadata("/dev/userfaultfd").is_ok_and(|device| {
                use std::os::unix::fs::PermissionsExt;
                device.permissions().mode() & 0o006 != 0
            })
        {
            return skip("unprivileged", "every user may serve every fault here");
        }
        let name = "doctor::tests::an_unprivileged_process_is_told_that_it_serves_its_own_faults_only";
        let child = std::env::current_exe().and_then(|test| {
            Command::new(test).args(["--exact", name, "--nocapture"]).env(CHILD, "1").uid(65534).gid(65534).output()
        });
        match child {
            Err(why) => skip("unprivileged", &format!("the test cannot be started as another user: {why}")),
            Ok(child) => {
                let said = String::from_utf8_lossy(&child.stdout);
                assert!(child.status.success() && said.contains("1 passed"), "{said}");
            }
        }
    }

    #[test]
    fn sizes_are_readable() {
        let sizes = [12, 2048, 3 << 29, 5 << 40];
        assert_eq!(sizes.map(readable), ["12 bytes", "2.0 KiB", "1.5 GiB", "5.0 TiB"]);
    }
}
