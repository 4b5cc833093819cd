//! Metrics of sandboxes, a sample every few seconds.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use stockade_service::{MetricsSample, Principal, ServiceError};

use super::{super::error::HttpError, JsonResult, Query, sandbox_id};
use crate::AppState;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Window {
    /// Seconds since the epoch.
    start: Option<i64>,
    end: Option<i64>,
}

impl Window {
    /// The first and the last instant of it: `end` names a whole second.
    fn bounds(&self) -> Result<(Option<Timestamp>, Option<Timestamp>), HttpError> {
        if self.start.zip(self.end).is_some_and(|(start, end)| start > end) {
            return Err(HttpError::bad_request("start lies after end"));
        }
        let at = |second: Option<i64>, rest: SignedDuration| {
            let instant = second.map(|second| Timestamp::from_second(second)?.checked_add(rest));
            instant.transpose().map_err(|error| HttpError::bad_request(format!("start or end is no time: {error}")))
        };
        Ok((at(self.start, SignedDuration::ZERO)?, at(self.end, SignedDuration::from_millis(999))?))
    }
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

impl From<MetricsSample> for Metric {
    fn from(MetricsSample { at, stats }: MetricsSample) -> Self {
        Self {
            timestamp: at,
            timestamp_unix: at.as_second(),
            cpu_count: stats.cpu_count,
            cpu_used_pct: stats.cpu_used_percent,
            mem_used: stats.memory_used,
            mem_total: stats.memory_total,
            mem_cache: stats.memory_cache,
            disk_used: stats.disk_used,
            disk_total: stats.disk_total,
        }
    }
}

pub(super) async fn one(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Query(window): Query<Window>,
) -> JsonResult<Vec<Metric>> {
    let (start, end) = window.bounds()?;
    let samples = state.service.metrics(&who, &sandbox_id(&id)?, start, end).await?;
    Ok(Json(samples.into_iter().map(Into::into).collect()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
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
        match state.service.metrics(&who, &sandbox, None, None).await {
            Ok(samples) => {
                sandboxes.extend(samples.into_iter().next_back().map(|latest| (id.to_owned(), latest.into())));
            }
            Err(
                ServiceError::SandboxNotFound { .. }
                | ServiceError::SandboxEnded { .. }
                | ServiceError::WrongState { .. },
            ) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(ManyReply { sandboxes }))
}
