//! Snapshots: take, list, look at, delete. A sandbox is made from one by naming it as the template.

use std::{collections::BTreeMap, time::Duration};

use axum::{extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use stockade_model::{MachineShape, Snapshot, SnapshotId};
use stockade_service::{ServiceError, SnapshotFilter, SnapshotRequest, SnapshotScope};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{query, sandbox_id, sandboxes::TemplateRef, show_time};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path, QueryPairs},
};

/// A snapshot can be kept for ever, so a longer time than this is a slip.
const LONGEST_SECONDS: f64 = 1e9;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(create)).routes(routes!(list)).routes(routes!(get, delete))
}

/// What to take.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct SnapshotCreateRequest {
    /// A name; the newest snapshot of a name is meant by it. 1 to 128 bytes without control characters, and no id.
    name: Option<String>,
    /// Labels of your choice.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// False: the disk alone; what is made from it boots.
    #[serde(default = "default_memory")]
    #[schema(default = true)]
    memory: bool,
    /// Seconds after which it is deleted by itself; left out: never.
    expires_after_seconds: Option<f64>,
}

fn default_memory() -> bool {
    true
}

/// One snapshot.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Snapshot)]
struct SnapshotView {
    id: String,
    name: Option<String>,
    labels: BTreeMap<String, String>,
    /// The sandbox it was taken of.
    sandbox: String,
    /// The snapshot that sandbox came from.
    parent: Option<String>,
    template: TemplateRef,
    shape: MachineShape,
    /// Whether memory is in it.
    memory: bool,
    /// Bytes of memory that differ from the template's.
    memory_bytes: u64,
    /// Bytes of its disk layers, those shared with others included.
    disk_bytes: u64,
    /// How long the sandbox stood still for it.
    paused_seconds: f64,
    #[schema(format = DateTime)]
    created_at: String,
    /// When it is deleted by itself.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

impl From<Snapshot> for SnapshotView {
    fn from(snapshot: Snapshot) -> Self {
        Self {
            id: snapshot.id.to_string(),
            name: snapshot.name,
            labels: snapshot.labels,
            sandbox: snapshot.sandbox.to_string(),
            parent: snapshot.parent.map(|parent| parent.to_string()),
            template: TemplateRef { id: snapshot.template.to_string(), name: snapshot.template_name },
            shape: snapshot.shape,
            memory: snapshot.has_memory,
            memory_bytes: snapshot.memory_bytes,
            disk_bytes: snapshot.disk_bytes,
            paused_seconds: snapshot.paused.as_secs_f64(),
            created_at: show_time(snapshot.created_at),
            expires_at: snapshot.expires_at.map(show_time),
        }
    }
}

/// One page of snapshots.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct SnapshotPage {
    items: Vec<SnapshotView>,
    /// For the next page; null on the last.
    cursor: Option<String>,
}

/// Take a snapshot of a running sandbox, which goes on. Answers when it is durable.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/snapshots", tag = "snapshots", operation_id = "create_snapshot",
    params(("id" = String, Path)),
    request_body = SnapshotCreateRequest, responses((status = 201, body = SnapshotView))
)]
async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<SnapshotCreateRequest>,
) -> Result<(StatusCode, axum::Json<SnapshotView>), ApiError> {
    let request = SnapshotRequest {
        name: request.name,
        labels: request.labels,
        scope: if request.memory { SnapshotScope::MemoryAndDisk } else { SnapshotScope::DiskOnly },
        expires_after: request.expires_after_seconds.map(expiry).transpose()?,
    };
    let snapshot = state.service.snapshot(&caller.0, &sandbox_id(&id)?, request).await?;
    Ok((StatusCode::CREATED, axum::Json(snapshot.into())))
}

fn expiry(seconds: f64) -> Result<Duration, ApiError> {
    if seconds > 0.0 && seconds <= LONGEST_SECONDS {
        return Ok(Duration::from_secs_f64(seconds));
    }
    Err(ApiError::invalid(format!("expires_after_seconds must be over 0 and at most {LONGEST_SECONDS}")))
}

/// List snapshots, newest first. All conditions hold.
#[utoipa::path(
    get,
    path = "/v1/snapshots",
    tag = "snapshots",
    operation_id = "list_snapshots",
    params(
        ("sandbox" = Option<String>, Query, description = "Taken of this sandbox."),
        ("name" = Option<String>, Query, description = "Of this name."),
        ("label" = Option<Vec<String>>, Query, description = "`KEY=VALUE`; may be repeated, all must match."),
        ("order" = Option<String>, Query, description = "`desc` (newest first, the default) or `asc`."),
        ("limit" = Option<u32>, Query, description = "1 to 1000, by default 100."),
        ("cursor" = Option<String>, Query, description = "From the page before."),
    ),
    responses((status = 200, body = SnapshotPage))
)]
async fn list(
    State(state): State<AppState>,
    caller: Caller,
    QueryPairs(pairs): QueryPairs,
) -> Result<axum::Json<SnapshotPage>, ApiError> {
    let page = state.service.snapshots(&caller.0, &list_filter(pairs)?).await?;
    let items = page.items.into_iter().map(SnapshotView::from).collect();
    Ok(axum::Json(SnapshotPage { items, cursor: page.cursor }))
}

fn list_filter(pairs: Vec<(String, String)>) -> Result<SnapshotFilter, ApiError> {
    let mut filter = SnapshotFilter { limit: query::DEFAULT_LIMIT, ..SnapshotFilter::default() };
    let mut seen = Vec::new();
    for (name, value) in pairs {
        query::once(&mut seen, &name, "label")?;
        match name.as_str() {
            "sandbox" => filter.sandbox = Some(sandbox_id(&value)?),
            "name" => filter.name = Some(value),
            "label" => query::add_label(&mut filter.labels, &name, &value)?,
            "order" => filter.ascending = query::ascending(&value)?,
            "limit" => filter.limit = query::limit(&value)?,
            "cursor" => filter.cursor = Some(value),
            _ => {
                return Err(query::unknown("`sandbox`, `name`, `label`, `order`, `limit`, `cursor`"));
            }
        }
    }
    Ok(filter)
}

/// One snapshot by id, or the newest of a name.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}", tag = "snapshots", operation_id = "get_snapshot",
    params(("snapshot" = String, Path)), responses((status = 200, body = SnapshotView))
)]
async fn get(
    State(state): State<AppState>,
    caller: Caller,
    Path(snapshot): Path<String>,
) -> Result<axum::Json<SnapshotView>, ApiError> {
    Ok(axum::Json(state.service.get_snapshot(&caller.0, &snapshot).await?.into()))
}

/// Delete a snapshot by its id. What was made from it lives on; 409 while something is just being started from it.
#[utoipa::path(
    delete, path = "/v1/snapshots/{snapshot}", tag = "snapshots", operation_id = "delete_snapshot",
    params(("snapshot" = String, Path)), responses((status = 204))
)]
async fn delete(
    State(state): State<AppState>,
    caller: Caller,
    Path(snapshot): Path<String>,
) -> Result<StatusCode, ApiError> {
    // By id alone: which one a name means can change between a look and a delete.
    let id: SnapshotId = snapshot.parse().map_err(|_| ServiceError::SnapshotNotFound { name: snapshot.clone() })?;
    state.service.delete_snapshot(&caller.0, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
