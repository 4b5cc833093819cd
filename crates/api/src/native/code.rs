//! Running code in the kernels of a sandbox made from the `code-interpreter` template.
//!
//! The kernels belong to a service in the guest, reached over the guest link; what it says is put into our words
//! line by line. A client that goes away, or whose time is up, has its code interrupted; the context stays.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Json as JsonBody,
    body::Body,
    extract::State,
    http::{Method, Request, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stockade_engine::{EngineError, GuestClient};
use stockade_wire::ErrorCode;
use tokio::time::Instant;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{exec::timeout, guest, stream::NDJSON};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path},
};

/// Where the service listens in the guest.
pub(crate) const PORT: u16 = 49999;
/// Longest line of the service; a result holds whole pictures and tables.
const MAX_LINE_BYTES: usize = 64 << 20;
const MAX_ANSWER_BYTES: usize = 1 << 20;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(run))
        .routes(routes!(list_contexts, create_context))
        .routes(routes!(remove_context))
        .routes(routes!(restart_context))
}

/// Code to run. At most one of `context` and `language`; neither: Python, in its default context.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct CodeRequest {
    code: String,
    /// A context's id.
    #[serde(default)]
    context: Option<String>,
    /// Runs in the language's default context: `python`, `javascript`, `typescript`, `bash`, `r`, `java`.
    #[serde(default)]
    language: Option<String>,
    /// For this run only.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// After this long the code is interrupted; at most 86400. Absent: never.
    #[serde(default, deserialize_with = "timeout")]
    #[schema(value_type = Option<f64>)]
    timeout_seconds: Option<Duration>,
}

/// One line of a run. `end` is the last; a stream without it was cut.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
#[schema(as = CodeEvent)]
enum CodeLine {
    /// The kernel has taken the code; counts the runs in its context.
    Started {
        count: u64,
    },
    Stdout {
        text: String,
    },
    Stderr {
        text: String,
    },
    /// The value of the code, or something it displayed.
    Result {
        /// It is the value of the code.
        is_main: bool,
        /// MIME type → content; binary content is base64.
        data: BTreeMap<String, Value>,
        /// What a chart shows, where the picture is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        chart: Option<Value>,
    },
    /// The code failed, its time was up (`Timeout`), or its kernel died (`KernelDied`, `OutOfMemory`).
    Error {
        name: String,
        value: String,
        traceback: String,
    },
    KeepAlive,
    End,
}

/// A line of the service in the guest.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
enum GuestLine {
    NumberOfExecutions {
        execution_count: u64,
    },
    Stdout {
        text: String,
    },
    Stderr {
        text: String,
    },
    Result {
        is_main_result: bool,
        #[serde(flatten)]
        fields: BTreeMap<String, Value>,
    },
    Error {
        name: String,
        value: String,
        traceback: String,
    },
    Keepalive,
    EndOfExecution,
}

impl From<GuestLine> for CodeLine {
    fn from(line: GuestLine) -> Self {
        match line {
            GuestLine::NumberOfExecutions { execution_count } => Self::Started { count: execution_count },
            GuestLine::Stdout { text } => Self::Stdout { text },
            GuestLine::Stderr { text } => Self::Stderr { text },
            GuestLine::Result { is_main_result, mut fields } => {
                let chart = fields.remove("chart");
                let extra = match fields.remove("extra") {
                    Some(Value::Object(extra)) => extra,
                    _ => serde_json::Map::new(),
                };
                let known = fields.into_iter().map(|(name, value)| (mime_type(&name).to_owned(), value));
                Self::Result { is_main: is_main_result, data: known.chain(extra).collect(), chart }
            }
            GuestLine::Error { name, value, traceback } => Self::Error { name, value, traceback },
            GuestLine::Keepalive => Self::KeepAlive,
            GuestLine::EndOfExecution => Self::End,
        }
    }
}

fn mime_type(field: &str) -> &str {
    match field {
        "text" => "text/plain",
        "html" => "text/html",
        "markdown" => "text/markdown",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpeg" => "image/jpeg",
        "pdf" => "application/pdf",
        "latex" => "text/latex",
        "json" => "application/json",
        "javascript" => "application/javascript",
        "data" => "application/vnd.stockade.table+json",
        other => other,
    }
}

