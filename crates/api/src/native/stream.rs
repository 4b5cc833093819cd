//! Event streams on their way to a client, as JSON lines or binary frames.
//!
//! Nothing is collected: an event is asked for when the connection takes more, so a slow reader slows the
//! process down, and memory stays at one piece. When nothing happens a keep-alive is sent, so that no
//! box on the way takes the connection for dead. What ends without an `exit` ends with an `error`.

use std::{convert::Infallible, pin::Pin, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use serde::Serialize;
use stockade_engine::{EngineError, guest::Events};
use stockade_model::SandboxId;
use stockade_service::Service;
use stockade_wire::{
    event::{Event, EventCodec},
    files::FileChange,
};
use tokio_util::sync::CancellationToken;

use crate::{ApiError, AppState, error::ErrorDetail};

const KEEP_ALIVE: Duration = Duration::from_secs(15);
pub(super) const NDJSON: &str = "application/x-ndjson";
pub(super) const FRAMES: &str = "application/vnd.stockade.events";
/// Frame of an error; the payload is the JSON of the error envelope. Other kinds: [`EventCodec`].
const ERROR_KIND: u8 = 255;

/// How events are written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Format {
    /// One JSON object a line.
    Ndjson,
    /// The frames of the guest link.
    Frames,
}

impl Format {
    /// What the client asks for.
    pub(super) fn accepted(headers: &HeaderMap) -> Self {
        let wanted = |value: &header::HeaderValue| value.to_str().is_ok_and(|text| text.contains(FRAMES));
        if headers.get_all(header::ACCEPT).iter().any(wanted) { Self::Frames } else { Self::Ndjson }
    }
}

/// What the stream is about, for the error if it breaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Process,
    Watch,
}

/// One line of a stream, one text message of a WebSocket.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
#[schema(as = Event)]
pub(crate) enum Line<'a> {
    /// The process runs.
    Started {
        pid: u32,
        /// Bytes of output before the first this stream carries.
        offset: u64,
    },
    Stdout {
        /// Base64.
        data: String,
    },
    Stderr {
        /// Base64.
        data: String,
    },
    Pty {
        /// Base64.
        data: String,
    },
    /// This reader was too slow or too late.
    Missed {
        bytes: u64,
    },
    KeepAlive,
    /// The last line of a process that ended; one of `code` and `signal`.
    Exit(ExitView),
    /// The watch stands.
    Watching,
    Change {
        /// Relative to the watched path.
        name: String,
        /// `create`, `write`, `remove`, `rename` or `chmod`.
        #[schema(value_type = String)]
        change: FileChange,
    },
    /// Changes were dropped; look at the tree again.
    Overflow,
    /// The last line of a stream that broke.
    Error {
        #[schema(inline)]
        error: ErrorDetail<'a>,
    },
    /// WebSocket only: a message was refused; the stream goes on.
    Refused {
        #[schema(inline)]
        error: ErrorDetail<'a>,
    },
}

/// How a process ended.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Exit)]
pub(crate) struct ExitView {
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
    /// It was killed because its time was up.
    timed_out: bool,
    /// The guest had no memory left for it.
    out_of_memory: bool,
}

impl From<stockade_wire::process::Exit> for ExitView {
    fn from(exit: stockade_wire::process::Exit) -> Self {
        Self { code: exit.code, signal: exit.signal, timed_out: exit.timed_out, out_of_memory: exit.out_of_memory }
    }
}

impl From<Event> for Line<'_> {
    fn from(event: Event) -> Self {
        match event {
            Event::Started(started) => Self::Started { pid: started.pid, offset: started.offset },
            Event::Stdout(bytes) => Self::Stdout { data: BASE64.encode(bytes) },
            Event::Stderr(bytes) => Self::Stderr { data: BASE64.encode(bytes) },
            Event::Pty(bytes) => Self::Pty { data: BASE64.encode(bytes) },
            Event::Exit(exit) => Self::Exit(exit.into()),
            Event::KeepAlive => Self::KeepAlive,
            Event::Missed(missed) => Self::Missed { bytes: missed.bytes },
            Event::File(file) => Self::Change { name: file.name, change: file.change },
            Event::Watching => Self::Watching,
            Event::Overflow => Self::Overflow,
        }
    }
}

/// What a client is told next: an event, or why there are no more.
pub(super) enum Step {
    Event(Event),
    Broken(ApiError),
}

/// The events of a process or a watch, with keep-alives in between and an end that is never silent.
pub(super) struct Pump {
    first: Option<Event>,
    events: Pin<Box<dyn Stream<Item = Result<Event, EngineError>> + Send>>,
    kind: Kind,
    stopping: CancellationToken,
    /// Whose record may know why it breaks.
    sandbox: Option<(Service, SandboxId)>,
    broken: Option<ApiError>,
    is_over: bool,
}

impl Pump {
    pub(super) fn new(events: Events, kind: Kind, state: &AppState, sandbox: SandboxId) -> Self {
        Self {
            // The guest's client has taken a watch's first event: it stands when `watch` returns.
            first: match kind {
                Kind::Process => events.started.map(Event::Started),
                Kind::Watch => Some(Event::Watching),
            },
            events: events.events,
            kind,
            stopping: state.lifecycle.stopping.clone(),
            sandbox: Some((state.service.clone(), sandbox)),
            broken: None,
            is_over: false,
        }
    }

