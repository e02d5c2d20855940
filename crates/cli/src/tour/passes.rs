//! A file that is read again and again, and does not fit its frames: the policy decides what that costs.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use selfpage::pager::PagerError;
use selfpage::{Domain, Failure, FileAccess, Trap};

use super::scratch::Scratch;
use super::screen::Screen;
use super::{MIB, PAGE_BYTES, Row, Sizes, Stop, mib};
use crate::output;

const WORDS: usize = PAGE_BYTES / 8;
/// Pages between two looks at the clock.
const STEP: usize = 64;
/// Of less than this, the reserve of frames is too large a part for the figures to mean anything.
const LEAST_FILE_BYTES: usize = 4 * MIB;

/// What a line about the user's file begins with.
static FILE: OnceLock<String> = OnceLock::new();

const CUT_SHORT: &str = "it was cut short meanwhile; begin again";

/// One pass over a file.
struct Pass {
    read_bytes: u64,
    took: Duration,
}

/// Loops over a file of the tour's own.
pub fn of_own_file(screen: &mut Screen, sizes: &Sizes) -> Result<Vec<Row>, Stop> {
    let len_bytes = sizes.frames_bytes / 3 * 4 / PAGE_BYTES * PAGE_BYTES;
    screen.say(&format!(
        "2. A file of {}, a third larger than its {} of frames, read from front to back again and again.",
        mib(len_bytes as u64),
        mib(sizes.frames_bytes as u64)
    ));
    let file = Scratch::write(screen, len_bytes)?;
    compare(screen, &file.path(), len_bytes, sizes.frames_bytes, sizes)
}

/// Loops over the user's file, or over its beginning where it is very large.
pub fn of_users_file(screen: &mut Screen, path: &Path, sizes: &Sizes) -> Result<Vec<Row>, Stop> {
    let file_bytes = checked_len(path).map_err(|why| Stop::BadFile(format!("{}: {why}", path.display())))?;
    let len_bytes = file_bytes.min(sizes.file_bytes_max as u64) as usize;
    let frames_bytes = len_bytes / 4 * 3 / PAGE_BYTES * PAGE_BYTES;
    let name = output::printable(&path.display().to_string());
    let part = match len_bytes as u64 {
        len if len == file_bytes => format!("{} of {name}", mib(len)),
        len => format!("The first {} of the {} of {name}", mib(len), mib(file_bytes)),
    };
    screen.say(&format!(
        "{part}, read from front to back again and again in {} of frames. The file is only read.",
        mib(frames_bytes as u64)
    ));
    let _ = FILE.set(format!("selfpage tour: {}", path.display()));
    compare(screen, path, len_bytes, frames_bytes, sizes)
}

/// Ends the tour where the file cannot be read on: the access would be a SIGBUS.
fn end(_: usize, failure: Failure) {
    // In a trap: of the thread that loops, which holds no lock.
    let name = FILE.get().map_or("selfpage tour: the file", String::as_str);
    if io::stdout().is_terminal() {
        // Below the live line.
        let _ = writeln!(io::stderr());
    }
    match failure {
        Failure::Pager(PagerError::Truncated) => {
            output::tell(format_args!("{name}: {CUT_SHORT}"));
        }
        Failure::Pager(PagerError::Io(errno)) => {
            output::tell(format_args!("{name}: {}; give another file", io::Error::from_raw_os_error(errno)));
        }
        other => output::tell(format_args!("{name}: {other}; begin again")),
    }
    std::process::exit(2);
}

/// The length of a file that can be looped over.
fn checked_len(path: &Path) -> Result<u64, String> {
    let about = fs::metadata(path).map_err(|error| error.to_string())?;
    if about.is_dir() {
        return Err("it is a directory; give a regular file".into());
    }
    if !about.is_file() {
        return Err("it is not a regular file".into());
    }
    fs::File::open(path).map_err(|error| error.to_string())?;
    match about.len() {
        0 => Err("it is empty".into()),
        len if len < LEAST_FILE_BYTES as u64 => {
            Err(format!("it has {len} bytes; the tour wants a file of {} at least", mib(LEAST_FILE_BYTES as u64)))
        }
        len => Ok(len),
    }
}

