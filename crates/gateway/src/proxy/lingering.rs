//! Uploads that were answered before they ended.
//!
//! In HTTP/2 a body nobody wants any more resets its stream, and clients then take the whole exchange for broken and show
//! nothing of the answer that says why (curl of Debian 12 does). So what is left of it is read and forgotten for a while.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::BodyError;

/// A body whose rest is read for a while when it is dropped.
pub(super) struct Lingering {
    /// There until the drop.
    body: Option<Incoming>,
    patience: Duration,
}

impl Lingering {
    pub(super) fn new(body: Incoming, patience: Duration) -> Self {
        Self { body: Some(body), patience }
    }
}

impl Body for Lingering {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            None => Poll::Ready(None),
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let Some(mut body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        let patience = self.patience;
        tokio::spawn(timeout(patience, async move { while let Some(Ok(_)) = body.frame().await {} }));
    }
}
