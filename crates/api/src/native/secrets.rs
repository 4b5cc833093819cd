//! Secrets that sandboxes use without having them. Values go in and never come out.

use std::collections::BTreeMap;

use axum::{extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use stockade_model::Secret;
use stockade_service::{OAuthClient, SecretContent, SecretInfo, SecretRequest};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::show_time;
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path},
};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get, put, remove))
}

/// A secret, without its value.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Secret)]
struct SecretView {
    /// No later secret of the same name has it; the operator's have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    name: String,
    /// `value`: its value is kept. `oauth`: values are access tokens. `command`, `callback`: of the operator's; values
    /// are made when they are needed.
    source: &'static str,
    /// Counts up with each change.
    version: u64,
    /// Where it may be sent.
    hosts: Vec<String>,
    /// The client of the token endpoint, without its secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    oauth: Option<OAuthClient>,
    /// Labels.
    metadata: BTreeMap<String, String>,
    #[schema(format = DateTime)]
    #[serde(skip_serializing_if = "Option::is_none")]
    created_at: Option<String>,
    #[schema(format = DateTime)]
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_at: Option<String>,
}

impl From<SecretInfo> for SecretView {
    fn from(secret: SecretInfo) -> Self {
        Self {
            id: secret.id,
            name: secret.name,
            source: secret.source,
            version: secret.version,
            hosts: secret.hosts,
            oauth: secret.oauth,
            metadata: secret.metadata,
            created_at: secret.created_at.map(show_time),
            updated_at: secret.updated_at.map(show_time),
        }
    }
}

/// All secrets.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct SecretList {
    items: Vec<SecretView>,
}

/// A secret's next value: `value`, or `oauth` and `client_secret`.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct PutSecretRequest {
    /// The value: what a header can hold, without line breaks.
    #[serde(default)]
    #[schema(write_only)]
    value: Option<String>,
    /// A client of a token endpoint: its access tokens are the values (OAuth 2.0 client credentials).
    #[serde(default)]
    oauth: Option<OAuthClient>,
    /// The client's secret.
    #[serde(default)]
    #[schema(write_only)]
    client_secret: Option<String>,
    /// Where it may be sent: `api.example.com`, `*.example.com`, or `*` for everywhere.
    hosts: Vec<String>,
    /// Labels; left out: as they are.
    #[serde(default)]
    metadata: Option<BTreeMap<String, String>>,
}

impl PutSecretRequest {
    fn read(self, name: String) -> Result<SecretRequest, ApiError> {
        let content = match (self.value, self.oauth, self.client_secret) {
            (Some(value), None, None) => SecretContent::Value(Secret::new(value)),
            (None, Some(client), Some(secret)) => SecretContent::OAuth { client, client_secret: Secret::new(secret) },
            _ => return Err(ApiError::invalid("give `value`, or `oauth` and `client_secret`")),
        };
        Ok(SecretRequest { name, hosts: self.hosts, content, metadata: self.metadata })
    }
}

/// List secrets, without their values.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets", responses((status = 200, body = SecretList)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Result<axum::Json<SecretList>, ApiError> {
    let items = state.service.secrets(&caller.0).await?.into_iter().map(SecretView::from).collect();
    Ok(axum::Json(SecretList { items }))
}

/// One secret, without its value.
#[utoipa::path(
    get, path = "/v1/secrets/{name}", tag = "secrets", params(("name" = String, Path)),
    responses((status = 200, body = SecretView))
)]
async fn get(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<axum::Json<SecretView>, ApiError> {
    Ok(axum::Json(state.service.secret(&caller.0, &name).await?.into()))
}

/// Keep a secret, or give it its next value: sandboxes that use it send the new one from now on.
#[utoipa::path(
    put, path = "/v1/secrets/{name}", tag = "secrets", params(("name" = String, Path)),
    request_body = PutSecretRequest, responses((status = 200, body = SecretView))
)]
async fn put(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Json(request): Json<PutSecretRequest>,
) -> Result<axum::Json<SecretView>, ApiError> {
    Ok(axum::Json(state.service.put_secret(&caller.0, request.read(name)?).await?.into()))
}

/// Forget a secret. Requests that need it fail from now on.
#[utoipa::path(
    delete, path = "/v1/secrets/{name}", tag = "secrets", params(("name" = String, Path)), responses((status = 204))
)]
async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.service.remove_secret(&caller.0, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}
