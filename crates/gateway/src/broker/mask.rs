//! Values that must not come back: what answers show instead of them.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame};
use memchr::memmem;
use stockade_model::Secret;

use crate::proxy::{BodyError, BoxBody};

/// What to look for in an answer, and what is shown instead.
#[derive(Clone, Debug, Default)]
pub(crate) struct Masks(Vec<Mask>);

#[derive(Clone, Debug)]
struct Mask {
    shown: String,
    value: Secret,
}

/// What is to be done with the start of a text.
#[derive(Debug, Eq, PartialEq)]
enum Next<'m> {
    /// So many bytes may go; then so many are shown as something else.
    Hide { after: usize, length: usize, shown: &'m str },
    /// So many bytes may go; the rest may be the start of a value.
    Wait { after: usize },
}

impl Masks {
    /// A value that was put into a request, in the form it was sent in and in the one JSON writes it in.
    pub(crate) fn add(&mut self, shown: &str, value: &Secret) {
        let text = value.expose();
        if text.is_empty() || self.0.iter().any(|mask| mask.value.expose() == text) {
            return;
        }
        self.0.push(Mask { shown: shown.to_owned(), value: value.clone() });
        let json = Secret::new(serde_json::Value::from(text).to_string());
        let inner = &json.expose()[1..json.expose().len() - 1];
        if inner != text {
            self.0.push(Mask { shown: shown.to_owned(), value: Secret::new(inner) });
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Hides values in headers and trailers.
    pub(crate) fn hide_in(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            if let Some(hidden) = self.hide(value.as_bytes()) {
                // What is shown is of header characters; a header that is none is left empty rather than as it was.
                *value = HeaderValue::from_bytes(&hidden).unwrap_or(HeaderValue::from_static(""));
            }
        }
    }

    /// A text without the values in it; none: there are none.
    fn hide(&self, text: &[u8]) -> Option<Bytes> {
        let mut rest = BytesMut::from(text);
        let hidden = self.take(&mut rest, true);
        (hidden != text).then_some(hidden)
    }

    /// Takes from `held` what can go. What is shown is not looked at again: it may hold a value itself.
    fn take(&self, held: &mut BytesMut, is_all: bool) -> Bytes {
        let mut out = BytesMut::new();
        loop {
            match self.next(held, is_all) {
                Next::Hide { after, length, shown } => {
                    out.extend_from_slice(&held[..after]);
                    out.extend_from_slice(shown.as_bytes());
                    held.advance(after + length);
                }
                Next::Wait { after } if out.is_empty() => return held.split_to(after).freeze(),
                Next::Wait { after } => {
                    out.extend_from_slice(&held.split_to(after));
                    return out.freeze();
                }
            }
        }
    }

    /// The first value, the longest of those that start at one place.
    fn next(&self, text: &[u8], is_all: bool) -> Next<'_> {
        let found = self.0.iter().filter_map(|mask| {
            let value = mask.value.expose().as_bytes();
            memmem::find(text, value).map(|at| (at, value.len(), mask.shown.as_str()))
        });
        let first = found.min_by_key(|(at, length, _)| (*at, std::cmp::Reverse(*length)));
        let open = if is_all { text.len() } else { self.open_from(text) };
        match first {
            // A longer value that starts no later may still become whole.
            Some((after, length, shown)) if is_all || after < open => Next::Hide { after, length, shown },
            _ => Next::Wait { after: open },
        }
    }

    /// Where the rest of a text is the start of a value, and not a whole one.
    fn open_from(&self, text: &[u8]) -> usize {
        let longest = self.0.iter().map(|mask| mask.value.expose().len()).max().unwrap_or(0);
        let starts = |rest: &[u8]| {
            let begins = |value: &[u8]| value.len() > rest.len() && value.starts_with(rest);
            self.0.iter().any(|mask| begins(mask.value.expose().as_bytes()))
        };
        let first = (text.len() + 1).saturating_sub(longest);
        (first..text.len()).find(|at| starts(&text[*at..])).unwrap_or(text.len())
    }
}

/// Hides values in a body and its trailers. The length may change, so that the answer is framed anew.
pub(crate) struct EchoMask {
    inner: BoxBody,
    masks: Masks,
    held: BytesMut,
    ended: bool,
    trailers: Option<HeaderMap>,
}

impl EchoMask {
    pub(crate) fn new(inner: BoxBody, masks: Masks) -> Self {
        Self { inner, masks, held: BytesMut::new(), ended: false, trailers: None }
    }
}

impl Body for EchoMask {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        loop {
            let out = this.masks.take(&mut this.held, this.ended);
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out))));
            }
            if this.ended {
                return Poll::Ready(this.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))));
            }
            match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.held.extend_from_slice(&data),
                    Err(other) => {
                        this.ended = true;
                        this.trailers = other.into_trailers().ok();
                        if let Some(trailers) = &mut this.trailers {
                            this.masks.hide_in(trailers);
                        }
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
    use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};

    fn masks(list: &[(&str, &str)]) -> Masks {
        let mut masks = Masks::default();
        list.iter().for_each(|(shown, value)| masks.add(shown, &Secret::new(*value)));
        masks
    }

    /// What is left of a text that arrives in pieces.
    fn hidden(list: &[(&str, &str)], text: &str, size: usize) -> String {
        let pieces: Vec<_> = text.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect();
        let frames = pieces.into_iter().map(|piece| Ok::<_, BodyError>(Frame::data(piece)));
        let body = UnsyncBoxBody::new(StreamBody::new(futures::stream::iter(frames)));
        let whole = block_on(EchoMask::new(body, masks(list)).collect()).expect("a body").to_bytes();
        String::from_utf8(whole.to_vec()).expect("text")
    }

    #[test]
    fn an_echoed_value_is_hidden_however_an_answer_is_cut() {
        for size in 1..30 {
            let text = hidden(&[("TOKEN", "sk-live-42")], "your key is sk-live-42, sk-live-42 sk-live", size);
            assert_eq!(text, "your key is TOKEN, TOKEN sk-live", "{size}");
        }
    }

    #[test]
    fn of_values_that_overlap_the_first_and_longest_is_hidden() {
        let list = [("A", "sk-live"), ("B", "sk-live-42"), ("C", "live-4")];
        for size in 1..30 {
            assert_eq!(hidden(&list, "sk-live-42 sk-live-4 live-42 sk-live", size), "B A-4 C2 A", "{size}");
        }
    }

    #[test]
    fn what_is_shown_may_hold_the_value() {
        for size in 1..9 {
            assert_eq!(hidden(&[("<abc>", "b")], "abba", size), "a<abc><abc>a", "{size}");
        }
    }

    #[test]
    fn a_value_is_hidden_as_json_writes_it() {
        let list = [("T", "a\"b\\c")];
        assert_eq!(hidden(&list, r#"{"raw": a"b\c, "json": "a\"b\\c"}"#, 3), r#"{"raw": T, "json": "T"}"#);
    }

    #[test]
    fn trailers_and_headers_hide_values_too() {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-message", HeaderValue::from_static("no such key: sk-live-42"));
        let frames = [Ok::<_, BodyError>(Frame::data(Bytes::from_static(b"sk-live"))), Ok(Frame::trailers(trailers))];
        let body = UnsyncBoxBody::new(StreamBody::new(futures::stream::iter(frames)));
        let whole = block_on(EchoMask::new(body, masks(&[("T", "sk-live-42")])).collect()).expect("a body");
        assert_eq!(whole.trailers().expect("trailers")["grpc-message"], "no such key: T");
        assert_eq!(whole.to_bytes(), "sk-live");
    }
}
