//! Pause, connect, resume and fork.
//!
//! Connect is the verb clients use to come back to a sandbox: one that runs is only ever given more time
//! (200), one that is paused runs again and lives for the timeout asked for from then on (201).

use std::time::Duration;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use stockade_engine::EngineError;
use stockade_model::{OnTimeout, Sandbox, SandboxId, SandboxState};
use stockade_service::{ForkRequest, PauseMode, Principal, ServiceError};
use tokio::time::timeout;

use super::{
    super::error::{ErrorJson, HttpError},
    Body, sandbox_id,
    sandboxes::{DEFAULT_TIMEOUT_V1, DEFAULT_TIMEOUT_V2, SandboxReply, live},
};
use crate::AppState;

/// How long a guest that is to be paused may take to say that it is there.
const GUEST_PATIENCE: Duration = Duration::from_secs(5);

/// Whether E2B calls it paused; it knows no other state beside running.
pub(super) fn is_paused(state: SandboxState) -> bool {
    matches!(state, SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopped)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Pause {
    memory: Option<bool>,
    require_healthy_guest: Option<bool>,
}

pub(super) async fn pause(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(Pause { memory, require_healthy_guest }): Body<Pause>,
) -> Result<StatusCode, HttpError> {
    let sandbox = live(&state, &who, &sandbox_id(&id)?).await?;
    // The service would take one in standby further down: a success where E2B has none.
    if matches!(sandbox.state, SandboxState::Paused | SandboxState::Stopped) {
        return Err(HttpError::new(StatusCode::CONFLICT, format!("sandbox {id} is paused already")));
    }
    if require_healthy_guest == Some(true) {
        expect_answer(&state, &who, &sandbox.id).await?;
    }
    let mode = PauseMode { memory: memory.unwrap_or(true), ..PauseMode::default() };
    state.service.pause(&who, &sandbox.id, mode).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A pause needs no help of the guest. Whoever wants to know that it will be there afterwards asks for this.
async fn expect_answer(state: &AppState, who: &Principal, id: &SandboxId) -> Result<(), HttpError> {
    let health = async { state.service.guest(who, id).await?.health().await.map(drop).map_err(ServiceError::from) };
    match timeout(GUEST_PATIENCE, health).await {
        Ok(answered) => Ok(answered?),
        Err(_) => Err(HttpError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "the guest of sandbox {id} does not answer; it was not paused. Without requireHealthyGuest it is \
                 paused as it is, and comes back from its disk with memory false"
            ),
        )),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Connect {
    timeout: Option<i64>,
    memory: Option<bool>,
}

type Reply = Result<(StatusCode, Json<SandboxReply>), HttpError>;

pub(super) async fn connect_v1(
    state: State<AppState>,
    who: Extension<Principal>,
    id: Path<String>,
    Body(request): Body<Connect>,
) -> Reply {
    let timeout = request.timeout.ok_or_else(|| HttpError::bad_request("timeout is missing"))?;
    connect(state, who, id, timeout, request.memory).await
}

pub(super) async fn connect_v2(
    state: State<AppState>,
    who: Extension<Principal>,
    id: Path<String>,
    Body(request): Body<Connect>,
) -> Reply {
    connect(state, who, id, request.timeout.unwrap_or(DEFAULT_TIMEOUT_V2), request.memory).await
}

async fn connect(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    timeout: i64,
    memory: Option<bool>,
) -> Reply {
    let seconds = u64::try_from(timeout).map_err(|_| HttpError::bad_request("timeout must not be negative"))?;
    let sandbox = live(&state, &who, &sandbox_id(&id)?).await?;
    let paused = is_paused(sandbox.state);
    let sandbox = match seconds {
        0 if paused => return Err(HttpError::bad_request("timeout is 0; it must be over 0 seconds to resume")),
        0 => sandbox,
        // Resuming what runs extends it: right also for one that was paused or resumed just now.
        seconds => bring_back(&state, &who, &sandbox.id, memory, Duration::from_secs(seconds)).await?,
    };
    let status = if paused { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(SandboxReply::of(&state, &sandbox).await?)))
}

/// Brings it back with its memory, or (`memory` false) boots it from its disk; one that runs is extended.
async fn bring_back(
    state: &AppState,
    who: &Principal,
    id: &SandboxId,
    memory: Option<bool>,
    lifetime: Duration,
) -> Result<Sandbox, HttpError> {
    let service = &state.service;
    match memory {
        Some(false) => Ok(service.resume_from_disk(who, id, Some(lifetime)).await?),
        _ => service.resume(who, id, Some(lifetime)).await.map_err(|error| match error {
            ServiceError::Engine(EngineError::GuestSilent { .. }) => HttpError::conflict(
                "sandbox_snapshot_guest_agent_unresponsive",
                format!(
                    "the guest of sandbox {id} does not answer with the memory it was paused with; it is still paused. \
                         memory false boots it from its disk"
                ),
            ),
            other => other.into(),
        }),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Resume {
    timeout: Option<i64>,
    auto_pause: Option<bool>,
    memory: Option<bool>,
}

/// The old way to resume; a sandbox that runs is a conflict.
pub(super) async fn resume(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<Resume>,
) -> Reply {
    let sandbox = live(&state, &who, &sandbox_id(&id)?).await?;
    if !is_paused(sandbox.state) {
        return Err(HttpError::new(StatusCode::CONFLICT, format!("sandbox {id} is running already")));
    }
    let pauses = sandbox.rules.on_timeout != OnTimeout::Kill;
    if request.auto_pause.is_some_and(|asked| asked != pauses) {
        return Err(HttpError::bad_request(format!(
            "autoPause is {pauses} since the sandbox was made and cannot be changed by this release of Stockade; \
             leave it out"
        )));
    }
    let lifetime = over_zero(request.timeout.unwrap_or(DEFAULT_TIMEOUT_V1))?;
    let sandbox = bring_back(&state, &who, &sandbox.id, request.memory, lifetime).await?;
    Ok((StatusCode::CREATED, Json(SandboxReply::of(&state, &sandbox).await?)))
}

fn over_zero(timeout: i64) -> Result<Duration, HttpError> {
    let seconds = u64::try_from(timeout).ok().filter(|seconds| *seconds > 0);
    let wrong = || HttpError::bad_request(format!("timeout is {timeout}; it must be over 0 seconds"));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fork {
    timeout: Option<i64>,
    count: Option<i64>,
}

/// One child, or why there is none.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ForkReply {
    Sandbox(Box<SandboxReply>),
    Error(ErrorJson),
}

pub(super) async fn fork(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(Fork { timeout, count }): Body<Fork>,
) -> Result<(StatusCode, Json<Vec<ForkReply>>), HttpError> {
    let lifetime = over_zero(timeout.unwrap_or(DEFAULT_TIMEOUT_V1))?;
    let count = count.unwrap_or(1);
    let request = ForkRequest {
        count: u32::try_from(count)
            .map_err(|_| HttpError::bad_request(format!("count is {count}; it must be 1 or more")))?,
        lifetime: Some(lifetime),
        ..ForkRequest::default()
    };
    let children = state.service.fork(&who, &sandbox_id(&id)?, request).await?;
    let mut replies = Vec::with_capacity(children.len());
    for child in children {
        replies.push(match child {
            Ok(child) => ForkReply::Sandbox(Box::new(SandboxReply::of(&state, &child).await?)),
            Err(error) => ForkReply::Error(HttpError::from(error).into()),
        });
    }
    Ok((StatusCode::CREATED, Json(replies)))
}
