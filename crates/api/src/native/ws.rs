//! Interactive processes over a WebSocket.
//!
//! ```text
//! client                                        server
//!  | text  ExecRequest (not when attaching) ---->  |
//!  | <------------------------- text  started ---  |
//!  | binary input ------------------------------>  |
//!  | text  close_stdin | signal | resize ------->  |
//!  | <----- binary 1 stdout | 2 stderr | 3 pty --  |   first byte: the stream
//!  | <------------- text  missed | refused ------  |
//!  | <------------- text  exit | error, close ---  |
//! ```
//!
//! Both directions are bounded and independent: output waits for the client, input waits for the process,
//! and neither waits for the other. A client that goes away leaves the process running; one that no
//! longer answers pings counts as gone.

use std::time::Duration;

use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, WebSocket, close_code, rejection::WebSocketUpgradeRejection},
    },
    http::StatusCode,
    response::Response,
};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use serde::Deserialize;
use stockade_engine::{
    EngineError, GuestClient,
    guest::{Events, Selector},
};
use stockade_model::SandboxId;
use stockade_wire::{ErrorCode, event::Event};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    exec::{ExecRequest, Size},
    guest,
    processes::{AttachParams, SignalName, selector},
    sandbox_id,
    stream::{Kind, Line, Pump, Step},
};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{MAX_JSON_BYTES, Path, Query, parse_json},
};

/// Largest message a client may send.
const MAX_MESSAGE_BYTES: usize = MAX_JSON_BYTES;
/// The first message must come within this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// A client from which nothing came for so long, not even a pong, is gone.
const SILENCE: Duration = Duration::from_secs(60);
/// A client that takes nothing for so long is gone.
const SEND_TIMEOUT: Duration = Duration::from_secs(600);
/// Input messages on their way to the process.
const INPUT_QUEUE: usize = 4;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(exec)).routes(routes!(attach))
}

type Upgrade = Result<WebSocketUpgrade, WebSocketUpgradeRejection>;

/// Run a command over a WebSocket. The first text message is an `ExecRequest`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/exec/ws", tag = "processes", params(("id" = String, Path)),
    responses((status = 101, description = "Text messages are events, binary ones output behind a stream byte."))
)]
async fn exec(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    upgrade: Upgrade,
) -> Result<Response, ApiError> {
    let upgrade = checked(upgrade)?;
    let guest = guest(&state, &caller, &id).await?;
    let id = sandbox_id(&id)?;
    Ok(start(upgrade, state, async move |mut socket, state| match first_request(&mut socket, &guest).await {
        Ok(events) => serve(socket, guest, events, &state, id).await,
        Err(mut error) => {
            error.explained(&state.service, &id).await;
            refuse(socket, error).await;
        }
    }))
}

/// Attach to a process over a WebSocket.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/processes/{process}/ws", tag = "processes",
    params(("id" = String, Path), ("process" = String, Path, description = "A pid, or `tag:NAME`."), AttachParams),
    responses((status = 101, description = "Text messages are events, binary ones output behind a stream byte."))
)]
async fn attach(
    State(state): State<AppState>,
    caller: Caller,
    Path((id, process)): Path<(String, String)>,
    Query(params): Query<AttachParams>,
    upgrade: Upgrade,
) -> Result<Response, ApiError> {
    let upgrade = checked(upgrade)?;
    let process = selector(&process)?;
    let guest = guest(&state, &caller, &id).await?;
    let events = guest.attach(&process, params.after).await?;
    let id = sandbox_id(&id)?;
    Ok(start(upgrade, state, async move |socket, state| serve(socket, guest, events, &state, id).await))
}

pub(super) fn checked(upgrade: Upgrade) -> Result<WebSocketUpgrade, ApiError> {
    upgrade.map_err(|rejection| {
        ApiError::new(StatusCode::UPGRADE_REQUIRED, "websocket_required", "this route speaks WebSocket")
            .hint("send a WebSocket handshake over HTTP/1.1")
            .caused_by(rejection)
    })
}

