//! Looks for texts that must not be anywhere in a directory: in clear, in base64, in hexadecimal, in JSON.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use memchr::memmem::Finder;

const PIECE: usize = 4 << 20;

/// A text in the forms it might be found in.
pub struct Needle {
    name: &'static str,
    forms: Vec<Vec<u8>>,
}

/// Where a text was found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finding {
    /// Which one.
    pub name: &'static str,
    /// In which file.
    pub path: PathBuf,
}

impl Needle {
    /// A text of at least 12 bytes, and what to call it in findings.
    pub fn new(name: &'static str, text: &str) -> Self {
        assert!(text.len() >= 12, "a short text is found by chance");
        let mut forms = vec![text.as_bytes().to_vec(), text.bytes().rev().collect()];
        forms.push(text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>().into_bytes());
        forms.push(text.encode_utf16().flat_map(u16::to_le_bytes).collect());
        // Base64 depends on where in a triple the text starts; its first and last characters on what is beside it.
        for before in 0..3 {
            let padded = format!("{}{text}", "x".repeat(before));
            let encoded = STANDARD_NO_PAD.encode(padded);
            forms.push(encoded.as_bytes()[(before * 8).div_ceil(6)..encoded.len() - 1].to_vec());
        }
        Self { name, forms }
    }
}

/// Every file below a directory that holds one of the texts. Files that go away meanwhile are passed over.
pub fn scan(directory: &Path, needles: &[Needle]) -> Vec<Finding> {
    let finders: Vec<(&'static str, Vec<Finder<'_>>)> =
        needles.iter().map(|needle| (needle.name, needle.forms.iter().map(Finder::new).collect())).collect();
    let longest = needles.iter().flat_map(|needle| &needle.forms).map(Vec::len).max().unwrap_or(0);
    let mut findings = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => directories.push(path),
                Ok(kind) if kind.is_file() => {
                    let names = scan_file(&path, &finders, longest).unwrap_or_else(|error| match error.kind() {
                        io::ErrorKind::NotFound => Vec::new(),
                        _ => panic!("{}: {error}", path.display()),
                    });
                    findings.extend(names.into_iter().map(|name| Finding { name, path: path.clone() }));
                }
                _ => {}
            }
        }
    }
    findings
}

fn scan_file(
    path: &Path,
    finders: &[(&'static str, Vec<Finder<'_>>)],
    longest: usize,
) -> io::Result<Vec<&'static str>> {
    let mut file = File::open(path)?;
    let mut found = Vec::new();
    let mut held: Vec<u8> = Vec::with_capacity(PIECE + longest);
    loop {
        let read = (&mut file).take(PIECE as u64).read_to_end(&mut held)?;
        if read == 0 {
            return Ok(found);
        }
        for (name, forms) in finders {
            if !found.contains(name) && forms.iter().any(|form| form.find(&held).is_some()) {
                found.push(name);
            }
        }
        held.drain(..held.len().saturating_sub(longest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_in_every_form_and_over_the_borders_of_pieces() {
        let text = "sk-live-0123456789";
        let directory = tempfile::tempdir().expect("a directory");
        let deep = directory.path().join("a/b");
        std::fs::create_dir_all(&deep).expect("made");
        let look = || scan(directory.path(), &[Needle::new("key", text), Needle::new("other", "nowhere-to-be-found")]);
        assert_eq!(look(), []);
        let encode = |text: String| STANDARD_NO_PAD.encode(text);
        let forms = [
            text.to_owned(),
            encode(text.to_owned()),
            encode(format!("user:{text}")),
            encode(format!("u:{text}")),
            encode(format!("me:{text}:x")),
            text.bytes().map(|byte| format!("{byte:02x}")).collect(),
        ];
        for form in forms {
            let path = deep.join("file");
            for before in [0, 3, PIECE - 5] {
                std::fs::write(&path, format!("{}{form}...", " ".repeat(before))).expect("written");
                assert_eq!(look(), [Finding { name: "key", path: path.clone() }], "{form} after {before}");
            }
        }
    }
}
