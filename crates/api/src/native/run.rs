//! Running a command in one request: it ends, then the answer comes, with all it wrote.

use std::{collections::BTreeMap, time::Duration};

use axum::{Json as JsonBody, extract::State};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use stockade_engine::{
    EngineError, GuestClient,
    guest::{ByteStream, Selector},
};
use stockade_wire::{
    ErrorCode,
    event::Event,
    process::{Exit, StartRequest},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    exec::{ExecRequest, Size, timeout},
    guest, sandbox_id,
    stream::{Kind, Pump, Step},
};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path},
};

/// How much of each stream is kept.
const KEPT_BYTES: usize = 1 << 20;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(run))
}

/// What to run, and its input. One of `argv` and `shell`.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct RunRequest {
    #[serde(default)]
    argv: Option<Vec<String>>,
    #[serde(default)]
    shell: Option<String>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    stdin: bool,
    #[serde(default)]
    pty: Option<Size>,
    #[serde(default, deserialize_with = "timeout")]
    #[schema(value_type = Option<f64>)]
    timeout_seconds: Option<Duration>,
    #[serde(default)]
    tag: Option<String>,
    /// All of its standard input, base64. Absent: empty.
    #[serde(default)]
    stdin_base64: Option<String>,
}

impl RunRequest {
    fn into_parts(self) -> Result<(StartRequest, Option<Bytes>), ApiError> {
        let decode = |text| {
            let decoded = BASE64.decode(text).map(Bytes::from);
            decoded.map_err(|_| ApiError::invalid("`stdin_base64` is not standard base64"))
        };
        let input = self.stdin_base64.map(decode).transpose()?;
        let input = input.or(self.stdin.then(Bytes::new));
        let exec = ExecRequest {
            argv: self.argv,
            shell: self.shell,
            user: self.user,
            cwd: self.cwd,
            env: self.env,
            stdin: input.is_some(),
            pty: self.pty,
            timeout_seconds: self.timeout_seconds,
            tag: self.tag,
        };
        Ok((exec.into_start()?, input))
    }
}

/// How it ended and what it wrote. With a terminal all output is in `stdout`.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct RunResult {
    /// Exit code; null if a signal ended it.
    code: Option<i32>,
    /// The signal that ended it.
    signal: Option<i32>,
    timed_out: bool,
    out_of_memory: bool,
    stdout_base64: String,
    stderr_base64: String,
    /// Bytes of output over the 1 MiB that are kept.
    stdout_truncated_bytes: u64,
    stderr_truncated_bytes: u64,
}

/// The beginning of a stream, and how much more there was.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    truncated: u64,
}

impl Kept {
    fn take(&mut self, piece: &[u8]) {
        let room = KEPT_BYTES - self.bytes.len();
        let (kept, rest) = piece.split_at(piece.len().min(room));
        self.bytes.extend_from_slice(kept);
        self.truncated += rest.len() as u64;
    }
}

/// Run a command to its end.
///
/// Of each stream the first MiB is kept and the rest counted. A client that goes away leaves the process
/// running; give a `tag` to find it again, or stream it with `exec`.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/run", tag = "processes", params(("id" = String, Path)),
    request_body = RunRequest, responses((status = 200, body = RunResult))
)]
async fn run(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(request): Json<RunRequest>,
) -> Result<JsonBody<RunResult>, ApiError> {
    let (start, input) = request.into_parts()?;
    let guest = guest(&state, &caller, &id).await?;
    let events = guest.start(&start).await?;
    let pid = events.started.as_ref().map(|started| started.pid);
    // Written while the output is read: a process that does both would else wait for us for ever.
    let mut read = std::pin::pin!(collect(Pump::new(events, Kind::Process, &state, sandbox_id(&id)?)));
    let (exit, stdout, stderr) = tokio::select! {
        done = read.as_mut() => done?,
        written = write_input(guest, pid, input) => {
            written?;
            read.await?
        }
    };
    Ok(JsonBody(RunResult {
        code: exit.code,
        signal: exit.signal,
        timed_out: exit.timed_out,
        out_of_memory: exit.out_of_memory,
        stdout_base64: BASE64.encode(&stdout.bytes),
        stderr_base64: BASE64.encode(&stderr.bytes),
        stdout_truncated_bytes: stdout.truncated,
        stderr_truncated_bytes: stderr.truncated,
    }))
}

async fn collect(mut pump: Pump) -> Result<(Exit, Kept, Kept), ApiError> {
    let (mut stdout, mut stderr) = (Kept::default(), Kept::default());
    loop {
        match pump.next().await {
            Some(Step::Event(Event::Stdout(bytes) | Event::Pty(bytes))) => stdout.take(&bytes),
            Some(Step::Event(Event::Stderr(bytes))) => stderr.take(&bytes),
            // Which stream they belonged to is not known.
            Some(Step::Event(Event::Missed(missed))) => stdout.truncated += missed.bytes,
            Some(Step::Event(Event::Exit(exit))) => return Ok((exit, stdout, stderr)),
            Some(Step::Event(_)) => {}
            Some(Step::Broken(error)) => return Err(error),
            None => unreachable!("a stream says exit or error before it ends"),
        }
    }
}

async fn write_input(guest: GuestClient, pid: Option<u32>, input: Option<Bytes>) -> Result<(), ApiError> {
    let (Some(pid), Some(input)) = (pid, input) else {
        return Ok(());
    };
    let body: ByteStream = Box::pin(futures::stream::once(async { Ok(input) }));
    match guest.write_stdin(&Selector::Pid(pid), body, true).await {
        // A process need not read what it is given: `head -1` ends first.
        Err(EngineError::Guest(error)) if matches!(error.code, ErrorCode::StdinClosed | ErrorCode::NoSuchProcess) => {
            Ok(())
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_counted() {
        let mut kept = Kept::default();
        kept.take(&vec![1; KEPT_BYTES - 1]);
        kept.take(&[2; 3]);
        kept.take(&[3; 3]);
        assert_eq!((kept.bytes.len(), kept.truncated), (KEPT_BYTES, 5));
        assert_eq!(kept.bytes.last(), Some(&2));
    }
}
