//! Refusals that explain themselves.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use serde_json::json;

use super::BoxBody;
use crate::{
    broker::Refused,
    dial::DialError,
    policy::{Decision, Reason},
};

/// What the guest is told instead of an answer from the host.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    message: String,
    hint: &'static str,
    close: bool,
}

const ASK_OWNER: &str = "the sandbox's owner can allow it in its network policy; retrying does not help";
const ASK_OPERATOR: &str =
    "the operator of this deployment closed it, which no policy of the sandbox changes; retrying does not help";
const ASK_NOBODY: &str = "it is closed in every deployment; retrying does not help";

impl Refusal {
    fn new(status: StatusCode, code: &'static str, message: String, hint: &'static str) -> Self {
        Self { status, code, message, hint, close: false }
    }

    pub(crate) fn policy(code: &'static str, host: &str, why: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, code, format!("this sandbox may not reach {host}: {why}"), ASK_OWNER)
    }

    pub(crate) fn denied(decision: &Decision, host: &str) -> Self {
        Self::closed(decision.reason, host, &decision.reason.to_string())
    }

    fn closed(reason: Reason, host: &str, why: &str) -> Self {
        let hint = match reason {
            Reason::Operator | Reason::PrivateAddress | Reason::HostAddress => ASK_OPERATOR,
            Reason::MetadataAddress => ASK_NOBODY,
            Reason::Rule | Reason::Default | Reason::NothingInCommon | Reason::RequestsAreRead => ASK_OWNER,
        };
        Self { hint, ..Self::policy(reason.code(), host, why) }
    }

    pub(crate) fn dial(error: &DialError, host: &str) -> Self {
        if let DialError::Denied(decision, _) = error {
            return Self::closed(decision.reason, host, &error.message());
        }
        let message = format!("{host} was not reached: {}", error.message());
        Self::new(StatusCode::BAD_GATEWAY, error.code(), message, "the policy allows it; try again later")
    }

    pub(crate) fn upstream(host: &str, problem: &str) -> Self {
        let message = format!("{host} did not answer: {problem}");
        Self::new(
            StatusCode::BAD_GATEWAY,
            "upstream_failed",
            message,
            "the request may have been received; see the host",
        )
    }

    pub(crate) fn misdirected(host: &str, asked: &str) -> Self {
        let message = format!("this connection was made to {host}, the request is for {asked}");
        let hint = "open a connection to each host by its own name";
        Self { close: true, ..Self::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", message, hint) }
    }

    pub(crate) fn bad_request(message: &str) -> Self {
        let hint = "send one Host header and an origin-form target";
        Self { close: true, ..Self::new(StatusCode::BAD_REQUEST, "bad_request", message.to_owned(), hint) }
    }

    pub(crate) fn connect() -> Self {
        let message = "CONNECT is not offered: every destination is reached directly".to_owned();
        let hint = "unset HTTP_PROXY and HTTPS_PROXY";
        Self { close: true, ..Self::new(StatusCode::METHOD_NOT_ALLOWED, "no_proxy", message, hint) }
    }

    pub(crate) fn rule(host: &str, rule: &str, is_operators: bool) -> Self {
        let (whose, hint) = if is_operators { ("the operator's", ASK_OPERATOR) } else { ("this sandbox's", ASK_OWNER) };
        let message = format!("rule {rule} of {whose} policy refuses the request to {host}");
        Self::new(StatusCode::FORBIDDEN, "http_rule", message, hint)
    }

    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("bodies in which secrets are replaced may have at most {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message, "send the secret in a header")
    }

    pub(crate) fn misplaced(secret: &str, place: &str, host: &str) -> Self {
        let message = format!("the token of secret {secret} may not be sent to {host} (found in {place})");
        let hint = "the token works only for the hosts the secret allows, over HTTPS";
        Self { close: true, ..Self::new(StatusCode::FORBIDDEN, "token_misplaced", message, hint) }
    }

    pub(crate) fn secret(refused: &Refused, host: &str) -> Self {
        match refused {
            Refused::Misplaced { secret, place } => Self::misplaced(secret, place, host),
            Refused::Secret(error) => {
                let hint = "the sandbox's owner can look at the secret's state";
                Self::new(StatusCode::BAD_GATEWAY, "secret_unavailable", error.to_string(), hint)
            }
        }
    }

    pub(crate) fn response(&self) -> Response<BoxBody> {
        let error = json!({"error": {"code": self.code, "message": self.message, "hint": self.hint}});
        let body = Full::new(Bytes::from(error.to_string())).map_err(|never| match never {}).boxed_unsync();
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert("x-stockade-refused", HeaderValue::from_static(self.code));
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
