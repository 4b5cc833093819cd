//! A flow as a byte stream, and the fastest way between it and another one.

use std::{
    future::poll_fn,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use smoltcp::socket::tcp::RecvError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Flow;
use crate::upstream::Io;

/// The handler's end of a flow. Dropped without a shutdown, it resets the connection.
pub(crate) struct FlowStream(Arc<Flow>);

impl FlowStream {
    pub(super) fn new(flow: Arc<Flow>) -> Self {
        Self(flow)
    }

    pub(crate) fn flow(&self) -> &Arc<Flow> {
        &self.0
    }

    /// Waits until `judge` is content with the bytes received so far, which stay unread. `judge` gets the bytes and
    /// whether no more will come.
    pub(crate) async fn peek<T>(&self, mut judge: impl FnMut(&[u8], bool) -> Option<T>) -> io::Result<T> {
        poll_fn(|cx| {
            let mut tcp = self.0.lock();
            let socket = tcp.socket();
            let queued = socket.recv_queue();
            let opening = is_opening(socket.state());
            let ended = !opening && (!socket.may_recv() || socket.recv_capacity() == queued);
            let bytes = match socket.peek(queued) {
                Ok(bytes) => bytes,
                Err(RecvError::Finished) => &[],
                Err(RecvError::InvalidState) if opening => &[],
                Err(RecvError::InvalidState) => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            };
            if let Some(answer) = judge(bytes, ended) {
                return Poll::Ready(Ok(answer));
            }
            tcp.socket().register_recv_waker(cx.waker());
            Poll::Pending
        })
        .await
    }

    /// Waits until a connection opened by us is established.
    pub(crate) async fn established(&self) -> io::Result<()> {
        poll_fn(|cx| {
            let mut tcp = self.0.lock();
            let socket = tcp.socket();
            if socket.may_send() {
                return Poll::Ready(Ok(()));
            }
            if !is_opening(socket.state()) {
                return Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into()));
            }
            socket.register_send_waker(cx.waker());
            socket.register_recv_waker(cx.waker());
            Poll::Pending
        })
        .await
    }

    /// Gives received bytes to `use_bytes`, which says how many it took.
    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        use_bytes: impl FnOnce(&mut Context<'_>, &[u8]) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let Some(link) = self.0.link() else { return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())) };
        let mut tcp = self.0.lock();
        let socket = tcp.socket();
        if !socket.can_recv() {
            if socket.may_recv() || is_opening(socket.state()) {
                socket.register_recv_waker(cx.waker());
                return Poll::Pending;
            }
            return match socket.recv(|_| (0, ())) {
                Err(RecvError::InvalidState) => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                _ => Poll::Ready(Ok(0)),
            };
        }
        let taken = socket.recv(|bytes| {
            let result = use_bytes(cx, bytes);
            let count = if let Poll::Ready(Ok(count)) = &result { *count } else { 0 };
            (count, result)
        });
        let result = taken.unwrap_or_else(|_| Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())));
        if let Poll::Ready(Ok(count)) = &result {
            self.0.count_out(*count);
            // The window may have opened.
            let driven = self.0.drive_locked(&link, &mut tcp);
            drop(tcp);
            link.after(&self.0, driven);
        }
        result
    }

    /// Lets `make_bytes` fill a part of the send ring; it says how many it wrote.
    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        make_bytes: impl FnOnce(&mut Context<'_>, &mut [u8]) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let Some(link) = self.0.link() else { return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())) };
        let mut tcp = self.0.lock();
        if tcp.is_closing() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let socket = tcp.socket();
        if !socket.may_send() {
            if is_opening(socket.state()) {
                socket.register_send_waker(cx.waker());
                return Poll::Pending;
            }
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if !socket.can_send() {
            socket.register_send_waker(cx.waker());
            return Poll::Pending;
        }
        let made = socket.send(|room| {
            let result = make_bytes(cx, room);
            let count = if let Poll::Ready(Ok(count)) = &result { *count } else { 0 };
            (count, result)
        });
        let result = made.unwrap_or_else(|_| Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())));
        if let Poll::Ready(Ok(count)) = &result {
            self.0.count_in(*count);
            let driven = self.0.drive_locked(&link, &mut tcp);
            drop(tcp);
            link.after(&self.0, driven);
        }
        result
    }

    fn close(&self) {
        self.0.lock().close();
        self.0.drive();
    }

    /// Whether the guest reset the connection or it was reset under it.
    fn is_broken(&self, cx: &mut Context<'_>) -> bool {
        let mut tcp = self.0.lock();
        let socket = tcp.socket();
        socket.register_recv_waker(cx.waker());
        !socket.is_open()
    }
}

