//! Secrets that stay outside. The guest holds a token; the value is fetched when a request leaves and is put into
//! that request alone.
//!
//! ```text
//! guest: Authorization: Bearer stk_3f…   ──intercepted──> policy: may this token go to this host, in this header?
//!                                              │ yes: provider.value(secret) ──> Authorization: Bearer sk-live…
//!                                              └ no:  403 and a record (or unchanged, where the policy says so)
//! ```
//!
//! Values are read at send time, so that a rotated secret needs no restart. They are checked to be header values
//! without control characters, marked sensitive (never indexed by HPACK, never printed), and never leave this module
//! in an error or a record; records carry names.

mod body;
mod mask;
mod request;

use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderValue;
use stockade_model::{SandboxId, Secret};
use zeroize::Zeroizing;

pub(crate) use self::{
    body::{TokenWatch, read_at_most},
    mask::{EchoMask, Masks},
    request::{Refused, Sent, Substituter},
};

/// Whose request needs the value.
#[derive(Clone, Debug)]
pub struct SecretRequest {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The owner labels given when it was attached.
    pub owner: Arc<std::collections::BTreeMap<String, String>>,
    /// The secret's name.
    pub secret: String,
    /// Where the value will be sent.
    pub host: String,
}

/// Why there is no value. The text is shown to the guest; it never holds a value.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SecretError {
    /// Nobody knows it.
    #[error("secret {0} does not exist")]
    Unknown(String),
    /// It may not be used by this sandbox or for this host.
    #[error("secret {0} may not be used here")]
    Forbidden(String),
    /// It could not be fetched or minted now.
    #[error("secret {name} cannot be had now: {problem}")]
    Unavailable {
        /// Its name.
        name: String,
        /// Why, without any part of a value.
        problem: String,
    },
}

impl SecretError {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Unknown(name) | Self::Forbidden(name) | Self::Unavailable { name, .. } => name,
        }
    }

    /// A stable word for records.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unknown(_) => "secret_unknown",
            Self::Forbidden(_) => "secret_forbidden",
            Self::Unavailable { .. } => "secret_unavailable",
        }
    }

    /// Whether somebody decided so, as opposed to a failure.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Unavailable { .. })
    }
}

/// Gives values: static ones from the store, or short-lived ones minted per request.
#[async_trait]
pub trait SecretProvider: Send + Sync + 'static {
    /// The value to send now.
    async fn value(&self, request: &SecretRequest) -> Result<Secret, SecretError>;
}

/// A provider that has no secrets.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSecrets;

#[async_trait]
impl SecretProvider for NoSecrets {
    async fn value(&self, request: &SecretRequest) -> Result<Secret, SecretError> {
        Err(SecretError::Unknown(request.secret.clone()))
    }
}

/// A new token for a guest: unique, of header- and URL-safe characters, and worthless elsewhere.
pub fn placeholder() -> String {
    Secret::random_hex("stk_", 20).expose().to_owned()
}

/// Whether a value can be sent in a header; ask before storing it.
pub fn check_value(value: &Secret) -> Result<(), &'static str> {
    let text = value.expose();
    if text.is_empty() {
        return Err("the value is empty");
    }
    // A header value may hold a tab; a secret has no business with one.
    if text.bytes().any(|byte| byte < 0x20 || byte == 0x7f) {
        return Err("the value holds a line break or another control character");
    }
    HeaderValue::from_str(text).map(drop).map_err(|_| "the value is no header value")
}

/// A header value with references to secrets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Template(Vec<Piece>);

#[derive(Clone, Debug, Eq, PartialEq)]
enum Piece {
    Text(String),
    Secret(String),
}

impl Template {
    /// Reads `text ${secrets.NAME} text`; `$$` is a dollar sign.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find('$') {
            literal.push_str(&rest[..at]);
            let after = &rest[at + 1..];
            if let Some(next) = after.strip_prefix('$') {
                literal.push('$');
                rest = next;
                continue;
            }
            let wrong = || "a $ starts ${secrets.NAME}; write $$ for a dollar sign".to_owned();
            let (name, next) =
                after.strip_prefix("{secrets.").and_then(|tail| tail.split_once('}')).ok_or_else(wrong)?;
            let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
            if name.is_empty() || name.len() > 128 || !name.bytes().all(known) {
                return Err(wrong());
            }
            if !literal.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut literal)));
            }
            pieces.push(Piece::Secret(name.to_owned()));
            rest = next;
        }
        literal.push_str(rest);
        if literal.bytes().any(|byte| byte < 0x20 || byte == 0x7f) || HeaderValue::from_str(&literal).is_err() {
            return Err("holds a line break or another control character".to_owned());
        }
        pieces.push(Piece::Text(literal));
        Ok(Self(pieces))
    }

    pub(crate) fn secret_names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|piece| match piece {
            Piece::Secret(name) => Some(name.as_str()),
            Piece::Text(_) => None,
        })
    }

    pub(crate) fn has_secret(&self) -> bool {
        self.secret_names().next().is_some()
    }

    /// Whether it is a reference and nothing else.
    pub(crate) fn is_one_secret(&self) -> bool {
        self.secret_names().count() == 1
            && self.0.iter().all(|piece| matches!(piece, Piece::Secret(_)) || *piece == Piece::Text(String::new()))
    }

    /// The text with the values in it.
    pub(crate) async fn fill(
        &self,
        provider: &dyn SecretProvider,
        request: &SecretRequest,
    ) -> Result<Secret, SecretError> {
        let mut text = Zeroizing::new(String::new());
        for piece in &self.0 {
            match piece {
                Piece::Text(literal) => text.push_str(literal),
                Piece::Secret(name) => {
                    let request = SecretRequest { secret: name.clone(), ..request.clone() };
                    text.push_str(provider.value(&request).await?.expose());
                }
            }
        }
        Ok(Secret::new(text.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_reads_names_and_dollars_and_refuses_the_rest() {
        let names = |text: &str| Template::parse(text).map(|t| t.secret_names().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(names("Bearer ${secrets.KEY}"), Ok(vec!["KEY".to_owned()]));
        assert_eq!(names("$$5"), Ok(vec![]));
        for bad in ["$KEY", "${KEY}", "${secrets.}", "${secrets.A", "a\r\nb", "a\0b", "${secrets.a b}"] {
            assert!(Template::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_value_with_a_line_break_is_refused_when_it_is_stored() {
        assert!(check_value(&Secret::new("sk-live-1")).is_ok());
        for bad in ["", "a\r\nX-Evil: 1", "a\nb", "a\0b", "a\tb"] {
            assert!(check_value(&Secret::new(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn placeholders_differ_and_are_safe_in_urls() {
        assert_ne!(placeholder(), placeholder());
        assert!(placeholder().bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'));
    }
}
