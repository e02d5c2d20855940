//! Signals that come to `selfpage run`, of which most are meant for the program.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Child;

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::Pid;
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPIPE, SIGPROF, SIGQUIT, SIGTERM, SIGTRAP, SIGURG,
    SIGUSR1, SIGUSR2,
};
use signal_hook::consts::{SIGVTALRM, SIGWINCH, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::{Cause, Origin};

use super::{Refused, bad, cause, group, ignored};

/// What somebody may send to end a program, or to tell it something. SIGCHLD too: that is heard of anyway.
pub const PASSED_ON: [i32; 20] = [
    SIGHUP,
    SIGINT,
    SIGQUIT,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    SIGALRM,
    SIGCONT,
    SIGWINCH,
    SIGIO,
    SIGPROF,
    SIGTRAP,
    SIGVTALRM,
    SIGXCPU,
    SIGXFSZ,
    // A watchdog's. The C library's abort() ends this process all the same.
    SIGABRT,
    // Nothing of ours is written while the program runs: it is somebody's.
    SIGPIPE,
    SIGURG,
    libc::SIGPWR,
    libc::SIGSTKFLT,
];
/// What the kernel sends for a terminal, to all that are in its foreground. Others come of this process's own: a timer survives an exec.
const OF_TERMINALS: [i32; 5] = [SIGHUP, SIGINT, SIGQUIT, SIGCONT, SIGWINCH];
/// Of these, what says that the terminal is gone: where it goes by itself, to the leader of its session alone.
const OF_ITS_END: [i32; 2] = [SIGHUP, SIGCONT];

/// Hears of the ends of children, also where whoever started us ignores them.
pub fn listen() -> Result<SignalsInfo<WithOrigin>, Refused> {
    can_hear().and_then(|()| SignalsInfo::new([SIGCHLD])).map_err(|cause| {
        let allow = "allow socketpair, sendto and recvfrom in the container's seccomp profile";
        let remedy = Errno::from_io_error(&cause).and_then(cause::remedy).unwrap_or(allow);
        bad(format!("cannot listen for signals: {cause}; {remedy}"))
    })
}

/// Sends and receives as a handler of a signal and [`SignalsInfo`] do: where a filter refuses it the one is silent, and we would wait for
/// ever, and the other panics.
fn can_hear() -> std::io::Result<()> {
    let (mut heard, told) = UnixStream::pair()?;
    rustix::net::send(told, b"X", SendFlags::DONTWAIT)?;
    heard.read_exact(&mut [0])
}

/// Passes on what is for the program.
pub fn hear(program: &Child, origins: impl Iterator<Item = Origin>) {
    origins.filter(|origin| is_for_the_program(program, origin)).for_each(|origin| pass_on(program, origin.signal));
}

/// Whether somebody meant the program, who cannot know that it is not this process.
fn is_for_the_program(child: &Child, origin: &Origin) -> bool {
    match origin.signal {
        // The end of a child is ours to see. What our caller ignored is listened for nevertheless.
        SIGCHLD => !matches!(origin.cause, Cause::Chld(_)) && !ignored::is(SIGCHLD),
        signal if origin.cause == Cause::Kernel && OF_TERMINALS.contains(&signal) => {
            OF_ITS_END.contains(&signal) && group::leads_session() || stands_for_group_of(child)
        }
        _ => true,
    }
}

/// Whether the terminal has this process in place of the program. What it sends, it sends to the program as well, where that is in the same
/// group. One that has made a group of its own would lead this one if nobody were between it and its caller, and could not have left it.
fn stands_for_group_of(child: &Child) -> bool {
    group::is_led() && number(child).and_then(group::of).is_some_and(|of_child| of_child != group::own())
}

pub fn number(child: &Child) -> Option<Pid> {
    Pid::from_raw(i32::try_from(child.id()).ok()?)
}

fn pass_on(child: &Child, signal: i32) {
    let signal = rustix::process::Signal::from_named_raw(signal);
    if let (Some(pid), Some(signal)) = (number(child), signal) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
