//! A sandbox's network: what it may reach, what would happen to a request, what has been decided.

use axum::{
    body::Body,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use stockade_model::SandboxId;
use stockade_service::{
    AuditFilter, DefaultNetwork, DefaultOf, NetworkChange, NetworkSpec, NetworkState, NetworkStats, policy::Explanation,
};
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{query, sandbox_id, stream::NDJSON};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path, QueryPairs},
};

const KEEP_ALIVE: std::time::Duration = std::time::Duration::from_secs(15);

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(get, put, patch))
        .routes(routes!(explain))
        .routes(routes!(audit))
        .routes(routes!(get_default, put_default, delete_default))
        .routes(routes!(get_template, put_template, delete_template))
}

/// A sandbox's network now.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Network)]
struct NetworkView {
    /// Counts up with each change; every audit record names it.
    revision: u64,
    /// What its owner wrote.
    network: NetworkSpec,
    /// While it is attached to the gateway: connections and bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    stats: Option<StatsView>,
}

/// Numbers of a sandbox's link since it was attached.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = NetworkStats)]
struct StatsView {
    bytes_from_guest: u64,
    bytes_to_guest: u64,
    /// Connections now.
    connections: usize,
    /// Names the guest has asked for.
    names: usize,
    /// Frames that were no proper packets of the guest's.
    dropped_frames: u64,
}

impl From<NetworkState> for NetworkView {
    fn from(state: NetworkState) -> Self {
        let stats = |stats: NetworkStats| StatsView {
            bytes_from_guest: stats.bytes_from_guest,
            bytes_to_guest: stats.bytes_to_guest,
            connections: stats.flows,
            names: stats.names,
            dropped_frames: stats.dropped_frames,
        };
        Self { revision: state.revision, network: state.spec.shown(), stats: state.stats.map(stats) }
    }
}

/// The network of a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/network", tag = "network", params(("id" = String, Path)),
    responses((status = 200, body = NetworkView))
)]
async fn get(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<axum::Json<NetworkView>, ApiError> {
    Ok(axum::Json(state.service.network(&caller.0, &sandbox_id(&id)?).await?.into()))
}

/// Change the network of a sandbox as a whole: what is left out is as in a request that says nothing. When this
/// answers the change is in force; connections it does not allow have been reset.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/network", tag = "network", params(("id" = String, Path)),
    request_body = NetworkSpec, responses((status = 200, body = NetworkView))
)]
async fn put(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(spec): Json<NetworkSpec>,
) -> Result<axum::Json<NetworkView>, ApiError> {
    Ok(axum::Json(state.service.set_network(&caller.0, &sandbox_id(&id)?, spec).await?.into()))
}

/// Change some of the network of a sandbox: what is given takes the place of what was, the rest stays.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{id}/network", tag = "network", params(("id" = String, Path)),
    operation_id = "change_network", request_body = NetworkChange, responses((status = 200, body = NetworkView))
)]
async fn patch(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(change): Json<NetworkChange>,
) -> Result<axum::Json<NetworkView>, ApiError> {
    Ok(axum::Json(state.service.change_network(&caller.0, &sandbox_id(&id)?, change).await?.into()))
}

/// What sandboxes start from whose request says nothing about the network.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = DefaultNetwork)]
struct DefaultView {
    /// Who says so: `template`, `workspace` or `operator`; the first of them that says something.
    from: &'static str,
    network: NetworkSpec,
}

impl From<DefaultNetwork> for DefaultView {
    fn from(default: DefaultNetwork) -> Self {
        Self { from: default.from, network: default.spec.shown() }
    }
}

/// What sandboxes of your workspace start from.
#[utoipa::path(get, path = "/v1/network/default", tag = "network", operation_id = "get_default_network",
    responses((status = 200, body = DefaultView)))]
async fn get_default(State(state): State<AppState>, caller: Caller) -> Result<axum::Json<DefaultView>, ApiError> {
    Ok(axum::Json(state.service.default_network(&caller.0, DefaultOf::Workspace).await?.into()))
}

/// Change what sandboxes of your workspace start from. Those that are there keep what they have.
#[utoipa::path(put, path = "/v1/network/default", tag = "network", operation_id = "put_default_network",
    request_body = NetworkSpec, responses((status = 200, body = DefaultView)))]
