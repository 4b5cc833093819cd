//! `/files`: contents of files, streamed both ways; nothing is kept in memory whole.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use async_compression::tokio::bufread::GzipEncoder;
use axum::{
    Extension, Json,
    body::{Body, Bytes},
    extract::{Query, Request},
    response::Response,
};
use futures::{SinkExt, Stream, StreamExt, TryStreamExt};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::{Timestamp, tz::TimeZone};
use serde::{Deserialize, Serialize};
use stockade_engine::guest::{ByteStream, FileBody, ReadFile, WriteFile};
use stockade_wire::files as wire;
use tokio_util::io::{ReaderStream, StreamReader};

use super::{
    super::{
        access::{self, Signed},
        error::HttpError,
    },
    Entered,
    filesystem::METADATA_PREFIX,
    guest_error::Asked,
    range::Range,
};

/// After a failed write the rest of the body is read and dropped, so that the client sees the answer
/// instead of a broken pipe; but not for ever.
const MAX_DRAIN: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
pub(super) struct FileQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

impl FileQuery {
    /// The token or a signature; one of them is enough.
    fn check(&self, entered: &Entered, headers: &HeaderMap, operation: &'static str) -> Result<(), HttpError> {
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

    fn user(&self) -> Option<String> {
        self.username.clone().filter(|user| !user.is_empty())
    }
}

fn asked<'a>(user: &'a Option<String>, path: &'a str) -> Asked<'a> {
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

/// What an upload made.
#[derive(Debug, Serialize)]
pub(super) struct Written {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

/// Where uploads go, with what.
struct Upload {
    entered: Entered,
    user: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl Upload {
    async fn write(&self, path: String, body: ByteStream) -> Result<Written, HttpError> {
        let attributes =
            self.metadata.iter().map(|(key, value)| (format!("{METADATA_PREFIX}{key}"), value.clone())).collect();
        let request = WriteFile {
            path: path.clone(),
            user: self.user.clone(),
            // In place, so that a watcher sees one file and an existing one keeps its mode.
            atomic: false,
            mode: None,
            attributes: Some(attributes),
        };
        let written = self.entered.guest.write_file(&request, body).await;
        let entry = written.map_err(|error| asked(&self.user, &path).http_error(error))?;
        Ok(Written { path: entry.path, name: entry.name, kind: "file", metadata: self.metadata.clone() })
    }

    /// Writes, and on failure reads the rest of the body.
    async fn write_and_drain(&self, path: String, body: ByteStream) -> Result<Written, HttpError> {
        let tap = Tap(Arc::new(Mutex::new(body)));
        let result = self.write(path, Box::pin(tap.clone())).await;
        if result.is_err() {
            tap.drain().await;
        }
        result
    }
}

pub(super) async fn upload(
    Extension(entered): Extension<Entered>,
    Query(query): Query<FileQuery>,
    request: Request,
) -> Result<Json<Vec<Written>>, HttpError> {
    query.check(&entered, request.headers(), "write")?;
    let metadata = metadata_of(request.headers())?;
    let upload = Upload { entered, user: query.user(), metadata };
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let content_type = content_type.unwrap_or_default().to_owned();
    let body = request.into_body().into_data_stream().map_err(std::io::Error::other);
    if let Ok(boundary) = multer::parse_boundary(&content_type) {
        return multipart(&upload, query.path, multer::Multipart::new(body, boundary)).await.map(Json);
    }
    if content_type.split(';').next().is_some_and(|essence| essence.trim() == "application/octet-stream") {
        let path = query.path.filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| HttpError::bad_request("path is missing from the query"))?;
        return Ok(Json(vec![upload.write_and_drain(path, Box::pin(body)).await?]));
    }
    let message = "the body must be multipart/form-data with parts named file, or application/octet-stream";
    Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// Parts named `file`, each with its full path as file name; `path` in the query names the only one.
async fn multipart(
    upload: &Upload,
    path: Option<String>,
    mut parts: multer::Multipart<'static>,
) -> Result<Vec<Written>, HttpError> {
    let malformed = |error: multer::Error| HttpError::bad_request(format!("the multipart body is malformed: {error}"));
    let path = path.filter(|path| !path.is_empty());
    let mut written: Vec<Written> = Vec::new();
    let mut failure = None;
    while let Some(part) = parts.next_field().await.map_err(malformed)? {
        if part.name() != Some("file") || failure.is_some() {
            continue;
        }
        if path.is_some() && !written.is_empty() {
            failure = Some(HttpError::bad_request("path in the query names one file, but the body has several"));
            continue;
        }
        let Some(path) = path.clone().or_else(|| part.file_name().map(unescape_file_name)) else {
            failure = Some(HttpError::bad_request("a part named file has no file name, and the query no path"));
            continue;
        };
        // The parts after a failed one are read and dropped by the parser.
        match write_part(upload, path, part).await {
            Ok(entry) => written.push(entry),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) => Err(error),
        None if written.is_empty() => Err(HttpError::bad_request("the body has no part named file")),
        None => Ok(written),
    }
}

/// Writes a part that is read by this task alone: the parser fails where a part and the next one are asked for
/// at once, as they would be while the guest link lets go of the part's end.
async fn write_part(upload: &Upload, path: String, mut part: multer::Field<'static>) -> Result<Written, HttpError> {
    let (mut feed, body) = futures::channel::mpsc::channel(1);
    let forward = async move {
        while let Some(piece) = part.next().await {
            if feed.send(piece.map_err(std::io::Error::other)).await.is_err() {
                break;
            }
        }
    };
    tokio::join!(upload.write(path, Box::pin(body)), forward).0
}

/// Undoes what HTML5 form encoding does to a file name: quote, carriage return and line feed.
fn unescape_file_name(name: &str) -> String {
    name.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n")
}

/// The `X-Metadata-<key>` headers, checked.
fn metadata_of(headers: &HeaderMap) -> Result<BTreeMap<String, String>, HttpError> {
    const MAX_KEY_BYTES: usize = 246;
    const MAX_TOTAL_BYTES: usize = 4096;
    let mut metadata = BTreeMap::new();
    let mut total = 0;
    for (name, value) in headers {
        // Header names are lower case already.
        let Some(key) = name.as_str().strip_prefix("x-metadata-") else { continue };
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            let message = format!("metadata key '{key}' must have 1 to {MAX_KEY_BYTES} bytes");
            return Err(HttpError::bad_request(message));
        }
        let text = value.to_str().ok().filter(|text| text.bytes().all(|byte| (0x20..0x7f).contains(&byte)));
        let text =
            text.ok_or_else(|| HttpError::bad_request(format!("metadata value of '{key}' must be printable ASCII")))?;
        total += key.len() + text.len();
        metadata.insert(key.to_owned(), text.to_owned());
    }
    if total > MAX_TOTAL_BYTES {
        let message = format!("metadata has {total} bytes; at most {MAX_TOTAL_BYTES} are possible");
        return Err(HttpError::bad_request(message));
    }
    Ok(metadata)
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
    for path in request.source_paths {
        let remove = wire::RemoveRequest { path: path.clone(), user: user.clone(), recursive: false, missing_ok: true };
        entered.guest.remove(&remove).await.map_err(|error| asked(&user, &path).http_error(error))?;
    }
    Ok(Json(Written { path: entry.path, name: entry.name, kind: "file", metadata: BTreeMap::new() }))
}

/// A body that can still be read after its reader has given up.
#[derive(Clone)]
struct Tap(Arc<Mutex<ByteStream>>);

impl Stream for Tap {
    type Item = std::io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).poll_next_unpin(context)
    }
}

impl Tap {
    async fn drain(mut self) {
        let rest = async { while let Some(Ok(_)) = self.next().await {} };
        // A client that is slower than this sees its connection close.
        let _ = tokio::time::timeout(MAX_DRAIN, rest).await;
    }
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

    #[test]
    fn metadata_comes_from_headers_and_is_bounded() {
        let good = metadata_of(&headers(&[("x-metadata-author", "me & you"), ("x-other", "1")])).expect("valid");
        assert_eq!(good, BTreeMap::from([("author".to_owned(), "me & you".to_owned())]));
        assert!(metadata_of(&headers(&[("x-metadata-a", &"v".repeat(4096))])).is_err());
        assert!(metadata_of(&headers(&[("x-metadata-a", "é")])).is_err());
    }
}
