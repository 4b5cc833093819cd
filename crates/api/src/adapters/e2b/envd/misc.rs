//! `/health`, `/metrics`, `/envs`.

use std::collections::BTreeMap;

use axum::{Extension, Json};
use http::StatusCode;
use serde::Serialize;

use super::{super::error::HttpError, Entered, guest_error::Asked};

/// 204: the proxy has found the sandbox running before this is asked.
pub(super) async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

pub(super) async fn envs(Extension(entered): Extension<Entered>) -> Json<BTreeMap<String, String>> {
    Json(entered.sandbox.env)
}

#[derive(Serialize)]
pub(super) struct Metrics {
    ts: u64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

pub(super) async fn metrics(Extension(entered): Extension<Entered>) -> Result<Json<Metrics>, HttpError> {
    let stats = entered.guest.stats().await.map_err(|error| Asked::default().http_error(error))?;
    Ok(Json(Metrics {
        ts: stats.unix_ms / 1000,
        cpu_count: stats.cpu_count,
        cpu_used_pct: stats.cpu_used_percent,
        mem_total: stats.memory_total,
        mem_used: stats.memory_used,
        mem_cache: stats.memory_cache,
        mem_total_mib: stats.memory_total >> 20,
        mem_used_mib: stats.memory_used >> 20,
        disk_used: stats.disk_used,
        disk_total: stats.disk_total,
    }))
}
