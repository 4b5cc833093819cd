//! File bodies on their way to a client: whole, or a range of them.
//!
//! The length announced is the length sent: a file that grows while it is read is cut at the announced
//! length, one that shrinks breaks the transfer, so that a client never takes half a file for a whole
//! one. Files that say they are empty and are not (`/proc`) go out without a length.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use stockade_engine::{
    GuestClient,
    guest::{ByteStream, FileBody, ReadFile},
};
use stockade_wire::files::{EntryInfo, EntryKind, PathRequest};

use crate::ApiError;

/// One range of a `Range` header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Range {
    /// From the first byte to the last (included), or to the end.
    From(u64, Option<u64>),
    /// The last so many bytes.
    Last(u64),
}

/// Answers a read of one file.
pub(super) async fn respond(
    guest: &GuestClient,
    request: PathRequest,
    is_head: bool,
    headers: &HeaderMap,
) -> Result<Response, ApiError> {
    let read = ReadFile { path: request.path, user: request.user, offset: 0, length: is_head.then_some(0) };
    let Some(range) = wanted_range(headers) else {
        return whole(guest, read, is_head).await;
    };
    let (offset, length) = match range {
        Range::From(first, last) => (first, last.map(|last| last - first + 1)),
        Range::Last(count) => {
            let size = guest.read_file(&ReadFile { length: Some(0), ..read.clone() }).await?.info.size;
            (size.saturating_sub(count), Some(count))
        }
    };
    let length = if is_head { Some(0) } else { length };
    let FileBody { info, body } = guest.read_file(&ReadFile { offset, length, ..read.clone() }).await?;
    if !has_length(&info) {
        return whole(guest, read, is_head).await;
    }
    let end = match range {
        Range::From(_, last) => last.map_or(info.size, |last| info.size.min(last.saturating_add(1))),
        Range::Last(count) => info.size.min(offset.saturating_add(count)),
    };
    if offset >= end {
        let message = format!("the file has {} bytes", info.size);
        let mut response =
            ApiError::new(StatusCode::RANGE_NOT_SATISFIABLE, "range_not_satisfiable", message).into_response();
        response.headers_mut().insert(header::CONTENT_RANGE, text(format!("bytes */{}", info.size)));
        return Ok(response);
    }
    let mut response = sized(&info, end - offset, body, is_head);
    *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    let content_range = text(format!("bytes {offset}-{}/{}", end - 1, info.size));
    response.headers_mut().insert(header::CONTENT_RANGE, content_range);
    Ok(response)
}

/// Whether the size a file states is the number of its bytes.
fn has_length(info: &EntryInfo) -> bool {
    info.kind == EntryKind::File && info.size > 0
}

async fn whole(guest: &GuestClient, read: ReadFile, is_head: bool) -> Result<Response, ApiError> {
    let FileBody { info, mut body } = guest.read_file(&read).await?;
    if has_length(&info) {
        return Ok(sized(&info, info.size, body, is_head));
    }
    if is_head {
        return Ok(answer(&info, Body::empty()));
    }
    // Empty, or of unknown length: the first piece tells.
    match body.next().await {
        None => Ok(sized(&info, 0, body, is_head)),
        Some(first) => Ok(answer(&info, Body::from_stream(futures::stream::iter([first]).chain(body)))),
    }
}

fn sized(info: &EntryInfo, length: u64, body: ByteStream, is_head: bool) -> Response {
    let body = if is_head { Body::empty() } else { Body::from_stream(Exact { body, remaining: length }) };
    let mut response = answer(info, body);
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    response.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    response
}

fn answer(info: &EntryInfo, body: Body) -> Response {
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    // A file of a guest must never run as a page of this server.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Ok(modified) = jiff::Timestamp::from_millisecond(info.modified_unix_ms) {
        headers.insert(header::LAST_MODIFIED, text(modified.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()));
    }
    response
}

fn text(value: String) -> HeaderValue {
    HeaderValue::try_from(value).expect("digits and ASCII words")
}

/// The one range asked for. Several at once, other units and `If-Range` (we give no validators that
/// could match) get the whole file, as HTTP allows.
fn wanted_range(headers: &HeaderMap) -> Option<Range> {
    let value = headers.get(header::RANGE)?.to_str().ok()?;
    if headers.contains_key(header::IF_RANGE) {
        return None;
    }
    let (first, last) = value.strip_prefix("bytes=")?.trim().split_once('-')?;
    let number = |text: &str| text.parse::<u64>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    match (first, last) {
        ("", last) => Some(Range::Last(number(last)?)),
        (first, "") => Some(Range::From(number(first)?, None)),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            // One less than the maximum, so that the length can be counted.
            (first <= last && last < u64::MAX).then_some(Range::From(first, Some(last)))
        }
    }
}

/// Exactly so many bytes, or an error.
struct Exact {
    body: ByteStream,
    remaining: u64,
}

impl Stream for Exact {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.remaining == 0 {
            return Poll::Ready(None);
        }
        self.body.poll_next_unpin(cx).map(|item| match item {
            Some(Ok(mut piece)) => {
                piece.truncate(usize::try_from(self.remaining).unwrap_or(usize::MAX));
                self.remaining -= piece.len() as u64;
                Some(Ok(piece))
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "a file could not be read to its end");
                Some(Err(error))
            }
            None => {
                let reason = "the file became shorter while it was read";
                self.remaining = 0;
                Some(Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason)))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt as _;

    use super::*;

    fn range(value: &str) -> Option<Range> {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, HeaderValue::from_str(value).expect("a value"));
        wanted_range(&headers)
    }

    #[test]
    fn one_range_is_understood_and_all_else_means_the_whole_file() {
        assert_eq!(range("bytes=0-0"), Some(Range::From(0, Some(0))));
        assert_eq!(range("bytes=5-"), Some(Range::From(5, None)));
        assert_eq!(range("bytes=-7"), Some(Range::Last(7)));
        let whole = [
            "bytes=",
            "bytes=-",
            "bytes=5-4",
            "bytes=0-1,3-4",
            "lines=1-2",
            "bytes=+1-2",
            "bytes=0-99999999999999999999",
        ];
        for value in whole {
            assert_eq!(range(value), None, "{value}");
        }
        assert_eq!(range(&format!("bytes=0-{}", u64::MAX)), None);
    }

    async fn exact(pieces: &[&'static str], length: u64) -> io::Result<String> {
        let pieces: Vec<_> = pieces.iter().map(|piece| Ok(Bytes::from_static(piece.as_bytes()))).collect();
        let body = Exact { body: Box::pin(futures::stream::iter(pieces)), remaining: length };
        let bytes: Vec<Bytes> = body.try_collect().await?;
        Ok(String::from_utf8(bytes.concat()).expect("UTF-8"))
    }

    #[tokio::test]
    async fn the_length_announced_is_the_length_sent() {
        assert_eq!(exact(&["ab", "cd"], 4).await.expect("all"), "abcd");
        assert_eq!(exact(&["ab", "cd", "grown"], 3).await.expect("cut"), "abc");
        assert_eq!(exact(&["ab"], 0).await.expect("none"), "");
        assert_eq!(exact(&["ab"], 3).await.expect_err("short").kind(), io::ErrorKind::UnexpectedEof);
    }
}
