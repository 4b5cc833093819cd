//! The right to reach into a sandbox: its access token, or a signed URL for one file.
//!
//! A signature is `v1_` and the unpadded base64 of SHA-256 over
//! `path:operation:user:token` or `path:operation:user:token:expiration`; operation is `read` or `write`,
//! user is empty if the query names none, path is as in the query.

use base64::Engine as _;
use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use sha2::{Digest, Sha256};
use stockade_model::{Sandbox, Secret};
use subtle::ConstantTimeEq;

use super::error::HttpError;

/// A label we keep on sandboxes made through the first create call without `secure`: E2B asks for no
/// token there. It is hidden from E2B clients and cannot be set by them.
pub(super) const OPEN_LABEL: &str = "stockade.e2b.open";

/// Whether calls into the sandbox need its token.
pub(super) fn is_secured(sandbox: &Sandbox) -> bool {
    !sandbox.metadata.contains_key(OPEN_LABEL)
}

/// Checks `X-Access-Token`.
pub(super) fn check_token(sandbox: &Sandbox, headers: &HeaderMap) -> Result<(), HttpError> {
    if !is_secured(sandbox) {
        return Ok(());
    }
    match headers.get("x-access-token").map(|value| value.to_str()) {
        Some(Ok(token)) if sandbox.access_token.matches(token) => Ok(()),
        Some(_) => Err(unauthorized("the access token in X-Access-Token is not this sandbox's")),
        None => Err(unauthorized("access token is missing: send it as X-Access-Token")),
    }
}

/// What a signed URL says.
pub(super) struct Signed<'a> {
    pub(super) path: &'a str,
    pub(super) operation: &'static str,
    pub(super) user: Option<&'a str>,
    pub(super) signature: &'a str,
    pub(super) expiration: Option<i64>,
}

impl Signed<'_> {
    fn expected(&self, token: &Secret) -> String {
        let mut hash = Sha256::new();
        for part in [self.path, ":", self.operation, ":", self.user.unwrap_or_default(), ":", token.expose()] {
            hash.update(part);
        }
        if let Some(expiration) = self.expiration {
            hash.update(format!(":{expiration}"));
        }
        format!("v1_{}", base64::engine::general_purpose::STANDARD_NO_PAD.encode(hash.finalize()))
    }

    /// Checks the signature, then whether it is still valid at `now`.
    pub(super) fn check(&self, token: &Secret, now: Timestamp) -> Result<(), HttpError> {
        // Some senders pad; the padding carries nothing.
        let given = self.signature.trim_end_matches('=').as_bytes();
        if !bool::from(given.ct_eq(self.expected(token).as_bytes())) {
            return Err(unauthorized("invalid signature"));
        }
        match self.expiration {
            Some(expiration) if expiration < now.as_second() => Err(unauthorized("signature is already expired")),
            _ => Ok(()),
        }
    }
}

fn unauthorized(message: &str) -> HttpError {
    HttpError::new(StatusCode::UNAUTHORIZED, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed<'a>(signature: &'a str, expiration: Option<i64>) -> Signed<'a> {
        Signed { path: "/home/user/a b.txt", operation: "read", user: None, signature, expiration }
    }

    #[test]
    fn a_signature_is_accepted_for_exactly_what_it_was_made_for() {
        let token = Secret::new("token");
        let now = Timestamp::now();
        // python3: "v1_" + base64.b64encode(hashlib.sha256(b"/home/user/a b.txt:read::token").digest()).rstrip("=")
        let golden = "v1_VV5cnKMLm+JJ6UtC8V1agQ4x7dIUMCEZwYlYmh0UPy8";
        assert!(signed(golden, None).check(&token, now).is_ok());
        assert!(signed(golden, Some(now.as_second() + 60)).check(&token, now).is_err(), "expiration is signed too");
        assert!(signed(golden, None).check(&Secret::new("other"), now).is_err());
        assert!(Signed { operation: "write", ..signed(golden, None) }.check(&token, now).is_err());
        assert!(Signed { user: Some("root"), ..signed(golden, None) }.check(&token, now).is_err());
        assert!(signed("", None).check(&token, now).is_err());
    }

    #[test]
    fn an_old_signature_is_refused_by_the_words_the_sdk_knows() {
        let token = Secret::new("token");
        let now = Timestamp::now();
        let expiration = now.as_second() - 1;
        let signature = signed("", Some(expiration)).expected(&token);
        let error = signed(&signature, Some(expiration)).check(&token, now).expect_err("expired");
        assert_eq!(error.message, "signature is already expired");
    }
}
