//! Templates: what there is of them; building them is in `builds`.

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use http::StatusCode;
use jiff::Timestamp;
use serde::Serialize;
use stockade_model::{TemplateState, shortened};
use stockade_service::{Principal, ServiceError, TemplateTag};

use super::{
    super::{ENVD_VERSION, error::HttpError},
    JsonResult,
    builds::{build_id, full_name},
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
    build_count: u64,
    envd_version: &'static str,
    build_status: &'static str,
}

impl Template {
    async fn of(
        state: &AppState,
        who: &Principal,
        template: stockade_model::Template,
        tags: &[TemplateTag],
    ) -> Result<Self, HttpError> {
        let named = tags.iter().filter(|tag| tag.template == template.id);
        let mut names: Vec<String> = named
            .map(|tag| if tag.tag == "default" { tag.name.clone() } else { format!("{}:{}", tag.name, tag.tag) })
            .collect();
        if names.is_empty() {
            names.push(template.name.clone());
        }
        Ok(Self {
            build_id: build_id(state, who, &template.id).await?,
            template_id: template.id.to_string(),
            cpu_count: template.shape.vcpus,
            memory_mb: template.shape.memory_mib,
            disk_size_mb: template.shape.disk_mib,
            public: template.workspace.is_none(),
            aliases: vec![template.name],
            names,
            created_at: template.created_at,
            updated_at: template.created_at,
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: 1,
            envd_version: ENVD_VERSION,
            build_status: match template.state {
                TemplateState::Building => "building",
                TemplateState::Ready | TemplateState::Replaced => "ready",
                TemplateState::Failed => "error",
            },
        })
    }
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
) -> JsonResult<Vec<Template>> {
    let tags = state.service.template_tags(&who).await?;
    let mut templates = Vec::new();
    for template in state.service.templates(&who).await? {
        if template.state != TemplateState::Replaced {
            templates.push(Template::of(&state, &who, template, &tags).await?);
        }
    }
    Ok(Json(templates))
}

pub(super) async fn one(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> JsonResult<Template> {
    let template = state.service.template(&who, &full_name(&id)?).await?;
    let tags = state.service.template_tags(&who).await?;
    Ok(Json(Template::of(&state, &who, template, &tags).await?))
}

/// `DELETE /templates/{id}`: a template that was built, or a snapshot. A name means what it means in create.
pub(super) async fn delete(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode, HttpError> {
    let name = full_name(&id)?;
    match state.service.delete_template(&who, &name).await {
        Ok(()) => return Ok(StatusCode::NO_CONTENT),
        Err(ServiceError::TemplateNotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let snapshot = state.service.get_snapshot(&who, &name).await?;
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
        Ok(template) => {
            Ok(Json(AliasReply { template_id: template.id.to_string(), public: template.workspace.is_none() }))
        }
        Err(ServiceError::TemplateNotFound { .. }) => {
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
