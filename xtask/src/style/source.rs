//! The files of the tree, and Rust source without its comments and strings.

use super::findings::Finding;
use std::path::Path;

/// One text file.
pub struct Source {
    /// From the repository's root, with `/`.
    pub path: String,
    pub text: String,
    /// Of Rust: the text with every byte of comments, strings and character literals blanked. Same lines, same columns.
    pub code: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Source {
        let code = if path.ends_with(".rs") { blank(text) } else { String::new() };
        Source { path: path.into(), text: text.into(), code }
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// A finding at a byte of the text.
    pub fn finding(&self, at: usize, what: impl Into<String>) -> Finding {
        let line = self.text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1;
        Finding { path: self.path.clone(), line, what: what.into() }
    }
}

/// Every text file under the root that is not built or git's own.
pub fn tree(root: &Path) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(kind) = entry.file_type() else { continue };
            let name = entry.file_name();
            if kind.is_dir() {
                if ![".git", "target", ".venv", "__pycache__", ".pytest_cache"].iter().any(|skipped| name == *skipped) {
                    dirs.push(path);
                }
            } else if kind.is_file() && name != "Cargo.lock" && name != ".git" {
                let Ok(text) = std::fs::read_to_string(&path) else {
                    continue;
                };
                let path = path.strip_prefix(root).unwrap_or(&path);
                sources.push(Source::new(&path.to_string_lossy(), &text));
            }
        }
    }
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources
}

/// Where `word` stands in `text` with no letter, digit or underscore on either side.
pub fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let part = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    text.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let bytes = text.as_bytes();
        !part(at.checked_sub(1).and_then(|before| bytes.get(before))) && !part(bytes.get(at + word.len()))
    })
}

fn blank(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut before = ' ';
    while let Some(first) = rest.chars().next() {
        let in_word = before.is_alphanumeric() || before == '_';
        let length = if in_word { 0 } else { raw_string_len(rest) }.max(other_len(rest));
        if length > 0 {
            let (hidden, after) = rest.split_at(length);
            code.extend(hidden.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
            (rest, before) = (after, ' ');
        } else if first.is_ascii() {
            code.push(first);
            (rest, before) = (&rest[1..], first);
        } else {
            code.extend(std::iter::repeat_n(' ', first.len_utf8()));
            (rest, before) = (&rest[first.len_utf8()..], first);
        }
    }
    code
}

/// The length of the raw string that `text` begins with, or 0.
fn raw_string_len(text: &str) -> usize {
    let Some(after_r) = ["r", "br", "cr"].iter().find_map(|prefix| text.strip_prefix(prefix)) else {
        return 0;
    };
    let body = after_r.trim_start_matches('#');
    let hashes = after_r.len() - body.len();
    let Some(body) = body.strip_prefix('"') else { return 0 };
    let close = format!("\"{}", "#".repeat(hashes));
    let end = body.find(&close).map_or(body.len(), |at| at + close.len());
    text.len() - body.len() + end
}

/// The length of the comment, string or character literal that `text` begins with, or 0.
fn other_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    match bytes {
        [b'/', b'/', ..] => text.find('\n').unwrap_or(text.len()),
        [b'/', b'*', ..] => block_comment_len(bytes),
        [b'"', ..] => quoted_len(bytes, b'"'),
        [b'\'', b'\\', ..] => quoted_len(bytes, b'\''),
        // A lifetime has no closing quote after one character.
        [b'\'', ..] => {
            let mut characters = text.char_indices().skip(2);
            characters.next().map_or(0, |(at, character)| if character == '\'' { at + 1 } else { 0 })
        }
        _ => 0,
    }
}

fn quoted_len(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 2,
            byte if *byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn block_comment_len(bytes: &[u8]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < bytes.len() {
        match &bytes[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        let code = Source::new("a.rs", text).code;
        assert_eq!(code.len(), text.len());
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_strings_are_not_code() {
        assert_eq!(code("a // unsafe\nb"), "a b");
        assert_eq!(code("a /* x /* y */ unsafe */ b"), "a b");
        assert_eq!(code(r#"f("unsafe \" {", 'u', '\'', b"x") g"#), "f( , , , b ) g");
        assert_eq!(code("f(r#\"unsafe \" {\"#, br\"y\\\") g"), "f( , ) g");
    }

    #[test]
    fn lifetimes_and_names_are_code() {
        assert_eq!(code("fn f<'a>(x: &'a str) {}"), "fn f<'a>(x: &'a str) {}");
        assert_eq!(code("let bar = var; r\"x\""), "let bar = var;");
    }

    #[test]
    fn a_word_stands_alone() {
        assert_eq!(words("unsafe_code unsafe not_unsafe unsafe", "unsafe").collect::<Vec<_>>(), [12, 30]);
    }
}
