//! `/files`: contents of files, streamed both ways; nothing is kept in memory whole.

use std::collections::BTreeMap;

use async_compression::tokio::bufread::GzipEncoder;
use axum::{Extension, Json, body::Body, response::Response};
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::{Timestamp, tz::TimeZone};
use serde::Deserialize;
use stockade_engine::guest::{ByteStream, FileBody, ReadFile, WriteFile};
use stockade_wire::files as wire;
use tokio_util::io::{ReaderStream, StreamReader};

use super::{
    super::{
        access::{self, Signed},
        error::HttpError,
        extract::Query,
    },
    Entered,
    guest_error::Asked,
    range::Range,
    uploads::Written,
};

#[derive(Deserialize)]
pub(super) struct FileQuery {
    pub(super) path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

impl FileQuery {
    /// The token or a signature; one of them is enough.
    pub(super) fn check(
        &self,
        entered: &Entered,
        headers: &HeaderMap,
        operation: &'static str,
    ) -> Result<(), HttpError> {
        let by_token = access::check_token(&entered.sandbox, headers);
        let Some(signature) = self.signature.as_deref() else { return by_token };
        if by_token.is_ok() {
            return Ok(());
        }
        let signed = Signed {
            path: self.path.as_deref().unwrap_or_default(),
            operation,
            user: self.username.as_deref(),
            signature,
            expiration: self.signature_expiration,
        };
        signed.check(&entered.sandbox.access_token, Timestamp::now())
    }

    pub(super) fn user(&self) -> Option<String> {
        self.username.clone().filter(|user| !user.is_empty())
    }
}

pub(super) fn asked<'a>(user: &'a Option<String>, path: &'a str) -> Asked<'a> {
    Asked { user: user.as_deref(), cwd: None, path: Some(path) }
}

pub(super) async fn download(
    Extension(entered): Extension<Entered>,
    Query(query): Query<FileQuery>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    query.check(&entered, &headers, "read")?;
    let compress = wants_gzip(&headers)?;
    let user = query.user();
    let path = query.path.unwrap_or_default();
    let wanted = Range::of(&headers);
    let (offset, length) = match wanted {
        Some(range @ Range::Last(_)) => {
            let request = wire::PathRequest { path: path.clone(), user: user.clone() };
            let info = entered.guest.stat(&request).await.map_err(|error| asked(&user, &path).http_error(error))?;
            range.within(info.resolved.map_or(info.size, |resolved| resolved.size)).unwrap_or_default()
        }
        Some(Range::From(start)) => (start, None),
        Some(Range::Between(start, end)) => (start, Some((end - start).saturating_add(1))),
        None => (0, None),
    };
    let request = ReadFile { path: path.clone(), user: user.clone(), offset, length };
    let file = entered.guest.read_file(&request).await.map_err(|error| asked(&user, &path).http_error(error))?;
    match wanted {
        Some(range) if file.info.size > 0 => partial(file, range),
        _ if compress => Ok(compressed(file)),
        _ => Ok(whole(file)),
    }
}

/// Gzip only for those who ask for it alone: general clients list it always, and compressing costs
/// more than it saves on the way to them. An error if no encoding we have is acceptable.
fn wants_gzip(headers: &HeaderMap) -> Result<bool, HttpError> {
    let Some(value) = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()) else {
        return Ok(false);
    };
    let refused =
        |item: &str| item.split(';').skip(1).any(|q| matches!(q.trim(), "q=0" | "q=0.0" | "q=0.00" | "q=0.000"));
    let name = |item: &str| item.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let items: Vec<&str> = value.split(',').map(str::trim).filter(|item| !item.is_empty()).collect();
    let accepts = |wanted: &str| items.iter().any(|item| name(item) == wanted && !refused(item));
    let rejects = |wanted: &str| items.iter().any(|item| name(item) == wanted && refused(item));
    let identity = !rejects("identity") && (accepts("identity") || !rejects("*"));
    let only_gzip =
        accepts("gzip") && items.iter().all(|item| matches!(name(item).as_str(), "gzip" | "identity" | "*"));
    if only_gzip || (!identity && accepts("gzip")) {
        return Ok(true);
    }
    if identity {
        return Ok(false);
    }
    let message = "no acceptable encoding: identity and gzip are the ones there are";
    Err(HttpError::new(StatusCode::NOT_ACCEPTABLE, message))
}