    /// The next step; `None` after an exit or a break. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Step> {
        if self.is_over {
            return None;
        }
        if let Some(first) = self.first.take() {
            return Some(Step::Event(first));
        }
        if self.broken.is_none() {
            self.broken = Some(tokio::select! {
                biased;
                event = self.events.next() => match event {
                    Some(Ok(event)) => {
                        self.is_over = matches!(event, Event::Exit(_));
                        return Some(Step::Event(event));
                    }
                    Some(Err(error)) => error.into(),
                    None => self.cut(),
                },
                () = self.stopping.cancelled() => self.server_stops(),
                () = tokio::time::sleep(KEEP_ALIVE) => return Some(Step::Event(Event::KeepAlive)),
            });
        }
        if let (Some(error), Some((service, id))) = (&mut self.broken, &self.sandbox) {
            error.explained(service, id).await;
        }
        self.is_over = true;
        self.broken.take().map(Step::Broken)
    }

    fn cut(&self) -> ApiError {
        let source = "the stream from the guest ended early".into();
        ApiError::from(EngineError::LinkBroken { started: true, source }).hint(self.next_step())
    }

    fn server_stops(&self) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_stopping", "the server is being stopped");
        error.hint(self.next_step())
    }

    fn next_step(&self) -> &'static str {
        match self.kind {
            Kind::Process => {
                "the process may still run: attach to it again with the bytes you have, do not start it anew"
            }
            Kind::Watch => "watch again and look at the tree: changes in between were not seen",
        }
    }
}

/// A stream as a response.
pub(super) fn response(events: Events, format: Format, kind: Kind, state: &AppState, sandbox: SandboxId) -> Response {
    let pump = Pump::new(events, kind, state, sandbox);
    let pieces = futures::stream::unfold(pump, move |mut pump| async move {
        let step = pump.next().await?;
        Some((Ok::<_, Infallible>(encode(step, format)), pump))
    });
    let content_type = match format {
        Format::Ndjson => NDJSON,
        Format::Frames => FRAMES,
    };
    // Told to proxies that would otherwise collect the body.
    let headers = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-store")];
    (headers, [("x-accel-buffering", "no")], Body::from_stream(pieces)).into_response()
}

fn encode(step: Step, format: Format) -> Bytes {
    match (format, step) {
        (Format::Ndjson, Step::Event(event)) => line(&event.into()),
        (Format::Ndjson, Step::Broken(error)) => {
            error.log();
            line(&Line::Error { error: error.envelope().error })
        }
        (Format::Frames, Step::Event(event)) => {
            let mut frame = BytesMut::new();
            EventCodec::put(&event, &mut frame);
            frame.freeze()
        }
        (Format::Frames, Step::Broken(error)) => {
            error.log();
            let payload = serde_json::to_vec(&error.envelope()).unwrap_or_default();
            let mut frame = BytesMut::with_capacity(payload.len() + 5);
            frame.put_u8(ERROR_KIND);
            frame.put_u32(payload.len() as u32);
            frame.put_slice(&payload);
            frame.freeze()
        }
    }
}

fn line(line: &Line<'_>) -> Bytes {
    let mut text = serde_json::to_vec(line).expect("a line is plain data");
    text.push(b'\n');
    text.into()
}

#[cfg(test)]
mod tests {
    use stockade_wire::process::{Exit, Started};

    use super::*;

    async fn text(items: Vec<Result<Event, EngineError>>, kind: Kind) -> String {
        let started = Some(Started { pid: 7, offset: 0 });
        let mut pump = Pump {
            first: started.map(Event::Started),
            events: Box::pin(futures::stream::iter(items)),
            kind,
            stopping: CancellationToken::new(),
            sandbox: None,
            broken: None,
            is_over: false,
        };
        let mut text = Vec::new();
        while let Some(step) = pump.next().await {
            text.extend(encode(step, Format::Ndjson));
        }
        String::from_utf8(text).expect("UTF-8")
    }

    #[tokio::test]
    async fn a_whole_stream_ends_with_its_exit() {
        let exit = Exit { code: Some(3), ..Exit::default() };
        let items = vec![Ok(Event::Stdout(Bytes::from_static(b"\xff"))), Ok(Event::Exit(exit))];
        let expected = concat!(
            "{\"type\":\"started\",\"pid\":7,\"offset\":0}\n",
            "{\"type\":\"stdout\",\"data\":\"/w==\"}\n",
            "{\"type\":\"exit\",\"code\":3,\"timed_out\":false,\"out_of_memory\":false}\n"
        );
        assert_eq!(text(items, Kind::Process).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_with_keep_alives_until_the_server_stops() {
        let stopping = CancellationToken::new();
        let mut pump = Pump {
            first: None,
            events: Box::pin(futures::stream::pending()),
            kind: Kind::Process,
            stopping: stopping.clone(),
            sandbox: None,
            broken: None,
            is_over: false,
        };
        let begun = tokio::time::Instant::now();
        for _ in 0..4 {
            assert!(matches!(pump.next().await, Some(Step::Event(Event::KeepAlive))));
        }
        assert_eq!(begun.elapsed(), KEEP_ALIVE * 4);
        stopping.cancel();
        assert!(matches!(pump.next().await, Some(Step::Broken(error)) if error.code == "server_stopping"));
        assert!(pump.next().await.is_none());
    }

    #[tokio::test]
    async fn a_stream_that_breaks_ends_with_an_error_and_never_an_exit() {
        let broken = || EngineError::LinkBroken { started: true, source: "reset".into() };
        for items in
            [vec![], vec![Err(broken())], vec![Ok(Event::KeepAlive), Err(broken()), Ok(Event::Exit(Exit::default()))]]
        {
            let text = text(items, Kind::Process).await;
            let last = text.lines().last().expect("a line");
            assert!(last.contains("\"type\":\"error\"") && last.contains("guest_link_broken"), "{text}");
            assert!(!text.contains("exit"), "{text}");
        }
    }
}
