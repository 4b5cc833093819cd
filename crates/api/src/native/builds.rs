//! Building templates.
//!
//! ```text
//! PUT  /v1/uploads/{digest}          an archive (tar, plain or gzip) that `copy` steps copy from
//! POST /v1/templates                 begins a build; the answer has its id
//! GET  /v1/builds/{build}            its state and its log from an offset on
//! DELETE /v1/templates/{template}
//! ```

use axum::{
    Json as JsonBody,
    body::Body,
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
};
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use stockade_service::{
    BuildAction, BuildPlace, BuildPlan, BuildState, BuildStep, BuildView, LogEntry, LogLevel, NewBuild,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::show_time;
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path, Query},
};

const MOST_LOG_LINES: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(start))
        .routes(routes!(status))
        .routes(routes!(remove))
        .merge(OpenApiRouter::new().routes(routes!(upload)).layer(DefaultBodyLimit::disable()))
}

/// A template to be built.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct BuildRequest {
    /// Lower-case letters, digits, `-`, `_`, `.` and `/`.
    name: String,
    /// By default `default`, which is what the plain name means.
    #[serde(default)]
    tags: Vec<String>,
    /// The parent: a template or a snapshot, by name or id.
    from: String,
    #[serde(default)]
    steps: Vec<StepRequest>,
    /// A command line that runs on in every sandbox made from the template.
    #[serde(default)]
    start: Option<String>,
    /// A command line that succeeds once `start` is ready; tried again until it does, for ten minutes.
    #[serde(default)]
    ready: Option<String>,
    /// Carry out every step, also those an earlier build has carried out.
    #[serde(default)]
    force: bool,
}

/// One step of a build.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum StepRequest {
    /// Run a command line; one that fails ends the build.
    Run {
        command: String,
        #[serde(default)]
        user: Option<String>,
    },
    /// Copy files of an upload, as a Dockerfile's COPY does.
    Copy {
        /// The upload's digest.
        upload: String,
        /// A path or a pattern in it.
        source: String,
        destination: String,
        /// `user` or `user:group`.
        #[serde(default)]
        owner: Option<String>,
        /// Permission bits of the files, octal.
        #[serde(default)]
        mode: Option<String>,
    },
    /// Set a variable; `$NAME` in the value stands for an earlier one.
    Env { name: String, value: String },
    /// Set the working directory, made if it is not there.
    Workdir { path: String },
    /// Set the user, made if there is none.
    User {
        name: String,
        /// May become root without a password.
        #[serde(default)]
        sudo: bool,
    },
}

impl From<StepRequest> for BuildStep {
    fn from(step: StepRequest) -> Self {
        let action = match step {
            StepRequest::Run { command, user } => BuildAction::Run { command, user },
            StepRequest::Copy { upload, source, destination, owner, mode } => {
                BuildAction::Copy { source, destination, owner, mode, archive: upload }
            }
            StepRequest::Env { name, value } => BuildAction::Env(vec![(name, value)]),
            StepRequest::Workdir { path } => BuildAction::WorkDir(path),
            StepRequest::User { name, sudo } => BuildAction::User { name, sudo },
        };
        Self { action, force: false }
    }
}

/// A build as it is now.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Build)]
struct BuildReply {
    id: String,
    /// The template it makes.
    template: String,
    name: String,
    tags: Vec<String>,
    /// `waiting`, `building`, `ready` or `failed`.
    state: &'static str,
    log: Vec<LogLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<Failure>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = BuildLogLine)]
struct LogLine {
    #[schema(format = DateTime)]
    at: String,
    /// `info`, `warn` (standard error of commands) or `error`.
    level: &'static str,
    /// `base`, the step's number from 1, or `finalize`.
    step: String,
    message: String,
}

/// Where and why a build failed.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = BuildFailure)]
struct Failure {
    /// `base`, the step's number from 1, or `finalize`.
    step: String,
    message: String,
}

