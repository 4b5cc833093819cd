//! Sandboxes: make, list, look at, end, and how long they live.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
};
use serde::{Deserialize, Serialize};
use stockade_model::{EndCause, IdleRules, MachineShape, OnTimeout, Sandbox, SandboxState, Tier};
use stockade_service::{CreateSandbox, LifeChange, ListFilter, NetworkSpec};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{guest, query, sandbox_id, show_time, show_unix_ms};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path, QueryPairs},
};

const DEFAULT_LIFETIME_SECONDS: f64 = 300.0;
/// Beyond this a lifetime is not even handed to the service, which knows the real maximum.
const ABSURD_SECONDS: f64 = 1e9;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, kill, change))
        .routes(routes!(extend))
        .routes(routes!(stats))
        .routes(routes!(logs))
}

/// What to make.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateRequest {
    /// A template's or a snapshot's name or id; of a name a template comes first, then the newest snapshot.
    #[serde(default = "default_template")]
    #[schema(default = "base")]
    template: String,
    /// How long it may live, in seconds.
    #[serde(default = "default_lifetime")]
    #[schema(default = 300.0)]
    lifetime_seconds: f64,
    /// Labels of your choice.
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    /// Environment of every process.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// What happens when its lifetime is over.
    #[serde(default)]
    #[schema(default = "kill")]
    on_timeout: OnTimeout,
    /// Whether a request to its guest brings it back from a pause.
    #[serde(default)]
    auto_resume: bool,
    /// When it goes down by itself for want of use.
    #[serde(default)]
    idle: Idle,
    /// False, where `template` is a snapshot: boot from its disk, whatever memory is in it.
    #[serde(default = "default_memory")]
    #[schema(default = true)]
    memory: bool,
    /// What it may reach and with which secrets; left out: as the deployment has it, or the snapshot it comes from.
    #[serde(default)]
    network: Option<NetworkSpec>,
}

fn default_memory() -> bool {
    true
}

/// How long nobody has used a sandbox when it goes down by itself. A request to its guest is use, and so is every
/// stream from it that is open. The times must be in this order; null: never.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Idle {
    /// Seconds until it goes into standby: back in milliseconds, at the price of its memory.
    #[serde(default)]
    standby_after_seconds: Option<f64>,
    /// Seconds until it is hibernated: kept in files, at the price of its disk.
    #[serde(default)]
    hibernate_after_seconds: Option<f64>,
    /// Seconds until it goes into the archive, once it is hibernated or stopped.
    #[serde(default)]
    archive_after_seconds: Option<f64>,
    /// Seconds until it ends, whatever tier it is in by then.
    #[serde(default)]
    delete_after_seconds: Option<f64>,
    /// A guest that uses this many per cent of one processor when its time is up is in use, too: 1 to 100. Null:
    /// what the guest does by itself does not count.
    #[serde(default)]
    busy_percent: Option<u32>,
}

impl Idle {
    fn rules(self) -> Result<IdleRules, ApiError> {
        let time = |name: &str, seconds: Option<f64>| match seconds {
            Some(seconds) if !(seconds > 0.0 && seconds <= ABSURD_SECONDS) => {
                Err(ApiError::invalid(format!("idle.{name} must be over 0 and at most {ABSURD_SECONDS}, or null")))
            }
            seconds => Ok(seconds.map(Duration::from_secs_f64)),
        };
        Ok(IdleRules {
            standby_after: time("standby_after_seconds", self.standby_after_seconds)?,
            hibernate_after: time("hibernate_after_seconds", self.hibernate_after_seconds)?,
            archive_after: time("archive_after_seconds", self.archive_after_seconds)?,
            delete_after: time("delete_after_seconds", self.delete_after_seconds)?,
            busy_percent: self.busy_percent,
        })
    }
}

impl From<IdleRules> for Idle {
    fn from(rules: IdleRules) -> Self {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Self {
            standby_after_seconds: seconds(rules.standby_after),
            hibernate_after_seconds: seconds(rules.hibernate_after),
            archive_after_seconds: seconds(rules.archive_after),
            delete_after_seconds: seconds(rules.delete_after),
            busy_percent: rules.busy_percent,
        }
    }
}

fn default_template() -> String {
    "base".to_owned()
}

fn default_lifetime() -> f64 {
    DEFAULT_LIFETIME_SECONDS
}

