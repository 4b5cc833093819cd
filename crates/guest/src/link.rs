//! One link, many sessions: finds hellos, answers them, serves HTTP/2 until the session ends.
//!
//! ```text
//!          hello seen: echo it          HTTP/2 begins            end of input
//! Scanning ------------------> Opening --------------> Session --------------> done (the port hung up)
//!    ^                            |  identities           |
//!    +------- other hello --------+---- other hello ------+
//! ```
//!
//! A machine restored from a snapshot may be connected to a new host without having seen the old one
//! hang up. The old session then reads the new host's hellos: usually as a protocol error, but where it
//! was in the middle of a frame they would pass for the frame's payload for a long time. So a read
//! that consists of nothing but hellos of another epoch ends the session too. (A host sends hellos only
//! outside of a session, and never shorter or joined to other bytes before them.)

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use stockade_wire::hello::{self, HELLO_BYTES, Hello, MAGIC, Opening, Scanner};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::{Agent, failure::invalid, identity, routes};

/// What one stream may have under way towards us: ten round trips of the link at its full speed.
const STREAM_WINDOW: u32 = 256 << 10;
/// The whole connection's share is no limit of its own: streams whose reader is stuck (a process that does
/// not read its input) must never use up what the others need.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
const MAX_STREAMS: u32 = 512;
const MAX_FRAME: u32 = 64 << 10;
/// A path and attributes, percent-encoded, fit; more is refused.
const MAX_HEADERS: u32 = 64 << 10;
/// The virtio console driver takes 32 KiB at once; each write wakes the host.
const WRITE_PIECE: usize = 32 << 10;
const WRITE_BUFFER: usize = 2 * WRITE_PIECE;
const READ_PIECE: usize = 16 << 10;

/// Serves sessions on `stream` until it ends. Processes outlive sessions.
///
/// # Errors
/// What reading from or writing to the stream says.
pub async fn serve<S>(stream: S, agent: Agent) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    agent.start_reaper()?;
    let mut link = Link::new(stream);
    while let Some(hello) = link.next_hello().await? {
        link.begin(hello).await?;
        if link.open(&agent).await? {
            let served = serve_session(&mut link, &agent).await;
            if let Err(error) = served {
                tracing::debug!(%error, "session ended");
            }
        }
        if link.has_ended {
            break;
        }
    }
    Ok(())
}

/// Serves HTTP/2 until the session ends.
async fn serve_session<S>(link: &mut Link<S>, agent: &Agent) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    let service = service_fn(move |request| routes::answer(agent.clone(), request));
    http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buf_size(WRITE_BUFFER)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(link), service)
        .await
}

