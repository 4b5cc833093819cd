//! Looks for texts that must not be anywhere in a directory: in clear, in base64, in hexadecimal, in JSON.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use memchr::memmem::Finder;

const PIECE: usize = 4 << 20;

/// A text in the forms it might be found in.
pub struct Needle {
    name: String,
    forms: Vec<Vec<u8>>,
}

/// Where a text was found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finding {
    /// Which one.
    pub name: String,
    /// In which file.
    pub path: PathBuf,
}

impl Needle {
    /// The shortest text that is not found by chance, in bytes.
    pub const SHORTEST: usize = 12;

    /// A text of at least [`Needle::SHORTEST`] bytes, and what to call it in findings.
    pub fn new(name: &str, text: &str) -> Self {
        assert!(text.len() >= Self::SHORTEST, "a short text is found by chance");
        let mut forms = vec![text.as_bytes().to_vec(), text.bytes().rev().collect()];
        forms.push(text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>().into_bytes());
        forms.push(text.encode_utf16().flat_map(u16::to_le_bytes).collect());
        // Base64 depends on where in a triple the text starts; its first and last characters on what is beside it.
        for before in 0..3 {
            let padded = format!("{}{text}", "x".repeat(before));
            let encoded = STANDARD_NO_PAD.encode(padded);
            forms.push(encoded.as_bytes()[(before * 8).div_ceil(6)..encoded.len() - 1].to_vec());
        }
        Self { name: name.to_owned(), forms }
    }
}

/// Files by what identifies them on this host: one with several names is one file.
#[derive(Debug, Default)]
pub struct Inodes(HashSet<(u64, u64)>);

impl Inodes {
    /// Every file below a directory.
    pub fn below(directory: &Path) -> Self {
        let mut inodes = HashSet::new();
        for_each_file(directory, &mut |path| {
            inodes.extend(fs::metadata(path).map(|file| (file.dev(), file.ino())));
        });
        Self(inodes)
    }

    fn hold(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|file| self.0.contains(&(file.dev(), file.ino())))
    }
}

/// Every file below a directory that holds one of the texts, but for those to be passed over. Files that go away
/// meanwhile are passed over, too.
pub fn scan(directory: &Path, needles: &[Needle], passed_over: &Inodes) -> Vec<Finding> {
    let finders: Vec<(&str, Vec<Finder<'_>>)> =
        needles.iter().map(|needle| (&*needle.name, needle.forms.iter().map(Finder::new).collect())).collect();
    let longest = needles.iter().flat_map(|needle| &needle.forms).map(Vec::len).max().unwrap_or(0);
    let mut findings = Vec::new();
    for_each_file(directory, &mut |path| {
        if passed_over.hold(path) {
            return;
        }
        let names = scan_file(path, &finders, longest).unwrap_or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Vec::new(),
            _ => panic!("{}: {error}", path.display()),
        });
        findings.extend(names.into_iter().map(|name| Finding { name: name.to_owned(), path: path.to_owned() }));
    });
    findings
}

fn for_each_file(directory: &Path, see: &mut dyn FnMut(&Path)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => for_each_file(&entry.path(), see),
            Ok(kind) if kind.is_file() => see(&entry.path()),
            _ => {}
        }
    }
}

fn scan_file<'a>(path: &Path, finders: &[(&'a str, Vec<Finder<'_>>)], longest: usize) -> io::Result<Vec<&'a str>> {
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
                found.push(*name);
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
        let needles = [Needle::new("key", text), Needle::new("other", "nowhere-to-be-found")];
        let look = || scan(directory.path(), &needles, &Inodes::default());
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
                assert_eq!(look(), [Finding { name: "key".into(), path: path.clone() }], "{form} after {before}");
            }
        }
    }

    #[test]
    fn files_to_be_passed_over_are_known_by_any_of_their_names() {
        let directory = tempfile::tempdir().expect("a directory");
        let (shared, own) = (directory.path().join("shared"), directory.path().join("own"));
        std::fs::create_dir_all(&shared).expect("made");
        std::fs::create_dir_all(&own).expect("made");
        std::fs::write(shared.join("disk"), "sk-live-0123456789").expect("written");
        std::fs::hard_link(shared.join("disk"), own.join("linked")).expect("linked");
        std::fs::copy(shared.join("disk"), own.join("copied")).expect("copied");
        let findings = scan(&own, &[Needle::new("key", "sk-live-0123456789")], &Inodes::below(&shared));
        assert_eq!(findings, [Finding { name: "key".into(), path: own.join("copied") }]);
    }
}
