//! Ids are types, made from one list, so that a template is never passed as a sandbox. Their text is
//! a prefix and 20 characters of `[a-z0-9]` (103 random bits): a valid host name label and a valid
//! id in every API we serve.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::quoted;

const RANDOM_CHARS: usize = 20;
const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// Why a text is not an id.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{} is not a {noun} id: expected \"{prefix}\" and {RANDOM_CHARS} characters of a-z and 0-9", quoted(text))]
pub struct IdError {
    text: String,
    noun: &'static str,
    prefix: &'static str,
}

macro_rules! define_ids {
    ($($(#[$doc:meta])* $name:ident: $prefix:literal, $noun:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, utoipa::ToSchema)]
        #[serde(try_from = "String", into = "String")]
        #[schema(value_type = String)]
        pub struct $name(String);

        impl $name {
            /// A new id, different from all others.
            pub fn random() -> Self {
                Self(format!("{}{}", $prefix, random_chars()))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                if is_id(text, $prefix) {
                    return Ok(Self(text.to_owned()));
                }
                Err(IdError { text: text.to_owned(), noun: $noun, prefix: $prefix })
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

define_ids! {
    /// One sandbox, for all its life.
    SandboxId: "sbx", "sandbox";
    /// One template.
    TemplateId: "tpl", "template";
    /// One snapshot, and one directory of saved state.
    SnapshotId: "snap", "snapshot";
    /// One machine an engine runs; a sandbox may have several, one after the other.
    MachineId: "mch", "machine";
    /// One workspace: the owner of sandboxes, templates and keys.
    WorkspaceId: "wsp", "workspace";
    /// One API key (not its text).
    ApiKeyId: "key", "API key";
    /// One public key for SSH.
    SshKeyId: "ssh", "SSH key";
}

fn is_id(text: &str, prefix: &str) -> bool {
    text.strip_prefix(prefix)
        .is_some_and(|rest| rest.len() == RANDOM_CHARS && rest.bytes().all(|byte| ALPHABET.contains(&byte)))
}

fn random_chars() -> String {
    let mut chars = String::with_capacity(RANDOM_CHARS);
    while chars.len() < RANDOM_CHARS {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).expect("the kernel's random generator works once it is seeded");
        // 252 = 7 * 36: bytes from there on would favour the first letters.
        let fair = bytes.iter().filter(|byte| **byte < 252);
        chars.extend(fair.take(RANDOM_CHARS - chars.len()).map(|byte| char::from(ALPHABET[usize::from(byte % 36)])));
    }
    chars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_and_no_other_kind_accepts_it() {
        let id = SandboxId::random();
        assert_eq!(id.to_string().parse::<SandboxId>(), Ok(id.clone()));
        assert!(id.to_string().parse::<TemplateId>().is_err());
        for bad in ["", "sbx", "sbx_aaaaaaaaaaaaaaaaaaaa", "sbxAAAAAAAAAAAAAAAAAAAA", "sbxaaaaaaaaaaaaaaaaaaaaa"] {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad}");
        }
    }
}
