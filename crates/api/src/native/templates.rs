//! Templates: what there is.

use axum::{Json, extract::State};
use serde::Serialize;
use stockade_model::{MachineShape, Template, TemplateState};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::show_time;
use crate::{ApiError, AppState, auth::Caller, extract::Path};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get))
}

/// What sandboxes start from.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Template)]
struct TemplateView {
    id: String,
    name: String,
    state: TemplateState,
    shape: MachineShape,
    #[schema(format = DateTime)]
    created_at: String,
    /// User of processes and files that name none.
    default_user: String,
}

impl From<Template> for TemplateView {
    fn from(template: Template) -> Self {
        Self {
            id: template.id.to_string(),
            name: template.name,
            state: template.state,
            shape: template.shape,
            created_at: show_time(template.created_at),
            default_user: template.default_user,
        }
    }
}

/// All templates.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct TemplateList {
    items: Vec<TemplateView>,
}

/// List the templates you can use.
#[utoipa::path(get, path = "/v1/templates", tag = "templates", responses((status = 200, body = TemplateList)))]
async fn list(State(state): State<AppState>, caller: Caller) -> Result<Json<TemplateList>, ApiError> {
    let templates = state.service.templates(&caller.0).await?;
    Ok(Json(TemplateList { items: templates.into_iter().map(TemplateView::from).collect() }))
}

/// One template by name or id.
#[utoipa::path(
    get, path = "/v1/templates/{template}", tag = "templates", params(("template" = String, Path)),
    responses((status = 200, body = TemplateView))
)]
async fn get(
    State(state): State<AppState>,
    caller: Caller,
    Path(template): Path<String>,
) -> Result<Json<TemplateView>, ApiError> {
    Ok(Json(state.service.template(&caller.0, &template).await?.into()))
}
