//! The native `/v1` API.
//!
//! Each route is declared once, with its documentation; [`crate::openapi`] collects the document from the
//! same declarations the router is built from.

use std::sync::LazyLock;

use axum::{
    Json, Router,
    extract::{RawPathParams, Request, State, rejection::RawPathParamsRejection},
    http::{StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use stockade_engine::GuestClient;
use stockade_model::{Accelerator, IsolationClass, SandboxId};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{ApiError, AppState, auth, auth::Caller, error::LostGuest};

mod builds;
mod code;
mod download;
mod exec;
mod files;
mod lifecycle;
mod network;
mod ports;
mod processes;
mod query;
mod run;
mod sandboxes;
mod secrets;
mod snapshots;
mod ssh;
mod stream;
mod templates;
mod upload;
mod usage;
mod ws;

pub(crate) use code::PORT as CODE_INTERPRETER_PORT;

/// The routes and their documentation.
pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(health))
        .routes(routes!(version))
        .routes(routes!(openapi_document))
        .merge(sandboxes::routes())
        .merge(lifecycle::routes())
        .merge(snapshots::routes())
        .merge(network::routes())
        .merge(secrets::routes())
        .merge(ports::routes())
        .merge(ssh::routes())
        .merge(exec::routes())
        .merge(run::routes())
        .merge(processes::routes())
        .merge(ws::routes())
        .merge(code::routes())
        .merge(files::routes())
        .merge(templates::routes())
        .merge(usage::routes())
        .merge(builds::routes())
}

/// The native API, ready to serve.
pub(crate) fn router(state: AppState) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .fallback(no_such_route)
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "the route does not take this method")
                .hint("the Allow header lists the methods it takes")
        })
        .layer(middleware::from_fn_with_state(state.clone(), tell_the_end))
        .layer(middleware::from_fn_with_state(state.clone(), auth::require_key))
        .with_state(state)
}

async fn no_such_route(uri: Uri) -> ApiError {
    let refuse = |message: &str| ApiError::new(StatusCode::NOT_FOUND, "no_such_route", message);
    match uri.path().ends_with('/') || uri.path().contains("//") {
        true => refuse("there is no such route: a part of the path is empty")
            .hint("is a name or an id empty? GET /v1/openapi.json lists the routes"),
        false => refuse("there is no such route").hint("GET /v1/openapi.json lists the routes"),
    }
}

/// Who loses the guest because its sandbox ends is told that, whatever was being done with it.
async fn tell_the_end(
    State(state): State<AppState>,
    path: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
    next: Next,
) -> Response {
    let response = next.run(request).await;
    let Some(LostGuest(error)) = response.extensions().get() else { return response };
    let id = path.iter().flatten().find(|(name, _)| *name == "id").and_then(|(_, id)| id.parse().ok());
    if let Some(id) = id
        && let Some(ended) = state.service.end_of(&id).await
    {
        return ApiError::from(ended).into_response();
    }
    error.log();
    response
}

/// An id from the path. What is no id is no sandbox: the same answer as for one that is not there.
fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    text.parse().map_err(|_| stockade_service::ServiceError::SandboxNotFound { id: text.to_owned() }.into())
}

/// The guest of the sandbox in the path.
async fn guest(state: &AppState, caller: &Caller, id: &str) -> Result<GuestClient, ApiError> {
    Ok(state.service.guest(&caller.0, &sandbox_id(id)?).await?)
}

/// A time as the API shows it: RFC 3339, UTC, milliseconds.
fn show_time(at: jiff::Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// As [`show_time`], from the guest's clock; what no calendar holds is shown as the epoch.
fn show_unix_ms(ms: i64) -> String {
    show_time(jiff::Timestamp::from_millisecond(ms).unwrap_or_default())
}

#[derive(Serialize, utoipa::ToSchema)]
struct Health {
    /// Always `ok`.
    status: &'static str,
}

/// Whether the server answers. The only route without a key.
#[utoipa::path(get, path = "/v1/health", tag = "server", security(()), responses((status = 200, body = Health)))]
async fn health() -> Json<Health> {
    Json(Health { status: "ok" })
}

#[derive(Serialize, utoipa::ToSchema)]
struct Version {
    /// The server's version.
    version: &'static str,
    engine: EngineView,
}

/// What runs the machines.
#[derive(Serialize, utoipa::ToSchema)]
struct EngineView {
    /// The driver's name.
    name: &'static str,
    accelerator: Accelerator,
    isolation: IsolationClass,
    /// The emulator's version.
    version: String,
}

/// What the server is and what runs its machines.
#[utoipa::path(get, path = "/v1/version", tag = "server", responses((status = 200, body = Version)))]
async fn version(State(state): State<AppState>) -> Json<Version> {
    let info = state.service.engine_info();
    let (accelerator, isolation) = (info.accelerator, info.isolation);
    let engine = EngineView { name: info.name, accelerator, isolation, version: info.version };
    Json(Version { version: env!("CARGO_PKG_VERSION"), engine })
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "server", responses((status = 200, body = serde_json::Value)))]
async fn openapi_document() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(|| crate::openapi::document().to_json().unwrap_or_default());
    ([(header::CONTENT_TYPE, "application/json")], TEXT.as_str()).into_response()
}
