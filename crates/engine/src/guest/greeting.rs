//! The beginning of a session, before HTTP/2: the hello, and who the machine is.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use stockade_wire::{
    PROTOCOL,
    hello::{self, HELLO_BYTES, Hello, Opening, Scanner},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    time::timeout_at,
};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::{
    PortStream,
    session::{Heard, broken},
};
use crate::EngineError;

/// How long to wait for an answer before the hello is said again.
const HELLO_INTERVAL: Duration = Duration::from_millis(75);

/// A link on which the hello was answered: what is read begins behind that.
pub(super) struct Greeted {
    stream: Box<dyn PortStream>,
    ahead: BytesMut,
    epoch: [u8; 16],
    at_start: bool,
    heard: Arc<Heard>,
    when_cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Greeted {
    /// Says hello until it is answered.
    pub(super) async fn by(
        mut stream: Box<dyn PortStream>,
        epoch: [u8; 16],
        heard: Arc<Heard>,
        when_cut: WaitForCancellationFutureOwned,
    ) -> Result<Self, EngineError> {
        let ahead = greet(&mut stream, Hello::new(epoch)).await?;
        Ok(Self { stream, ahead, epoch, at_start: true, heard, when_cut: Box::pin(when_cut) })
    }

    /// Says this in a message and gives the body of the answer.
    pub(super) async fn ask(&mut self, body: &[u8]) -> io::Result<BytesMut> {
        let message = hello::message(body).ok_or(io::ErrorKind::InvalidInput)?;
        self.stream.write_all(&message).await?;
        self.stream.flush().await?;
        loop {
            match Opening::of(&self.ahead) {
                Opening::Hello(hello) if hello.epoch == self.epoch => self.ahead.advance(HELLO_BYTES),
                Opening::Message(body) => {
                    let mut answer = self.ahead.split_to(body.end);
                    answer.advance(body.start);
                    return Ok(answer);
                }
                Opening::Unclear => {
                    if self.stream.read_buf(&mut self.ahead).await? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    self.heard.now();
                }
                _ => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "the guest gave no answer to its identity"));
                }
            }
        }
    }

    /// Whether the guest's end is there. Nothing comes from it before it is spoken to.
    pub(super) fn is_connected(&mut self) -> bool {
        let (mut byte, mut context) = ([0], Context::from_waker(Waker::noop()));
        let mut buffer = ReadBuf::new(&mut byte);
        match Pin::new(&mut self.stream).poll_read(&mut context, &mut buffer) {
            Poll::Pending => true,
            Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                self.ahead.extend_from_slice(buffer.filled());
                true
            }
            Poll::Ready(_) => false,
        }
    }

    /// `false`: more input is needed to tell a hello from HTTP/2.
    fn skip_hellos(&mut self) -> io::Result<bool> {
        loop {
            match Opening::of(&self.ahead) {
                Opening::Unclear => return Ok(false),
                Opening::Hello(hello) if hello.epoch == self.epoch => self.ahead.advance(HELLO_BYTES),
                Opening::Http2 => {
                    self.at_start = false;
                    return Ok(true);
                }
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "the guest speaks no HTTP/2")),
            }
        }
    }
}

/// Repeats the hello until it comes back; gives what was read behind it.
async fn greet<S>(stream: &mut S, hello: Hello) -> Result<BytesMut, EngineError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut scanner = Scanner::default();
    let mut input = BytesMut::with_capacity(4_096);
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

impl AsyncRead for Greeted {
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

impl AsyncWrite for Greeted {
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
