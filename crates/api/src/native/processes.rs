//! Processes that run or ran: list, attach, write to, signal, resize.

use axum::{
    Json as JsonBody,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use serde::{Deserialize, Serialize};
use stockade_engine::guest::Selector;
use stockade_wire::process::{Command, ProcessInfo, SignalRequest};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    exec::Size,
    guest, sandbox_id, show_unix_ms,
    stream::{self, ExitView},
    upload,
};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path, Query},
};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(events))
        .routes(routes!(write_stdin))
        .routes(routes!(signal))
        .routes(routes!(resize))
}

/// A process id, or `tag:` and a tag.
pub(super) fn selector(text: &str) -> Result<Selector, ApiError> {
    if let Some(tag) = text.strip_prefix("tag:").filter(|tag| !tag.is_empty()) {
        return Ok(Selector::Tag(tag.to_owned()));
    }
    let pid = text.parse().ok().filter(|pid| *pid > 0);
    pid.map(Selector::Pid).ok_or_else(|| ApiError::invalid("a process is named by its pid or by tag:NAME"))
}

/// A process of the sandbox.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Process)]
struct ProcessView {
    pid: u32,
    tag: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    argv: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shell: Option<String>,
    user: String,
    cwd: String,
    pty: bool,
    #[schema(format = DateTime)]
    started_at: String,
    /// Set once it has ended.
    exit: Option<ExitView>,
}

impl From<ProcessInfo> for ProcessView {
    fn from(process: ProcessInfo) -> Self {
        let (argv, shell) = match process.command {
            Command::Argv(argv) => (Some(argv), None),
            Command::Shell(shell) => (None, Some(shell)),
            Command::Tool(tool) => (Some(tool.argv()), None),
        };
        Self {
            pid: process.pid,
            tag: process.tag,
            argv,
            shell,
            user: process.user,
            cwd: process.cwd,
            pty: process.pty,
            started_at: show_unix_ms(i64::try_from(process.started_unix_ms).unwrap_or(i64::MAX)),
            exit: process.exit.map(ExitView::from),
        }
    }
}

/// Processes started through the API, oldest first; ended ones are kept for a while.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct ProcessList {
    items: Vec<ProcessView>,
}

/// List the processes started through the API.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/processes", tag = "processes", params(("id" = String, Path)),
    responses((status = 200, body = ProcessList))
)]
async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<JsonBody<ProcessList>, ApiError> {
    let list = guest(&state, &caller, &id).await?.processes().await?;
    Ok(JsonBody(ProcessList { items: list.processes.into_iter().map(ProcessView::from).collect() }))
}

/// Where to attach.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AttachParams {
    /// Bytes of output already seen, all streams together; 0 for all that is kept. Absent: only what
    /// comes from now on.
    pub(super) after: Option<u64>,
}

/// Attach to a process and stream what it does, as `exec` does.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/processes/{process}/events", tag = "processes",
    params(("id" = String, Path), ("process" = String, Path, description = "A pid, or `tag:NAME`."), AttachParams),
    responses((status = 200, content(
        (stream::Line<'static> = "application/x-ndjson"),
        (Vec<u8> = "application/vnd.stockade.events"),
    )))
)]
async fn events(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, process)): Path<(String, String)>,
    Query(params): Query<AttachParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let process = selector(&process)?;
    let events = guest(&state, &caller, &id).await?.attach(&process, params.after).await?;
    Ok(stream::response(events, stream::Format::accepted(&headers), stream::Kind::Process, &state, sandbox_id(&id)?))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StdinParams {
    /// The process sees the end of its input after these bytes.
    #[serde(default)]
    close: bool,
}

/// Write to a process's input. Any bytes, any length; answered when the process has taken them.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/processes/{process}/stdin", tag = "processes",
    params(("id" = String, Path), ("process" = String, Path, description = "A pid, or `tag:NAME`."), StdinParams),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 204))
)]
async fn write_stdin(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, process)): Path<(String, String)>,
    Query(params): Query<StdinParams>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let process = selector(&process)?;
    let guest = guest(&state, &caller, &id).await?;
    let (stream, watch) = upload::start(body, &headers);
    watch.finish(guest.write_stdin(&process, stream, params.close).await).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A signal by number or name.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub(super) enum SignalName {
    /// Its number on Linux, 1 to 64.
    Number(i32),
    /// Its name, with or without `SIG`.
    Name(String),
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct SignalBody {
    signal: SignalName,
}

/// Names in the order of their numbers on x86-64 and arm64, from 1.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
];

impl SignalName {
    pub(super) fn request(&self) -> Result<SignalRequest, ApiError> {
        let number = match self {
            Self::Number(number) => Some(*number).filter(|number| (1..=64).contains(number)),
            Self::Name(name) => {
                let upper = name.to_ascii_uppercase();
                let short = upper.strip_prefix("SIG").unwrap_or(&upper);
                SIGNALS.iter().zip(1..).find(|(known, _)| **known == short).map(|(_, number)| number)
            }
        };
        let signal = number.ok_or_else(|| {
            ApiError::new(StatusCode::BAD_REQUEST, "unknown_signal", "not a signal of Linux")
                .hint("use a name such as TERM or SIGTERM, or a number from 1 to 64")
        })?;
        Ok(SignalRequest { signal, main_only: false })
    }
}

/// Send a signal to a process and its group.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/processes/{process}/signal", tag = "processes",
    params(("id" = String, Path), ("process" = String, Path, description = "A pid, or `tag:NAME`.")),
    request_body = SignalBody, responses((status = 204))
)]
async fn signal(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, process)): Path<(String, String)>,
    Json(body): Json<SignalBody>,
) -> Result<StatusCode, ApiError> {
    let (process, request) = (selector(&process)?, body.signal.request()?);
    guest(&state, &caller, &id).await?.signal(&process, request).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Change the size of a process's terminal.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/processes/{process}/resize", tag = "processes",
    params(("id" = String, Path), ("process" = String, Path, description = "A pid, or `tag:NAME`.")),
    request_body = Size, responses((status = 204))
)]
async fn resize(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, process)): Path<(String, String)>,
    Json(size): Json<Size>,
) -> Result<StatusCode, ApiError> {
    let (process, size) = (selector(&process)?, size.checked()?);
    guest(&state, &caller, &id).await?.resize(&process, size).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        let number = |name: SignalName| name.request().map(|request| request.signal).ok();
        for name in ["TERM", "SIGTERM", "term", "SigTerm"] {
            assert_eq!(number(SignalName::Name(name.into())), Some(15), "{name}");
        }
        assert_eq!(number(SignalName::Name("SYS".into())), Some(31));
        assert_eq!(number(SignalName::Number(64)), Some(64));
        for bad in ["", "SIG", "SIGSIGTERM", "NOPE", "15 "] {
            assert_eq!(number(SignalName::Name(bad.into())), None, "{bad:?}");
        }
        assert_eq!((number(SignalName::Number(0)), number(SignalName::Number(-9))), (None, None));
    }

    #[test]
    fn a_process_is_named_by_pid_or_tag() {
        assert_eq!(selector("12").ok(), Some(Selector::Pid(12)));
        assert_eq!(selector("tag:12").ok(), Some(Selector::Tag("12".into())));
        for bad in ["", "0", "-1", "tag:", "x", "99999999999"] {
            assert!(selector(bad).is_err(), "{bad:?}");
        }
    }
}