fn place(place: BuildPlace) -> String {
    match place {
        BuildPlace::Base => "base".to_owned(),
        BuildPlace::Step(number) => number.to_string(),
        BuildPlace::Finalize => "finalize".to_owned(),
    }
}

impl From<LogEntry> for LogLine {
    fn from(entry: LogEntry) -> Self {
        let level = match entry.level {
            LogLevel::Info => "info",
            LogLevel::Warn => "warn",
            LogLevel::Error => "error",
        };
        Self { at: show_time(entry.at), level, step: place(entry.place), message: entry.message }
    }
}

impl From<BuildView> for BuildReply {
    fn from(build: BuildView) -> Self {
        Self {
            id: build.id,
            template: build.template.to_string(),
            name: build.name,
            tags: build.tags,
            state: match build.state {
                BuildState::Waiting => "waiting",
                BuildState::Building => "building",
                BuildState::Ready => "ready",
                BuildState::Failed => "failed",
            },
            log: build.log.into_iter().map(LogLine::from).collect(),
            failure: build.failure.map(|(step, message)| Failure { step: place(step), message }),
        }
    }
}

/// Begin to build a template.
///
/// The build goes on by itself: a sandbox is made from the parent, the steps are carried out in it, and what it
/// is then, memory and running programs included, becomes the template. Steps that an earlier build has carried
/// out on the same parent after the same steps are not carried out again.
#[utoipa::path(
    post, path = "/v1/templates", tag = "templates", request_body = BuildRequest,
    responses((status = 202, body = BuildReply))
)]
async fn start(
    State(state): State<AppState>,
    caller: Caller,
    Json(request): Json<BuildRequest>,
) -> Result<(StatusCode, JsonBody<BuildReply>), ApiError> {
    let reserved = state.service.reserve_build(&caller.0, NewBuild { name: request.name, tags: request.tags })?;
    let plan = BuildPlan {
        from: request.from,
        steps: request.steps.into_iter().map(BuildStep::from).collect(),
        start: request.start.filter(|command| !command.is_empty()),
        ready: request.ready.filter(|command| !command.is_empty()),
        force: request.force,
    };
    state.service.start_build(&caller.0, &reserved.id, plan)?;
    Ok((StatusCode::ACCEPTED, JsonBody(state.service.build(&caller.0, &reserved.id, 0, 0).await?.into())))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogQuery {
    #[serde(default)]
    log_offset: usize,
}

/// How far a build is, with its log from `log_offset` on, at most 1000 lines.
#[utoipa::path(
    get, path = "/v1/builds/{build}", tag = "templates",
    params(("build" = String, Path), ("log_offset" = Option<usize>, Query, description = "Lines seen already")),
    responses((status = 200, body = BuildReply))
)]
async fn status(
    State(state): State<AppState>,
    caller: Caller,
    Path(build): Path<String>,
    Query(query): Query<LogQuery>,
) -> Result<JsonBody<BuildReply>, ApiError> {
    Ok(JsonBody(state.service.build(&caller.0, &build, query.log_offset, MOST_LOG_LINES).await?.into()))
}

/// Upload an archive for `copy` steps: tar, plain or gzip.
///
/// The digest names it, 32 to 128 hexadecimal digits; it is the client's business that another content has
/// another digest. Kept for a day after its last use.
#[utoipa::path(
    put, path = "/v1/uploads/{digest}", tag = "templates", params(("digest" = String, Path)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 204))
)]
async fn upload(
    State(state): State<AppState>,
    caller: Caller,
    Path(digest): Path<String>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let pieces = body.into_data_stream().map(|piece| piece.map(Vec::from).map_err(std::io::Error::other));
    state.service.keep_upload(&caller.0.workspace, &digest, Box::pin(pieces)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Delete a template that was built here; refused while sandboxes or snapshots need it.
#[utoipa::path(
    delete, path = "/v1/templates/{template}", tag = "templates", params(("template" = String, Path)),
    responses((status = 204))
)]
async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Path(template): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.service.delete_template(&caller.0, &template).await?;
    Ok(StatusCode::NO_CONTENT)
}