/// Run code and stream what it does.
///
/// One JSON object a line. Runs in one context wait for each other; contexts run side by side.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/code", tag = "code", params(("id" = String, Path)),
    request_body = CodeRequest,
    responses((status = 200, content((CodeLine = "application/x-ndjson"))))
)]
async fn run(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<CodeRequest>,
) -> Result<Response, ApiError> {
    let guest = guest(&state, &caller, &id).await?;
    let deadline = request.timeout_seconds.map(|patience| (Instant::now() + patience, patience));
    let body = serde_json::json!({
        "code": request.code,
        "context_id": request.context,
        "language": request.language,
        "env_vars": request.env,
    });
    let answer = send(&guest, Method::POST, "/execute", Some(&body)).await?;
    let lines = Lines { body: answer.into_body(), pending: BytesMut::new(), deadline, is_over: false };
    let lines = futures::stream::unfold(lines, |mut lines| async move {
        let line = lines.next().await?;
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), lines))
    });
    // A stream that is asked for nothing leaves the guest's writes waiting: a slow reader slows its code.
    let stopping = state.lifecycle.stopping.clone();
    let lines = lines.take_until(async move { stopping.cancelled().await });
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(lines)).into_response())
}

/// The service's lines, until the last one or until time is up.
struct Lines {
    body: Incoming,
    pending: BytesMut,
    deadline: Option<(Instant, Duration)>,
    is_over: bool,
}

impl Lines {
    async fn next(&mut self) -> Option<CodeLine> {
        if self.is_over {
            return None;
        }
        let line = match self.deadline {
            Some((at, patience)) => tokio::time::timeout_at(at, self.read()).await.unwrap_or_else(|_| {
                let value = format!("the code was interrupted after {} s; its context stays", patience.as_secs_f64());
                CodeLine::Error { name: "Timeout".to_owned(), value, traceback: String::new() }
            }),
            None => self.read().await,
        };
        let is_cut = matches!(&line, CodeLine::Error { name, .. } if name == "Timeout" || name == "StreamCut");
        // Dropping the connection has the service interrupt the code.
        self.is_over = is_cut || matches!(line, CodeLine::End);
        Some(line)
    }

    async fn read(&mut self) -> CodeLine {
        let cut = |value: &str| CodeLine::Error {
            name: "StreamCut".to_owned(),
            value: value.to_owned(),
            traceback: String::new(),
        };
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line = self.pending.split_to(end + 1);
                return match serde_json::from_slice::<GuestLine>(&line) {
                    Ok(line) => line.into(),
                    Err(_) => cut("the code interpreter said something that makes no sense"),
                };
            }
            if self.pending.len() > MAX_LINE_BYTES {
                return cut("the code interpreter sent a line that is too long");
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.pending.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
                Some(Err(_)) | None => {
                    return cut("the code interpreter ended before the code did; what the code did is not known");
                }
            }
        }
    }
}

/// A kernel with a language, a directory and a state of its own.
#[derive(Debug, Deserialize, Serialize, utoipa::ToSchema)]
struct CodeContext {
    id: String,
    language: String,
    cwd: String,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct CodeContexts {
    items: Vec<CodeContext>,
}

#[derive(Debug, Deserialize, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct NewCodeContext {
    /// By default `python`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    language: Option<String>,
    /// By default `/home/user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cwd: Option<String>,
}

/// List a sandbox's contexts.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/code/contexts", tag = "code", params(("id" = String, Path)),
    responses((status = 200, body = CodeContexts))
)]
async fn list_contexts(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<JsonBody<CodeContexts>, ApiError> {
    let answer = send(&guest(&state, &caller, &id).await?, Method::GET, "/contexts", None).await?;
    Ok(JsonBody(CodeContexts { items: parse(answer).await? }))
}

/// Make a context; it is ready when the answer comes.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/code/contexts", tag = "code", params(("id" = String, Path)),
    request_body = NewCodeContext, responses((status = 201, body = CodeContext))
)]
async fn create_context(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<NewCodeContext>,
) -> Result<(StatusCode, JsonBody<CodeContext>), ApiError> {
    let guest = guest(&state, &caller, &id).await?;
    let body = serde_json::to_value(request).unwrap_or_default();
    let answer = send(&guest, Method::POST, "/contexts", Some(&body)).await?;
    Ok((StatusCode::CREATED, JsonBody(parse(answer).await?)))
}

