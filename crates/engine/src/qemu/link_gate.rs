//! Holds the guest link still while a snapshot is taken.
//!
//! A halted guest's emulator still moves bytes between the link's socket and the guest's memory, so a
//! page could be copied after and the device's state before such a move, and a child would find the two
//! at odds. So for these milliseconds nobody here reads from or writes to the link, and no stream notices.
//! The emulator still takes what waits in the socket while the guest has room, and still puts into it what the
//! guest had ready while the socket has room: [`Closed::bytes`] tells when it has come to rest.

use std::{
    io,
    os::fd::AsRawFd,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Waker, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};

/// Lets a machine's link through, or not.
#[derive(Debug, Default)]
pub(crate) struct LinkGate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    waiting: Vec<Waker>,
    /// The connection there is.
    stream: Weak<UnixStream>,
}

impl LinkGate {
    /// A connection that the gate can hold still.
    pub(crate) fn wrap(self: &Arc<Self>, stream: UnixStream) -> GatedLink {
        let stream = Arc::new(stream);
        self.lock().stream = Arc::downgrade(&stream);
        GatedLink { stream, gate: self.clone() }
    }

    /// From here on nothing moves until the guard is dropped.
    pub(crate) fn close(&self) -> Closed<'_> {
        self.lock().is_closed = true;
        Closed { gate: self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A closed gate.
#[derive(Debug)]
pub(crate) struct Closed<'a> {
    gate: &'a LinkGate,
}

impl Closed<'_> {
    /// What is in the socket, each way. It changes when the emulator moves anything.
    pub(crate) fn bytes(&self) -> InSocket {
        let stream = self.gate.lock().stream.upgrade();
        let count = |request| stream.as_ref().map_or(0, |stream| queued(stream, request));
        InSocket { untaken: count(libc::TIOCOUTQ), unread: count(libc::FIONREAD) }
    }
}

/// How many bytes are in a connection's socket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct InSocket {
    /// That the emulator has not taken; as the kernel accounts for them, more than their number.
    untaken: usize,
    /// That the emulator has put there.
    unread: usize,
}

fn queued(stream: &UnixStream, request: libc::c_ulong) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is open while `stream` lives; the kernel writes one integer.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), request, &raw mut bytes) };
    if result < 0 { 0 } else { usize::try_from(bytes).unwrap_or(0) }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.gate.lock();
            state.is_closed = false;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// A connection to the guest link that can be held still.
#[derive(Debug)]
pub(crate) struct GatedLink {
    stream: Arc<UnixStream>,
    gate: Arc<LinkGate>,
}

impl GatedLink {
    /// The gate, held open for one attempt; or not now.
    fn pass(&self, context: &Context<'_>) -> Poll<MutexGuard<'_, State>> {
        let mut state = self.gate.lock();
        if state.is_closed {
            // A reader and a writer wait at most, for milliseconds.
            state.waiting.push(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(state)
    }
}

impl AsyncRead for GatedLink {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let _open = ready!(self.pass(context));
            match self.stream.try_read(buffer.initialize_unfilled()) {
                Ok(read) => {
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for GatedLink {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            let _open = ready!(self.pass(context));
            match self.stream.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let fd = self.stream.as_raw_fd();
        Poll::Ready(nix::sys::socket::shutdown(fd, nix::sys::socket::Shutdown::Write).map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_closed_gate_lets_nothing_through_and_loses_nothing() {
        let gate = Arc::new(LinkGate::default());
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let mut link = gate.wrap(ours);
        link.write_all(b"one").await.expect("written");
        theirs.write_all(b"answer").await.expect("written");
        {
            let closed = gate.close();
            assert!(closed.bytes().untaken > 0);
            assert_eq!(closed.bytes().unread, 6);
            let mut bytes = [0; 3];
            theirs.read_exact(&mut bytes).await.expect("read");
            assert_eq!(closed.bytes(), InSocket { untaken: 0, unread: 6 });
            let before = closed.bytes();
            theirs.write_all(b"!").await.expect("written");
            assert_ne!(closed.bytes(), before, "what the emulator says is seen, too");
            let mut answer = [0; 7];
            assert!(futures::poll!(Box::pin(link.read_exact(&mut answer))).is_pending());
            assert!(futures::poll!(Box::pin(link.write_all(b"x"))).is_pending());
        }
        let mut answer = [0; 7];
        link.read_exact(&mut answer).await.expect("read");
        assert_eq!(&answer, b"answer!");
        drop(link);
        assert_eq!(theirs.read(&mut answer).await.expect("read"), 0, "the gate holds no connection open");
    }

    #[tokio::test]
    async fn who_waits_at_the_gate_is_woken() {
        let gate = Arc::new(LinkGate::default());
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let mut link = gate.wrap(ours);
        let closed = gate.close();
        let writer = tokio::spawn(async move { link.write_all(b"late").await.map(|()| link) });
        tokio::task::yield_now().await;
        drop(closed);
        let _link = writer.await.expect("ran").expect("written");
        let mut bytes = [0; 4];
        theirs.read_exact(&mut bytes).await.expect("read");
    }
}
