//! Metrics: one sample, taken when asked. No history is kept yet, so a window in the past is empty.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stockade_model::SandboxId;
use stockade_service::{Principal, ServiceError};

use super::{super::error::HttpError, JsonResult, sandbox_id};
use crate::AppState;

#[derive(Deserialize)]
pub(super) struct Window {
    /// Seconds since the epoch.
    start: Option<i64>,
    end: Option<i64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metric {
    timestamp: Timestamp,
    timestamp_unix: i64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_used: u64,
    mem_total: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

async fn sample(state: &AppState, who: &Principal, id: &SandboxId) -> Result<Metric, ServiceError> {
    let guest = state.service.guest(who, id).await?;
    let stats = guest.stats().await.map_err(ServiceError::Engine)?;
    // The host's clock: a window is asked for by it.
    let timestamp = Timestamp::now();
    Ok(Metric {
        timestamp,
        timestamp_unix: timestamp.as_second(),
        cpu_count: stats.cpu_count,
        cpu_used_pct: stats.cpu_used_percent,
        mem_used: stats.memory_used,
        mem_total: stats.memory_total,
        mem_cache: stats.memory_cache,
        disk_used: stats.disk_used,
        disk_total: stats.disk_total,
    })
}

pub(super) async fn one(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Query(window): Query<Window>,
) -> JsonResult<Vec<Metric>> {
    if window.start.zip(window.end).is_some_and(|(start, end)| start > end) {
        return Err(HttpError::bad_request("start lies after end"));
    }
    let metric = sample(&state, &who, &sandbox_id(&id)?).await?;
    let now = metric.timestamp_unix;
    let inside = window.start.is_none_or(|start| start <= now) && window.end.is_none_or(|end| now <= end);
    Ok(Json(if inside { vec![metric] } else { Vec::new() }))
}

#[derive(Deserialize)]
pub(super) struct Many {
    sandbox_ids: String,
}

#[derive(Serialize)]
pub(super) struct ManyReply {
    sandboxes: BTreeMap<String, Metric>,
}

/// The latest sample of each; those that are gone are left out.
pub(super) async fn many(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Query(query): Query<Many>,
) -> JsonResult<ManyReply> {
    let ids: Vec<&str> = query.sandbox_ids.split(',').filter(|id| !id.is_empty()).collect();
    if ids.len() > 100 {
        return Err(HttpError::bad_request(format!("sandbox_ids has {} ids; at most 100 are possible", ids.len())));
    }
    let mut sandboxes = BTreeMap::new();
    for id in ids {
        let Ok(sandbox) = sandbox_id(id) else { continue };
        match sample(&state, &who, &sandbox).await {
            Ok(metric) => drop(sandboxes.insert(id.to_owned(), metric)),
            Err(ServiceError::SandboxNotFound { .. } | ServiceError::SandboxEnded { .. }) => {}
            Err(ServiceError::WrongState { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(ManyReply { sandboxes }))
}
