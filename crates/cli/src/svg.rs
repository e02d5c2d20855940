//! What pictures are made of.

use std::fmt::Write as _;
use std::path::Path;

use crate::output;

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
    let plain: String = text.chars().map(|char| if char.is_control() { '?' } else { char }).collect();
    plain.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Writes the picture that `verb` drew to a file, or to standard output. The status to end with.
pub fn put(verb: &str, picture: &str, to: Option<&Path>) -> i32 {
    let Some(path) = to else { return output::print(verb, picture) };
    match std::fs::write(path, picture) {
        Ok(()) => 0,
        Err(why) => {
            output::tell(format_args!("selfpage {verb}: {}: {why}", path.display()));
            1
        }
    }
}
