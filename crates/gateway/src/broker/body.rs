//! Bodies that are looked at while they pass, piece by piece, in bounded memory.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use memchr::memmem;

use crate::proxy::{BodyError, BoxBody};

/// Reads a whole body of at most `limit` bytes; `None` when it is longer.
pub(crate) async fn read_at_most(mut body: BoxBody, limit: usize) -> Result<Option<Bytes>, BodyError> {
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            if whole.len() + data.len() > limit {
                return Ok(None);
            }
            whole.extend_from_slice(&data);
        }
    }
    Ok(Some(whole.freeze()))
}

/// Finds tokens in a stream, over the borders of its pieces.
struct Seam {
    tail: Vec<u8>,
    longest: usize,
}

impl Seam {
    fn new(longest: usize) -> Self {
        Self { tail: Vec::new(), longest }
    }

    /// Whether one of `tokens` ends in `data`.
    fn finds<'t>(&mut self, data: &[u8], tokens: impl Iterator<Item = &'t str>) -> Option<usize> {
        let keep = self.longest.saturating_sub(1);
        let mut border = std::mem::take(&mut self.tail);
        border.extend_from_slice(&data[..data.len().min(keep)]);
        let found = tokens.enumerate().find(|(_, token)| has(&border, token) || has(data, token)).map(|(at, _)| at);
        if data.len() >= keep {
            self.tail = data[data.len() - keep..].to_vec();
        } else {
            border.drain(..border.len().saturating_sub(keep));
            self.tail = border;
        }
        found
    }
}

fn has(haystack: &[u8], needle: &str) -> bool {
    memmem::find(haystack, needle.as_bytes()).is_some()
}

/// Learns the name of the secret whose token was found.
type Report = Box<dyn FnOnce(&str) + Send>;

/// Passes a body on until it holds a token that may not be sent; then it fails and `report` learns the secret's name.
pub(crate) struct TokenWatch {
    inner: BoxBody,
    tokens: Vec<(String, String)>,
    seam: Seam,
    report: Option<Report>,
}

impl TokenWatch {
    pub(crate) fn new(inner: BoxBody, tokens: Vec<(String, String)>, report: Report) -> Self {
        let longest = tokens.iter().map(|(token, _)| token.len()).max().unwrap_or(0);
        Self { inner, tokens, seam: Seam::new(longest), report: Some(report) }
    }
}

impl Body for TokenWatch {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        if let Some(Ok(data)) = frame.as_ref().map(|frame| frame.as_ref().map(|frame| frame.data_ref()))
            && let Some(data) = data
            && let Some(at) = this.seam.finds(data, this.tokens.iter().map(|(token, _)| token.as_str()))
        {
            if let Some(report) = this.report.take() {
                report(&this.tokens[at].1);
            }
            return Poll::Ready(Some(Err("the body holds a token that may not be sent there".into())));
        }
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::executor::block_on;
    use http_body_util::{StreamBody, combinators::UnsyncBoxBody};

    fn body(pieces: Vec<String>) -> BoxBody {
        let frames = pieces.into_iter().map(|piece| Ok::<_, BodyError>(Frame::data(Bytes::from(piece))));
        UnsyncBoxBody::new(StreamBody::new(futures::stream::iter(frames)))
    }

    fn cut(text: &str, size: usize) -> Vec<String> {
        text.as_bytes().chunks(size).map(|piece| String::from_utf8_lossy(piece).into_owned()).collect()
    }

    #[test]
    fn a_token_is_found_however_a_body_is_cut() {
        for size in 1..30 {
            let (tell, told) = std::sync::mpsc::channel();
            let report = Box::new(move |name: &str| drop(tell.send(name.to_owned())));
            let pieces = cut("some text with stk_0123456789 inside", size);
            let watch = TokenWatch::new(body(pieces), vec![("stk_0123456789".into(), "KEY".into())], report);
            assert!(block_on(watch.collect()).is_err(), "{size}");
            assert_eq!(told.recv().ok().as_deref(), Some("KEY"));
        }
    }
}
