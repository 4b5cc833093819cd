//! Tokens in the bodies of requests: found where they may not be, replaced where they may.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderValue, header, request};
use http_body_util::{BodyExt, Full};

use super::Session;
use crate::{
    audit::{AuditKind, Facts, Verdict},
    broker::{Sent, TokenWatch, read_at_most},
    proxy::{BoxBody, refuse::Refusal},
    sandbox::facts_of,
};

impl Session {
    pub(super) fn watch_body(
        &self,
        body: BoxBody,
        tokens: Vec<(String, String)>,
        misplaced: &Arc<Mutex<Option<String>>>,
    ) -> BoxBody {
        if tokens.is_empty() {
            return body;
        }
        let (sandbox, flow, told) = (Arc::clone(&self.sandbox), Arc::clone(&self.flow), Arc::clone(misplaced));
        let report = move |secret: &str| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(secret.to_owned());
            let facts = Facts {
                secrets: vec![secret.to_owned()],
                detail: Some("found in the body".to_owned()),
                ..facts_of(&flow)
            };
            sandbox.audit(AuditKind::Token, Verdict::Deny, "token_misplaced", facts);
        };
        TokenWatch::new(body, tokens, Box::new(report)).boxed_unsync()
    }

    /// Replaces tokens in a body, which is read whole for it, and says which secrets were used.
    pub(super) async fn substitute_body(
        &self,
        head: &mut request::Parts,
        body: BoxBody,
        sent: &Sent,
    ) -> Result<(BoxBody, Vec<String>), Refusal> {
        let plain = head.headers.get(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity");
        if sent.body.is_empty() || !plain || http_body::Body::is_end_stream(&body) {
            return Ok((body, Vec::new()));
        }
        let limit = self.limits().substituted_body_bytes;
        let whole = read_at_most(body, limit).await.map_err(|_| Refusal::bad_request("the body broke off"))?;
        let whole = whole.ok_or_else(|| Refusal::too_large(limit))?;
        let mut changed = whole.to_vec();
        let mut used = Vec::new();
        for (token, name, value) in &sent.body {
            let (next, count) = replace_all(&changed, token.as_bytes(), value.expose().as_bytes());
            if count > 0 {
                used.push(name.clone());
                changed = next;
            }
        }
        head.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(changed.len()));
        Ok((full(changed), used))
    }
}

pub(super) fn full(bytes: impl Into<Bytes>) -> BoxBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

fn replace_all(bytes: &[u8], from: &[u8], to: &[u8]) -> (Vec<u8>, usize) {
    let (mut out, mut count, mut at) = (Vec::with_capacity(bytes.len()), 0, 0);
    while at < bytes.len() {
        if bytes[at..].starts_with(from) {
            out.extend_from_slice(to);
            at += from.len();
            count += 1;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    (out, count)
}
