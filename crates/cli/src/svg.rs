//! What pictures are made of.

use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::geteuid;

use crate::{identity, output};

/// A white picture, to be ended by [`close`].
pub fn open(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    )
}

/// Ends a picture.
pub fn close(svg: &mut String) {
    svg.push_str("</svg>\n");
}

/// The line above a picture, from `x` on.
pub fn headline(svg: &mut String, x: f64, what: &str) {
    text(svg, x, 24.0, "start", &format!("<tspan font-size=\"16\">{}</tspan>", escaped(what)));
}

/// A text, which is escaped already.
pub fn text(svg: &mut String, x: f64, y: f64, anchor: &str, what: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{what}</text>");
}

/// What may stand in a text.
pub fn escaped(text: &str) -> String {
    output::printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Writes the picture that `verb` drew of `input` to a file, or to standard output. The status to end with.
pub fn put(verb: &str, picture: &str, input: &Path, to: Option<&Path>) -> i32 {
    let Some(path) = to.filter(|path| path.as_os_str() != "-") else { return output::print(verb, picture) };
    if identity::at(path).is_some_and(|one| identity::at(input) == Some(one)) {
        let shown = path.display();
        output::tell(format_args!("selfpage {verb}: {shown}: the picture is drawn of this file; name another with -o"));
        return 2;
    }
    match replace(path, picture) {
        Ok(()) => 0,
        Err(why) => {
            output::tell(format_args!("selfpage {verb}: {}: {why}", path.display()));
            1
        }
    }
}

/// Writes a file whole or not at all: what was there stays where the disk is full.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let there = match (fs::metadata(path), fs::read_link(path)) {
        // Of a link to nothing, what it names.
        (Err(why), Ok(named)) if why.kind() == io::ErrorKind::NotFound => {
            return replace(&path.with_file_name("").join(named), text);
        }
        (there, _) => there.ok(),
    };
    // A pipe or a device, as /dev/stdout may be.
    if there.as_ref().is_some_and(|about| !about.is_file()) {
        return fs::write(path, text);
    }
    // Of a link, what it names.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    // A name is replaced by whoever may write to its directory. Who may not write to the file is refused, as a shell's `>` would be.
    if there.is_some() {
        File::options().write(true).open(&path)?;
    }
    let new = path.with_file_name(format!(".selfpage-{}", std::process::id()));
    let mut file = File::create_new(&new).or_else(|why| if is_left(&new) { again(&new) } else { Err(why) })?;
    // Others see by it that this one is written: where files cannot be locked, none does.
    let _ = file.try_lock();
    let written = file.write_all(text.as_bytes());
    let written = written.and_then(|()| there.map_or(Ok(()), |about| file.set_permissions(about.permissions())));
    // The new name may be on the disk before the contents are, and the machine stop between the two.
    let written = written.and_then(|()| file.sync_all());
    let replaced = written.and_then(|()| fs::rename(&new, &path));
    if replaced.is_err() {
        let _ = fs::remove_file(&new);
    }
    replaced
}

/// Whether a file is of this user's, and nobody writes it: one that was killed has left it, and had the number that this process has now, as
/// happens in containers.
fn is_left(new: &Path) -> bool {
    let is_ours = |about: fs::Metadata| about.is_file() && about.uid() == geteuid().as_raw();
    fs::symlink_metadata(new).is_ok_and(is_ours)
        && File::open(new).is_ok_and(|file| !matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Makes a file anew.
fn again(new: &Path) -> io::Result<File> {
    fs::remove_file(new)?;
    File::create_new(new)
}
