//! Key pairs: the server's own, and those made for one login.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use russh::keys::{
    HashAlg, PrivateKey,
    ssh_key::{LineEnding, private::Ed25519Keypair},
};
use stockade_model::Secret;

const SEED_BYTES: usize = 32;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read or made.
    #[error("cannot use the SSH host key {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// What is in the file is no key.
    #[error("{} holds no SSH private key without a passphrase", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What the parser said.
        #[source]
        source: russh::keys::ssh_key::Error,
    },
    /// A key cannot be written as text.
    #[error("cannot encode an SSH key")]
    Encode(#[source] russh::keys::ssh_key::Error),
}

/// What clients know the server by.
pub struct HostKey {
    pub(crate) private: PrivateKey,
    /// As in `known_hosts`.
    pub public: String,
    /// As `ssh` shows it.
    pub fingerprint: String,
}

impl std::fmt::Debug for HostKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostKey").field("fingerprint", &self.fingerprint).finish_non_exhaustive()
    }
}

impl HostKey {
    /// The key in the file; one is made, for its owner's eyes only, if the file is not there.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds something else.
    pub fn open_or_create(path: &Path) -> Result<Self, KeyError> {
        let failed = |source| KeyError::File { path: path.to_owned(), source };
        let private = match fs::read(path) {
            Ok(text) => match PrivateKey::from_openssh(text) {
                Ok(key) if !key.is_encrypted() => key,
                Ok(_) => return Err(malformed(path, russh::keys::ssh_key::Error::Encrypted)),
                Err(error) => return Err(malformed(path, error)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let private = random();
                let text = private.to_openssh(LineEnding::LF).map_err(KeyError::Encode)?;
                write_whole(path, text.as_bytes()).map_err(failed)?;
                private
            }
            Err(error) => return Err(failed(error)),
        };
        let public = private.public_key().to_openssh().map_err(KeyError::Encode)?;
        let fingerprint = private.fingerprint(HashAlg::Sha256).to_string();
        Ok(Self { private, public, fingerprint })
    }
}

fn malformed(path: &Path, source: russh::keys::ssh_key::Error) -> KeyError {
    KeyError::Malformed { path: path.to_owned(), source }
}

/// Appears with all of its content or not at all.
fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".new");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&unfinished)?;
    io::Write::write_all(&mut file, text)?;
    file.sync_all()?;
    fs::rename(&unfinished, path)
}

/// A pair for one login.
#[derive(Debug)]
pub struct KeyPair {
    /// As in `id_ed25519`.
    pub private: Secret,
    /// As in `id_ed25519.pub`.
    pub public: String,
}

impl KeyPair {
    /// A new one.
    ///
    /// # Errors
    /// It cannot be written as text.
    pub fn generate() -> Result<Self, KeyError> {
        let private = random();
        let text = private.to_openssh(LineEnding::LF).map_err(KeyError::Encode)?;
        let public = private.public_key().to_openssh().map_err(KeyError::Encode)?;
        Ok(Self { private: Secret::new(text.as_str()), public })
    }
}

fn random() -> PrivateKey {
    let mut seed = [0; SEED_BYTES];
    getrandom::fill(&mut seed).expect("the kernel's random generator works once it is seeded");
    PrivateKey::from(Ed25519Keypair::from_seed(&seed))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_host_key_is_made_once_and_closed_to_others() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("ssh-host-key");
        let first = HostKey::open_or_create(&path).expect("made");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        let again = HostKey::open_or_create(&path).expect("read");
        assert_eq!((first.public, first.fingerprint), (again.public, again.fingerprint));
        assert_eq!(fs::read_dir(place.path()).expect("there").count(), 1);
        fs::write(&path, "what").expect("written");
        assert!(matches!(HostKey::open_or_create(&path), Err(KeyError::Malformed { .. })));
    }

    #[test]
    fn pairs_differ_and_show_no_secret() {
        let (one, other) = (KeyPair::generate().expect("a pair"), KeyPair::generate().expect("a pair"));
        assert_ne!(one.public, other.public);
        let key = PrivateKey::from_openssh(one.private.expose()).expect("a key");
        assert_eq!(key.public_key().to_openssh().expect("text"), one.public);
        assert!(!format!("{one:?}").contains("PRIVATE"));
    }
}
