//! Request bodies of any length on their way into the guest.
//!
//! The pieces pass one by one; nothing is collected. There is no limit on the total time, only on how long
//! a client may say nothing while we wait for it (time in which the guest makes us wait does not count).
//!
//! An answer that comes before the whole body was read (a full disk, say) would be lost with HTTP/1.1: the
//! client still writes and sees a reset connection. So the rest is read and dropped for a short while.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, BodyDataStream},
    http::{HeaderMap, StatusCode, header},
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use stockade_engine::{EngineError, guest::ByteStream};
use tokio::{
    sync::oneshot,
    time::{Instant, Sleep},
};

use crate::ApiError;

/// How long a client may send nothing.
const SILENCE: Duration = Duration::from_secs(60);
/// How long the rest of a refused body is read.
const DRAIN: Duration = Duration::from_secs(5);

const RUNNING: u8 = 0;
const STALLED: u8 = 1;
const CUT: u8 = 2;

/// Knows what became of a body that was handed on.
pub(super) struct Watch {
    fate: Arc<AtomicU8>,
    rest: oneshot::Receiver<BodyDataStream>,
}

/// The body as a stream for the guest, and the watch over it.
pub(super) fn start(body: Body, headers: &HeaderMap) -> (ByteStream, Watch) {
    start_with(body, headers, SILENCE)
}

fn start_with(body: Body, headers: &HeaderMap, silence: Duration) -> (ByteStream, Watch) {
    let fate = Arc::new(AtomicU8::new(RUNNING));
    let (back, rest) = oneshot::channel();
    let stream = Upload {
        body: Some(body.into_data_stream()),
        silence,
        timer: Box::pin(tokio::time::sleep(silence)),
        is_waiting: false,
        // Such a client has not begun to send; reading now would tell it to.
        waits_for_leave: headers.contains_key(header::EXPECT),
        fate: Arc::clone(&fate),
        back: Some(back),
    };
    (Box::pin(stream), Watch { fate, rest })
}

impl Watch {
    /// The result of the request the body went into, told from the client's side.
    pub(super) async fn finish<T>(self, result: Result<T, EngineError>) -> Result<T, ApiError> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        match self.fate.load(Ordering::Acquire) {
            STALLED => {
                let message = "the client sent nothing for too long";
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "upload_stalled", message).caused_by(error))
            }
            CUT => Err(ApiError::new(StatusCode::BAD_REQUEST, "body_cut_off", "the body was cut off").caused_by(error)),
            _ => {
                let drain = async {
                    if let Ok(mut rest) = self.rest.await {
                        while let Some(Ok(_)) = rest.next().await {}
                    }
                };
                // Whether the client managed to send the rest makes no difference to the answer.
                let _ = tokio::time::timeout(DRAIN, drain).await;
                Err(error.into())
            }
        }
    }
}

struct Upload {
    body: Option<BodyDataStream>,
    silence: Duration,
    timer: Pin<Box<Sleep>>,
    is_waiting: bool,
    waits_for_leave: bool,
    fate: Arc<AtomicU8>,
    back: Option<oneshot::Sender<BodyDataStream>>,
}

impl Upload {
    fn end(&mut self, fate: u8, error: io::Error) -> Poll<Option<io::Result<Bytes>>> {
        self.fate.store(fate, Ordering::Release);
        self.body = None;
        Poll::Ready(Some(Err(error)))
    }
}

impl Stream for Upload {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.waits_for_leave = false;
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        match body.poll_next_unpin(cx) {
            Poll::Ready(Some(Ok(piece))) => {
                self.is_waiting = false;
                Poll::Ready(Some(Ok(piece)))
            }
            Poll::Ready(Some(Err(error))) => self.end(CUT, io::Error::other(error)),
            Poll::Ready(None) => {
                self.body = None;
                Poll::Ready(None)
            }
            Poll::Pending => {
                if !self.is_waiting {
                    self.is_waiting = true;
                    let deadline = Instant::now() + self.silence;
                    self.timer.as_mut().reset(deadline);
                }
                match self.timer.as_mut().poll(cx) {
                    Poll::Ready(()) => self.end(STALLED, io::ErrorKind::TimedOut.into()),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let (Some(body), Some(back), false) = (self.body.take(), self.back.take(), self.waits_for_leave) {
            // Nobody wants it if the request went well.
            let _ = back.send(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use stockade_wire::{ErrorBody, ErrorCode};

    use super::*;

    fn full() -> EngineError {
        EngineError::Guest(ErrorBody::new(ErrorCode::NoSpace, "full"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_told_so() {
        let body = Body::from_stream(futures::stream::pending::<io::Result<Bytes>>());
        let (mut stream, watch) = start(body, &HeaderMap::new());
        assert!(stream.next().await.expect("an item").is_err());
        drop(stream);
        let error = watch.finish::<()>(Err(full())).await.expect_err("stalled");
        assert_eq!((error.status.as_u16(), &*error.code), (408, "upload_stalled"));
    }

    #[tokio::test(start_paused = true)]
    async fn time_the_guest_takes_is_not_the_clients_silence() {
        let pieces = futures::stream::unfold(0, async |count| {
            tokio::time::sleep(SILENCE / 2).await;
            (count < 3).then(|| (Ok::<_, io::Error>(Bytes::from_static(b"x")), count + 1))
        });
        let (mut stream, _watch) = start(Body::from_stream(pieces), &HeaderMap::new());
        let mut seen = 0;
        while let Some(piece) = stream.next().await {
            piece.expect("a piece");
            seen += 1;
            tokio::time::sleep(SILENCE * 2).await;
        }
        assert_eq!(seen, 3);
    }

    #[tokio::test]
    async fn a_refused_body_is_read_to_its_end_so_that_the_answer_arrives() {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..100 {
            sender.send(Ok::<_, io::Error>(Bytes::from_static(b"x"))).expect("open");
        }
        let body = Body::from_stream(futures::stream::unfold(receiver, async |mut receiver| {
            let piece = receiver.recv().await?;
            Some((piece, receiver))
        }));
        let (mut stream, watch) = start(body, &HeaderMap::new());
        stream.next().await.expect("an item").expect("a piece");
        drop(stream);
        let client = sender.clone();
        drop(sender);
        let finish = tokio::spawn(watch.finish::<()>(Err(full())));
        drop(client);
        let error = finish.await.expect("no panic").expect_err("full");
        assert_eq!(error.status.as_u16(), 507);
    }
}
