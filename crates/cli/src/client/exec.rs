//! Commands over a WebSocket: the request, then input from us and events from the server.
//!
//! ```text
//! client -> server  text: the request; then binary: input, text: close_stdin | resize
//! server -> client  binary: one byte stream (1 out, 2 err, 3 terminal) + data; text: all other events
//! ```
//!
//! A connection that ends without an exit event was cut; that is a failure, never a success.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{sync::mpsc, time};
use tokio_tungstenite::tungstenite::Message;

use super::{
    Client,
    socket::Socket,
    types::{ApiError, Items, Process},
};
use crate::failure::Failure;

/// How often we show that we are there.
const PING_EVERY: Duration = Duration::from_secs(15);
/// A connection on which nothing at all came for this long is dead: each ping has an answer.
const SILENT_AFTER: Duration = Duration::from_secs(60);
/// Pieces of input on their way.
const INPUT_QUEUE: usize = 16;

/// A command to run.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ExecRequest {
    pub(crate) argv: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cwd: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) stdin: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pty: Option<PtySize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timeout_seconds: Option<f64>,
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct PtySize {
    pub(crate) cols: u16,
    pub(crate) rows: u16,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Exit {
    #[serde(default)]
    pub(crate) code: Option<i32>,
    #[serde(default)]
    pub(crate) signal: Option<i32>,
    #[serde(default)]
    pub(crate) timed_out: bool,
    #[serde(default)]
    pub(crate) out_of_memory: bool,
}

/// What the server reports.
#[derive(Clone, Debug)]
pub(crate) enum ExecEvent {
    /// The command runs.
    Started { pid: u32 },
    /// It wrote to its standard output or terminal.
    Stdout(Bytes),
    /// It wrote to its standard error.
    Stderr(Bytes),
    /// We were too slow and missed bytes.
    Missed { bytes: u64 },
    /// It ended; the last event.
    Exit(Exit),
}

/// What goes to the command.
#[derive(Clone, Debug)]
pub(crate) enum ExecInput {
    /// Bytes for its standard input or terminal.
    Stdin(Bytes),
    /// The end of its standard input.
    CloseStdin,
    /// Its terminal has this size now.
    Resize(PtySize),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum TextEvent {
    Started {
        pid: u32,
    },
    Missed {
        bytes: u64,
    },
    KeepAlive,
    Exit(Exit),
    Error {
        error: ApiError,
    },
    #[serde(other)]
    Unknown,
}

/// A running command.
pub(crate) struct ExecSession {
    client: Client,
    incoming: SplitStream<Socket>,
    input: mpsc::Sender<ExecInput>,
}

impl Client {
    /// Starts a command.
    pub(crate) async fn exec(&self, id: &str, request: &ExecRequest) -> Result<ExecSession, Failure> {
        let mut socket = self.socket(&["v1", "sandboxes", id, "exec", "ws"], None).await?;
        let request = serde_json::to_string(request).map_err(|error| Failure::new("internal", error.to_string()))?;
        socket.send(Message::text(request)).await.map_err(|error| self.broken(&error))?;
        Ok(ExecSession::new(self, socket))
    }

    /// Attaches to a process, named by its pid or `tag:NAME`. `replay`: first what is kept of its output.
    pub(crate) async fn attach(&self, id: &str, process: &str, replay: bool) -> Result<ExecSession, Failure> {
        let query = replay.then_some("after=0");
        let socket = self.socket(&["v1", "sandboxes", id, "processes", process, "ws"], query).await?;
        Ok(ExecSession::new(self, socket))
    }

    /// The processes that were started, oldest first; those that have ended for a while.
    pub(crate) async fn processes(&self, id: &str) -> Result<Vec<Process>, Failure> {
        let list: Items<Process> = self.json(self.request(Method::GET, &["v1", "sandboxes", id, "processes"])).await?;
        Ok(list.items)
    }

    /// Sends a signal to a process group. Not through the WebSocket, where it would wait behind input.
    pub(crate) async fn signal(&self, id: &str, pid: u32, signal: i32) -> Result<(), Failure> {
        let pid = pid.to_string();
        let request = self.request(Method::POST, &["v1", "sandboxes", id, "processes", &pid, "signal"]);
        self.send(request.json(&json!({"signal": signal}))).await.map(drop)
    }
}

impl ExecSession {
    fn new(client: &Client, socket: Socket) -> Self {
        let (outgoing, incoming) = socket.split();
        let (input, queue) = mpsc::channel(INPUT_QUEUE);
        // The writer is a task of its own: input that waits for a slow reader must not stop the output.
        tokio::spawn(write_input(outgoing, queue));
        Self { client: client.clone(), incoming, input }
    }

    /// Where input goes; waits while the server takes no more.
    pub(crate) fn input(&self) -> mpsc::Sender<ExecInput> {
        self.input.clone()
    }

    /// The next event. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<ExecEvent, Failure> {
        loop {
            let message =
                time::timeout(SILENT_AFTER, self.incoming.next()).await.map_err(|_| self.cut("it fell silent"))?;
            let event = match message {
                None | Some(Ok(Message::Close(_))) => return Err(self.cut("it was closed")),
                Some(Err(error)) => return Err(self.client.broken(&error)),
                Some(Ok(Message::Binary(data))) => self.output(data)?,
                Some(Ok(Message::Text(text))) => self.text(&text)?,
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => None,
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    fn output(&self, data: Bytes) -> Result<Option<ExecEvent>, Failure> {
        match data.first() {
            Some(1 | 3) => Ok(Some(ExecEvent::Stdout(data.slice(1..)))),
            Some(2) => Ok(Some(ExecEvent::Stderr(data.slice(1..)))),
            other => Err(self.unexpected(&format!("output of stream {other:?}"))),
        }
    }

    fn text(&self, text: &str) -> Result<Option<ExecEvent>, Failure> {
        let event = serde_json::from_str(text).map_err(|error| self.unexpected(&error.to_string()))?;
        Ok(match event {
            TextEvent::Started { pid } => Some(ExecEvent::Started { pid }),
            TextEvent::Missed { bytes } => Some(ExecEvent::Missed { bytes }),
            TextEvent::Exit(exit) => Some(ExecEvent::Exit(exit)),
            TextEvent::Error { error } => return Err(error.into_failure()),
            TextEvent::KeepAlive | TextEvent::Unknown => None,
        })
    }

    fn cut(&self, how: &str) -> Failure {
        let message = format!("the connection to {} was lost before the command ended: {how}", self.client.url());
        Failure::new("stream_cut", message)
            .hint("the command may still run; `stockade info` shows whether its sandbox does")
    }

    fn unexpected(&self, what: &str) -> Failure {
        Failure::new(
            "unexpected_answer",
            format!("{} sent an event this client does not know: {what}", self.client.url()),
        )
    }
}

/// Writes what is queued, and a ping where nothing is. Ends with the session or the connection; a broken
/// connection is reported by the reader.
async fn write_input(mut outgoing: SplitSink<Socket, Message>, mut queue: mpsc::Receiver<ExecInput>) {
    loop {
        let message = match time::timeout(PING_EVERY, queue.recv()).await {
            Err(_) => Message::Ping(Bytes::new()),
            Ok(None) => break,
            Ok(Some(ExecInput::Stdin(data))) => Message::Binary(data),
            Ok(Some(ExecInput::CloseStdin)) => Message::text(r#"{"type":"close_stdin"}"#),
            Ok(Some(ExecInput::Resize(PtySize { cols, rows }))) => {
                Message::text(json!({"type": "resize", "cols": cols, "rows": rows}).to_string())
            }
        };
        if outgoing.send(message).await.is_err() {
            break;
        }
    }
}