/// What is to change; what is left out stays as it is.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ChangeRequest {
    /// Seconds from now to the deadline, earlier or later than it was.
    lifetime_seconds: Option<f64>,
    /// What happens when its lifetime is over.
    on_timeout: Option<OnTimeout>,
    /// Whether a request to its guest brings it back from a pause.
    auto_resume: Option<bool>,
    /// All of its idle rules.
    idle: Option<Idle>,
}

/// A new life.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LifetimeRequest {
    /// Seconds from now.
    lifetime_seconds: f64,
}

/// A template, named.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct TemplateRef {
    pub(super) id: String,
    pub(super) name: String,
}

/// One sandbox.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Sandbox)]
pub(super) struct SandboxView {
    id: String,
    template: TemplateRef,
    state: SandboxState,
    /// Where it is kept while it is paused; of a stopped one only that it is archived.
    tier: Option<Tier>,
    shape: MachineShape,
    metadata: BTreeMap<String, String>,
    #[schema(format = DateTime)]
    created_at: String,
    /// When it took its first command.
    #[schema(format = DateTime)]
    started_at: Option<String>,
    /// When its lifetime is over; does not count while it is paused or stopped.
    #[schema(format = DateTime)]
    deadline: String,
    /// What happens then.
    on_timeout: OnTimeout,
    /// Whether a request to its guest brings it back from a pause.
    auto_resume: bool,
    /// When it goes down by itself for want of use.
    idle: Idle,
    /// The sandbox it was forked from.
    parent: Option<String>,
    /// The snapshot it came from.
    snapshot: Option<String>,
    /// Set once it has ended.
    ending: Option<EndingView>,
}

/// When and why a sandbox ended.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Ending)]
pub(super) struct EndingView {
    #[schema(format = DateTime)]
    at: String,
    cause: EndCause,
    /// What else is known, for people.
    detail: String,
}

impl From<Sandbox> for SandboxView {
    fn from(sandbox: Sandbox) -> Self {
        let ending = sandbox.ending.map(|ending| EndingView {
            at: show_time(ending.at),
            cause: ending.cause,
            detail: ending.detail,
        });
        Self {
            id: sandbox.id.to_string(),
            template: TemplateRef { id: sandbox.template.to_string(), name: sandbox.template_name },
            state: sandbox.state,
            tier: sandbox.tier,
            shape: sandbox.shape,
            metadata: sandbox.metadata,
            created_at: show_time(sandbox.created_at),
            started_at: sandbox.started_at.map(show_time),
            deadline: show_time(sandbox.deadline),
            on_timeout: sandbox.rules.on_timeout,
            auto_resume: sandbox.rules.auto_resume,
            idle: sandbox.rules.idle.into(),
            parent: sandbox.lineage.parent.map(|parent| parent.to_string()),
            snapshot: sandbox.lineage.snapshot.map(|snapshot| snapshot.to_string()),
            ending,
        }
    }
}

/// One page of sandboxes.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct SandboxPage {
    items: Vec<SandboxView>,
    /// For the next page; null on the last.
    cursor: Option<String>,
}

/// A lifetime the service can judge.
pub(super) fn lifetime(seconds: f64) -> Result<Duration, ApiError> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(ApiError::invalid("lifetime_seconds must not be negative"));
    }
    Ok(Duration::from_secs_f64(seconds.min(ABSURD_SECONDS)))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut keys = headers.get_all("idempotency-key").iter();
    let Some(key) = keys.next() else {
        return Ok(None);
    };
    let text = key.to_str().ok().filter(|text| (1..=255).contains(&text.len()) && keys.next().is_none());
    text.map(|text| Some(text.to_owned()))
        .ok_or_else(|| ApiError::invalid("Idempotency-Key must be 1 to 255 printable ASCII characters, sent once"))
}

/// Make a sandbox. Answers when it takes commands.
#[utoipa::path(
    post,
    path = "/v1/sandboxes",
    tag = "sandboxes",
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key within a day gives the same sandbox.")),
    request_body = CreateRequest,
    responses((status = 201, body = SandboxView))
)]
async fn create(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Json(request): Json<CreateRequest>,
) -> Result<(StatusCode, axum::Json<SandboxView>), ApiError> {
    let create = CreateSandbox {
        template: request.template,
        lifetime: lifetime(request.lifetime_seconds)?,
        metadata: request.metadata,
        env: request.env,
        on_timeout: request.on_timeout,
        auto_resume: request.auto_resume,
        idle: request.idle.rules()?,
        from_disk: !request.memory,
        network: request.network,
        idempotency_key: idempotency_key(&headers)?,
    };
    let sandbox = state.service.create(&caller.0, create).await?;
    Ok((StatusCode::CREATED, axum::Json(sandbox.into())))
}

