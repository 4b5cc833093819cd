//! Secrets that sandboxes use without having them. Values go in and never come out.

use axum::{extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use stockade_model::Secret;
use stockade_service::{SecretRecord, SecretRequest};
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
    name: String,
    /// Counts up with each value.
    version: u64,
    /// Where it may be sent.
    hosts: Vec<String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    updated_at: String,
}

impl From<SecretRecord> for SecretView {
    fn from(record: SecretRecord) -> Self {
        Self {
            name: record.name,
            version: record.version,
            hosts: record.hosts,
            created_at: show_time(record.created_at),
            updated_at: show_time(record.updated_at),
        }
    }
}

/// All secrets.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct SecretList {
    items: Vec<SecretView>,
}

/// A secret's next value.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct PutSecretRequest {
    /// The value: what a header can hold, without line breaks.
    #[schema(write_only)]
    value: String,
    /// Where it may be sent: `api.example.com`, `*.example.com`, or `*` for everywhere.
    hosts: Vec<String>,
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
    let PutSecretRequest { value, hosts } = request;
    let request = SecretRequest { name, hosts, value: Secret::new(value) };
    Ok(axum::Json(state.service.put_secret(&caller.0, request).await?.into()))
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