fn is_opening(state: smoltcp::socket::tcp::State) -> bool {
    use smoltcp::socket::tcp::State;
    matches!(state, State::Listen | State::SynSent | State::SynReceived)
}

impl Drop for FlowStream {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl AsyncRead for FlowStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = self.poll_recv(cx, |_, bytes| {
            let count = bytes.len().min(buf.remaining());
            buf.put_slice(&bytes[..count]);
            Poll::Ready(Ok(count))
        });
        read.map_ok(drop)
    }
}

impl AsyncWrite for FlowStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |_, room| {
            let count = room.len().min(buf.len());
            room[..count].copy_from_slice(&buf[..count]);
            Poll::Ready(Ok(count))
        })
    }

    /// The parts go to the guest as one: TLS writes a record after the other, and each alone would be a small frame.
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |_, room| Poll::Ready(Ok(gather(parts, room))))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.close();
        Poll::Ready(Ok(()))
    }
}

/// Copies as much of the parts as there is room for and says how much that was.
fn gather(parts: &[IoSlice<'_>], room: &mut [u8]) -> usize {
    let mut filled = 0;
    for part in parts {
        let count = part.len().min(room.len() - filled);
        room[filled..filled + count].copy_from_slice(&part[..count]);
        filled += count;
    }
    filled
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Half {
    Moving,
    Flushing,
    Closing,
    Done,
}

/// Moves bytes both ways until both ends are done. They go from the flow's ring into the other side's socket and back
/// without a buffer between: back-pressure on one side is back-pressure on the other.
pub(crate) async fn splice(flow: &FlowStream, other: &mut (dyn Io + '_)) -> io::Result<()> {
    let (mut outward, mut inward) = (Half::Moving, Half::Moving);
    poll_fn(|cx| {
        poll_outward(flow, other, &mut outward, cx)?;
        poll_inward(flow, other, &mut inward, cx)?;
        if outward == Half::Done && inward == Half::Done {
            return Poll::Ready(Ok(()));
        }
        // While the other side is slow, or one half is closed, nobody else would notice a reset.
        if inward != Half::Done && flow.is_broken(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Pending
    })
    .await
}

fn poll_outward(flow: &FlowStream, other: &mut (dyn Io + '_), half: &mut Half, cx: &mut Context<'_>) -> io::Result<()> {
    while *half == Half::Moving {
        let moved = flow.poll_recv(cx, |cx, bytes| Pin::new(&mut *other).poll_write(cx, bytes));
        match moved? {
            Poll::Ready(0) => *half = Half::Flushing,
            Poll::Ready(_) => {}
            Poll::Pending => {
                // TLS and the like keep what was written until they are flushed.
                let _: Poll<()> = Pin::new(&mut *other).poll_flush(cx)?;
                return Ok(());
            }
        }
    }
    if *half == Half::Flushing && Pin::new(&mut *other).poll_flush(cx)?.is_ready() {
        *half = Half::Closing;
    }
    if *half == Half::Closing {
        match Pin::new(&mut *other).poll_shutdown(cx) {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => *half = Half::Done,
            // It closed first.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::NotConnected => *half = Half::Done,
            Poll::Ready(Err(error)) => return Err(error),
        }
    }
    Ok(())
}

fn poll_inward(flow: &FlowStream, other: &mut (dyn Io + '_), half: &mut Half, cx: &mut Context<'_>) -> io::Result<()> {
    while *half == Half::Moving {
        let moved = flow.poll_send(cx, |cx, room| {
            let mut buf = ReadBuf::new(room);
            Pin::new(&mut *other).poll_read(cx, &mut buf).map_ok(|()| buf.filled().len())
        });
        match moved? {
            Poll::Ready(0) => {
                flow.close();
                *half = Half::Done;
            }
            Poll::Ready(_) => {}
            Poll::Pending => return Ok(()),
        }
    }
    Ok(())
}