/// Remove a context; code that runs in it ends with an error.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/code/contexts/{context}", tag = "code",
    params(("id" = String, Path), ("context" = String, Path)), responses((status = 204))
)]
async fn remove_context(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, context)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let guest = guest(&state, &caller, &id).await?;
    send(&guest, Method::DELETE, &format!("/contexts/{}", context_id(&context)?), None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Give a context a new kernel. Language and directory stay, all else is lost.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/code/contexts/{context}/restart", tag = "code",
    params(("id" = String, Path), ("context" = String, Path)), responses((status = 204))
)]
async fn restart_context(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, context)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let guest = guest(&state, &caller, &id).await?;
    send(&guest, Method::POST, &format!("/contexts/{}/restart", context_id(&context)?), None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ids are UUIDs; nothing else goes into a path of the guest.
fn context_id(text: &str) -> Result<&str, ApiError> {
    let is_id = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if is_id { Ok(text) } else { Err(no_context("no context has such an id")) }
}

fn no_context(message: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "code_context_not_found", message)
        .hint("GET /v1/sandboxes/{id}/code/contexts lists them")
}

/// One request to the service in the guest; a refusal of it becomes one of ours.
async fn send(
    guest: &GuestClient,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Response<Incoming>, ApiError> {
    let stream = guest.connect_port(PORT).await.map_err(|error| match error {
        EngineError::Guest(body) if body.code == ErrorCode::PortClosed => no_interpreter(),
        error => error.into(),
    })?;
    let broken = |error: hyper::Error| {
        let message = "the code interpreter in the sandbox broke off before it answered";
        ApiError::new(StatusCode::BAD_GATEWAY, "code_interpreter_broke", message).caused_by(error)
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to a code interpreter ended early");
        }
    });
    let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(bytes))
        .map_err(|error| ApiError::invalid("the request cannot be passed on").caused_by(error))?;
    let answer = sender.send_request(request).await.map_err(broken)?;
    match answer.status() {
        status if status.is_success() => Ok(answer),
        StatusCode::NOT_FOUND => Err(no_context(&text_of(answer).await)),
        _ => Err(ApiError::invalid(text_of(answer).await)),
    }
}

fn no_interpreter() -> ApiError {
    let message = "no code interpreter runs in this sandbox";
    ApiError::new(StatusCode::CONFLICT, "no_code_interpreter", message)
        .hint("make the sandbox from the template code-interpreter, which `stockade up --with code-interpreter` makes")
}

async fn text_of(answer: Response<Incoming>) -> String {
    let body = http_body_util::Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
    body.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned()).unwrap_or_default()
}

async fn parse<T: serde::de::DeserializeOwned>(answer: Response<Incoming>) -> Result<T, ApiError> {
    serde_json::from_str(&text_of(answer).await).map_err(|error| {
        let message = "the code interpreter in the sandbox said something that makes no sense";
        ApiError::new(StatusCode::BAD_GATEWAY, "code_interpreter_broke", message).caused_by(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(json: &str) -> Value {
        let line: GuestLine = serde_json::from_str(json).expect("a line of the service");
        serde_json::to_value(CodeLine::from(line)).expect("serializable")
    }

    #[test]
    fn a_result_names_its_forms_by_mime_type() {
        let seen = line(
            r#"{"type":"result","is_main_result":true,"text":"2","png":"aGk=","chart":{"type":"bar"},"extra":{"x/y":1}}"#,
        );
        let expected = serde_json::json!({
            "type": "result", "is_main": true, "chart": {"type": "bar"},
            "data": {"text/plain": "2", "image/png": "aGk=", "x/y": 1},
        });
        assert_eq!(seen, expected);
    }

    #[test]
    fn every_other_line_has_a_counterpart() {
        assert_eq!(line(r#"{"type":"number_of_executions","execution_count":3}"#)["count"], 3);
        assert_eq!(line(r#"{"type":"stderr","text":"x","timestamp":1}"#)["type"], "stderr");
        assert_eq!(line(r#"{"type":"keepalive"}"#)["type"], "keep_alive");
        assert_eq!(line(r#"{"type":"end_of_execution"}"#)["type"], "end");
        assert_eq!(line(r#"{"type":"error","name":"N","value":"v","traceback":""}"#)["name"], "N");
    }

    #[test]
    fn what_is_no_context_id_does_not_reach_the_guest() {
        for odd in ["", "../x", "a/b", "a?b", "a b"] {
            assert_eq!(context_id(odd).expect_err(odd).code, "code_context_not_found");
        }
    }
}
