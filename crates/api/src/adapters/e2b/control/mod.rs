//! `api.e2b.<base>`: sandboxes and templates as E2B's SDKs and CLI ask for them.

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use stockade_model::SandboxId;
use tower_http::cors::CorsLayer;

use super::{
    error::HttpError,
    extract::{Body, MAX_BODY_BYTES, Query, parse},
};
use crate::AppState;

mod builds;
mod filter;
mod later;
mod lifecycle;
mod list;
mod logs;
mod metrics;
mod network;
mod paging;
mod sandboxes;
mod secrets;
mod snapshots;
mod templates;

pub(super) fn router(state: AppState) -> Router {
    let with_key = Router::new()
        .route("/sandboxes", get(list::list_running).post(sandboxes::create_v1))
        .route("/v2/sandboxes", get(list::list).post(sandboxes::create_v2))
        .route("/sandboxes/metrics", get(metrics::many))
        .route("/sandboxes/{id}", get(sandboxes::info).delete(sandboxes::kill))
        .route("/sandboxes/{id}/connect", post(lifecycle::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(lifecycle::connect_v2))
        .route("/sandboxes/{id}/resume", post(lifecycle::resume))
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/metrics", get(metrics::one))
        .route("/sandboxes/{id}/pause", post(lifecycle::pause))
        .route("/sandboxes/{id}/fork", post(lifecycle::fork))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/network", put(network::update))
        .route("/sandboxes/{id}/logs", get(logs::first))
        .route("/v2/sandboxes/{id}/logs", get(logs::second))
        .route("/secrets", get(secrets::list).post(secrets::create))
        .route("/secrets/{secret}", get(secrets::one).post(secrets::update).delete(secrets::remove))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/templates/{id}", get(templates::one).delete(templates::delete))
        .route("/v3/templates", post(builds::reserve))
        .route("/templates/tags", post(builds::assign_tags).delete(builds::remove_tags))
        .route("/templates/{id}/tags", get(builds::tags))
        .route("/templates/{id}/files/{hash}", get(builds::upload_link))
        .route("/v2/templates/{id}/builds/{build}", post(builds::start))
        .route("/templates/{id}/builds/{build}/status", get(builds::status))
        .fallback(fallback)
        .method_not_allowed_fallback(fallback)
        .layer(middleware::from_fn_with_state(state.clone(), require_key));
    Router::new()
        .route("/health", get(|| async { StatusCode::NO_CONTENT }))
        .merge(with_key)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .route("/uploads/{workspace}/{hash}", put(builds::upload).layer(DefaultBodyLimit::disable()))
        .layer(CorsLayer::permissive())
        .with_state(state)
}

async fn require_key(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let Some(key) = key_of(request.headers()) else {
        let message = "API key is missing: send it as X-API-Key";
        return HttpError::new(StatusCode::UNAUTHORIZED, message).into_response();
    };
    match state.service.authenticate(key).await {
        Ok(Some(principal)) => {
            request.extensions_mut().insert(principal);
            next.run(request).await
        }
        Ok(None) => HttpError::new(StatusCode::UNAUTHORIZED, "API key is not valid").into_response(),
        Err(error) => HttpError::from(error).into_response(),
    }
}

fn key_of(headers: &HeaderMap) -> Option<&str> {
    if let Some(key) = headers.get("x-api-key") {
        return key.to_str().ok();
    }
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// What no route answers: an area of E2B's API that this release lacks, or nothing of it at all.
async fn fallback(method: Method, uri: Uri) -> HttpError {
    later::area(uri.path()).unwrap_or_else(|| {
        HttpError::new(StatusCode::NOT_FOUND, format!("there is no {method} {} in this API", uri.path()))
    })
}

/// An id from a path: `<id>` or, as older clients write it, `<id>-<client id>`.
fn sandbox_id(text: &str) -> Result<SandboxId, HttpError> {
    let id = text.split_once('-').map_or(text, |(id, _)| id);
    id.parse().map_err(|_| HttpError::sandbox_not_found(text))
}

/// For handlers that answer with JSON.
type JsonResult<T> = Result<Json<T>, HttpError>;
