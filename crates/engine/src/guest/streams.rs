//! Bodies that stream: events, file contents, ports.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use futures::{Stream, StreamExt, stream};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use stockade_wire::{
    event::{Event, EventCodec},
    files::EntryInfo,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::mpsc,
};
use tokio_util::{codec::Decoder, sync::PollSender};

use super::session::broken;
use crate::EngineError;

/// An answer's body, and what must live as long as somebody reads it.
pub(super) struct Answer {
    body: Incoming,
    _hold: Option<super::Hold>,
}

impl Answer {
    pub(super) fn new(body: Incoming, hold: Option<super::Hold>) -> Self {
        Self { body, _hold: hold }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }
}

/// What an [`EntryInfo`] in front of a file may take.
const MAX_ENTRY: usize = 256 << 10;

/// The next bytes of an answer; an empty answer ends with `None`.
async fn next_data(body: &mut Answer) -> Option<Result<Bytes, hyper::Error>> {
    loop {
        match body.frame().await? {
            Ok(frame) => {
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                }
            }
            Err(error) => return Some(Err(error)),
        }
    }
}

/// Reads an answer of at most `limit` bytes.
pub(super) async fn collect(mut body: Answer, limit: usize) -> Result<Bytes, EngineError> {
    let mut whole = BytesMut::new();
    while let Some(data) = next_data(&mut body).await {
        let data = data.map_err(broken(true))?;
        if whole.len() + data.len() > limit {
            return Err(broken(true)(format!("the guest's answer is over the limit of {limit} bytes")));
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

/// Takes events out of an answer's bytes. Fuses after an error, after the exit, and at the end.
pub(super) struct EventReader {
    body: Answer,
    input: BytesMut,
    is_done: bool,
    /// The stream must end with an exit; a watch's never does.
    must_exit: bool,
}

impl EventReader {
    pub(super) fn new(body: Answer, must_exit: bool) -> Self {
        Self { body, input: BytesMut::new(), is_done: false, must_exit }
    }

    pub(super) async fn next(&mut self) -> Option<Result<Event, EngineError>> {
        while !self.is_done {
            match EventCodec.decode(&mut self.input) {
                Ok(Some(event)) => {
                    self.is_done = matches!(event, Event::Exit(_));
                    return Some(Ok(event));
                }
                Ok(None) => {}
                Err(error) => return Some(self.fail(error)),
            }
            match next_data(&mut self.body).await {
                // Most frames come whole in one piece: no copy then.
                Some(Ok(data)) if self.input.is_empty() => self.input = BytesMut::from(data),
                Some(Ok(data)) => self.input.extend_from_slice(&data),
                Some(Err(error)) => return Some(self.fail(error)),
                None if self.must_exit || !self.input.is_empty() => {
                    return Some(self.fail("the guest ended the stream before the process ended"));
                }
                None => self.is_done = true,
            }
        }
        None
    }

    fn fail<E>(&mut self, error: E) -> Result<Event, EngineError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.is_done = true;
        Err(broken(true)(error))
    }

    pub(super) fn into_stream(self) -> Pin<Box<dyn Stream<Item = Result<Event, EngineError>> + Send>> {
        Box::pin(stream::unfold(self, |mut reader| async move {
            let event = reader.next().await?;
            Some((event, reader))
        }))
    }
}

/// Takes the entry off the front of a file's answer.
pub(super) async fn split_entry(mut body: Answer) -> Result<(EntryInfo, super::ByteStream), EngineError> {
    let mut head = BytesMut::new();
    let mut needed = 4;
    while head.len() < needed {
        let data = next_data(&mut body).await.ok_or("the guest's answer is cut off").map_err(broken(true))?;
        head.extend_from_slice(&data.map_err(broken(true))?);
        if needed == 4 && head.len() >= 4 {
            needed += (&head[..4]).get_u32() as usize;
            if needed > MAX_ENTRY {
                return Err(broken(true)("the guest's description of the file is too long"));
            }
        }
    }
    let info = serde_json::from_slice(&head[4..needed]).map_err(broken(true))?;
    head.advance(needed);
    let first = stream::iter((!head.is_empty()).then(|| Ok(head.freeze())));
    let rest = stream::unfold(body, |mut body| async move {
        let data = next_data(&mut body).await?.map_err(io::Error::other);
        Some((data, body))
    });
    Ok((info, Box::pin(first.chain(rest))))
}

/// A request's body from a stream of pieces. Empty ones are left out: a peer takes a hundred frames without
/// content in the life of a session for an attack and ends it.
pub(super) struct StreamBody(pub(super) super::ByteStream);

impl Body for StreamBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            match ready!(self.0.poll_next_unpin(context)) {
                Some(Ok(piece)) if piece.is_empty() => {}
                piece => return Poll::Ready(piece.map(|piece| piece.map(Frame::data))),
            }
        }
    }
}

/// A request's body that a writer feeds.
pub(super) struct ChannelBody(pub(super) mpsc::Receiver<Bytes>);

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// A connection to a port in the guest: writes become the request's body, reads come from the answer's.
pub(super) struct Port {
    pub(super) sender: PollSender<Bytes>,
    pub(super) body: Answer,
    pub(super) ahead: Bytes,
}

impl AsyncRead for Port {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let port = self.get_mut();
        while port.ahead.is_empty() {
            match ready!(Pin::new(&mut port.body).poll_frame(context)) {
                Some(Ok(frame)) => port.ahead = frame.into_data().unwrap_or_default(),
                Some(Err(error)) => return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionReset, error))),
                None => return Poll::Ready(Ok(())),
            }
        }
        let piece = port.ahead.len().min(buffer.remaining());
        buffer.put_slice(&port.ahead.split_to(piece));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Port {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let sender = &mut self.get_mut().sender;
        let closed = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        ready!(sender.poll_reserve(context)).map_err(closed)?;
        sender.send_item(Bytes::copy_from_slice(bytes)).map_err(closed)?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().sender.close();
        Poll::Ready(Ok(()))
    }
}
