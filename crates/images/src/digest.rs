//! Names for content: SHA-256 over labelled fields, so that no two lists of fields give the same bytes.

use std::{fs::File, io, path::Path};

use sha2::{Digest as _, Sha256};

/// Digits kept in file names: 128 bits.
const SHORT: usize = 32;

#[derive(Default)]
pub(crate) struct Digest(Sha256);

impl Digest {
    pub(crate) fn field(mut self, label: &str, value: impl AsRef<[u8]>) -> Self {
        for part in [label.as_bytes(), value.as_ref()] {
            self.0.update((part.len() as u64).to_be_bytes());
            self.0.update(part);
        }
        self
    }

    pub(crate) fn finish(self) -> String {
        let mut text: String = self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        text.truncate(SHORT);
        text
    }
}

/// The digest of a file's bytes.
pub(crate) fn of_file(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    let mut text: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    text.truncate(SHORT);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_a_byte_between_fields_changes_the_digest() {
        let one = Digest::default().field("a", "bc").finish();
        assert_eq!(one, Digest::default().field("a", "bc").finish());
        assert_ne!(one, Digest::default().field("ab", "c").finish());
        assert_ne!(one, Digest::default().field("a", "b").field("", "c").finish());
    }
}
