//! Batches of frames as the body of an answer.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

pub(super) struct Frames(pub(super) mpsc::Receiver<Bytes>);

impl Body for Frames {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context).map(|batch| batch.map(|batch| Ok(Frame::data(batch))))
    }
}