/// Hands the socket to `talk` in a task the server waits for when it stops.
pub(super) fn start<F, Fut>(upgrade: WebSocketUpgrade, state: AppState, talk: F) -> Response
where
    F: FnOnce(WebSocket, AppState) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let token = state.lifecycle.tasks.token();
    let cut = state.lifecycle.cut.clone();
    upgrade.max_message_size(MAX_MESSAGE_BYTES).max_frame_size(MAX_MESSAGE_BYTES).on_upgrade(async move |socket| {
        cut.run_until_cancelled(talk(socket, state)).await;
        drop(token);
    })
}

async fn first_request(socket: &mut WebSocket, guest: &GuestClient) -> Result<Events, ApiError> {
    let late = || {
        let message = format!("the first message did not come within {REQUEST_TIMEOUT:?}");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    };
    let first = async {
        loop {
            match socket.next().await {
                Some(Ok(Message::Text(text))) => return parse_json::<ExecRequest>(text.as_bytes()),
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => return Err(ApiError::invalid("the first message must be an ExecRequest as text")),
            }
        }
    };
    let request = timeout(REQUEST_TIMEOUT, first).await.map_err(|_| late())??;
    Ok(guest.start(&request.into_start()?).await?)
}

async fn refuse(mut socket: WebSocket, error: ApiError) {
    error.log();
    // The client may be gone already; there is nobody else to tell.
    let _ = timeout(REQUEST_TIMEOUT, async {
        socket.send(text(&Line::Error { error: error.envelope().error })).await?;
        socket.send(close(&error)).await
    })
    .await;
}

fn text(line: &Line<'_>) -> Message {
    Message::text(serde_json::to_string(line).expect("a line is plain data"))
}

fn close(error: &ApiError) -> Message {
    let code = if error.status.is_server_error() { close_code::ERROR } else { close_code::POLICY };
    Message::Close(Some(CloseFrame { code, reason: error.code.as_ref().into() }))
}

/// What a client says besides input.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type", deny_unknown_fields)]
enum Control {
    CloseStdin {},
    Signal { signal: SignalName },
    Resize { cols: u16, rows: u16 },
}

/// Both directions until the process has ended, the client has gone, or the server stops.
async fn serve(socket: WebSocket, guest: GuestClient, events: Events, state: &AppState, id: SandboxId) {
    let Some(pid) = events.started.as_ref().map(|started| started.pid) else {
        let message = "the guest did not say which process it started";
        return refuse(socket, ApiError::new(StatusCode::BAD_GATEWAY, "guest_link_broken", message)).await;
    };
    let pump = Pump::new(events, Kind::Process, state, id);
    let (sink, stream) = socket.split();
    let (replies, reply_queue) = mpsc::channel(4);
    let input = Input { guest, process: Selector::Pid(pid), replies };
    tokio::select! {
        () = output(sink, pump, reply_queue) => {}
        () = input.run(stream) => {}
    }
}