/// The stream with what was read ahead and what is still to be written.
struct Link<S> {
    stream: S,
    /// Read from the stream, not yet handed on.
    ahead: BytesMut,
    out: BytesMut,
    epoch: Option<[u8; 16]>,
    /// Ends the session at hand; the next one begins with it.
    next: Option<Hello>,
    has_ended: bool,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Link<S> {
    fn new(stream: S) -> Self {
        Self {
            stream,
            ahead: BytesMut::new(),
            out: BytesMut::with_capacity(WRITE_BUFFER),
            epoch: None,
            next: None,
            has_ended: false,
        }
    }

    /// Reads until there is a hello of another epoch than the last; `None` at the end of the stream.
    async fn next_hello(&mut self) -> io::Result<Option<Hello>> {
        if let Some(hello) = self.next.take() {
            return Ok(Some(hello));
        }
        let mut scanner = Scanner::default();
        loop {
            while self.ahead.has_remaining() {
                match scanner.push(self.ahead.get_u8()) {
                    Some(hello) if Some(hello.epoch) != self.epoch => return Ok(Some(hello)),
                    _ => {}
                }
            }
            self.ahead.reserve(READ_PIECE);
            if self.stream.read_buf(&mut self.ahead).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// Answers a hello. What the old session still had to say is forgotten.
    async fn begin(&mut self, hello: Hello) -> io::Result<()> {
        self.out.clear();
        self.epoch = Some(hello.epoch);
        self.stream.write_all(&Hello::new(hello.epoch).encode()).await?;
        self.stream.flush().await
    }

    /// Takes what comes before HTTP/2: repeated hellos, and who the machine is. `false`: HTTP/2 does not begin.
    async fn open(&mut self, agent: &Agent) -> io::Result<bool> {
        loop {
            match Opening::of(&self.ahead) {
                Opening::Http2 => return Ok(true),
                Opening::Hello(hello) => {
                    self.ahead.advance(HELLO_BYTES);
                    if Some(hello.epoch) != self.epoch {
                        self.next = Some(hello);
                        return Ok(false);
                    }
                }
                Opening::Message(body) => {
                    let message = self.ahead.split_to(body.end);
                    let answer = introduced(agent, &message[body]);
                    self.stream.write_all(&answer).await?;
                    self.stream.flush().await?;
                }
                Opening::Rubbish => return Ok(false),
                Opening::Unclear => {
                    let before = self.ahead.len();
                    self.ahead.reserve(READ_PIECE);
                    if self.stream.read_buf(&mut self.ahead).await? == 0 {
                        self.has_ended = true;
                        return Ok(false);
                    }
                    // In the middle of a message, whose rest never comes.
                    if let Some(hello) = self.only_another(&self.ahead[before..]) {
                        self.ahead.clear();
                        self.next = Some(hello);
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// The last hello in bytes that are hellos and nothing else, if it begins another session.
    fn only_another(&self, bytes: &[u8]) -> Option<Hello> {
        only_hellos(bytes).filter(|hello| Some(hello.epoch) != self.epoch)
    }

    fn interrupt(&mut self, hello: Hello) -> io::Error {
        self.next = Some(hello);
        io::Error::new(io::ErrorKind::ConnectionReset, "another session begins")
    }

    fn poll_write_out(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.out.has_remaining() {
            let piece = self.out.len().min(WRITE_PIECE);
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.out[..piece]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        self.out.reserve(WRITE_BUFFER);
        Poll::Ready(Ok(()))
    }
}

/// Takes an identity and says what came of it.
fn introduced(agent: &Agent, introduction: &[u8]) -> Vec<u8> {
    let taken = serde_json::from_slice(introduction)
        .map_err(|error| invalid(format!("malformed introduction: {error}")))
        .and_then(|introduction| identity::introduce(agent, introduction));
    let answer = taken.err().map(|error| serde_json::to_vec(&error).unwrap_or_default()).unwrap_or_default();
    hello::message(&answer).unwrap_or_default()
}

/// The last hello in bytes that are hellos and nothing else.
fn only_hellos(bytes: &[u8]) -> Option<Hello> {
    if bytes.is_empty() || !bytes.len().is_multiple_of(HELLO_BYTES) || !bytes.starts_with(&MAGIC) {
        return None;
    }
    bytes.chunks(HELLO_BYTES).map(Hello::decode).collect::<Option<Vec<_>>>()?.pop()
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Link<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let link = self.get_mut();
        if link.next.is_some() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if link.ahead.has_remaining() {
            let piece = link.ahead.len().min(buffer.remaining());
            buffer.put_slice(&link.ahead[..piece]);
            link.ahead.advance(piece);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut link.stream).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        if read.is_empty() {
            link.has_ended = true;
        } else if let Some(hello) = link.only_another(read) {
            buffer.set_filled(before);
            return Poll::Ready(Err(link.interrupt(hello)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Link<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    /// Gathers small frames, so that the host is woken once for many.
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let link = self.get_mut();
        if link.out.len() >= WRITE_BUFFER {
            ready!(link.poll_write_out(context))?;
        }
        let mut taken = 0;
        for slice in slices {
            let piece = slice.len().min(WRITE_BUFFER - link.out.len());
            link.out.extend_from_slice(&slice[..piece]);
            taken += piece;
        }
        Poll::Ready(Ok(taken))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let link = self.get_mut();
        ready!(link.poll_write_out(context))?;
        Pin::new(&mut link.stream).poll_flush(context)
    }

    /// A session ends; the stream goes on.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(context)
    }
}
