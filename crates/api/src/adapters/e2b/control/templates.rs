//! Templates, as far as they are only read.

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use http::StatusCode;
use jiff::Timestamp;
use serde::Serialize;
use stockade_model::TemplateState;
use stockade_service::{Principal, ServiceError};

use super::{
    super::{ENVD_VERSION, error::HttpError},
    JsonResult,
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

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
) -> JsonResult<Vec<Template>> {
    let templates = state.service.templates(&who).await?;
    let templates = templates.into_iter().filter(|template| template.state != TemplateState::Replaced);
    let templates = templates.map(|template| Template {
        // A template is one build here, so one id serves for both.
        build_id: template.id.to_string(),
        template_id: template.id.to_string(),
        cpu_count: template.shape.vcpus,
        memory_mb: template.shape.memory_mib,
        disk_size_mb: template.shape.disk_mib,
        public: template.workspace.is_none(),
        aliases: vec![template.name.clone()],
        names: vec![template.name],
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
    });
    Ok(Json(templates.collect()))
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
    match state.service.template(&who, &alias).await {
        Ok(template) => {
            Ok(Json(AliasReply { template_id: template.id.to_string(), public: template.workspace.is_none() }))
        }
        Err(ServiceError::TemplateNotFound { .. }) => {
            Err(HttpError::new(StatusCode::NOT_FOUND, format!("template alias '{alias}' not found")))
        }
        Err(error) => Err(error.into()),
    }
}