async fn put_default(
    State(state): State<AppState>,
    caller: Caller,
    Json(spec): Json<NetworkSpec>,
) -> Result<axum::Json<DefaultView>, ApiError> {
    Ok(axum::Json(state.service.set_default_network(&caller.0, DefaultOf::Workspace, spec).await?.into()))
}

/// Forget it: sandboxes start from what the operator has set.
#[utoipa::path(delete, path = "/v1/network/default", tag = "network", operation_id = "delete_default_network",
    responses((status = 204)))]
async fn delete_default(State(state): State<AppState>, caller: Caller) -> Result<StatusCode, ApiError> {
    state.service.remove_default_network(&caller.0, DefaultOf::Workspace).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What sandboxes of a template start from in your workspace.
#[utoipa::path(get, path = "/v1/templates/{template}/network", tag = "network",
    operation_id = "get_template_network", params(("template" = String, Path)),
    responses((status = 200, body = DefaultView)))]
async fn get_template(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<axum::Json<DefaultView>, ApiError> {
    Ok(axum::Json(state.service.default_network(&caller.0, DefaultOf::Template(&name)).await?.into()))
}

/// Change what sandboxes of a template start from in your workspace; it is kept by the template's name. Sandboxes
/// that are there keep what they have.
#[utoipa::path(put, path = "/v1/templates/{template}/network", tag = "network",
    operation_id = "put_template_network", params(("template" = String, Path)),
    request_body = NetworkSpec, responses((status = 200, body = DefaultView)))]
async fn put_template(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
    Json(spec): Json<NetworkSpec>,
) -> Result<axum::Json<DefaultView>, ApiError> {
    Ok(axum::Json(state.service.set_default_network(&caller.0, DefaultOf::Template(&name), spec).await?.into()))
}

/// Forget it: sandboxes of the template start from what your workspace or the operator has set.
#[utoipa::path(delete, path = "/v1/templates/{template}/network", tag = "network",
    operation_id = "delete_template_network", params(("template" = String, Path)), responses((status = 204)))]
async fn delete_template(
    State(state): State<AppState>,
    caller: Caller,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.service.remove_default_network(&caller.0, DefaultOf::Template(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A request the guest might make.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct ExplainRequest {
    /// `http://`, `https://`, or `tcp://host:port` for plain TCP.
    url: String,
    #[serde(default = "default_method")]
    #[schema(default = "GET")]
    method: String,
}

fn default_method() -> String {
    "GET".to_owned()
}

/// What would happen to a request of the guest, and why. Nothing is sent.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/network/explain", tag = "network", params(("id" = String, Path)),
    request_body = ExplainRequest, responses((status = 200, body = Explanation))
)]
async fn explain(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<ExplainRequest>,
) -> Result<axum::Json<Explanation>, ApiError> {
    let ExplainRequest { url, method } = request;
    Ok(axum::Json(state.service.explain(&caller.0, &sandbox_id(&id)?, &method, &url).await?))
}

/// Decisions, newest first.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct AuditPage {
    #[schema(value_type = Vec<Object>)]
    items: Vec<serde_json::Value>,
    /// For the next page, if there is more.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

/// What the gateway decided for your sandboxes, newest first. With `follow=true` a stream of JSON lines: decisions
/// from now on, an empty line now and then.
#[utoipa::path(
    get,
    path = "/v1/audit",
    tag = "network",
    params(
        ("sandbox" = Option<String>, Query, description = "Of this sandbox."),
        ("kind" = Option<String>, Query, description = "`connect`, `dns`, `tls`, `http`, `token`, `secret`, `dial`, `udp`, `closed`, `policy` or `link`."),
        ("verdict" = Option<String>, Query, description = "`allow`, `deny` or `error`."),
        ("since" = Option<String>, Query, description = "From this time on, RFC 3339."),
        ("limit" = Option<u32>, Query, description = "1 to 1000, by default 100."),
        ("cursor" = Option<String>, Query, description = "From the page before."),
        ("follow" = Option<bool>, Query, description = "Stream what is decided from now on; takes `sandbox` alone."),
    ),
    responses((status = 200, body = AuditPage))
)]
async fn audit(
    State(state): State<AppState>,
    caller: Caller,
    QueryPairs(pairs): QueryPairs,
) -> Result<Response, ApiError> {
    let (filter, follow) = audit_filter(pairs)?;
    if let Some(sandbox) = &filter.sandbox {
        // A sandbox of others is not there.
        state.service.get(&caller.0, sandbox).await?;
    }
    if follow {
        return follow_audit(&state, &caller, filter.sandbox);
    }
    let (texts, cursor) = state.service.audit(&caller.0, &filter).await?;
    let items = texts.iter().filter_map(|text| serde_json::from_str(text).ok()).collect();
    Ok(axum::Json(AuditPage { items, cursor }).into_response())
}

