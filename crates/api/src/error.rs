//! The last step of every failure: a domain error becomes a status, a stable code, a message and a
//! hint for the caller, and the full chain of causes for the log (once, when the answer is made).
//!
//! What a caller may not see is 404; what is wrong with a credential is 401; a state in the way is
//! 409; 429 and 503 carry `Retry-After`. Paths and processes of the host stay in the log.

use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use stockade_engine::EngineError;
use stockade_model::{SandboxId, SandboxState};
use stockade_service::{Service, ServiceError, StateOf};
use stockade_wire::ErrorCode;

/// An error on its way to a caller.
#[derive(Debug)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// A `snake_case` word that never changes its meaning.
    pub code: Cow<'static, str>,
    /// What happened, for people.
    pub message: String,
    /// What to do about it; may be empty.
    pub hint: Cow<'static, str>,
    /// When to try again.
    pub retry_after: Option<Duration>,
    in_the_way: Option<Box<InTheWay>>,
    cause: Option<Box<dyn Error + Send + Sync>>,
    /// The guest was lost in the middle of something: the sandbox's record may know why.
    is_lost_guest: bool,
}

/// The sandbox whose state is in the way.
#[derive(Debug)]
struct InTheWay {
    sandbox: SandboxId,
    state: SandboxState,
}

/// In the extensions of an answer whose error may be told better, and is not logged yet.
#[derive(Clone, Debug)]
pub(crate) struct LostGuest(pub(crate) Arc<ApiError>);

/// The body of every answer that is not a success.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct ErrorEnvelope<'a> {
    /// What happened.
    #[schema(inline)]
    pub(crate) error: ErrorDetail<'a>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct ErrorDetail<'a> {
    /// A word that never changes its meaning.
    #[schema(example = "sandbox_not_found")]
    code: &'a str,
    /// What happened.
    message: &'a str,
    /// What to do about it; may be empty.
    hint: &'a str,
    /// With `wrong_state`: the sandbox that is in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    sandbox: Option<&'a str>,
    /// With `wrong_state`: the state it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = SandboxState, required = false)]
    state: Option<SandboxState>,
}

impl ApiError {
    /// An error without a cause behind it.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let (code, message) = (Cow::Borrowed(code), message.into());
        Self {
            status,
            code,
            message,
            hint: Cow::Borrowed(""),
            retry_after: None,
            in_the_way: None,
            cause: None,
            is_lost_guest: false,
        }
    }

    /// The request makes no sense: 400 `invalid_argument`.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_argument", message)
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.hint = hint.into();
        self
    }

    /// Adds when to try again.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Adds what lies behind it, for the log alone.
    #[must_use]
    pub fn caused_by(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    fn lost_guest(mut self) -> Self {
        self.is_lost_guest = true;
        self
    }

    /// That the sandbox has ended, where that is why its guest was lost.
    pub(crate) async fn explained(&mut self, service: &Service, id: &SandboxId) {
        if !self.is_lost_guest {
            return;
        }
        match service.end_of(id).await {
            Some(ended) => *self = ended.into(),
            None => self.is_lost_guest = false,
        }
    }

    /// The error as the body of an answer or the last line of a stream.
    pub(crate) fn envelope(&self) -> ErrorEnvelope<'_> {
        let in_the_way = self.in_the_way.as_deref();
        ErrorEnvelope {
            error: ErrorDetail {
                code: &self.code,
                message: &self.message,
                hint: &self.hint,
                sandbox: in_the_way.map(|way| way.sandbox.as_str()),
                state: in_the_way.map(|way| way.state),
            },
        }
    }

    /// Logs the error with all its causes. Called where the error is answered, once. Adapters that
    /// answer in a shape of their own call it before they do.
    pub fn log(&self) {
        let mut chain = String::new();
        let mut next = self.cause.as_deref().map(|cause| cause as &dyn Error);
        while let Some(cause) = next {
            chain.push_str(if chain.is_empty() { "" } else { ": " });
            chain.push_str(&cause.to_string());
            next = cause.source();
        }
        if self.status.is_server_error() {
            tracing::error!(status = self.status.as_u16(), code = %self.code, cause = %chain, "{}", self.message);
        } else {
            tracing::debug!(status = self.status.as_u16(), code = %self.code, cause = %chain, "{}", self.message);
        }
    }
}

