//! The threads of this process, as /proc shows them.
//!
//! It numbers them as its mount does: a process in a PID namespace of its own, under the /proc of an outer one, has other numbers there
//! than gettid(2) says.
//!
//! For `selfpage run` alone.

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Pid;
use rustix::thread::gettid;

const TASKS: &str = "/proc/self/task";
const STAT: &str = "/proc/self/stat";

/// Each thread's number, as gettid(2) says it, and its folder in /proc; `None`: it has ended meanwhile. Where one that runs is
/// missing, there is such a one.
///
/// # Context
/// Normal or PagerThread.
///
/// # Errors
/// What the kernel does not tell: there is no /proc, or one that does not know this process, or no descriptor to be had.
pub fn each() -> io::Result<Vec<(Option<u32>, PathBuf)>> {
    let numbers = Numbers::of_proc();
    let mut tries = 0;
    loop {
        let folders = std::fs::read_dir(TASKS)?.map(|task| Ok(task?.path())).collect::<io::Result<Vec<_>>>()?;
        // The kernel's list ends early at a thread that ends just then, without it and what it may have begun.
        let is_whole = folders.len() >= count()?;
        tries += 1;
        if is_whole || tries == MOST_TRIES {
            let one_that_has_ended = (!is_whole).then(|| Ok((None, PathBuf::from(TASKS))));
            let each = folders.into_iter().map(|folder| Ok((numbers.of(&folder)?, folder)));
            return each.chain(one_that_has_ended).collect();
        }
    }
}

/// How often the list is asked for anew. Where threads end all the time it may never be whole.
const MOST_TRIES: u32 = 8;

/// How many there are.
fn count() -> io::Result<usize> {
    let stat = text(Path::new(STAT))?;
    // Behind the name.
    let number = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(17)?.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("{STAT} does not say how many threads there are")))
}

/// What a file of a process or a thread says. A name in it may be anything, also what is no text: the kernel cuts it within a letter.
///
/// # Context
/// Normal or PagerThread.
///
/// # Errors
/// What opening or reading it meets.
pub fn text(file: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(file)?).into_owned())
}

/// The folder of one thread. Where there is none it is a name that nothing has.
pub(crate) fn folder(thread: u32) -> PathBuf {
    let found = || each().ok()?.into_iter().find_map(|(number, folder)| (number == Some(thread)).then_some(folder));
    folder_at_hand(thread).or_else(found).unwrap_or_else(|| named(thread))
}

/// The same, where it takes no look at every thread.
pub(crate) fn folder_at_hand(thread: u32) -> Option<PathBuf> {
    matches!(Numbers::of_proc(), Numbers::Ours).then(|| named(thread))
}

fn named(number: u32) -> PathBuf {
    format!("{TASKS}/{number}").into()
}

/// Whose numbers the folders have.
enum Numbers {
    Ours,
    Others,
}

impl Numbers {
    fn of_proc() -> Numbers {
        // Its end is the calling thread's number there.
        let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
        let here = Pid::as_raw(Some(gettid())).to_string();
        if link.file_name().is_none_or(|there| *there == *here) { Numbers::Ours } else { Numbers::Others }
    }

    /// The number of the thread that has this folder; `None`: it has ended.
    fn of(&self, folder: &Path) -> io::Result<Option<u32>> {
        match self {
            Numbers::Ours => Ok(folder.file_name().and_then(|name| name.to_str()?.parse().ok())),
            Numbers::Others => match text(&folder.join("status")) {
                Ok(status) => Ok(innermost(&status)),
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
                Err(error) => Err(error),
            },
        }
    }
}

/// A thread's number in its own namespace, by its status: there is one for each namespace, from that of /proc inwards.
fn innermost(status: &str) -> Option<u32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::child;

    #[test]
    fn each_thread_has_a_folder() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(Pid::as_raw(Some(gettid())) as u32).unwrap();
            let _ = ends.recv();
        });
        let number = told.recv().unwrap();
        let all = each().unwrap();
        let listed = all.iter().find(|task| task.0 == Some(number)).unwrap();
        assert_eq!(listed.1, folder(number));
        let status = std::fs::read_to_string(listed.1.join("status")).unwrap();
        assert_eq!(innermost(&status), Some(number));
        drop(end);
        thread.join().unwrap();
        assert_eq!(folder(u32::MAX), PathBuf::from(format!("{TASKS}/{}", u32::MAX)));
    }

    /// At each moment there is one of them.
    #[test]
    fn threads_that_hand_on_to_one_another_are_listed() {
        const LOOKS: usize = 20_000;
        fn hand_on(until: Arc<AtomicBool>) {
            if !until.load(Ordering::Relaxed) {
                std::thread::spawn(move || hand_on(until));
            }
        }
        // Alone: of other tests' threads nothing is known.
        child::forked(|| {
            let until = Arc::new(AtomicBool::new(false));
            hand_on(until.clone());
            let missing = (0..LOOKS).filter(|_| each().unwrap().len() < 2).count();
            until.store(true, Ordering::Relaxed);
            assert_eq!(missing, 0);
        });
    }

    #[test]
    fn the_last_of_several_numbers_is_the_threads_own() {
        assert_eq!(innermost("Name:\ta\nPid:\t18284\nNSpid:\t18284\t7\t1\nThreads:\t1\n"), Some(1));
        assert_eq!(innermost("Name:\ta\nPid:\t18284\n"), None);
    }
}
