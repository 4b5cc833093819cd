//! A judged request on its way, and its answer on the way back.

use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::ext::ReasonPhrase;

use super::{
    Outcome, Session,
    hop::{Upgrade, relay, strip_hop_headers},
};
use crate::{
    audit::{AuditKind, Facts, Verdict},
    broker::{EchoMask, Masks},
    proxy::{
        BoxBody,
        client::{Client, ClientError},
        refuse::Refusal,
    },
    sandbox::facts_of,
};

/// A request that may go.
pub(super) struct Leaving<'a> {
    pub(super) client: Arc<Client>,
    pub(super) request: Request<BoxBody>,
    pub(super) upgrade: Option<Upgrade>,
    /// What the answer shows instead of values.
    pub(super) masks: Masks,
    /// Whom it is for.
    pub(super) host: &'a str,
    /// For its record.
    pub(super) more: Facts,
    /// The secret whose token its body turned out to carry.
    pub(super) misplaced: Arc<Mutex<Option<String>>>,
}

impl Session {
    pub(super) async fn send(&self, leaving: Leaving<'_>) -> Result<Outcome, Refusal> {
        let Leaving { client, mut request, upgrade, masks, host, mut more, misplaced } = leaving;
        if !masks.is_empty() {
            // What is compressed cannot be looked at.
            request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        if let Some(upgrade) = &upgrade {
            request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            request.headers_mut().insert(header::UPGRADE, upgrade.protocol.clone());
        }
        let sent = client.send(request, upgrade.is_some()).await;
        let secret = misplaced.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(secret) = secret {
            return Err(Refusal::misplaced(&secret, "the body", host));
        }
        let (mut response, upstream) = sent.map_err(|error| match error {
            ClientError::Dial(error) => {
                let verdict = if error.is_denied() { Verdict::Deny } else { Verdict::Error };
                let facts = Facts { detail: Some(error.message()), ..facts_of(&self.flow) };
                self.sandbox.audit(AuditKind::Dial, verdict, error.code(), facts);
                Refusal::dial(&error, host)
            }
            ClientError::Failed(problem) => Refusal::upstream(host, &problem),
        })?;
        more.upstream = Some(upstream);
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let protocol = response.headers().get(header::UPGRADE).cloned();
        strip_hop_headers(response.headers_mut());
        // HTTP/3 is UDP, which is closed.
        response.headers_mut().remove(header::ALT_SVC);
        if switched {
            let (Some(upgrade), Some(protocol)) = (upgrade, protocol) else {
                return Err(Refusal::upstream(host, "it switched to another protocol unasked"));
            };
            self.flow.set_facts(|facts| facts.upgrade = upgrade.asked.map(Arc::new));
            // As for every flow whose bytes are no longer looked at: from here on a change of policy finds it.
            if !self.sandbox.allows_flow(&self.flow) {
                return Err(Refusal::policy("policy_changed", host, "its policy changed meanwhile"));
            }
            tokio::spawn(relay(upgrade.guest, hyper::upgrade::on(&mut response)));
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            response.headers_mut().insert(header::UPGRADE, protocol);
        }
        let response = mask_answer(response.map(|body| body.map_err(Into::into).boxed_unsync()), masks);
        Ok(Outcome { response, verdict: Verdict::Allow, reason: "forwarded", more })
    }
}

fn mask_answer(mut response: Response<BoxBody>, masks: Masks) -> Response<BoxBody> {
    if masks.is_empty() {
        return response;
    }
    masks.hide_in(response.headers_mut());
    // HTTP/1.1 has room for a text there.
    response.extensions_mut().remove::<ReasonPhrase>();
    let plain = response.headers().get(header::CONTENT_ENCODING).is_none_or(|coding| coding == "identity");
    if plain && !http_body::Body::is_end_stream(response.body()) {
        response.headers_mut().remove(header::CONTENT_LENGTH);
        response = response.map(|body| EchoMask::new(body, masks).boxed_unsync());
    }
    response
}