/// The error and its causes, each once.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.envelope())).into_response();
        if let Some(wait) = self.retry_after {
            // Whole seconds, rounded up: a client that waits too short asks in vain.
            let seconds = (wait.as_millis().div_ceil(1000) as u64).max(1);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.is_lost_guest {
            response.extensions_mut().insert(LostGuest(Arc::new(self)));
        } else {
            self.log();
        }
        response
    }
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        let message = error.to_string();
        match error {
            ServiceError::TemplateNotFound { .. } => Self::new(StatusCode::NOT_FOUND, "template_not_found", message)
                .hint("GET /v1/templates lists the templates there are"),
            ServiceError::SnapshotNotFound { .. } => Self::new(StatusCode::NOT_FOUND, "snapshot_not_found", message)
                .hint("GET /v1/snapshots lists the snapshots there are"),
            ServiceError::BuildNotFound { .. } => Self::new(StatusCode::NOT_FOUND, "build_not_found", message),
            ServiceError::TemplateInUse { .. } => Self::new(StatusCode::CONFLICT, "template_in_use", message)
                .hint("end the sandboxes and delete the snapshots made from it first"),
            ServiceError::SecretNotFound { .. } => Self::new(StatusCode::NOT_FOUND, "secret_not_found", message)
                .hint("GET /v1/secrets lists the secrets there are"),
            ServiceError::SecretExists { .. } => Self::new(StatusCode::CONFLICT, "secret_exists", message)
                .hint("PUT /v1/secrets/{name} gives it its next value"),
            ServiceError::OperatorsSecret { .. } => Self::new(StatusCode::CONFLICT, "operators_secret", message)
                .hint("choose another name; GET /v1/secrets says which are the operator's"),
            ServiceError::SshKeyNotFound { .. } => Self::new(StatusCode::NOT_FOUND, "ssh_key_not_found", message)
                .hint("GET /v1/ssh-keys lists the keys there are"),
            ServiceError::SshKeyExists { .. } => Self::new(StatusCode::CONFLICT, "ssh_key_exists", message)
                .hint("GET /v1/ssh-keys lists it; remove it first to change what it opens"),
            ServiceError::Network { .. } => Self::new(StatusCode::CONFLICT, "no_network", message)
                .hint("the operator's network settings say what there is"),
            ServiceError::SnapshotInUse { .. } => Self::new(StatusCode::CONFLICT, "snapshot_in_use", message),
            ServiceError::SandboxNotFound { .. } => Self::new(StatusCode::NOT_FOUND, "sandbox_not_found", message)
                .hint("GET /v1/sandboxes?state=running,gone lists the sandboxes there are and were"),
            ServiceError::SandboxEnded { .. } => Self::new(StatusCode::CONFLICT, "sandbox_ended", message)
                .hint("its record tells more; create a new sandbox"),
            ServiceError::WrongState { id, state } => {
                let mut error = Self::new(StatusCode::CONFLICT, "wrong_state", message).hint(way_on(state));
                error.in_the_way = Some(Box::new(InTheWay { sandbox: id, state }));
                error
            }
            ServiceError::Invalid { .. } => Self::invalid(message),
            ServiceError::IdempotencyConflict => Self::new(StatusCode::CONFLICT, "idempotency_conflict", message)
                .hint("use a new Idempotency-Key for a new request"),
            ServiceError::WrongToken => Self::new(StatusCode::UNAUTHORIZED, "wrong_token", message),
            ServiceError::Busy { retry_after, .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message).retry_after(retry_after)
            }
            ServiceError::StateUnusable { of, source } => unusable(&of, source),
            ServiceError::Engine(engine) => engine.into(),
            ServiceError::Archive(cause) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "archive_failed", message)
                .hint("the sandbox is as it was; the server's log says what the archive said")
                .retry_after(Duration::from_secs(30))
                .caused_by(cause),
            ServiceError::Store(cause) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "store_failed", message)
                .hint("the server's log says why; the disk of the data directory may be full")
                .caused_by(cause),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        let internal = |code, message: String| Self::new(StatusCode::INTERNAL_SERVER_ERROR, code, message);
        match error {
            EngineError::Guest(body) => guest_error(body.code, body.message),
            EngineError::NoCapacity { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_capacity", message)
                .hint("end sandboxes that are no longer needed, or give the host more")
                .retry_after(Duration::from_secs(5)),
            EngineError::Mismatch { .. } => Self::new(StatusCode::CONFLICT, "template_mismatch", message)
                .hint("build the template again on this host"),
            EngineError::Damaged { .. } => internal("template_damaged", "a file of the template is damaged".into())
                .hint("the server's log names the file; build the template again")
                .caused_by(error),
            EngineError::GuestSilent { .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, "guest_silent", message)
                .hint("the guest may be overloaded; try again, or create a new sandbox"),
            EngineError::Gone { .. } => Self::new(StatusCode::CONFLICT, "sandbox_ended", "the sandbox has ended")
                .hint("its record tells why; create a new sandbox")
                .caused_by(error)
                .lost_guest(),
            EngineError::Emulator { step, .. } => internal("emulator_failed", format!("the emulator failed at {step}"))
                .hint("the server's log has its words; `stockade doctor` checks the host")
                .caused_by(error),
            EngineError::Unsupported { .. } => {
                internal("host_unsupported", message).hint("`stockade doctor` says what would mend it")
            }
            EngineError::Host { ref source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_capacity", "the host's disk is full")
                    .hint("delete snapshots or end sandboxes that are no longer needed, or give the host more")
                    .retry_after(Duration::from_secs(5))
                    .caused_by(error)
            }
            EngineError::Host { .. } => internal("host_failed", "the host refused something the sandbox needs".into())
                .hint("the server's log says what; `stockade doctor` checks the host")
                .caused_by(error),
            EngineError::LinkBroken { started, .. } => {
                let hint = if started {
                    "the request may have reached the guest: look before repeating it"
                } else {
                    "the request did not reach the guest: it is safe to repeat"
                };
                Self::new(StatusCode::BAD_GATEWAY, "guest_link_broken", message)
                    .hint(hint)
                    .caused_by(error)
                    .lost_guest()
            }
        }
    }
}