/// List sandboxes, newest first. All conditions hold; without `state`: those that have not ended. A template that is
/// not known and from which none of them was made is 404.
#[utoipa::path(
    get,
    path = "/v1/sandboxes",
    tag = "sandboxes",
    params(
        ("state" = Option<String>, Query, description = "One or more states, separated by commas."),
        ("template" = Option<String>, Query, description = "Made from this template (name or id)."),
        ("metadata" = Option<Vec<String>>, Query, description = "`KEY=VALUE`; may be repeated, all must match."),
        ("order" = Option<String>, Query, description = "`desc` (newest first, the default) or `asc`."),
        ("limit" = Option<u32>, Query, description = "1 to 1000, by default 100."),
        ("cursor" = Option<String>, Query, description = "From the page before."),
    ),
    responses((status = 200, body = SandboxPage))
)]
async fn list(
    State(state): State<AppState>,
    caller: Caller,
    QueryPairs(pairs): QueryPairs,
) -> Result<axum::Json<SandboxPage>, ApiError> {
    let filter = list_filter(pairs)?;
    let page = state.service.list(&caller.0, &filter).await?;
    if let (true, Some(template)) = (page.items.is_empty(), &filter.template) {
        // Nothing was made from what there never was: more likely a slip than a question.
        state.service.template(&caller.0, template).await?;
    }
    let items = page.items.into_iter().map(SandboxView::from).collect();
    Ok(axum::Json(SandboxPage { items, cursor: page.cursor }))
}

fn list_filter(pairs: Vec<(String, String)>) -> Result<ListFilter, ApiError> {
    let mut filter = ListFilter { limit: query::DEFAULT_LIMIT, ..ListFilter::default() };
    let mut seen = Vec::new();
    for (name, value) in pairs {
        query::once(&mut seen, &name, "metadata")?;
        match name.as_str() {
            "state" => filter.states = value.split(',').map(state_word).collect::<Result<_, _>>()?,
            "template" => filter.template = Some(value),
            "metadata" => query::add_label(&mut filter.metadata, &name, &value)?,
            "order" => filter.ascending = query::ascending(&value)?,
            "limit" => filter.limit = query::limit(&value)?,
            "cursor" => filter.cursor = Some(value),
            _ => {
                return Err(query::unknown("`state`, `template`, `metadata`, `order`, `limit`, `cursor`"));
            }
        }
    }
    Ok(filter)
}

fn state_word(word: &str) -> Result<SandboxState, ApiError> {
    SandboxState::ALL.into_iter().find(|state| state.as_str() == word).ok_or_else(|| {
        let known = SandboxState::ALL.map(SandboxState::as_str).join(", ");
        ApiError::invalid(format!("query: `state` must be one or more of {known}, separated by commas"))
    })
}

