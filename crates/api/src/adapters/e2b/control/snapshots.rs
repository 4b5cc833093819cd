//! Snapshots, which E2B takes for a kind of template: made from a sandbox, named where a template is named,
//! and deleted as one.

use axum::{
    Extension, Json,
    extract::{Path, State},
    response::Response,
};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use stockade_model::{Snapshot, TEMPLATE_NAME, shortened};
use stockade_service::{Principal, ServiceError, SnapshotFilter, SnapshotRequest, SnapshotScope};

use super::{super::error::HttpError, Body, Query, paging, sandbox_id, sandboxes::template_name};
use crate::AppState;

/// `SnapshotInfo`.
#[derive(Serialize)]
pub(super) struct SnapshotInfo {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    names: Vec<String>,
}

impl From<Snapshot> for SnapshotInfo {
    fn from(snapshot: Snapshot) -> Self {
        Self { snapshot_id: snapshot.id.to_string(), names: snapshot.name.into_iter().collect() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewSnapshot {
    name: Option<String>,
    memory: Option<bool>,
}

pub(super) async fn create(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(NewSnapshot { name, memory }): Body<NewSnapshot>,
) -> Result<(StatusCode, Json<SnapshotInfo>), HttpError> {
    let request = SnapshotRequest {
        name: match name {
            Some(name) => Some(free_name(&state, &who, &name).await?),
            None => None,
        },
        labels: std::collections::BTreeMap::new(),
        scope: if memory.unwrap_or(true) { SnapshotScope::MemoryAndDisk } else { SnapshotScope::DiskOnly },
        expires_after: None,
    };
    let snapshot = state.service.snapshot(&who, &sandbox_id(&id)?, request).await?;
    Ok((StatusCode::CREATED, Json(snapshot.into())))
}

/// E2B keeps what sandboxes were made from; ours need it no longer, but their clients expect to be told.
pub(super) async fn expect_unused(state: &AppState, who: &Principal, snapshot: &Snapshot) -> Result<(), HttpError> {
    match state.service.made_from_snapshot(who, &snapshot.id).await? {
        None => Ok(()),
        Some(sandbox) => Err(HttpError::bad_request(format!(
            "snapshot '{}' is in use: sandbox {sandbox}, which lives, was made from it; kill that first",
            snapshot.name.as_deref().unwrap_or(snapshot.id.as_str())
        ))),
    }
}

/// A new snapshot's name: one that no template has, which create would find first.
async fn free_name(state: &AppState, who: &Principal, text: &str) -> Result<String, HttpError> {
    let name = plain_name(text)?;
    TEMPLATE_NAME.check(&name).map_err(|bad| HttpError::bad_request(format!("name {bad}")))?;
    match state.service.template(who, &name).await {
        Err(ServiceError::TemplateNotFound { .. }) => Ok(name),
        Ok(_) => {
            let message = format!("name '{name}' is a template's; take another");
            Err(HttpError::new(StatusCode::CONFLICT, message))
        }
        Err(error) => Err(error.into()),
    }
}

/// A name as create will look for it.
fn plain_name(text: &str) -> Result<String, HttpError> {
    template_name(text).map_err(|_| {
        let message = format!(
            "name '{}' has a tag, which this release of Stockade does not support; leave it out",
            shortened(text)
        );
        HttpError::bad_request(message)
    })
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct ListQuery {
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
    name: Option<String>,
    limit: Option<i64>,
    next_token: Option<String>,
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Query(query): Query<ListQuery>,
) -> Result<Response, HttpError> {
    let limit = paging::limit(query.limit)?;
    let filter = SnapshotFilter {
        sandbox: query.sandbox_id.as_deref().map(sandbox_id).transpose()?,
        name: query.name.as_deref().map(plain_name).transpose()?,
        limit,
        cursor: query.next_token.filter(|token| !token.is_empty()),
        ..SnapshotFilter::default()
    };
    let page = state.service.snapshots(&who, &filter).await?;
    let items: Vec<SnapshotInfo> = page.items.into_iter().map(SnapshotInfo::from).collect();
    Ok(paging::answer(items, page.cursor.as_deref()))
}
