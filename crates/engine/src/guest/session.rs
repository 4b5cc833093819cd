//! One link session: the hello, then HTTP/2 over it.

use std::{
    error::Error,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::{
    body::Incoming,
    client::conn::http2::{self, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use stockade_wire::{
    PROTOCOL,
    hello::{HELLO_BYTES, Hello, MAGIC, Scanner},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    time::{timeout, timeout_at},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::EngineError;

/// The body of a request on the link.
pub(super) type RequestBody = UnsyncBoxBody<Bytes, io::Error>;

/// How long to wait for an answer before the hello is said again.
const HELLO_INTERVAL: Duration = Duration::from_millis(75);
/// What one stream may have under way towards us; a reader that stands still holds this much memory.
const STREAM_WINDOW: u32 = 512 << 10;
/// No limit of its own: readers that stand still must never use up what the others need.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
const MAX_FRAME: u32 = 64 << 10;
/// Asks a silent agent for a sign of life, only while requests are under way: idle guests stay idle.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Long enough for a guest that works hard on a host that does, too: a lost session cuts every stream in it.
const PING_PATIENCE: Duration = Duration::from_secs(60);

/// A session. Its tasks end when the last user of its streams has gone, or when it is cut.
pub(super) struct Session {
    sender: SendRequest<RequestBody>,
    cut: CancellationToken,
    heard: Arc<Heard>,
}

impl Session {
    /// Says hello until it is answered, then begins HTTP/2.
    pub(super) async fn open<S>(mut stream: S, patience: Duration) -> Result<Self, EngineError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let started = Instant::now();
        let deadline = tokio::time::Instant::now() + patience;
        let silent = |_| EngineError::GuestSilent { waited: started.elapsed(), console: String::new() };
        let mut epoch = [0; 16];
        getrandom::fill(&mut epoch).map_err(|error| EngineError::Host {
            action: "draw random numbers".to_owned(),
            source: io::Error::other(error.to_string()),
        })?;
        let ahead = timeout_at(deadline, greet(&mut stream, Hello::new(epoch))).await.map_err(silent)??;
        let heard = Arc::new(Heard::new());
        let cut = CancellationToken::new();
        let when_cut = Box::pin(cut.clone().cancelled_owned());
        let io = Greeted { stream, ahead, epoch, at_start: true, heard: heard.clone(), when_cut };
        let handshake = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(MAX_FRAME)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_PATIENCE)
            .keep_alive_while_idle(false)
            .handshake(TokioIo::new(io));
        let (sender, connection) = timeout_at(deadline, handshake).await.map_err(silent)?.map_err(broken(false))?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = &error as &dyn Error, "guest link session ended");
            }
        });
        Ok(Self { sender, cut, heard })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.sender.is_closed() && !self.cut.is_cancelled()
    }

    /// Ends the session: everything under way fails at once.
    pub(super) fn close(&self) {
        self.cut.cancel();
    }

    /// How long nothing has come from the guest.
    pub(super) fn silence(&self) -> Duration {
        self.heard.ago()
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(&self, request: Request<RequestBody>) -> Result<Response<Incoming>, EngineError> {
        let mut sender = self.sender.clone();
        sender.ready().await.map_err(broken(false))?;
        sender.try_send_request(request).await.map_err(|mut failure| {
            // What comes back unsent has certainly not been started.
            let started = failure.take_message().is_none();
            broken(started)(failure.into_error())
        })
    }
}

/// For `map_err` on what the transport says.
pub(super) fn broken<E>(started: bool) -> impl FnOnce(E) -> EngineError
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    move |error| EngineError::LinkBroken { started, source: error.into() }
}

/// Repeats the hello until it comes back; gives what was read behind it.
async fn greet<S>(stream: &mut S, hello: Hello) -> Result<BytesMut, EngineError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut scanner = Scanner::default();
    let mut input = BytesMut::with_capacity(4096);
    loop {
        stream.write_all(&hello.encode()).await.map_err(broken(false))?;
        stream.flush().await.map_err(broken(false))?;
        let again = tokio::time::Instant::now() + HELLO_INTERVAL;
        // Rest of an old session may come for long: the hello is repeated by the clock.
        while let Ok(read) = timeout_at(again, stream.read_buf(&mut input)).await {
            if read.map_err(broken(false))? == 0 {
                return Err(broken(false)(io::Error::from(io::ErrorKind::UnexpectedEof)));
            }
            while input.has_remaining() {
                let Some(answer) = scanner.push(input.get_u8()) else { continue };
                if answer.epoch != hello.epoch {
                    continue;
                }
                if answer.protocol != PROTOCOL {
                    return Err(EngineError::Mismatch {
                        what: "guest agent protocol",
                        made_with: answer.protocol.to_string(),
                        here: PROTOCOL.to_string(),
                    });
                }
                return Ok(input);
            }
        }
    }
}

/// When the guest was last heard.
struct Heard {
    since: Instant,
    millis: AtomicU64,
}

impl Heard {
    fn new() -> Self {
        Self { since: Instant::now(), millis: AtomicU64::new(0) }
    }

    fn now(&self) {
        self.millis.store(self.since.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn ago(&self) -> Duration {
        self.since.elapsed().saturating_sub(Duration::from_millis(self.millis.load(Ordering::Relaxed)))
    }
}

/// The stream behind the hello: first what was read ahead, answers to repeated hellos left out.
struct Greeted<S> {
    stream: S,
    ahead: BytesMut,
    epoch: [u8; 16],
    at_start: bool,
    heard: Arc<Heard>,
    when_cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S> Greeted<S> {
    /// `false`: more input is needed to tell a hello from HTTP/2.
    fn skip_hellos(&mut self) -> io::Result<bool> {
        while self.ahead.first() == Some(&MAGIC[0]) {
            if self.ahead.len() < HELLO_BYTES {
                return Ok(false);
            }
            match Hello::decode(&self.ahead[..HELLO_BYTES]) {
                Some(hello) if hello.epoch == self.epoch => self.ahead.advance(HELLO_BYTES),
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "the guest speaks no HTTP/2")),
            }
        }
        self.at_start = self.ahead.is_empty();
        Ok(!self.at_start)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Greeted<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let greeted = self.get_mut();
        if greeted.when_cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        while greeted.at_start && !greeted.skip_hellos()? {
            let more = {
                let read = std::pin::pin!(greeted.stream.read_buf(&mut greeted.ahead));
                ready!(read.poll(context))?
            };
            if more == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        if greeted.ahead.has_remaining() {
            let piece = greeted.ahead.len().min(buffer.remaining());
            buffer.put_slice(&greeted.ahead.split_to(piece));
            return Poll::Ready(Ok(()));
        }
        ready!(Pin::new(&mut greeted.stream).poll_read(context, buffer))?;
        greeted.heard.now();
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Greeted<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
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
