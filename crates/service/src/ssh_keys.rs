//! Public keys that open sandboxes over SSH.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD, engine::general_purpose::STANDARD_NO_PAD};
use jiff::SignedDuration;
use sha2::{Digest as _, Sha256};
use stockade_model::{SSH_KEY_NAME, SandboxId, SshKeyId, quoted};
use stockade_store::SshKeyRecord;

use crate::{
    Principal, Service, ServiceError,
    error::{check_name, store_error},
};

const MOST_KEYS: u32 = 1000;
/// The largest key of an algorithm we take has a few hundred.
const LONGEST_KEY: usize = 2048;
const LONGEST_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
const ALGORITHMS: [&str; 4] = ["ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"];

/// A public key to be kept.
#[derive(Clone, Debug)]
pub struct SshKeyRequest {
    /// What to call it.
    pub name: String,
    /// A line as in `id_ed25519.pub`.
    pub public_key: String,
    /// The one sandbox it is to open; `None`: all of the caller's.
    pub sandbox: Option<SandboxId>,
    /// How long it opens anything; `None`: until it is removed.
    pub lifetime: Option<Duration>,
}

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// Lets a public key open the caller's sandboxes.
    pub async fn add_ssh_key(&self, who: &Principal, request: SshKeyRequest) -> Result<SshKeyRecord, ServiceError> {
        let invalid = |field, problem: String| ServiceError::Invalid { field, problem };
        let name = request.name.trim();
        check_name("name", SSH_KEY_NAME, name)?;
        let key = PublicKey::parse(&request.public_key).map_err(|problem| invalid("public_key", problem))?;
        if let Some(sandbox) = &request.sandbox {
            self.get(who, sandbox).await?;
        }
        let now = self.handle.core.now();
        let expires_at = match request.lifetime {
            Some(lifetime) if lifetime.is_zero() || lifetime > LONGEST_LIFETIME => {
                let problem = format!("must be over zero and at most {} s", LONGEST_LIFETIME.as_secs());
                return Err(invalid("lifetime_seconds", problem));
            }
            Some(lifetime) => SignedDuration::try_from(lifetime).ok().and_then(|time| now.checked_add(time).ok()),
            None => None,
        };
        let record = SshKeyRecord {
            id: SshKeyId::random(),
            name: name.to_owned(),
            fingerprint: key.fingerprint,
            public_key: key.line,
            sandbox: request.sandbox,
            created_at: now,
            expires_at,
        };
        // An expired one of the same text would be in the way.
        self.store().purge_ssh_keys(now).await.map_err(store_error)?;
        if self.store().insert_ssh_key(&who.workspace, &record, MOST_KEYS).await.map_err(store_error)? {
            return Ok(record);
        }
        match self.store().ssh_key(&who.workspace, &record.fingerprint).await.map_err(store_error)? {
            Some(there) => Err(ServiceError::SshKeyExists { fingerprint: there.fingerprint }),
            None => Err(invalid("public_key", format!("is one too many: a workspace has at most {MOST_KEYS}"))),
        }
    }

    /// The keys that open the caller's sandboxes.
    pub async fn ssh_keys(&self, who: &Principal) -> Result<Vec<SshKeyRecord>, ServiceError> {
        let now = self.handle.core.now();
        let mut keys = self.store().ssh_keys(&who.workspace).await.map_err(store_error)?;
        keys.retain(|key| key.expires_at.is_none_or(|end| end > now));
        Ok(keys)
    }

    /// Lets a key open nothing any more. Connections that are open stay so.
    pub async fn remove_ssh_key(&self, who: &Principal, key: &SshKeyId) -> Result<(), ServiceError> {
        let was_there = self.store().remove_ssh_key(&who.workspace, key).await.map_err(store_error)?;
        if was_there { Ok(()) } else { Err(ServiceError::SshKeyNotFound { id: key.to_string() }) }
    }

    /// Whether the key of this fingerprint opens a sandbox now, be it in whatever state. Nobody's key opens one that
    /// is not there.
    pub async fn opens_by_ssh(&self, id: &SandboxId, fingerprint: &str) -> Result<bool, ServiceError> {
        let sandbox = self.store().sandbox_of_any_workspace(id).await.map_err(store_error)?;
        let Some(sandbox) = sandbox else { return Ok(false) };
        let key = self.store().ssh_key(&sandbox.workspace, fingerprint).await.map_err(store_error)?;
        let now = self.handle.core.now();
        Ok(key.is_some_and(|key| {
            key.expires_at.is_none_or(|end| end > now) && key.sandbox.is_none_or(|sandbox| sandbox == *id)
        }))
    }
}

