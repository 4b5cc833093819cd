//! One link session: the hello, perhaps an identity, then HTTP/2.

use std::{
    error::Error,
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::{
    body::Incoming,
    client::conn::http2::{self, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Mutex,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::greeting::Greeted;
use crate::EngineError;

/// The body of a request on the link.
pub(super) type RequestBody = UnsyncBoxBody<Bytes, io::Error>;

/// What one stream may have under way towards us; a reader that stands still holds this much memory.
const STREAM_WINDOW: u32 = 512 << 10;
/// No limit of its own: readers that stand still must never use up what the others need.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
const MAX_FRAME: u32 = 64 << 10;
/// Asks a silent agent for a sign of life, only while requests are under way: idle guests stay idle.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Long enough for a guest that works hard on a host that does, too: a lost session cuts every stream in it.
const PING_PATIENCE: Duration = Duration::from_secs(60);
/// For the first bytes of HTTP/2 to be written.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(30);

/// A session. Its tasks end when the last user of its streams has gone, or when it is cut.
pub(super) struct Session {
    /// Until HTTP/2 begins; taken by whoever speaks, and not put back where that was broken off.
    opening: Mutex<Option<Greeted>>,
    sender: OnceLock<Sender>,
    cut: CancellationToken,
    heard: Arc<Heard>,
}

type Sender = SendRequest<RequestBody>;

impl Session {
    /// Says hello until it is answered. HTTP/2 begins with the first request.
    pub(super) async fn open<S>(stream: S, patience: Duration) -> Result<Self, EngineError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut epoch = [0; 16];
        getrandom::fill(&mut epoch).map_err(|error| EngineError::Host {
            action: "draw random numbers".to_owned(),
            source: io::Error::other(error.to_string()),
        })?;
        let (heard, cut) = (Arc::new(Heard::new()), CancellationToken::new());
        let greeted = Greeted::by(Box::new(stream), epoch, heard.clone(), cut.clone().cancelled_owned());
        let greeted = timeout(patience, greeted).await;
        let silent = |_| EngineError::GuestSilent { waited: patience, console: String::new() };
        let opening = Mutex::new(Some(greeted.map_err(silent)??));
        Ok(Self { opening, sender: OnceLock::new(), cut, heard })
    }

    pub(super) fn is_open(&self) -> bool {
        if self.cut.is_cancelled() {
            return false;
        }
        match (self.sender.get(), self.opening.try_lock()) {
            (Some(sender), _) => !sender.is_closed(),
            (None, Ok(mut opening)) => opening.as_mut().is_some_and(Greeted::is_connected),
            // Somebody speaks in it.
            (None, Err(_)) => true,
        }
    }

    /// Ends the session: everything under way fails at once.
    pub(super) fn close(&self) {
        self.cut.cancel();
    }

    /// How long nothing has come from the guest.
    pub(super) fn silence(&self) -> Duration {
        self.heard.ago()
    }

    /// Says this in a message and gives its answer, if HTTP/2 has not begun.
    pub(super) async fn ask_first(&self, body: &[u8]) -> Result<Option<BytesMut>, EngineError> {
        let mut opening = self.opening.lock().await;
        let Some(mut greeted) = opening.take() else { return Ok(None) };
        let answer = tokio::select! {
            answer = greeted.ask(body) => answer.map_err(broken(true))?,
            () = self.cut.cancelled() => return Err(broken(true)(io::Error::from(io::ErrorKind::ConnectionAborted))),
        };
        *opening = Some(greeted);
        Ok(Some(answer))
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(&self, request: Request<RequestBody>) -> Result<Response<Incoming>, EngineError> {
        let mut sender = self.sender().await?;
        sender.ready().await.map_err(broken(false))?;
        sender.try_send_request(request).await.map_err(|mut failure| {
            // What comes back unsent has certainly not been started.
            let started = failure.take_message().is_none();
            broken(started)(failure.into_error())
        })
    }

    async fn sender(&self) -> Result<Sender, EngineError> {
        if let Some(sender) = self.sender.get() {
            return Ok(sender.clone());
        }
        let mut opening = self.opening.lock().await;
        if let Some(sender) = self.sender.get() {
            return Ok(sender.clone());
        }
        let aborted = || broken(false)(io::Error::from(io::ErrorKind::ConnectionAborted));
        let sender = begin_http2(opening.take().ok_or_else(aborted)?).await?;
        Ok(self.sender.get_or_init(|| sender).clone())
    }
}

async fn begin_http2(greeted: Greeted) -> Result<Sender, EngineError> {
    let handshake = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_PATIENCE)
        .keep_alive_while_idle(false)
        .handshake(TokioIo::new(greeted));
    let (sender, connection) =
        within(HANDSHAKE_PATIENCE, false, async { handshake.await.map_err(broken(false)) }).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(error = &error as &dyn Error, "guest link session ended");
        }
    });
    Ok(sender)
}

/// For `map_err` on what the transport says.
pub(super) fn broken<E>(started: bool) -> impl FnOnce(E) -> EngineError
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    move |error| EngineError::LinkBroken { started, source: error.into() }
}

/// When the guest was last heard.
pub(super) struct Heard {
    since: Instant,
    millis: AtomicU64,
}

impl Heard {
    fn new() -> Self {
        Self { since: Instant::now(), millis: AtomicU64::new(0) }
    }

    pub(super) fn now(&self) {
        self.millis.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn ago(&self) -> Duration {
        self.since.elapsed().saturating_sub(Duration::from_millis(self.millis.load(Ordering::Relaxed)))
    }
}

/// A time limit whose end is an error of the link.
pub(super) async fn within<T>(
    limit: Duration,
    started: bool,
    work: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, EngineError> {
    match timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err(broken(started)(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the guest agent did not answer within {limit:?}"),
        ))),
    }
}
