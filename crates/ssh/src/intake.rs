//! What clients send ahead of the programs that read it.
//!
//! russh opens a channel's window again as soon as bytes have come, whether or not anybody has taken them. So the bytes
//! of a connection that nobody has taken yet are counted, and the connection is not read while there are too many: the
//! client then waits in TCP. That holds up all channels of the connection, and with them the window adjustments that
//! a program's output may be waiting for, before it reads on. Therefore there are two marks:
//!
//! ```text
//! 0 ------------- EASY ------------------------------------ MOST
//!   read on           | read on only if nothing is taken       | do not read
//! ```
//!
//! What lies between is more than a client, its kernel and ours hold between them, so an adjustment is always reached.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::task::AtomicWaker;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

const EASY: u64 = 1 << 20;
const MOST: u64 = 12 << 20;
/// Nothing has been taken for so long: a program waits for something else than input.
const STALL: Duration = Duration::from_millis(20);

/// The bytes of one connection, counted.
#[derive(Default)]
pub(crate) struct Intake {
    come: AtomicU64,
    taken: AtomicU64,
    waker: AtomicWaker,
}

/// Bytes that count until they are dropped.
pub(crate) struct Piece {
    bytes: Bytes,
    intake: Arc<Intake>,
}

impl Intake {
    pub(crate) fn piece(self: &Arc<Self>, bytes: &[u8]) -> Piece {
        self.come.fetch_add(bytes.len() as u64, Ordering::AcqRel);
        Piece { bytes: Bytes::copy_from_slice(bytes), intake: Arc::clone(self) }
    }

    fn waiting(&self) -> u64 {
        let taken = self.taken.load(Ordering::Acquire);
        self.come.load(Ordering::Acquire).saturating_sub(taken)
    }
}

impl Piece {
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.intake.taken.fetch_add(self.bytes.len() as u64, Ordering::AcqRel);
        self.intake.waker.wake();
    }
}

/// A client's connection, read no faster than its bytes are taken.
pub(crate) struct Metered<S> {
    stream: S,
    intake: Arc<Intake>,
    stall: Pin<Box<Sleep>>,
    /// How much had been taken when `stall` began.
    taken: u64,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S> Metered<S> {
    pub(crate) fn new(stream: S, intake: Arc<Intake>, cut: CancellationToken) -> Self {
        let stall = Box::pin(tokio::time::sleep(STALL));
        Self { stream, intake, stall, taken: u64::MAX, cut: Box::pin(cut.cancelled_owned()) }
    }

    fn poll_may_read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.intake.waker.register(cx.waker());
        let waiting = self.intake.waiting();
        if waiting < EASY {
            return Poll::Ready(());
        }
        let taken = self.intake.taken.load(Ordering::Acquire);
        if taken != self.taken {
            self.taken = taken;
            self.stall.as_mut().reset(Instant::now() + STALL);
        }
        if waiting >= MOST { Poll::Pending } else { self.stall.as_mut().poll(cx) }
    }

    fn check_cut(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.cut.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the connection was cut")),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.check_cut(cx)?;
        ready!(self.poll_may_read(cx));
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_cut(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_cut(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn connection(cut: &CancellationToken) -> (tokio::io::DuplexStream, Metered<tokio::io::DuplexStream>, Arc<Intake>) {
        let (client, server) = tokio::io::duplex(64);
        let intake = Arc::new(Intake::default());
        (client, Metered::new(server, Arc::clone(&intake), cut.clone()), intake)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_read_slowly_while_nothing_is_taken_and_not_at_all_at_the_upper_mark() {
        let (mut client, mut server, intake) = connection(&CancellationToken::new());
        client.write_all(b"abcd").await.expect("room");
        assert!(server.read_u8().now_or_never().is_some(), "nothing waits");
        let first = intake.piece(&vec![0; EASY as usize]);
        let before = Instant::now();
        assert_eq!(server.read_u8().await.expect("read"), b'b');
        assert_eq!(before.elapsed(), STALL);
        assert!(server.read_u8().now_or_never().is_some(), "still nothing was taken");
        let second = intake.piece(&vec![0; (MOST - EASY) as usize]);
        assert!(tokio::time::timeout(STALL * 100, server.read_u8()).await.is_err());
        drop((first, second));
        assert_eq!(server.read_u8().await.expect("read"), b'd');
    }

    #[tokio::test]
    async fn a_waiting_connection_goes_on_when_bytes_are_taken_and_ends_when_it_is_cut() {
        let cut = CancellationToken::new();
        let (mut client, mut server, intake) = connection(&cut);
        client.write_all(b"a").await.expect("room");
        let piece = intake.piece(&vec![0; MOST as usize]);
        let reader = tokio::spawn(async move {
            let first = server.read_u8().await;
            (first, server.read_u8().await, server.write_all(b"x").await)
        });
        tokio::task::yield_now().await;
        drop(piece);
        tokio::task::yield_now().await;
        cut.cancel();
        let (first, second, write) = reader.await.expect("ends");
        assert_eq!(first.expect("a byte"), b'a');
        assert_eq!(second.expect_err("cut").kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(write.expect_err("cut").kind(), io::ErrorKind::ConnectionAborted);
    }
}
