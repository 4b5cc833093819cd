//! Who may come in over SSH, and where.

use axum::{extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use stockade_model::{SandboxId, SshKeyId};
use stockade_service::{ServiceError, SshKeyRecord, SshKeyRequest};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{sandbox_id, sandboxes, show_time};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path},
};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(endpoint)).routes(routes!(list, add)).routes(routes!(remove))
}

/// Where the server speaks SSH.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct SshEndpoint {
    /// Address and port it listens on.
    #[schema(value_type = String)]
    address: std::net::SocketAddr,
    /// Its public key, as in `known_hosts`.
    host_key: String,
    /// The same, as `ssh` shows it.
    fingerprint: String,
}

/// A public key that opens sandboxes.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct SshKey {
    id: SshKeyId,
    name: String,
    /// As `ssh-keygen -l` shows it.
    fingerprint: String,
    public_key: String,
    /// The one sandbox it opens; `null`: all of the workspace.
    sandbox: Option<SandboxId>,
    #[schema(format = DateTime)]
    created_at: String,
    /// Until when it opens anything; `null`: until it is removed.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

impl From<SshKeyRecord> for SshKey {
    fn from(record: SshKeyRecord) -> Self {
        Self {
            id: record.id,
            name: record.name,
            fingerprint: record.fingerprint,
            public_key: record.public_key,
            sandbox: record.sandbox,
            created_at: show_time(record.created_at),
            expires_at: record.expires_at.map(show_time),
        }
    }
}

/// All keys.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct SshKeyList {
    items: Vec<SshKey>,
}

/// A key to be added.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct AddSshKeyRequest {
    /// What to call it.
    name: String,
    /// The line of a `.pub` file: Ed25519 or ECDSA.
    public_key: String,
    /// The one sandbox it is to open; absent: all of the workspace.
    #[serde(default)]
    sandbox: Option<String>,
    /// How long it is to open anything, in seconds; absent: until it is removed.
    #[serde(default)]
    lifetime_seconds: Option<f64>,
}

/// Where `ssh ID@host` connects to.
#[utoipa::path(get, path = "/v1/ssh", tag = "ssh", responses((status = 200, body = SshEndpoint)))]
async fn endpoint(State(state): State<AppState>) -> Result<axum::Json<SshEndpoint>, ApiError> {
    let crate::SshEndpoint { address, host_key, fingerprint } = state.ssh.as_deref().cloned().ok_or_else(|| {
        ApiError::new(StatusCode::NOT_FOUND, "ssh_off", "this server does not speak SSH")
            .hint("its operator starts it with --ssh ADDR, as in `stockade up --ssh 127.0.0.1:2222`")
    })?;
    Ok(axum::Json(SshEndpoint { address, host_key, fingerprint }))
}

/// List the keys that open sandboxes.
#[utoipa::path(get, path = "/v1/ssh-keys", tag = "ssh", responses((status = 200, body = SshKeyList)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Result<axum::Json<SshKeyList>, ApiError> {
    let items = state.service.ssh_keys(&caller.0).await?.into_iter().map(SshKey::from).collect();
    Ok(axum::Json(SshKeyList { items }))
}

/// Let a public key open sandboxes.
#[utoipa::path(
    post, path = "/v1/ssh-keys", tag = "ssh", request_body = AddSshKeyRequest,
    responses((status = 201, body = SshKey))
)]
async fn add(
    State(state): State<AppState>,
    caller: Caller,
    Json(request): Json<AddSshKeyRequest>,
) -> Result<(StatusCode, axum::Json<SshKey>), ApiError> {
    let request = SshKeyRequest {
        name: request.name,
        public_key: request.public_key,
        sandbox: request.sandbox.as_deref().map(sandbox_id).transpose()?,
        lifetime: request.lifetime_seconds.map(sandboxes::lifetime).transpose()?,
    };
    Ok((StatusCode::CREATED, axum::Json(state.service.add_ssh_key(&caller.0, request).await?.into())))
}

/// Remove a key. It opens nothing any more; connections that are open stay so.
#[utoipa::path(
    delete, path = "/v1/ssh-keys/{key}", tag = "ssh", params(("key" = String, Path)), responses((status = 204))
)]
async fn remove(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    let shown = || ServiceError::SshKeyNotFound { id: id.to_owned() };
    let key: SshKeyId = id.parse().map_err(|_| shown())?;
    state.service.remove_ssh_key(&caller.0, &key).await?;
    Ok(StatusCode::NO_CONTENT)
}
