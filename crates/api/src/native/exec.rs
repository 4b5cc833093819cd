//! Running commands: the request all ways of running share, and the streaming way.
//!
//! A process belongs to its sandbox, not to the connection that started it. A client that goes away
//! leaves it running; `started` names its pid, and `GET .../processes/{pid}/events?after=N` goes on
//! where the stream broke.

use std::{collections::BTreeMap, fmt, time::Duration};

use axum::{extract::State, http::HeaderMap, response::Response};
use serde::{Deserialize, Serialize};
use stockade_model::quoted;
use stockade_wire::process::{Command, PtySize, StartRequest};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{guest, sandbox_id, stream};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path},
};

/// Longest `timeout_seconds`.
const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;
const MAX_ARGUMENTS: usize = 32_768;
const MAX_ENV: usize = 8_192;
const MAX_NAME_BYTES: usize = 256;
const MAX_PATH_BYTES: usize = 4_096;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(exec))
}

/// What to run. One of `argv` and `shell`.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExecRequest {
    /// A program and its arguments.
    #[serde(default)]
    pub(super) argv: Option<Vec<String>>,
    /// A command line for the guest's shell.
    #[serde(default)]
    pub(super) shell: Option<String>,
    /// The user's name; by default the template's.
    #[serde(default)]
    pub(super) user: Option<String>,
    /// The working directory; by default the template's, else the user's home.
    #[serde(default)]
    pub(super) cwd: Option<String>,
    /// Added to the sandbox's environment.
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
    /// Keep standard input open for writing. False: it is empty.
    #[serde(default)]
    pub(super) stdin: bool,
    /// A terminal in place of the three pipes.
    #[serde(default)]
    pub(super) pty: Option<Size>,
    /// After this long all of it is killed; at most 86400. Absent: never.
    #[serde(default, deserialize_with = "timeout")]
    #[schema(value_type = Option<f64>)]
    pub(super) timeout_seconds: Option<Duration>,
    /// A name to find the process by, unique among those that run.
    #[serde(default)]
    pub(super) tag: Option<String>,
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = TerminalSize)]
pub(super) struct Size {
    #[schema(minimum = 1)]
    pub(super) cols: u16,
    #[schema(minimum = 1)]
    pub(super) rows: u16,
}

impl Size {
    pub(super) fn checked(self) -> Result<PtySize, ApiError> {
        if self.cols == 0 || self.rows == 0 {
            return Err(ApiError::invalid("a terminal has at least one column and one row"));
        }
        Ok(PtySize { cols: self.cols, rows: self.rows })
    }
}

/// Seconds as a duration; the refusal names the range.
pub(super) fn timeout<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    struct Seconds;
    impl<'de> serde::de::Visitor<'de> for Seconds {
        type Value = Option<Duration>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a number of seconds over 0 and at most {MAX_TIMEOUT_SECONDS} (leave it out for no limit)")
        }

        fn visit_f64<E: serde::de::Error>(self, seconds: f64) -> Result<Self::Value, E> {
            if seconds > 0.0 && seconds <= MAX_TIMEOUT_SECONDS {
                return Ok(Some(Duration::from_secs_f64(seconds)));
            }
            Err(E::invalid_value(serde::de::Unexpected::Float(seconds), &self))
        }

        fn visit_u64<E: serde::de::Error>(self, seconds: u64) -> Result<Self::Value, E> {
            self.visit_f64(seconds as f64)
        }

        fn visit_i64<E: serde::de::Error>(self, seconds: i64) -> Result<Self::Value, E> {
            self.visit_f64(seconds as f64)
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }
    }
    deserializer.deserialize_any(Seconds)
}

impl ExecRequest {
    /// The request as the guest takes it, once all of it makes sense.
    pub(super) fn into_start(self) -> Result<StartRequest, ApiError> {
        let command = match (self.argv, self.shell) {
            (Some(argv), None) => Command::Argv(check_argv(argv)?),
            (None, Some(shell)) => Command::Shell(check_text("shell", shell, usize::MAX)?),
            (Some(_), Some(_)) => return Err(ApiError::invalid("`argv` and `shell` exclude each other")),
            (None, None) => return Err(ApiError::invalid("one of `argv` and `shell` is needed")),
        };
        check_env(&self.env)?;
        let checked = |name, value: Option<String>, max| value.map(|text| check_text(name, text, max)).transpose();
        Ok(StartRequest {
            command,
            user: checked("user", self.user, MAX_NAME_BYTES)?,
            cwd: checked("cwd", self.cwd, MAX_PATH_BYTES)?,
            env: self.env,
            stdin: self.stdin,
            pty: self.pty.map(Size::checked).transpose()?,
            // Rounded up: a timeout of less than a millisecond must not become none.
            timeout_ms: self
                .timeout_seconds
                .map(|time| u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)),
            tag: checked("tag", self.tag, MAX_NAME_BYTES)?,
        })
    }
}

fn check_argv(argv: Vec<String>) -> Result<Vec<String>, ApiError> {
    if argv.first().is_none_or(String::is_empty) {
        return Err(ApiError::invalid("`argv` must begin with the program to run"));
    }
    if argv.len() > MAX_ARGUMENTS {
        return Err(ApiError::invalid(format!("`argv` has over {MAX_ARGUMENTS} entries")));
    }
    match argv.iter().position(|argument| argument.contains('\0')) {
        Some(index) => Err(ApiError::invalid(format!("argv[{index}] contains a NUL byte"))),
        None => Ok(argv),
    }
}