/// What to do about a sandbox that is in the wrong state.
fn way_on(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Paused => {
            "POST /v1/sandboxes/{id}/resume brings it back; with \"auto_resume\": true requests do by themselves"
        }
        SandboxState::Stopped => "POST /v1/sandboxes/{id}/start boots it from its disk",
        SandboxState::Creating | SandboxState::Pausing | SandboxState::Resuming => "it is on its way: try again soon",
        _ => "",
    }
}

/// Saved state this host cannot use, by its own fault or another emulator's.
fn unusable(of: &StateOf, source: EngineError) -> ApiError {
    let codes = match of {
        StateOf::Snapshot(_) => ("snapshot_mismatch", "snapshot_damaged"),
        StateOf::Sandbox(_) => ("saved_state_mismatch", "saved_state_damaged"),
    };
    if let EngineError::Mismatch { .. } = source {
        let hint = match of {
            StateOf::Snapshot(_) => {
                "create from it with \"memory\": false: that boots from its disk, as after a power failure"
            }
            StateOf::Sandbox(_) => {
                "resume it with \"memory\": false: that boots from its disk, as after a power failure"
            }
        };
        return ApiError::new(StatusCode::CONFLICT, codes.0, format!("{of} was {source}")).hint(hint);
    }
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, codes.1, format!("a file of {of} is not what was written"))
        .hint("the server's log names the file; others that were made from the same are not harmed")
        .caused_by(source)
}