/// A public key as we keep it.
#[derive(Debug)]
struct PublicKey {
    line: String,
    fingerprint: String,
}

impl PublicKey {
    /// Reads a line of a `.pub` file. Whether the numbers in it are a key shows when somebody comes with it.
    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.contains("PRIVATE KEY") {
            return Err("is a private key: send the .pub file beside it, and nothing else".to_owned());
        }
        let mut words = text.split_ascii_whitespace();
        let (Some(algorithm), Some(encoded)) = (words.next(), words.next()) else {
            return Err("must be one line as in id_ed25519.pub: algorithm and key".to_owned());
        };
        if text.lines().count() != 1 || encoded.len() > LONGEST_KEY {
            return Err("must be one line as in id_ed25519.pub, of one key".to_owned());
        }
        if !ALGORITHMS.contains(&algorithm) {
            let algorithms = ALGORITHMS.join(", ");
            return Err(format!(
                "is of algorithm {}, not one of {algorithms}; `ssh-keygen -t ed25519` makes one",
                quoted(algorithm)
            ));
        }
        let blob = STANDARD.decode(encoded).map_err(|_| "is not base64 after the algorithm".to_owned())?;
        let name = blob.split_first_chunk::<4>().and_then(|(length, rest)| {
            let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
            rest.get(..length)
        });
        if name != Some(algorithm.as_bytes()) {
            return Err(format!("is not a key of {algorithm} inside"));
        }
        let fingerprint = format!("SHA256:{}", STANDARD_NO_PAD.encode(Sha256::digest(&blob)));
        Ok(Self { line: format!("{algorithm} {encoded}"), fingerprint })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGLwVRLRY3dZmJxmUSCPGr6bRYbGHUXDIlAF2uQ5PDQf";

    #[test]
    fn a_key_is_kept_without_its_comment_and_known_by_its_fingerprint() {
        for text in [KEY.to_owned(), format!("  {KEY} me@host with words\n")] {
            let key = PublicKey::parse(&text).expect("a key");
            assert_eq!(key.line, KEY);
            // As `ssh-keygen -l` has it.
            assert_eq!(key.fingerprint, "SHA256:fbiy2Cd5VZo0qGk+sM/znSoP7KuwUQh80Hg11IU40mY");
        }
    }

    #[test]
    fn what_is_no_public_key_of_ours_is_refused_and_not_repeated() {
        let cases = [
            ("", "one line"),
            ("ssh-ed25519", "one line"),
            ("-----BEGIN OPENSSH PRIVATE KEY-----\nc2VjcmV0\n", "private key"),
            (&format!("{KEY}\n{KEY}"), "one key"),
            ("ssh-rsa AAAAB3NzaC1yc2E=", "ssh-keygen -t ed25519"),
            ("ssh-ed25519 c2VjcmV0!", "base64"),
            ("ssh-ed25519 AAAAB3NzaC1yc2E=", "inside"),
            ("ssh-ed25519 /////3NzaC1yc2E=", "inside"),
            ("ssh-ed25519 AAA=", "inside"),
        ];
        for (text, problem) in cases {
            let said = PublicKey::parse(text).expect_err(text);
            assert!(said.contains(problem) && !said.contains("c2VjcmV0"), "{text}: {said}");
        }
    }
}
