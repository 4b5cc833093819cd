//! The deployment's secret and what is derived from it.
//!
//! ```text
//! secret file: 64 hexadecimal digits (32 random bytes) and a newline, mode 0600
//!   --HMAC("fingerprint")--> meta.secret: tells a foreign secret file from the right one
//!   --HMAC("token:" id)----> access token of a sandbox
//!   --HMAC("preview:" ...)-> tokens of links to a sandbox's ports
//!   --HMAC("traffic:" id)--> token for all of a sandbox's ports
//!   --HMAC("digest:" ...)--> keyed digests of requests
//!   --HMAC("seal")---------> ChaCha20-Poly1305 key; sealed = 12 bytes nonce, ciphertext, 16 bytes tag
//! ```
//!
//! The sandbox's or snapshot's id is associated data of what is sealed: a sealed value moved to another row does not open.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use ring::{
    aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hmac,
    rand::{SecureRandom, SystemRandom},
};
use stockade_model::{SandboxId, Secret};
use zeroize::Zeroizing;

use crate::StoreError;

const SECRET_BYTES: usize = 32;

/// The deployment's secret, read from its file.
pub struct SecretFile {
    path: PathBuf,
    mac: hmac::Key,
    seal: LessSafeKey,
    random: SystemRandom,
}

impl SecretFile {
    /// Reads the file; makes it first if it does not exist.
    ///
    /// # Errors
    /// The file cannot be read or made, is not 64 hexadecimal digits, or others may read it.
    pub fn open_or_create(path: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Secret { path: path.to_owned(), source };
        let secret = match read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(path).map_err(fail)?,
            read => read.map_err(fail)?,
        };
        let mac = hmac::Key::new(hmac::HMAC_SHA256, &*secret);
        let seal_key = hmac::sign(&mac, b"seal");
        let seal = UnboundKey::new(&CHACHA20_POLY1305, seal_key.as_ref()).expect("the key has 32 bytes");
        Ok(Self { path: path.to_owned(), mac, seal: LessSafeKey::new(seal), random: SystemRandom::new() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fingerprint(&self) -> Vec<u8> {
        hmac::sign(&self.mac, b"fingerprint").as_ref().to_vec()
    }

    pub(crate) fn access_token(&self, id: &SandboxId) -> Secret {
        let tag = hmac::sign(&self.mac, format!("token:{id}").as_bytes());
        Secret::new(hex(tag.as_ref()))
    }

    pub(crate) fn preview_token(&self, id: &SandboxId, port: u16, expires: i64) -> Secret {
        let tag = hmac::sign(&self.mac, format!("preview:{id}:{port}:{expires}").as_bytes());
        Secret::new(hex(&tag.as_ref()[..20]))
    }

    pub(crate) fn traffic_token(&self, id: &SandboxId) -> Secret {
        let tag = hmac::sign(&self.mac, format!("traffic:{id}").as_bytes());
        Secret::new(hex(&tag.as_ref()[..20]))
    }

    pub(crate) fn digest(&self, bytes: &[u8]) -> Vec<u8> {
        let mut context = hmac::Context::with_key(&self.mac);
        context.update(b"digest:");
        context.update(bytes);
        context.sign().as_ref().to_vec()
    }

    pub(crate) fn seal(&self, id: &str, plain: &[u8]) -> Vec<u8> {
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).expect("the kernel's random generator works once it is seeded");
        let mut sealed = plain.to_vec();
        self.seal
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(id.as_bytes()), &mut sealed)
            .expect("an environment is far under the cipher's limit of 256 GiB");
        [&nonce[..], &sealed].concat()
    }

    pub(crate) fn open(&self, id: &str, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, StoreError> {
        let damaged = || StoreError::damaged(format!("environment of {id}"), "it does not open with the secret file");
        let (nonce, sealed) = sealed.split_at_checked(NONCE_LEN).ok_or_else(damaged)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| damaged())?;
        let mut plain = Zeroizing::new(sealed.to_vec());
        let length = self.seal.open_in_place(nonce, Aad::from(id.as_bytes()), &mut plain).map_err(|_| damaged())?.len();
        plain.truncate(length);
        Ok(plain)
    }
}

fn read(path: &Path) -> io::Result<Zeroizing<[u8; SECRET_BYTES]>> {
    let mode = File::open(path)?.metadata()?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(io::Error::other(format!("others may read it (mode {:04o}): chmod 600 it", mode & 0o7777)));
    }
    let text = Zeroizing::new(std::fs::read_to_string(path)?);
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "expected 64 hexadecimal digits");
    let digits = text.trim_end().as_bytes();
    if digits.len() != 2 * SECRET_BYTES {
        return Err(bad());
    }
    let mut secret = Zeroizing::new([0; SECRET_BYTES]);
    for (byte, pair) in secret.iter_mut().zip(digits.chunks(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| bad())?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| bad())?;
    }
    Ok(secret)
}

/// Written beside and renamed, so that a crash leaves no half secret.
fn create(path: &Path) -> io::Result<Zeroizing<[u8; SECRET_BYTES]>> {
    let mut secret = Zeroizing::new([0; SECRET_BYTES]);
    SystemRandom::new().fill(&mut *secret).map_err(|_| io::Error::other("no random bytes"))?;
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(Zeroizing::new(hex(&*secret) + "\n").as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        File::open(parent)?.sync_all()?;
    }
    Ok(secret)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_for_its_sandbox_alone_and_reads_back_after_a_restart() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("secret");
        let (mine, other) = (SandboxId::random(), SandboxId::random());
        let first = SecretFile::open_or_create(&path).expect("created");
        let sealed = first.seal(mine.as_str(), b"TOKEN=abc");
        assert!(!sealed.windows(3).any(|window| window == b"abc"));
        let again = SecretFile::open_or_create(&path).expect("read back");
        assert_eq!(&**again.open(mine.as_str(), &sealed).expect("opens"), b"TOKEN=abc");
        assert!(again.open(other.as_str(), &sealed).is_err());
        assert!(again.open(mine.as_str(), &sealed[..5]).is_err());
        assert!(again.access_token(&mine).matches(first.access_token(&mine).expose()));
        assert!(!again.access_token(&other).matches(first.access_token(&mine).expose()));
        let mode = std::fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn a_secret_file_that_others_can_read_or_that_is_cut_is_refused() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("secret");
        SecretFile::open_or_create(&path).expect("created");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("chmod");
        assert!(SecretFile::open_or_create(&path).is_err());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("chmod");
        std::fs::write(&path, "abcdef").expect("cut");
        assert!(SecretFile::open_or_create(&path).is_err());
    }
}