/// One sandbox, also one that has ended.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 200, body = SandboxView))
)]
async fn get(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<axum::Json<SandboxView>, ApiError> {
    let sandbox = state.service.get(&caller.0, &sandbox_id(&id)?).await?;
    Ok(axum::Json(sandbox.into()))
}

/// End a sandbox. Answers when nothing of it is left; one that has ended already is 409 `sandbox_ended`.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 204))
)]
async fn kill(State(state): State<AppState>, caller: Caller, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    state.service.kill(&caller.0, &sandbox_id(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Change how long a sandbox lives and when it goes down by itself, whatever state it is in. An idle time counts
/// from its last use, not from now.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path)),
    request_body = ChangeRequest, responses((status = 200, body = SandboxView))
)]
async fn change(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<ChangeRequest>,
) -> Result<axum::Json<SandboxView>, ApiError> {
    let ChangeRequest { lifetime_seconds, on_timeout, auto_resume, idle } = request;
    let rules = LifeChange { on_timeout, auto_resume, idle: idle.map(Idle::rules).transpose()? };
    let lifetime = lifetime_seconds.map(lifetime).transpose()?;
    let id = sandbox_id(&id)?;
    if lifetime.is_none() && rules.is_empty() {
        return Err(ApiError::invalid("nothing is to change: give one of the fields"));
    }
    let mut sandbox = None;
    if !rules.is_empty() {
        sandbox = Some(state.service.set_rules(&caller.0, &id, rules).await?);
    }
    if let Some(lifetime) = lifetime {
        sandbox = Some(state.service.set_lifetime(&caller.0, &id, lifetime).await?);
    }
    let sandbox = sandbox.ok_or_else(|| ApiError::invalid("nothing is to change"))?;
    Ok(axum::Json(sandbox.into()))
}

/// Move the deadline to now + `lifetime_seconds` if that is later.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/extend", tag = "sandboxes", params(("id" = String, Path)),
    request_body = LifetimeRequest, responses((status = 200, body = SandboxView))
)]
async fn extend(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<LifetimeRequest>,
) -> Result<axum::Json<SandboxView>, ApiError> {
    let lifetime = lifetime(request.lifetime_seconds)?;
    let sandbox = state.service.extend(&caller.0, &sandbox_id(&id)?, lifetime).await?;
    Ok(axum::Json(sandbox.into()))
}

/// How a sandbox does, one sample.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct StatsView {
    #[schema(format = DateTime)]
    at: String,
    cpu_count: u32,
    /// Per cent of all its processors, since the sample before.
    cpu_used_percent: f64,
    memory_total_bytes: u64,
    /// Without caches.
    memory_used_bytes: u64,
    memory_cache_bytes: u64,
    disk_total_bytes: u64,
    disk_used_bytes: u64,
}

/// Processor, memory and disk in use, as the guest sees them.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/stats", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 200, body = StatsView))
)]
async fn stats(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<axum::Json<StatsView>, ApiError> {
    let stats = guest(&state, &caller, &id).await?.stats().await?;
    Ok(axum::Json(StatsView {
        at: show_unix_ms(i64::try_from(stats.unix_ms).unwrap_or(i64::MAX)),
        cpu_count: stats.cpu_count,
        cpu_used_percent: stats.cpu_used_percent,
        memory_total_bytes: stats.memory_total,
        memory_used_bytes: stats.memory_used,
        memory_cache_bytes: stats.memory_cache,
        disk_total_bytes: stats.disk_total,
        disk_used_bytes: stats.disk_used,
    }))
}

/// What a sandbox's console says.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct LogsView {
    /// Last lines of the guest's console.
    console: String,
}

/// The last lines of the guest's console.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes", params(("id" = String, Path)),
    responses((status = 200, body = LogsView))
)]
async fn logs(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<axum::Json<LogsView>, ApiError> {
    let console = state.service.console(&caller.0, &sandbox_id(&id)?).await?;
    Ok(axum::Json(LogsView { console }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(pairs: &[(&str, &str)]) -> Result<ListFilter, String> {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        list_filter(pairs).map_err(|error| error.message)
    }

    #[test]
    fn list_conditions_are_read_and_nonsense_is_named() {
        let found = filter(&[
            ("state", "running,gone"),
            ("metadata", "a=1"),
            ("metadata", "b=x=y"),
            ("order", "asc"),
            ("limit", "7"),
        ])
        .expect("a filter");
        assert_eq!(found.states, [SandboxState::Running, SandboxState::Gone]);
        assert_eq!(found.metadata["b"], "x=y");
        assert!(found.ascending && found.limit == 7);
        let bad =
            [("state", "alive"), ("metadata", "a"), ("order", "up"), ("limit", "0"), ("limit", "1001"), ("x", "")];
        for pair in bad {
            assert!(filter(&[pair]).is_err(), "{pair:?}");
        }
        assert!(filter(&[("limit", "1"), ("limit", "2")]).is_err());
        assert!(filter(&[("metadata", "a=1"), ("metadata", "a=2")]).is_err());
    }

    #[test]
    fn lifetimes_that_make_no_sense_never_become_a_duration() {
        assert!(lifetime(-1.0).is_err());
        assert!(lifetime(f64::NAN).is_err());
        assert_eq!(lifetime(f64::INFINITY).ok(), Some(Duration::from_secs(1_000_000_000)));
        assert_eq!(lifetime(1.5).ok(), Some(Duration::from_millis(1500)));
    }
}
