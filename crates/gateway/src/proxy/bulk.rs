//! TLS in large pieces. The library reads four kilobytes at a time from below and hands one record at a time up; a
//! system call, a lock and a change of task for each of them cost more than the cipher does.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, BufReader, ReadBuf};

/// What is read at once from below TLS: some records.
const BELOW_BYTES: usize = 64 << 10;

/// A stream to put TLS on.
pub(super) fn below<S: AsyncRead>(stream: S) -> BufReader<S> {
    BufReader::with_capacity(BELOW_BYTES, stream)
}

/// A stream whose reads give everything that has come and fits, where it would give piece by piece.
pub(super) struct Joined<S> {
    stream: S,
    /// Came after bytes, which are given first.
    held: Option<io::Error>,
}

impl<S> Joined<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, held: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Joined<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.held.take() {
            return Poll::Ready(Err(error));
        }
        let before = buf.filled().len();
        loop {
            let at = buf.filled().len();
            match Pin::new(&mut self.stream).poll_read(cx, buf) {
                Poll::Ready(Ok(())) if buf.filled().len() > at && buf.remaining() > 0 => {}
                Poll::Ready(Err(error)) if at > before => {
                    self.held = Some(error);
                    return Poll::Ready(Ok(()));
                }
                Poll::Pending if at > before => return Poll::Ready(Ok(())),
                other => return other,
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Joined<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio_test::io::Builder;

    use super::*;

    #[tokio::test]
    async fn pieces_come_as_one_and_an_error_after_them() {
        let error = || io::Error::from(io::ErrorKind::ConnectionReset);
        let mut stream = Joined::new(Builder::new().read(b"one").read(b"two").read_error(error()).build());
        let mut bytes = [0; 16];
        assert_eq!(stream.read(&mut bytes).await.expect("bytes"), 6);
        assert_eq!(&bytes[..6], b"onetwo");
        assert_eq!(stream.read(&mut bytes).await.expect_err("an error").kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn no_more_than_fits_is_taken_and_the_end_is_the_end() {
        let mut stream = Joined::new(Builder::new().read(b"abcdef").build());
        let mut bytes = [0; 4];
        assert_eq!(stream.read(&mut bytes).await.expect("bytes"), 4);
        assert_eq!(stream.read(&mut bytes).await.expect("bytes"), 2);
        assert_eq!(stream.read(&mut bytes).await.expect("the end"), 0);
    }
}
