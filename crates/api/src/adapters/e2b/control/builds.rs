//! Template builds: `Template()` of the SDKs.
//!
//! ```text
//! POST /v3/templates                                  a name is reserved
//! GET  /templates/{id}/files/{hash}                   is that upload there? if not, where to put it
//! PUT  /uploads/{workspace's token}/{hash}            without a key: the token is the right to this one upload
//! POST /v2/templates/{id}/builds/{build}              the steps
//! GET  /templates/{id}/builds/{build}/status          polled, with the log from an offset on
//! ```

use axum::{
    Extension, Json,
    body::Body as Stream,
    extract::{Path, State},
    response::{IntoResponse as _, Response},
};
use futures::StreamExt as _;
use http::{HeaderMap, StatusCode, Uri, header};
use jiff::Timestamp;
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::Value;
use stockade_model::{WorkspaceId, shortened};
use stockade_service::{
    BuildAction, BuildPlace, BuildPlan, BuildState, BuildStep, BuildView, LogEntry, LogLevel, NewBuild, Principal,
    ServiceError,
};

use super::{super::error::HttpError, Body, JsonResult, Query, sandboxes::template_name, templates::of_any_tag};
use crate::AppState;

/// Images that stand for our own template `base`: what a `Template()` without a `from_...` names.
const BASE_IMAGES: [&str; 2] = ["e2bdev/base", "e2bdev/base:latest"];
/// What SDKs of the 2.45 generation send where nobody has chosen anything.
const SDK_DEFAULT_CPUS: u32 = 2;
const SDK_DEFAULT_MEMORY_MB: u64 = 1024;
const MOST_LOG_LINES: usize = 100;
/// What stands where a template's id does: `/templates/tags`.
const RESERVED_NAMES: [&str; 2] = ["aliases", "tags"];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Reserve {
    name: Option<String>,
    alias: Option<String>,
    tags: Option<Vec<String>>,
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
    min_free_disk_mb: Option<u64>,
    /// Nobody can be on another team here.
    #[serde(rename = "teamID")]
    _team_id: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Reserved {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    public: bool,
    names: Vec<String>,
    tags: Vec<String>,
    aliases: Vec<String>,
}

/// `[namespace/]alias[:tag]`, trimmed and lower-cased.
fn name_and_tag(text: &str) -> (String, Option<String>) {
    let name = text.trim().to_ascii_lowercase();
    match name.split_once(':') {
        Some((name, tag)) => (name.to_owned(), Some(tag.to_owned())),
        None => (name, None),
    }
}

impl Reserve {
    /// A template's machines have its parent's shape; other wishes are refused.
    fn check_shape(&self) -> Result<(), HttpError> {
        let refuse = |field: &str, value: u64| {
            Err(HttpError::bad_request(format!(
                "{field} {value} is not supported by this release of Stockade: a template has its parent's \
                 processors, memory and disk; leave it out"
            )))
        };
        match (self.cpu_count, self.memory_mb, self.min_free_disk_mb) {
            (Some(count), ..) if count != SDK_DEFAULT_CPUS => refuse("cpuCount", count.into()),
            (_, Some(memory), _) if memory != SDK_DEFAULT_MEMORY_MB => refuse("memoryMB", memory),
            (_, _, Some(disk)) => refuse("minFreeDiskMb", disk),
            _ => Ok(()),
        }
    }
}

pub(super) async fn reserve(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Body(request): Body<Reserve>,
) -> Result<(StatusCode, Json<Reserved>), HttpError> {
    request.check_shape()?;
    let text = request.name.as_deref().or(request.alias.as_deref());
    let text = text.ok_or_else(|| HttpError::bad_request("name is missing"))?;
    let (name, tag) = name_and_tag(text);
    if RESERVED_NAMES.contains(&name.as_str()) {
        return Err(HttpError::bad_request(format!(
            "name '{name}' has a meaning of its own in this API; take another"
        )));
    }
    let mut tags: Vec<String> =
        request.tags.unwrap_or_default().iter().map(|tag| tag.trim().to_ascii_lowercase()).collect();
    tags.extend(tag.filter(|tag| !tags.contains(tag)));
    let build = state.service.reserve_build(&who, NewBuild { name, tags })?;
    let reserved = Reserved {
        template_id: build.name.clone(),
        build_id: build.id,
        public: false,
        names: vec![build.name.clone()],
        tags: build.tags,
        aliases: vec![build.name],
    };
    Ok((StatusCode::ACCEPTED, Json(reserved)))
}

#[derive(Serialize)]
pub(super) struct UploadReply {
    present: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

pub(super) async fn upload_link(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path((_, hash)): Path<(String, String)>,
    Extension(peer): Extension<crate::Peer>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<(StatusCode, Json<UploadReply>), HttpError> {
    let present = state.service.upload(&who, &hash).await?.is_some();
    let url = (!present).then(|| {
        let scheme = if peer.is_secure { "https" } else { "http" };
        // As the client itself names us: HTTP/2 has it in the target.
        let named = uri.authority().map(|authority| authority.as_str());
        let host = named.or_else(|| headers.get(header::HOST)?.to_str().ok()).unwrap_or_default();
        let token = state.service.upload_token(&who.workspace, &hash);
        format!("{scheme}://{host}/uploads/{}/{hash}?token={}", who.workspace, token.expose())
    });
    Ok((StatusCode::CREATED, Json(UploadReply { present, url })))
}

#[derive(Deserialize)]
pub(super) struct Token {
    token: String,
}

/// The upload itself; its URL is the right to it.
pub(super) async fn upload(
    State(state): State<AppState>,
    Path((workspace, hash)): Path<(String, String)>,
    Query(Token { token }): Query<Token>,
    body: Stream,
) -> Result<StatusCode, HttpError> {
    let refused = || HttpError::new(StatusCode::FORBIDDEN, "the upload's token is not valid");
    let workspace: WorkspaceId = workspace.parse().map_err(|_| refused())?;
    if !state.service.upload_token(&workspace, &hash).matches(&token) {
        return Err(refused());
    }
    let pieces = body.into_data_stream().map(|piece| piece.map(Vec::from).map_err(std::io::Error::other));
    state.service.keep_upload(&workspace, &hash, Box::pin(pieces)).await?;
    Ok(StatusCode::OK)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Start {
    from_image: Option<String>,
    from_template: Option<String>,
    from_image_registry: Option<Value>,
    #[serde(default)]
    force: Option<bool>,
    #[serde(default)]
    steps: Vec<Step>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Step {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    args: Vec<String>,
    files_hash: Option<String>,
    force: Option<bool>,
    /// For the client's own use.
    #[serde(rename = "forceUpload")]
    _force_upload: Option<IgnoredAny>,
    #[serde(rename = "resolveSymlinks")]
    _resolve_symlinks: Option<IgnoredAny>,
    #[serde(rename = "gzip")]
    _gzip: Option<IgnoredAny>,
}

impl Start {
    fn plan(self) -> Result<BuildPlan, HttpError> {
        let registry = |image: &str| {
            HttpError::bad_request(format!(
                "building from the registry image '{image}' is not supported by this release of Stockade; \
                 build from a template (fromTemplate, base for example)"
            ))
        };
        let from = match (self.from_template, self.from_image) {
            (Some(_), None) if self.from_image_registry.is_some() => {
                return Err(HttpError::bad_request("fromImageRegistry does not go with fromTemplate; leave it out"));
            }
            (Some(template), None) => full_name(&template)?,
            (None, Some(image)) if BASE_IMAGES.contains(&image.as_str()) && self.from_image_registry.is_none() => {
                "base".to_owned()
            }
            (None, Some(image)) => return Err(registry(&image)),
            (None, None) => return Err(HttpError::bad_request("fromTemplate or fromImage is missing")),
            (Some(_), Some(_)) => {
                return Err(HttpError::bad_request("fromTemplate and fromImage exclude each other"));
            }
        };
        let steps = self.steps.into_iter().enumerate().map(|(index, step)| step.read(index + 1));
        Ok(BuildPlan {
            from,
            steps: steps.collect::<Result<_, _>>()?,
            start: self.start_cmd.filter(|command| !command.is_empty()),
            ready: self.ready_cmd.filter(|command| !command.is_empty()),
            force: self.force.unwrap_or(false),
        })
    }
}

/// As the service takes it: a tag stays with its name.
pub(super) fn full_name(text: &str) -> Result<String, HttpError> {
    match name_and_tag(text) {
        (name, Some(tag)) if tag != "default" => Ok(format!("{name}:{tag}")),
        (name, _) => template_name(&name),
    }
}

impl Step {
    fn read(self, number: usize) -> Result<BuildStep, HttpError> {
        let bad = |problem: &str| HttpError::bad_request(format!("step {number} ({}): {problem}", self.kind));
        let most = match self.kind.as_str() {
            "RUN" | "USER" => 2,
            "COPY" | "ADD" => 4,
            "WORKDIR" => 1,
            _ => usize::MAX,
        };
        if self.args.len() > most {
            return Err(bad(&format!("has {} arguments; {most} at most have a meaning", self.args.len())));
        }
        let argument = |index: usize| self.args.get(index).filter(|text| !text.is_empty()).cloned();
        let needed = |index: usize, what: &str| argument(index).ok_or_else(|| bad(&format!("{what} is missing")));
        let action = match self.kind.as_str() {
            "RUN" => BuildAction::Run { command: needed(0, "the command")?, user: argument(1) },
            "COPY" | "ADD" => BuildAction::Copy {
                source: needed(0, "the source")?,
                destination: needed(1, "the destination")?,
                owner: argument(2),
                mode: argument(3),
                archive: self.files_hash.clone().ok_or_else(|| bad("filesHash is missing"))?,
            },
            "ENV" => {
                let (pairs, rest) = self.args.as_chunks::<2>();
                if !rest.is_empty() {
                    return Err(bad("a name has no value"));
                }
                BuildAction::Env(pairs.iter().map(|[name, value]| (name.clone(), value.clone())).collect())
            }
            "WORKDIR" => BuildAction::WorkDir(needed(0, "the directory")?),
            "USER" => {
                BuildAction::User { name: needed(0, "the user's name")?, sudo: argument(1).as_deref() == Some("true") }
            }
            _ => return Err(bad("is not a step this release of Stockade knows: RUN, COPY, ENV, WORKDIR, USER")),
        };
        Ok(BuildStep { action, force: self.force.unwrap_or(false) })
    }
}

pub(super) async fn start(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path((_, build)): Path<(String, String)>,
    Body(request): Body<Start>,
) -> Result<StatusCode, HttpError> {
    let plan = request.plan()?;
    has_parent(&state, &who, &plan.from).await?;
    state.service.start_build(&who, &build, plan)?;
    Ok(StatusCode::ACCEPTED)
}

/// A build finds out by itself, but cannot say what a client that asks for MCP servers is to do.
async fn has_parent(state: &AppState, who: &Principal, from: &str) -> Result<(), HttpError> {
    match state.service.template(who, from).await {
        Err(missing @ ServiceError::TemplateNotFound { .. }) => {
            let is_snapshot = state.service.get_snapshot(who, from).await.is_ok();
            if is_snapshot { Ok(()) } else { Err(missing.into()) }
        }
        found => found.map(drop).map_err(HttpError::from),
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct StatusQuery {
    logs_offset: usize,
    limit: Option<usize>,
    level: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StatusReply {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    status: &'static str,
    logs: Vec<String>,
    log_entries: Vec<Entry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
}

#[derive(Serialize)]
struct Entry {
    timestamp: Timestamp,
    level: &'static str,
    message: String,
    step: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reason {
    message: String,
    step: String,
    log_entries: [(); 0],
}

impl From<LogEntry> for Entry {
    fn from(entry: LogEntry) -> Self {
        Self { timestamp: entry.at, level: word(entry.level), message: entry.message, step: step(entry.place) }
    }
}

fn word(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    }
}

fn step(place: BuildPlace) -> String {
    match place {
        BuildPlace::Base => "base".to_owned(),
        BuildPlace::Step(number) => number.to_string(),
        BuildPlace::Finalize => "finalize".to_owned(),
    }
}

pub(super) async fn status(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path((template, build)): Path<(String, String)>,
    Query(query): Query<StatusQuery>,
) -> JsonResult<StatusReply> {
    let limit = query.limit.unwrap_or(MOST_LOG_LINES).min(MOST_LOG_LINES);
    let view = state.service.build(&who, &build, query.logs_offset, limit).await?;
    if name_and_tag(&template).0 != view.name && template != view.template.as_str() {
        return Err(ServiceError::BuildNotFound { id: build }.into());
    }
    let least = match query.level.as_deref() {
        None | Some("debug" | "info") => LogLevel::Info,
        Some("warn") => LogLevel::Warn,
        Some("error") => LogLevel::Error,
        Some(other) => return Err(HttpError::bad_request(format!("level '{}' is not known", shortened(other)))),
    };
    Ok(Json(reply(view, least)))
}

fn reply(view: BuildView, least: LogLevel) -> StatusReply {
    let entries: Vec<Entry> = view.log.into_iter().filter(|entry| entry.level >= least).map(Entry::from).collect();
    StatusReply {
        template_id: view.name,
        build_id: view.id,
        status: match view.state {
            BuildState::Waiting => "waiting",
            BuildState::Building => "building",
            BuildState::Ready => "ready",
            BuildState::Failed => "error",
        },
        logs: entries.iter().map(|entry| entry.message.clone()).collect(),
        log_entries: entries,
        reason: view.failure.map(|(place, message)| Reason { message, step: step(place), log_entries: [] }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AssignTags {
    target: String,
    tags: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tagged {
    #[serde(rename = "buildID")]
    build_id: String,
    tags: Vec<String>,
}

pub(super) async fn assign_tags(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Body(AssignTags { target, tags }): Body<AssignTags>,
) -> Result<(StatusCode, Json<Tagged>), HttpError> {
    let tags: Vec<String> = tags.iter().map(|tag| tag.trim().to_ascii_lowercase()).collect();
    let template = state.service.tag_template(&who, &full_name(&target)?, &tags).await?;
    let build_id = state.service.build_of(&who, &template.id).await?.unwrap_or_default();
    Ok((StatusCode::CREATED, Json(Tagged { build_id, tags })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RemoveTags {
    name: String,
    tags: Vec<String>,
}

pub(super) async fn remove_tags(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Body(RemoveTags { name, tags }): Body<RemoveTags>,
) -> Result<StatusCode, HttpError> {
    state.service.untag_template(&who, &name_and_tag(&name).0, &tags).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tag {
    tag: String,
    #[serde(rename = "buildID")]
    build_id: String,
    created_at: Timestamp,
}

pub(super) async fn tags(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(template): Path<String>,
) -> Result<Response, HttpError> {
    let template = of_any_tag(&state, &who, &full_name(&template)?).await?;
    let tags = state.service.template_tags(&who).await?.into_iter().filter(|tag| tag.name == template.name);
    let tag =
        |tag: stockade_service::TemplateTag| Tag { tag: tag.tag, build_id: tag.build, created_at: tag.created_at };
    Ok(Json(tags.map(tag).collect::<Vec<_>>()).into_response())
}

#[cfg(test)]
mod tests {
    use super::{super::parse, *};

    fn plan(json: &str) -> Result<BuildPlan, HttpError> {
        parse::<Start>(json.as_bytes())?.plan()
    }

    #[test]
    fn what_the_sdks_send_becomes_a_plan() {
        let plan = plan(
            r#"{"fromImage":"e2bdev/base","force":false,"startCmd":"sleep 1","readyCmd":"true","steps":[
                {"type":"RUN","args":["echo 1","root"],"force":true},
                {"type":"COPY","args":["a","/b","","0644"],"filesHash":"00","forceUpload":true,
                "resolveSymlinks":false,"gzip":true,"force":false},
                {"type":"ENV","args":["A","1","B","2"]},{"type":"WORKDIR","args":["/w"]},{"type":"USER","args":["u"]}]}"#,
        );
        let plan = plan.unwrap_or_else(|error| panic!("{}", error.message));
        assert_eq!((plan.from.as_str(), plan.steps.len(), plan.force), ("base", 5, false));
        assert!(plan.steps[0].force && !plan.steps[1].force);
        assert!(
            matches!(&plan.steps[1].action, BuildAction::Copy { owner: None, mode: Some(mode), .. } if mode == "0644")
        );
        assert!(matches!(&plan.steps[2].action, BuildAction::Env(pairs) if pairs.len() == 2));
    }

    #[test]
    fn registry_images_and_unknown_steps_are_refused_by_name() {
        for (json, word) in [
            (r#"{"fromImage":"ubuntu:24.04"}"#, "registry image 'ubuntu:24.04'"),
            (r#"{"fromTemplate":"base","steps":[{"type":"HEALTHCHECK","args":[]}]}"#, "step 1 (HEALTHCHECK)"),
            (r#"{"fromTemplate":"base","steps":[{"type":"RUN","args":[]}]}"#, "step 1 (RUN): the command is missing"),
            (r#"{"fromTemplate":"base","steps":[{"type":"COPY","args":["a","b"]}]}"#, "filesHash"),
            (r#"{"fromTemplate":"base","cache":true}"#, "cache"),
            (r#"{"fromTemplate":"base","steps":[{"type":"WORKDIR","args":["/a","/b"]}]}"#, "has 2 arguments"),
            (r#"{"fromTemplate":"base","fromImageRegistry":{"type":"registry"}}"#, "fromImageRegistry"),
            (r#"{"fromTemplate":"base","steps":[{"type":"RUN","args":["true"],"shell":"sh"}]}"#, "shell"),
            (r"{}", "fromTemplate"),
        ] {
            let error = plan(json).expect_err(json);
            assert!(error.message.contains(word), "{json}: {}", error.message);
        }
    }

    #[test]
    fn a_shape_of_its_own_is_refused_and_the_sdks_default_is_not() {
        let check = |json: &str| parse::<Reserve>(json.as_bytes()).and_then(|new| new.check_shape());
        assert!(check(r#"{"name":"x","cpuCount":2,"memoryMB":1024}"#).is_ok());
        for (json, word) in [
            (r#"{"name":"x","cpuCount":4}"#, "cpuCount 4"),
            (r#"{"name":"x","memoryMB":4096}"#, "memoryMB 4096"),
            (r#"{"name":"x","minFreeDiskMb":9}"#, "minFreeDiskMb 9"),
        ] {
            assert!(check(json).expect_err(json).message.contains(word));
        }
    }
}
