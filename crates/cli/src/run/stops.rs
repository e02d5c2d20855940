//! A program that stops, whose caller has to see that: a shell that waits for it, to have the terminal back.

use std::process::Child;

use rustix::process::{WaitId, WaitIdOptions, getppid};
use signal_hook::consts::SIGTSTP;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use super::{blocked, group, signals};

/// Stops as well where the program has stopped, as a terminal would stop us, where we are a shell's job: whoever is in one group with us, a
/// script or make(1), does not look for that, and in an orphaned group the kernel stops nobody. Returns when somebody has sent SIGCONT, which
/// is to be heard of.
pub fn follow(program: &Child, heard: &mut SignalsInfo<WithOrigin>) {
    if has_caller_in_group() || !has_stopped(program) {
        return;
    }
    blocked::hold(SIGTSTP);
    // A SIGCONT from before is for the program, and heard of by now. One from here on takes the signal away that is held.
    signals::hear(program, heard.pending());
    if has_stopped(program) {
        blocked::let_come([SIGTSTP]);
    } else {
        blocked::forget(SIGTSTP);
    }
}

/// Whether our caller is in our group: then that, or somebody before it, is the shell's job.
fn has_caller_in_group() -> bool {
    getppid().and_then(group::of) == Some(group::own())
}

/// Looks, and has it be seen again as long as it stands.
fn has_stopped(program: &Child) -> bool {
    let look = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let number = signals::number(program);
    // Where a filter refuses that, nobody sees it.
    number.is_some_and(|pid| rustix::process::waitid(WaitId::Pid(pid), look).is_ok_and(|status| status.is_some()))
}