const KINDS: [&str; 11] =
    ["connect", "dns", "tls", "http", "token", "secret", "dial", "udp", "closed", "policy", "link"];
const VERDICTS: [&str; 3] = ["allow", "deny", "error"];

fn one_of(name: &str, value: String, known: &[&str]) -> Result<String, ApiError> {
    if known.contains(&value.as_str()) {
        return Ok(value);
    }
    Err(ApiError::invalid(format!("query: `{name}` must be one of {}", known.join(", "))))
}

fn audit_filter(pairs: Vec<(String, String)>) -> Result<(AuditFilter, bool), ApiError> {
    let mut filter = AuditFilter { limit: query::DEFAULT_LIMIT, ..AuditFilter::default() };
    let mut follow = false;
    for (name, value) in pairs {
        match name.as_str() {
            "sandbox" => filter.sandbox = Some(sandbox_id(&value)?),
            "kind" => filter.kind = Some(one_of("kind", value, &KINDS)?),
            "verdict" => filter.verdict = Some(one_of("verdict", value, &VERDICTS)?),
            "since" => {
                let time = value.parse().map_err(|_| ApiError::invalid("query: `since` must be a time, RFC 3339"))?;
                filter.since = Some(time);
            }
            "limit" => filter.limit = query::limit(&value)?,
            "cursor" => filter.cursor = Some(value),
            "follow" => {
                follow = value.parse().map_err(|_| ApiError::invalid("query: `follow` must be `true` or `false`"))?;
            }
            _ => {
                return Err(query::unknown("`sandbox`, `kind`, `verdict`, `since`, `limit`, `cursor`, `follow`"));
            }
        }
    }
    let others = filter.kind.is_some() || filter.verdict.is_some() || filter.since.is_some() || filter.cursor.is_some();
    if follow && others {
        return Err(ApiError::invalid("query: `follow` goes with `sandbox` alone"));
    }
    Ok((filter, follow))
}

fn follow_audit(state: &AppState, caller: &Caller, sandbox: Option<SandboxId>) -> Result<Response, ApiError> {
    let workspace = caller.0.workspace.clone();
    let lines = BroadcastStream::new(state.service.audit_stream()?).filter_map(move |line| {
        let text = match line {
            Ok(line) => line.is_for(&workspace, sandbox.as_ref()).then(|| format!("{}\n", line.text)),
            Err(BroadcastStreamRecvError::Lagged(missed)) => Some(format!("{{\"missed\":{missed}}}\n")),
        };
        std::future::ready(text.map(Bytes::from))
    });
    let ticks = tokio_stream::wrappers::IntervalStream::new(tokio::time::interval(KEEP_ALIVE));
    let lines = futures::stream::select(lines, ticks.map(|_| Bytes::from_static(b"\n")));
    // Ends with the server, which otherwise would wait for it.
    let lines =
        lines.take_until(state.lifecycle.stopping.clone().cancelled_owned()).map(Ok::<_, std::convert::Infallible>);
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(lines)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_on_decisions_are_read_and_nonsense_is_named() {
        let read = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            audit_filter(pairs).map_err(|error| error.message)
        };
        let (filter, follow) =
            read(&[("verdict", "deny"), ("limit", "5"), ("since", "2026-01-01T00:00:00Z")]).expect("read");
        assert!(!follow && filter.limit == 5 && filter.since.is_some());
        assert_eq!(filter.verdict.as_deref(), Some("deny"));
        assert!(read(&[("follow", "true")]).expect("read").1);
        for bad in [
            ("verdict", "denied"),
            ("kind", "tcp"),
            ("limit", "0"),
            ("since", "yesterday"),
            ("follow", "yes"),
            ("sandbox", "x"),
            ("x", ""),
        ] {
            assert!(read(&[bad]).is_err(), "{bad:?}");
        }
        assert!(read(&[("follow", "true"), ("kind", "dns")]).is_err());
    }
}
