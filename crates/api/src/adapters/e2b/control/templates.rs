//! Templates: what there is of them; building them is in `builds`.
//!
//! To E2B a template is a name, and its builds come and go; to us each build is a template. So its id is its name.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use http::StatusCode;
use jiff::Timestamp;
use serde::Serialize;
use stockade_model::shortened;
use stockade_service::{DEFAULT_TAG, Principal, ServiceError, TemplateTag};

use super::{
    super::{ENVD_VERSION, error::HttpError},
    JsonResult,
    builds::full_name,
    snapshots,
};
use crate::AppState;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Template {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    public: bool,
    aliases: Vec<String>,
    names: Vec<String>,
    created_at: Timestamp,
    updated_at: Timestamp,
    created_by: Option<String>,
    last_spawned_at: Option<Timestamp>,
    spawn_count: u64,
    build_count: usize,
    envd_version: &'static str,
    build_status: &'static str,
}

impl Template {
    /// A template as E2B's clients see one: a name, and all that was built under it. Ours is what one build has made.
    async fn of(
        state: &AppState,
        who: &Principal,
        builds: &[stockade_model::Template],
        tags: &[TemplateTag],
    ) -> Result<Self, HttpError> {
        let name = &builds[0].name;
        let is_own = builds[0].workspace.is_some();
        let tags: Vec<&TemplateTag> = tags.iter().filter(|tag| is_own && tag.name == *name).collect();
        // What its plain name means, else the newest.
        let default = tags.iter().find(|tag| tag.tag == DEFAULT_TAG).map(|tag| &tag.template);
        let shown = builds.iter().find(|build| Some(&build.id) == default).unwrap_or(&builds[builds.len() - 1]);
        let full_name = |tag: &&TemplateTag| match tag.tag.as_str() {
            DEFAULT_TAG => name.clone(),
            tag => format!("{name}:{tag}"),
        };
        let (spawn_count, last_spawned_at) = state.service.template_uses(who, builds).await?;
        Ok(Self {
            template_id: name.clone(),
            build_id: state.service.build_of(who, &shown.id).await?.unwrap_or_else(|| shown.id.to_string()),
            cpu_count: shown.shape.vcpus,
            memory_mb: shown.shape.memory_mib,
            disk_size_mb: shown.shape.disk_mib,
            public: !is_own,
            aliases: vec![name.clone()],
            names: if is_own { tags.iter().map(full_name).collect() } else { vec![name.clone()] },
            created_at: builds[0].created_at,
            updated_at: builds[builds.len() - 1].created_at,
            created_by: None,
            last_spawned_at,
            spawn_count,
            build_count: builds.len(),
            envd_version: ENVD_VERSION,
            build_status: "ready",
        })
    }
}

/// What can be used, by name; a template of the workspace's own apart from the server's of the same name.
async fn all(state: &AppState, who: &Principal) -> Result<Vec<Template>, HttpError> {
    let mut named: BTreeMap<(String, bool), Vec<stockade_model::Template>> = BTreeMap::new();
    for template in state.service.templates(who).await? {
        named.entry((template.name.clone(), template.workspace.is_none())).or_default().push(template);
    }
    let tags = state.service.template_tags(who).await?;
    let mut all = Vec::with_capacity(named.len());
    for mut builds in named.into_values() {
        builds.sort_by_key(|build| build.created_at);
        all.push(Template::of(state, who, &builds, &tags).await?);
    }
    Ok(all)
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
) -> JsonResult<Vec<Template>> {
    all(&state, &who).await.map(Json)
}

pub(super) async fn one(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> JsonResult<Template> {
    let template = of_any_tag(&state, &who, &full_name(&id)?).await?;
    let is_it = |known: &Template| known.template_id == template.name && known.public == template.workspace.is_none();
    let found = all(&state, &who).await?.into_iter().find(is_it);
    found.map(Json).ok_or_else(|| ServiceError::TemplateNotFound { name: id }.into())
}

/// `DELETE /templates/{id}`: all that was built under a name, or one build of it (`name:tag`), or a snapshot.
pub(super) async fn delete(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode, HttpError> {
    let name = full_name(&id)?;
    let missing = match state.service.delete_template(&who, &name).await {
        Ok(()) => return Ok(StatusCode::NO_CONTENT),
        Err(missing @ ServiceError::TemplateNotFound { .. }) => missing,
        Err(error) => return Err(error.into()),
    };
    let snapshot = match state.service.get_snapshot(&who, &name).await {
        Err(ServiceError::SnapshotNotFound { .. }) => return Err(missing.into()),
        found => found?,
    };
    snapshots::expect_unused(&state, &who, &snapshot).await?;
    state.service.delete_snapshot(&who, &snapshot.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Serialize)]
pub(super) struct AliasReply {
    #[serde(rename = "templateID")]
    template_id: String,
    public: bool,
}

pub(super) async fn alias(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(alias): Path<String>,
) -> JsonResult<AliasReply> {
    match of_any_tag(&state, &who, &full_name(&alias)?).await {
        Ok(template) => Ok(Json(AliasReply { template_id: template.name, public: template.workspace.is_none() })),
        Err(ServiceError::TemplateNotFound { .. }) => {
            let name = full_name(&alias)?;
            if state.service.knows_builds_of(&who, &name) {
                return Ok(Json(AliasReply { template_id: name, public: false }));
            }
            Err(HttpError::new(StatusCode::NOT_FOUND, format!("template alias '{}' not found", shortened(&alias))))
        }
        Err(error) => Err(error.into()),
    }
}

/// A template; under a name that nobody gave the tag `default`, the newest of its builds. To E2B, tags are of one
/// template, which is there as soon as one of them is.
pub(super) async fn of_any_tag(
    state: &AppState,
    who: &Principal,
    name: &str,
) -> Result<stockade_model::Template, ServiceError> {
    let missing = match state.service.template(who, name).await {
        Err(missing @ ServiceError::TemplateNotFound { .. }) => missing,
        found => return found,
    };
    let tags = state.service.template_tags(who).await?;
    match tags.into_iter().filter(|tag| tag.name == name).max_by_key(|tag| tag.created_at) {
        Some(tag) => state.service.template(who, tag.template.as_str()).await,
        None => Err(missing),
    }
}
