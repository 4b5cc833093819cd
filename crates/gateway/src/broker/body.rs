//! Bodies that are looked at while they pass, piece by piece, in bounded memory.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use stockade_model::Secret;

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
    find(haystack, needle.as_bytes()).is_some()
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    while let Some(at) = haystack.get(from..)?.iter().position(|byte| *byte == first) {
        let start = from + at;
        if haystack[start..].starts_with(needle) {
            return Some(start);
        }
        from = start + 1;
    }
    None
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

/// Puts tokens back where an answer repeats values. The length may change, so that the answer is framed anew.
pub(crate) struct EchoMask {
    inner: BoxBody,
    masks: Vec<(String, Secret)>,
    held: BytesMut,
    ended: bool,
    trailers: Option<Frame<Bytes>>,
}

impl EchoMask {
    pub(crate) fn new(inner: BoxBody, masks: Vec<(String, Secret)>) -> Self {
        Self { inner, masks, held: BytesMut::new(), ended: false, trailers: None }
    }

    /// What can go out: everything up to the longest end of `held` that may be the start of a value.
    fn release(&mut self) -> Bytes {
        loop {
            let hit = self.masks.iter().filter_map(|(token, value)| {
                find(&self.held, value.expose().as_bytes()).map(|at| (at, token, value.expose().len()))
            });
            let Some((at, token, length)) = hit.min_by_key(|(at, ..)| *at) else { break };
            let mut changed = BytesMut::with_capacity(self.held.len() + token.len());
            changed.extend_from_slice(&self.held[..at]);
            changed.extend_from_slice(token.as_bytes());
            changed.extend_from_slice(&self.held[at + length..]);
            self.held = changed;
        }
        let held = if self.ended { 0 } else { self.open_end() };
        let go = self.held.len() - held;
        self.held.split_to(go).freeze()
    }

    fn open_end(&self) -> usize {
        let may_start = |length: usize| {
            let end = &self.held[self.held.len() - length..];
            self.masks.iter().any(|(_, value)| value.expose().as_bytes().starts_with(end))
        };
        let longest = self.masks.iter().map(|(_, value)| value.expose().len()).max().unwrap_or(1);
        (1..longest.min(self.held.len() + 1)).rev().find(|length| may_start(*length)).unwrap_or(0)
    }
}

impl Body for EchoMask {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        loop {
            if this.ended {
                let rest = this.release();
                if !rest.is_empty() {
                    return Poll::Ready(Some(Ok(Frame::data(rest))));
                }
                return Poll::Ready(this.trailers.take().map(Ok));
            }
            match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        this.held.extend_from_slice(&data);
                        let out = this.release();
                        if !out.is_empty() {
                            return Poll::Ready(Some(Ok(Frame::data(out))));
                        }
                    }
                    Err(other) => {
                        this.trailers = Some(other);
                        this.ended = true;
                    }
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => this.ended = true,
            }
        }
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

    #[test]
    fn an_echoed_value_is_masked_however_an_answer_is_cut() {
        for size in 1..30 {
            let pieces = cut("your key is sk-live-42, sk-live-42 sk-live", size);
            let mask = EchoMask::new(body(pieces), vec![("TOKEN".into(), Secret::new("sk-live-42"))]);
            let whole = block_on(mask.collect()).expect("a body").to_bytes();
            assert_eq!(whole, "your key is TOKEN, TOKEN sk-live", "{size}");
        }
    }
}