fn response(status: StatusCode, info: &wire::EntryInfo, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers.insert(header::CONTENT_DISPOSITION, disposition(&info.name));
    if let Ok(modified) = Timestamp::from_millisecond(info.modified_unix_ms) {
        let text = modified.to_zoned(TimeZone::UTC).strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
        headers.extend(HeaderValue::from_str(&text).ok().map(|value| (header::LAST_MODIFIED, value)));
    }
    response
}

fn disposition(name: &str) -> HeaderValue {
    let encoded = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
    let text = format!("inline; filename*=UTF-8''{encoded}");
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("inline"))
}

fn whole(file: FileBody) -> Response {
    let size = file.info.size;
    let mut response = response(StatusCode::OK, &file.info, Body::from_stream(file.body));
    // Files of /proc say 0 and have content: those go without a length.
    if size > 0 {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    }
    response
}

fn compressed(file: FileBody) -> Response {
    let reader = StreamReader::new(file.body);
    let packed = ReaderStream::new(GzipEncoder::with_quality(reader, async_compression::Level::Fastest));
    let mut response = response(StatusCode::OK, &file.info, Body::from_stream(packed));
    response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    response
}

fn partial(file: FileBody, range: Range) -> Result<Response, HttpError> {
    let size = file.info.size;
    let Some((start, Some(length))) = range.within(size) else {
        let message = format!("the range lies outside the file's {size} bytes");
        return Err(HttpError::new(StatusCode::RANGE_NOT_SATISFIABLE, message));
    };
    let mut response = response(StatusCode::PARTIAL_CONTENT, &file.info, Body::from_stream(file.body));
    let end = start + length - 1;
    let text = format!("bytes {start}-{end}/{size}");
    let headers = response.headers_mut();
    headers.extend(HeaderValue::from_str(&text).ok().map(|value| (header::CONTENT_RANGE, value)));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

#[derive(Deserialize)]
pub(super) struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
    #[serde(default)]
    username: Option<String>,
}

/// Joins files into one and removes them.
pub(super) async fn compose(
    Extension(entered): Extension<Entered>,
    Json(request): Json<ComposeRequest>,
) -> Result<Json<Written>, HttpError> {
    if request.source_paths.is_empty() {
        return Err(HttpError::bad_request("source_paths is empty"));
    }
    let user = request.username.filter(|user| !user.is_empty());
    // All are opened before the destination is touched, so that a wrong path changes nothing.
    let mut bodies = Vec::new();
    for path in &request.source_paths {
        let read = ReadFile { path: path.clone(), user: user.clone(), ..ReadFile::default() };
        let file = entered.guest.read_file(&read).await.map_err(|error| asked(&user, path).http_error(error))?;
        bodies.push(file.body);
    }
    let joined: ByteStream = Box::pin(futures::stream::iter(bodies).flatten());
    let write =
        WriteFile { path: request.destination.clone(), user: user.clone(), atomic: true, ..WriteFile::default() };
    let written = entered.guest.write_file(&write, joined).await;
    let entry = written.map_err(|error| asked(&user, &request.destination).http_error(error))?;
    // One that is the destination, however it is spelled, is what was asked for.
    for path in request.source_paths {
        let source = wire::PathRequest { path: path.clone(), user: user.clone() };
        let there = entered.guest.stat(&source).await;
        if there.is_ok_and(|there| there.path == entry.path) {
            continue;
        }
        let remove = wire::RemoveRequest { path: path.clone(), user: user.clone(), recursive: false, missing_ok: true };
        entered.guest.remove(&remove).await.map_err(|error| asked(&user, &path).http_error(error))?;
    }
    Ok(Json(Written::new(entry, BTreeMap::new())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().expect("valid"))).collect()
    }

    #[test]
    fn gzip_is_sent_only_to_those_who_ask_for_it_alone() {
        let wants = |value: &str| wants_gzip(&headers(&[("accept-encoding", value)])).map_err(|error| error.status);
        assert_eq!(wants_gzip(&HeaderMap::new()).ok(), Some(false));
        assert_eq!(wants("gzip"), Ok(true));
        assert_eq!(wants("gzip, deflate, br"), Ok(false));
        assert_eq!(wants("identity"), Ok(false));
        assert_eq!(wants("br, identity;q=0, gzip"), Ok(true));
        assert_eq!(wants("br, identity;q=0"), Err(StatusCode::NOT_ACCEPTABLE));
        assert_eq!(wants("br, *;q=0"), Err(StatusCode::NOT_ACCEPTABLE));
    }
}