/// The agent's refusals keep their code: it is the same word in every API.
fn guest_error(code: ErrorCode, message: String) -> ApiError {
    let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let word = match serde_json::to_value(code) {
        Ok(serde_json::Value::String(word)) => word,
        _ => "internal".to_owned(),
    };
    let mut error = ApiError::new(status, "internal", message);
    error.code = Cow::Owned(word);
    match code {
        ErrorCode::OutOfMemory | ErrorCode::LimitReached => error.retry_after(Duration::from_secs(1)),
        ErrorCode::NoSpace => error.hint("the sandbox's disk is full: remove files in it"),
        ErrorCode::TooLarge => {
            error.hint("ask for fewer levels at a time, or run `find`, `rm` or the like in the sandbox")
        }
        ErrorCode::TooLong => error.hint("send long data as a file or through stdin"),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::{io, path::PathBuf};

    use axum::body::to_bytes;
    use stockade_wire::ErrorBody;

    use super::*;

    async fn body(error: ApiError) -> (StatusCode, axum::http::HeaderMap, serde_json::Value) {
        let response = error.into_response();
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, 1 << 20).await.expect("a body in memory");
        (parts.status, parts.headers, serde_json::from_slice(&bytes).expect("JSON"))
    }

    #[tokio::test]
    async fn paths_of_the_host_stay_in_the_log() {
        let secret = "/var/lib/stockade/machines/mch1/disk.qcow2";
        let errors = [
            EngineError::Damaged { path: PathBuf::from(secret), reason: secret.into() },
            EngineError::Host { action: format!("open {secret}"), source: io::Error::other(secret) },
            EngineError::Emulator { step: "start", detail: secret.into() },
        ];
        for error in errors {
            let (status, _, json) = body(ServiceError::Engine(error).into()).await;
            assert_eq!(status, 500);
            assert!(!json.to_string().contains("/var/lib"), "{json}");
            assert!(json["error"]["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{json}");
        }
    }

    #[tokio::test]
    async fn busy_says_when_to_come_back_in_whole_seconds() {
        let retry_after = Duration::from_millis(1200);
        let (status, headers, json) = body(ServiceError::Busy { what: "creates".into(), retry_after }.into()).await;
        assert_eq!((status.as_u16(), &headers["retry-after"]), (503, &HeaderValue::from_static("2")));
        assert_eq!(json["error"]["code"], "busy");
    }

    #[tokio::test]
    async fn a_full_guest_disk_is_507_in_the_agents_own_word() {
        let error = EngineError::Guest(ErrorBody::new(ErrorCode::NoSpace, "/data/x: no space left"));
        let (status, _, json) = body(error.into()).await;
        assert_eq!(status, 507);
        assert_eq!(json["error"]["code"], "no_space");
        assert_eq!(json["error"]["message"], "/data/x: no space left");
    }

    #[tokio::test]
    async fn what_is_too_large_stays_so_however_long_one_waits() {
        let error = |code| EngineError::Guest(ErrorBody::new(code, "more than 50000 entries in '/data'"));
        let (status, headers, json) = body(error(ErrorCode::TooLarge).into()).await;
        assert_eq!((status.as_u16(), &json["error"]["code"]), (413, &"too_large".into()));
        assert!(!headers.contains_key("retry-after") && json["error"]["hint"] != "", "{json}");
        let (status, headers, _) = body(error(ErrorCode::LimitReached).into()).await;
        assert!(status == 429 && headers.contains_key("retry-after"));
    }

    #[tokio::test]
    async fn state_of_another_emulator_is_refused_with_the_way_out() {
        let mismatch = || EngineError::Mismatch { what: "emulator", made_with: "7.1".into(), here: "7.2".into() };
        let damaged = || EngineError::Damaged { path: "/var/lib/x".into(), reason: "of the checksum".into() };
        let (snapshot, sandbox) = (stockade_model::SnapshotId::random(), stockade_model::SandboxId::random());
        let cases = [
            (StateOf::Snapshot(snapshot.clone()), mismatch(), 409, "snapshot_mismatch"),
            (StateOf::Sandbox(sandbox.clone()), mismatch(), 409, "saved_state_mismatch"),
            (StateOf::Snapshot(snapshot), damaged(), 500, "snapshot_damaged"),
            (StateOf::Sandbox(sandbox), damaged(), 500, "saved_state_damaged"),
        ];
        for (of, source, expected, code) in cases {
            let (status, _, json) = body(ServiceError::StateUnusable { of, source }.into()).await;
            assert_eq!((status.as_u16(), json["error"]["code"].as_str()), (expected, Some(code)));
            let text = json.to_string();
            assert!(!text.contains("/var/lib") && !json["error"]["hint"].as_str().unwrap_or("").is_empty(), "{text}");
            assert_eq!(text.contains("7.1") && text.contains("\\\"memory\\\": false"), expected == 409, "{text}");
        }
    }
}