fn compare(
    screen: &mut Screen,
    path: &Path,
    len_bytes: usize,
    frames_bytes: usize,
    sizes: &Sizes,
) -> Result<Vec<Row>, Stop> {
    let mut rows = Vec::new();
    let mut sums = Vec::new();
    for (policy, keeps) in [("lru", "keeps what was used last"), ("mru", "gives up what was used last")] {
        screen.say(&format!("   {}: {keeps}.", policy.to_uppercase()));
        let domain = Domain::with_frames(frames_bytes).policy(policy).on_failure(end).build()?;
        let region = domain.region(len_bytes).name("the file").trap(Trap::Upcall).file(path, 0, FileAccess::Read);
        if region.is_err() && fs::metadata(path).is_ok_and(|about| about.len() < len_bytes as u64) {
            return Err(Stop::BadFile(format!("{}: {CUT_SHORT}", path.display())));
        }
        let region = region?;
        let words = region.as_slice::<u64>();
        let mut again = Vec::new();
        for number in 0..=sizes.passes {
            let (pass, sum) = one(screen, &domain, words, &format!("{policy}, pass {number}"));
            sums.push(sum);
            screen.say(&match number {
                0 => format!("     pass 0 read {} (the first time all of it)", mib(pass.read_bytes)),
                _ => format!(
                    "     pass {number} read {} again, in {:.2} s",
                    mib(pass.read_bytes),
                    pass.took.as_secs_f64()
                ),
            });
            if number > 0 {
                again.push(pass);
            }
        }
        rows.push(row(policy, &again, len_bytes));
    }
    if sums.iter().any(|sum| *sum != sums[0]) {
        return Err(Stop::Failed("the passes did not all read the same: was the file written to meanwhile?".into()));
    }
    screen.say(
        "   All passes read the same bytes. Page caches use LRU, which drops each page just before it is needed again; a\n   \
         program that knows how it reads can say so. (A quarter of the file does not fit. What MRU reads beyond that went to\n   \
         make room for what was read ahead.)\n",
    );
    Ok(rows)
}

/// Reads every word once. Returns the sum, too.
fn one(screen: &mut Screen, domain: &Domain, words: &[u64], name: &str) -> (Pass, u64) {
    let filled = || domain.stats().counts.bytes_filled;
    let (before, began) = (filled(), Instant::now());
    let mut sum = 0u64;
    screen.begin(words.len());
    for (number, part) in words.chunks(STEP * WORDS).enumerate() {
        sum = part.iter().fold(sum, |sum, word| sum.rotate_left(1).wrapping_add(*word));
        if screen.is_due() {
            let done = number * STEP * WORDS + part.len();
            let line = format!(
                "{name}: {} of {} | {} read from the file",
                mib(done as u64 * 8),
                mib(words.len() as u64 * 8),
                mib(filled() - before)
            );
            screen.show(done, &line);
        }
    }
    (Pass { read_bytes: filled() - before, took: began.elapsed() }, sum)
}

/// The mean of the passes after the first.
fn row(policy: &str, again: &[Pass], len_bytes: usize) -> Row {
    let count = again.len().max(1) as u64;
    let read = again.iter().map(|pass| pass.read_bytes).sum::<u64>() / count;
    let percent = read as f64 * 100.0 / len_bytes as f64;
    let figures = format!("{} read again in a pass, {percent:.0} % of it", mib(read));
    let took = again.iter().map(|pass| pass.took).sum::<Duration>() / count as u32;
    Row { step: format!("loop over {} of file with {policy}", mib(len_bytes as u64)), figures, took }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_looped_over_is_named() {
        let refused = |path: &str| checked_len(Path::new(path)).unwrap_err();
        assert!(refused("/").contains("directory"));
        assert!(refused("/nonexistent").contains("No such file"));
        assert!(refused("/dev/zero").contains("regular"));
        assert!(refused("/proc/self/status").contains("empty"));
        assert!(refused("Cargo.toml").contains("4.0 MiB"));
    }

    #[test]
    fn a_row_is_the_mean_of_its_passes() {
        let pass = |mib: u64| Pass { read_bytes: mib << 20, took: Duration::from_secs(mib) };
        let row = row("lru", &[pass(1), pass(3)], 8 << 20);
        assert!(row.figures.starts_with("2.0 MiB") && row.figures.contains("25 %"), "{}", row.figures);
        assert_eq!(row.took, Duration::from_secs(2));
    }
}