/// Events and refusals to the client.
async fn output(mut sink: SplitSink<WebSocket, Message>, mut pump: Pump, mut replies: mpsc::Receiver<ApiError>) {
    let mut ping = tokio::time::interval(PING_INTERVAL);
    ping.reset();
    let mut farewell = None;
    while farewell.is_none() {
        let message = tokio::select! {
            step = pump.next() => match step {
                Some(Step::Event(Event::KeepAlive)) => continue,
                Some(Step::Event(event)) => {
                    if matches!(event, Event::Exit(_)) {
                        farewell = Some(Message::Close(Some(CloseFrame { code: close_code::NORMAL, reason: "exit".into() })));
                    }
                    event_message(event)
                }
                Some(Step::Broken(error)) => {
                    error.log();
                    farewell = Some(close(&error));
                    text(&Line::Error { error: error.envelope().error })
                }
                None => return,
            },
            Some(refused) = replies.recv() => text(&Line::Refused { error: refused.envelope().error }),
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        if !matches!(timeout(SEND_TIMEOUT, sink.send(message)).await, Ok(Ok(()))) {
            return;
        }
    }
    if let Some(farewell) = farewell {
        let _ = timeout(REQUEST_TIMEOUT, sink.send(farewell)).await;
    }
}

fn event_message(event: Event) -> Message {
    let (stream, bytes) = match event {
        Event::Stdout(bytes) => (1, bytes),
        Event::Stderr(bytes) => (2, bytes),
        Event::Pty(bytes) => (3, bytes),
        other => return text(&other.into()),
    };
    let mut message = BytesMut::with_capacity(bytes.len() + 1);
    message.put_u8(stream);
    message.put_slice(&bytes);
    Message::Binary(message.freeze())
}

/// Messages of the client to the process.
struct Input {
    guest: GuestClient,
    process: Selector,
    replies: mpsc::Sender<ApiError>,
}

/// An open write to the process's input, and its end.
struct Writer {
    pieces: mpsc::Sender<std::io::Result<Bytes>>,
    end: tokio::task::JoinHandle<Result<(), EngineError>>,
}

impl Input {
    async fn run(self, mut stream: SplitStream<WebSocket>) {
        let mut writer = None;
        let mut last_seen = Instant::now();
        loop {
            let message = match tokio::time::timeout_at(last_seen + SILENCE, stream.next()).await {
                Ok(Some(Ok(Message::Close(_)) | Err(_)) | None) => return,
                Ok(Some(Ok(message))) => message,
                Err(_) => {
                    tracing::debug!("a WebSocket client no longer answers pings");
                    return;
                }
            };
            let done = match message {
                Message::Binary(bytes) if bytes.is_empty() => Ok(()),
                Message::Binary(bytes) => self.write(&mut writer, bytes).await,
                Message::Text(text) => match parse_json(text.as_bytes()) {
                    Ok(control) => self.control(&mut writer, control).await,
                    Err(error) => Err(error),
                },
                Message::Ping(_) | Message::Pong(_) | Message::Close(_) => Ok(()),
            };
            if let Err(error) = done
                && self.replies.send(error).await.is_err()
            {
                return;
            }
            // Taken only now: time a busy process made us wait is not the client's silence.
            last_seen = Instant::now();
        }
    }

    /// All messages go into one request, so that they stay in order and wait for the process.
    async fn write(&self, writer: &mut Option<Writer>, bytes: Bytes) -> Result<(), ApiError> {
        let open = writer.get_or_insert_with(|| {
            let (pieces, queue) = mpsc::channel(INPUT_QUEUE);
            let (guest, process) = (self.guest.clone(), self.process.clone());
            let end = async move { guest.write_stdin(&process, Box::pin(ReceiverStream::new(queue)), false).await };
            Writer { pieces, end: tokio::spawn(end) }
        });
        if open.pieces.send(Ok(bytes)).await.is_ok() {
            return Ok(());
        }
        finish(writer.take()).await
    }

    async fn control(&self, writer: &mut Option<Writer>, control: Control) -> Result<(), ApiError> {
        match control {
            Control::CloseStdin {} => {
                finish(writer.take()).await?;
                let nothing = Box::pin(futures::stream::empty());
                harmless(self.guest.write_stdin(&self.process, nothing, true).await)
            }
            Control::Signal { signal } => harmless(self.guest.signal(&self.process, signal.request()?).await),
            Control::Resize { cols, rows } => {
                let size = Size { cols, rows }.checked()?;
                harmless(self.guest.resize(&self.process, size).await)
            }
        }
    }
}

/// Ends the open write and tells how it went.
async fn finish(writer: Option<Writer>) -> Result<(), ApiError> {
    let Some(Writer { pieces, end }) = writer else {
        return Ok(());
    };
    drop(pieces);
    match end.await {
        Ok(result) => harmless(result),
        Err(error) => {
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "input was lost").caused_by(error))
        }
    }
}

/// What comes too late for a process that has just ended is no error: its exit is on the way, or the end of all output.
fn harmless(result: Result<(), EngineError>) -> Result<(), ApiError> {
    match result {
        Err(EngineError::Guest(error)) if error.code == ErrorCode::NoSuchProcess => Ok(()),
        Err(EngineError::LinkBroken { .. } | EngineError::Gone { .. }) => Ok(()),
        other => Ok(other?),
    }
}
