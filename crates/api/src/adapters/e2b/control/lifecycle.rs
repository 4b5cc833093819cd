//! Pause, connect, resume and fork.
//!
//! Connect is the verb clients use to come back to a sandbox: one that runs is only ever given more time
//! (200), one that is paused runs again and lives for the timeout asked for from then on (201).

use std::time::Duration;

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Path, State},
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use stockade_model::{OnTimeout, Sandbox, SandboxState};
use stockade_service::{ForkRequest, PauseMode, Principal};

use super::{
    super::error::{ErrorJson, HttpError},
    parse, sandbox_id,
    sandboxes::{DEFAULT_TIMEOUT_V1, DEFAULT_TIMEOUT_V2, SandboxReply, live},
};
use crate::AppState;

/// Whether E2B calls it paused; it knows no other state beside running.
pub(super) fn is_paused(state: SandboxState) -> bool {
    matches!(state, SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopped)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Pause {
    memory: Option<bool>,
    require_healthy_guest: Option<bool>,
}

pub(super) async fn pause(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<StatusCode, HttpError> {
    let Pause { memory, require_healthy_guest } = parse(&body)?;
    let sandbox = live(&state, &who, &sandbox_id(&id)?).await?;
    if require_healthy_guest == Some(true) {
        let message = "requireHealthyGuest is not supported by this release of Stockade; leave it out";
        return Err(HttpError::bad_request(message));
    }
    // The service would take one in standby further down: a success where E2B has none.
    if matches!(sandbox.state, SandboxState::Paused | SandboxState::Stopped) {
        return Err(HttpError::new(StatusCode::CONFLICT, format!("sandbox {id} is paused already")));
    }
    let mode = PauseMode { memory: memory.unwrap_or(true), ..PauseMode::default() };
    state.service.pause(&who, &sandbox.id, mode).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Connect {
    timeout: Option<i64>,
    memory: Option<bool>,
}

type Reply = Result<(StatusCode, Json<SandboxReply>), HttpError>;

pub(super) async fn connect_v1(
    state: State<AppState>,
    who: Extension<Principal>,
    id: Path<String>,
    body: Bytes,
) -> Reply {
    let request: Connect = parse(&body)?;
    let timeout = request.timeout.ok_or_else(|| HttpError::bad_request("timeout is missing"))?;
    connect(state, who, id, timeout, request.memory).await
}

pub(super) async fn connect_v2(
    state: State<AppState>,
    who: Extension<Principal>,
    id: Path<String>,
    body: Bytes,
) -> Reply {
    let request: Connect = parse(&body)?;
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
    if paused {
        check_resume(&sandbox, memory)?;
    }
    let sandbox = match seconds {
        0 if paused => return Err(HttpError::bad_request("timeout is 0; it must be over 0 seconds to resume")),
        0 => sandbox,
        // Resuming what runs extends it: right also for one that was paused or resumed just now.
        seconds => state.service.resume(&who, &sandbox.id, Some(Duration::from_secs(seconds))).await?,
    };
    let status = if paused { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(SandboxReply::of(&state, &sandbox).await?)))
}

/// A paused sandbox comes back as it was paused: with its memory if that was kept.
fn check_resume(sandbox: &Sandbox, memory: Option<bool>) -> Result<(), HttpError> {
    if memory == Some(false) && sandbox.state != SandboxState::Stopped {
        let message = "memory false is not supported by this release of Stockade for a sandbox that was paused with \
                       its memory; leave it out, or pause with memory false";
        return Err(HttpError::bad_request(message));
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Resume {
    timeout: Option<i64>,
    auto_pause: Option<bool>,
    memory: Option<bool>,
}

/// The old way to resume; a sandbox that runs is a conflict.
pub(super) async fn resume(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    body: Bytes,
) -> Reply {
    let request: Resume = parse(&body)?;
    let sandbox = live(&state, &who, &sandbox_id(&id)?).await?;
    if !is_paused(sandbox.state) {
        return Err(HttpError::new(StatusCode::CONFLICT, format!("sandbox {id} is running already")));
    }
    check_resume(&sandbox, request.memory)?;
    let pauses = sandbox.rules.on_timeout != OnTimeout::Kill;
    if request.auto_pause.is_some_and(|asked| asked != pauses) {
        return Err(HttpError::bad_request(format!(
            "autoPause is {pauses} since the sandbox was made and cannot be changed by this release of Stockade; \
             leave it out"
        )));
    }
    let lifetime = over_zero(request.timeout.unwrap_or(DEFAULT_TIMEOUT_V1))?;
    let sandbox = state.service.resume(&who, &sandbox.id, Some(lifetime)).await?;
    Ok((StatusCode::CREATED, Json(SandboxReply::of(&state, &sandbox).await?)))
}

fn over_zero(timeout: i64) -> Result<Duration, HttpError> {
    let seconds = u64::try_from(timeout).ok().filter(|seconds| *seconds > 0);
    let wrong = || HttpError::bad_request(format!("timeout is {timeout}; it must be over 0 seconds"));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fork {
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
    body: Bytes,
) -> Result<(StatusCode, Json<Vec<ForkReply>>), HttpError> {
    let Fork { timeout, count } = parse(&body)?;
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
