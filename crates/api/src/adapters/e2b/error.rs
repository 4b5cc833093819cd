//! Errors outside the Connect protocol: `{"code": <HTTP status>, "message": "..."}`.

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use stockade_engine::EngineError;
use stockade_model::shortened;
use stockade_service::ServiceError;

use crate::error::chain;

/// What clients start where they are asked for MCP servers. It is not ours to have: which servers there are is for the
/// operator to say.
const MCP_TEMPLATE: &str = "mcp-gateway";
const BUILD_MCP_TEMPLATE: &str = "build one of that name with a command mcp-gateway in it, as docs/e2b.md (MCP servers) \
    and examples/e2b/mcp show, or name a template that has the command";

/// An error of the control API or of envd's HTTP routes.
#[derive(Debug)]
pub(super) struct HttpError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// A word of E2B's list, where the SDKs tell errors of one status apart by it.
    error_code: Option<&'static str>,
    retry_after_seconds: Option<u64>,
}

/// An error as clients see it.
#[derive(Serialize)]
pub(super) struct ErrorJson {
    code: u16,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<&'static str>,
}

impl HttpError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None, retry_after_seconds: None }
    }

    /// A conflict that the SDKs know by a word of E2B's list.
    pub(super) fn conflict(error_code: &'static str, message: String) -> Self {
        Self { error_code: Some(error_code), ..Self::new(StatusCode::CONFLICT, message) }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Something of E2B's API that this release does not have; never an answer that could pass for success.
    pub(super) fn not_supported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    pub(super) fn sandbox_not_found(id: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("Sandbox \"{}\" doesn't exist or you don't have access to it", shortened(id)),
        )
    }
}

impl From<HttpError> for ErrorJson {
    fn from(error: HttpError) -> Self {
        Self { code: error.status.as_u16(), message: error.message, error_code: error.error_code }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let (status, retry_after_seconds) = (self.status, self.retry_after_seconds);
        let mut response = (status, Json(ErrorJson::from(self))).into_response();
        if let Some(seconds) = retry_after_seconds {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<ServiceError> for HttpError {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::TemplateNotFound { name } => {
                let message = match name.split_once(':') {
                    Some((name, tag)) => {
                        format!("tag '{}' does not exist for template '{}'", shortened(tag), shortened(name))
                    }
                    None if name == MCP_TEMPLATE => format!("template '{name}' not found: {BUILD_MCP_TEMPLATE}"),
                    None => format!("template '{}' not found", shortened(&name)),
                };
                Self::new(StatusCode::NOT_FOUND, message)
            }
            ServiceError::BuildNotFound { .. } => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            ServiceError::TemplateInUse { .. } => Self::bad_request(error.to_string()),
            ServiceError::SnapshotNotFound { name } => {
                Self::new(StatusCode::NOT_FOUND, format!("snapshot '{}' not found", shortened(&name)))
            }
            ServiceError::SnapshotInUse { .. } => Self::bad_request(error.to_string()),
            ServiceError::SandboxNotFound { id } => Self::sandbox_not_found(&id),
            ServiceError::SandboxEnded { id, .. } => Self::sandbox_not_found(id.as_str()),
            ServiceError::SecretNotFound { .. } => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            ServiceError::SecretExists { .. } | ServiceError::OperatorsSecret { .. } => {
                Self::new(StatusCode::CONFLICT, error.to_string())
            }
            ServiceError::WrongState { .. } => Self::new(StatusCode::CONFLICT, error.to_string()),
            ServiceError::Invalid { field: "cursor", .. } => {
                Self::bad_request("nextToken is not one that this list gave; leave it out to begin anew")
            }
            ServiceError::Invalid { .. } => Self::bad_request(error.to_string()),
            ServiceError::IdempotencyConflict => Self::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()),
            ServiceError::WrongToken => Self::new(StatusCode::UNAUTHORIZED, error.to_string()),
            ServiceError::Busy { retry_after, .. } => Self {
                error_code: Some("sandbox_capacity_unavailable"),
                retry_after_seconds: Some(retry_after.as_secs().max(1)),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            },
            ServiceError::Engine(engine @ EngineError::NoCapacity { .. }) => Self {
                error_code: Some("sandbox_capacity_unavailable"),
                retry_after_seconds: Some(5),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, engine.to_string())
            },
            ServiceError::Engine(EngineError::Host { ref source, .. })
                if source.kind() == std::io::ErrorKind::StorageFull =>
            {
                tracing::error!(error = chain(&error), "an E2B request failed");
                Self {
                    error_code: Some("sandbox_capacity_unavailable"),
                    retry_after_seconds: Some(5),
                    ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "the host's disk is full".to_owned())
                }
            }
            other => {
                let chain = chain(&other);
                tracing::error!(error = chain, "an E2B request failed");
                Self {
                    error_code: Some("internal_server_error"),
                    ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, other.to_string())
                }
            }
        }
    }
}