fn check_env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if env.len() > MAX_ENV {
        return Err(ApiError::invalid(format!("`env` has over {MAX_ENV} entries")));
    }
    let is_bad = |name: &str| name.is_empty() || name.contains(['=', '\0']);
    if env.keys().any(|name| is_bad(name)) {
        return Err(ApiError::invalid("a name in `env` is empty or contains \"=\" or a NUL byte"));
    }
    match env.iter().find(|(_, value)| value.contains('\0')) {
        // The name may be told, the value not.
        Some((name, _)) => {
            Err(ApiError::invalid(format!("the value of {} in `env` contains a NUL byte", quoted(name))))
        }
        None => Ok(()),
    }
}

/// A text without NUL, not empty, not over `max` bytes.
pub(super) fn check_text(name: &str, text: String, max: usize) -> Result<String, ApiError> {
    if text.is_empty() {
        return Err(ApiError::invalid(format!("`{name}` is empty")));
    }
    if text.contains('\0') {
        return Err(ApiError::invalid(format!("`{name}` contains a NUL byte")));
    }
    if text.len() > max {
        let message = format!("`{name}` is too long: {} bytes, at most {max} are taken", text.len());
        return Err(ApiError::new(axum::http::StatusCode::BAD_REQUEST, "too_long", message));
    }
    Ok(text)
}

/// Run a command and stream what it does.
///
/// By default one JSON object a line; with `Accept: application/vnd.stockade.events` binary frames. The
/// last one is `exit` or `error`; a stream without either was cut. The process outlives the connection.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/exec", tag = "processes", params(("id" = String, Path)),
    request_body = ExecRequest,
    responses((status = 200, content(
        (stream::Line<'static> = "application/x-ndjson"),
        (Vec<u8> = "application/vnd.stockade.events"),
    )))
)]
async fn exec(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(request): Json<ExecRequest>,
) -> Result<Response, ApiError> {
    let format = stream::Format::accepted(&headers);
    let start = request.into_start()?;
    let events = guest(&state, &caller, &id).await?.start(&start).await?;
    Ok(stream::response(events, format, stream::Kind::Process, &state, sandbox_id(&id)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    fn start(json: &str) -> Result<StartRequest, String> {
        parse_json::<ExecRequest>(json.as_bytes()).and_then(ExecRequest::into_start).map_err(|error| error.message)
    }

    #[test]
    fn timeouts_that_make_no_sense_are_refused_with_the_maximum() {
        for odd in ["-1", "0", "1e12", "1000000000000", "86400.5", "\"10\"", "-0.0", "true", "[]"] {
            let error = start(&format!(r#"{{"shell":"true","timeout_seconds":{odd}}}"#)).expect_err(odd);
            assert!(error.contains("timeout_seconds: expected") && error.contains("86400"), "{odd}: {error}");
        }
        let error = start(r#"{"shell":"true","timeout_seconds":1e999}"#).expect_err("not that long");
        assert!(error.contains("timeout_seconds: the number is out of range"), "{error}");
        for odd in ["NaN", "Infinity"] {
            let error = start(&format!(r#"{{"shell":"true","timeout_seconds":{odd}}}"#)).expect_err(odd);
            assert!(error.contains("timeout_seconds: the body is not valid JSON"), "{odd}: {error}");
        }
        let of =
            |value: &str| start(&format!(r#"{{"shell":"true","timeout_seconds":{value}}}"#)).expect(value).timeout_ms;
        assert_eq!((of("2"), of("0.0001"), of("1.5"), of("null")), (Some(2000), Some(1), Some(1500), None));
    }

    #[test]
    fn commands_that_cannot_be_run_are_refused_before_they_travel() {
        let cases = [
            ("{}", "one of `argv` and `shell`"),
            (r#"{"argv":["a"],"shell":"a"}"#, "exclude"),
            (r#"{"argv":[]}"#, "begin with the program"),
            (r#"{"argv":[""]}"#, "begin with the program"),
            (r#"{"argv":["a","canary\u0000"]}"#, "argv[1] contains a NUL byte"),
            (r#"{"shell":"canary\u0000"}"#, "`shell` contains a NUL byte"),
            (r#"{"shell":"a","env":{"A=B":"canary"}}"#, "a name in `env`"),
            (r#"{"shell":"a","env":{"A":"canary\u0000"}}"#, "the value of \"A\" in `env` contains a NUL byte"),
            (r#"{"shell":"a","pty":{"cols":0,"rows":1}}"#, "at least one column"),
            (r#"{"shell":"a","pty":{"cols":70000,"rows":1}}"#, "pty.cols: expected a whole number from 0 to 65535"),
            (r#"{"shell":"a","user":""}"#, "`user` is empty"),
            (r#"{"shell":"a","tty":true}"#, "unknown field `tty`"),
        ];
        for (json, message) in cases {
            let error = start(json).expect_err(json);
            assert!(error.contains(message) && !error.contains("canary"), "{json}: {error}");
        }
    }
}
