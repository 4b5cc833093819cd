//! Down and up again, and what comes of one sandbox's state: pause, resume, stop, start, fork, rollback,
//! promote.

use std::collections::BTreeMap;

use axum::{extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use stockade_model::{SandboxId, SandboxState, Tier};
use stockade_service::{ForkRequest, PauseMode, ServiceError};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    sandbox_id,
    sandboxes::{SandboxView, lifetime},
};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path},
};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(stop))
        .routes(routes!(start))
        .routes(routes!(fork))
        .routes(routes!(rollback))
        .routes(routes!(promote))
}

type Answer = Result<axum::Json<SandboxView>, ApiError>;

/// How to pause.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct PauseRequest {
    /// False: only the disk is kept, as by stop.
    #[serde(default = "default_memory")]
    #[schema(default = true)]
    memory: bool,
    /// Where the memory is kept; `standby` needs `memory`.
    #[serde(default = "default_tier")]
    #[schema(default = "hibernated")]
    tier: Tier,
}

fn default_memory() -> bool {
    true
}

fn default_tier() -> Tier {
    PauseMode::default().tier
}

/// Pause a running sandbox. Answers when what is kept is durable. One that is paused as asked for already stays so; one in
/// standby can be taken further down; any other that is not running is 409.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/pause", tag = "lifecycle", params(("id" = String, Path)),
    request_body = PauseRequest, responses((status = 200, body = SandboxView))
)]
async fn pause(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<PauseRequest>,
) -> Answer {
    let PauseRequest { memory, tier } = request;
    if !memory && tier == Tier::Standby {
        return Err(ApiError::invalid("tier `standby` keeps the memory; leave out `tier` or `memory: false`"));
    }
    down(&state, &caller, &sandbox_id(&id)?, PauseMode { memory, tier }).await
}

/// A sandbox that is where it is to be already stays there, as one that runs does when it is resumed: who repeats a request
/// whose answer was lost gets the same answer.
async fn down(state: &AppState, Caller(who): &Caller, id: &SandboxId, mode: PauseMode) -> Answer {
    let refused = match state.service.pause(who, id, mode).await {
        Ok(sandbox) => return Ok(axum::Json(sandbox.into())),
        Err(refused @ ServiceError::WrongState { .. }) => refused,
        Err(error) => return Err(error.into()),
    };
    let sandbox = state.service.get(who, id).await?;
    let is_there = match mode {
        PauseMode { memory: false, .. } => sandbox.state == SandboxState::Stopped,
        PauseMode { tier, .. } => sandbox.state == SandboxState::Paused && sandbox.tier == Some(tier),
    };
    if is_there { Ok(axum::Json(sandbox.into())) } else { Err(refused.into()) }
}

/// How to come back.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct ResumeRequest {
    /// Seconds it may live from when it runs again; left out: what was left of its lifetime.
    lifetime_seconds: Option<f64>,
    /// False: boot from its disk and forget its memory, as after a power failure. The way out where the memory can
    /// no longer be used.
    #[serde(default = "default_memory")]
    #[schema(default = true)]
    memory: bool,
}

/// Bring a paused or stopped sandbox back. Answers when it takes commands; one that runs is at most extended.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/resume", tag = "lifecycle", params(("id" = String, Path)),
    request_body = ResumeRequest, responses((status = 200, body = SandboxView))
)]
async fn resume(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<ResumeRequest>,
) -> Answer {
    let lifetime = request.lifetime_seconds.map(lifetime).transpose()?;
    let (service, id) = (&state.service, sandbox_id(&id)?);
    let sandbox = match request.memory {
        true => service.resume(&caller.0, &id, lifetime).await?,
        false => service.resume_from_disk(&caller.0, &id, lifetime).await?,
    };
    Ok(axum::Json(sandbox.into()))
}

/// Shut a sandbox down and keep its disk. One that is stopped already stays so.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/stop", tag = "lifecycle", params(("id" = String, Path)),
    responses((status = 200, body = SandboxView))
)]
async fn stop(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> Answer {
    down(&state, &caller, &sandbox_id(&id)?, PauseMode { memory: false, ..PauseMode::default() }).await
}

/// Boot a stopped sandbox from its disk; a paused one comes back as by resume.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/start", tag = "lifecycle", params(("id" = String, Path)),
    responses((status = 200, body = SandboxView))
)]
async fn start(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> Answer {
    let sandbox = state.service.start_again(&caller.0, &sandbox_id(&id)?).await?;
    Ok(axum::Json(sandbox.into()))
}

/// What children to make.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ForkRequest)]
struct ForkBody {
    /// How many.
    #[serde(default = "default_count")]
    #[schema(default = 1)]
    count: u32,
    /// Seconds each may live; left out: as long as the parent was to.
    lifetime_seconds: Option<f64>,
    /// Their labels; left out: the parent's.
    metadata: Option<BTreeMap<String, String>>,
    /// If one cannot be made, none is, and the answer is its error.
    #[serde(default)]
    all_or_nothing: bool,
}

fn default_count() -> u32 {
    1
}

/// Children in order of their index.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct ForkList {
    items: Vec<ForkItem>,
}

/// One child: `sandbox` or `error`, the other is null.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct ForkItem {
    sandbox: Option<SandboxView>,
    error: Option<ForkError>,
}

/// Why a child was not made.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct ForkError {
    /// As in `ErrorEnvelope`.
    code: String,
    message: String,
}

/// Make children of a running sandbox, memory and disk included. Answers when each runs or has failed.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/fork", tag = "lifecycle", params(("id" = String, Path)),
    request_body = ForkBody, responses((status = 201, body = ForkList))
)]
async fn fork(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<ForkBody>,
) -> Result<(StatusCode, axum::Json<ForkList>), ApiError> {
    let request = ForkRequest {
        count: request.count,
        lifetime: request.lifetime_seconds.map(lifetime).transpose()?,
        metadata: request.metadata,
        all_or_nothing: request.all_or_nothing,
    };
    let children = state.service.fork(&caller.0, &sandbox_id(&id)?, request).await?;
    let items = children.into_iter().map(|child| match child {
        Ok(child) => ForkItem { sandbox: Some(child.into()), error: None },
        Err(error) => {
            let error = ApiError::from(error);
            error.log();
            ForkItem { sandbox: None, error: Some(ForkError { code: error.code.into_owned(), message: error.message }) }
        }
    });
    Ok((StatusCode::CREATED, axum::Json(ForkList { items: items.collect() })))
}

/// Where to go back to.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct RollbackRequest {
    /// A snapshot of this sandbox, or the one it was made from; name or id.
    snapshot: String,
}

/// Put a sandbox back to one of its snapshots under the same id. All that happened since is gone.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/rollback", tag = "lifecycle", params(("id" = String, Path)),
    request_body = RollbackRequest, responses((status = 200, body = SandboxView))
)]
async fn rollback(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<RollbackRequest>,
) -> Answer {
    let sandbox = state.service.rollback(&caller.0, &sandbox_id(&id)?, &request.snapshot).await?;
    Ok(axum::Json(sandbox.into()))
}

/// Let a forked child live on under its parent's id; the parent's machine and the child's id end. Answers with
/// the parent.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/promote", tag = "lifecycle", params(("id" = String, Path)),
    responses((status = 200, body = SandboxView))
)]
async fn promote(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> Answer {
    let sandbox = state.service.promote(&caller.0, &sandbox_id(&id)?).await?;
    Ok(axum::Json(sandbox.into()))
}
