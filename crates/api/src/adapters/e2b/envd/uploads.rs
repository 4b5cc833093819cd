//! Uploads to `/files`: one file as the body, or several as parts of a form.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{Extension, Json, body::Bytes, extract::Request};
use futures::{SinkExt, Stream, StreamExt, TryStreamExt};
use http::{HeaderMap, StatusCode, header};
use serde::Serialize;
use stockade_engine::guest::{ByteStream, WriteFile};
use stockade_wire::files::EntryInfo;

use super::{
    super::{error::HttpError, extract::Query},
    Entered,
    files::{FileQuery, asked},
    filesystem::METADATA_PREFIX,
};

/// After a failed write the rest of the body is read and dropped, so that the client sees the answer
/// instead of a broken pipe; but not for ever.
const MAX_DRAIN: Duration = Duration::from_secs(30);

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

impl Written {
    pub(super) fn new(entry: EntryInfo, metadata: BTreeMap<String, String>) -> Self {
        Self { path: entry.path, name: entry.name, kind: "file", metadata }
    }
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
        let problem = Arc::new(OnceLock::new());
        let noted = Arc::clone(&problem);
        let body = body.inspect_err(move |error| _ = noted.set(error.to_string()));
        let written = self.entered.guest.write_file(&request, Box::pin(body)).await;
        let entry = written.map_err(|error| match problem.get() {
            // What the guest saw of it is a stream that broke off.
            Some(problem) => HttpError::bad_request(format!("the body cannot be read: {problem}")),
            None => asked(&self.user, &path).http_error(error),
        })?;
        Ok(Written::new(entry, self.metadata.clone()))
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
    if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        let message = format!("the content encoding {encoding:?} is not known; send the body as it is, or as gzip");
        return Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let metadata = metadata_of(request.headers())?;
    let upload = Upload { entered, user: query.user(), metadata };
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let content_type = content_type.unwrap_or_default().to_owned();
    let body = request.into_body().into_data_stream().map_err(std::io::Error::other);
    if let Ok(boundary) = multer::parse_boundary(&content_type) {
        return multipart(&upload, query.path, multer::Multipart::new(PieceByPiece::of(body), boundary))
            .await
            .map(Json);
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

/// Undoes what clients do to a file name: HTML5 form encoding (quote, carriage return and line feed), and the older way of
/// a backslash before another.
fn unescape_file_name(name: &str) -> String {
    name.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n").replace("\\\\", "\\")
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

/// A form's body that hands out one piece, or its end, each time it is woken.
///
/// The parser looks twice for the first boundary. Where all of a body arrives between the two looks, it sees the end
/// and calls a whole form incomplete. It also gathers whatever is there, which this bounds.
struct PieceByPiece<S> {
    body: S,
    /// A piece was handed out since the parser was told to come again.
    gave: bool,
}

impl<S> PieceByPiece<S> {
    fn of(body: S) -> Self {
        Self { body, gave: false }
    }
}

impl<S: Stream + Unpin> Stream for PieceByPiece<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if std::mem::take(&mut self.gave) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let next = self.body.poll_next_unpin(context);
        self.gave = matches!(next, Poll::Ready(Some(_)));
        next
    }
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
    fn metadata_comes_from_headers_and_is_bounded() {
        let good = metadata_of(&headers(&[("x-metadata-author", "me & you"), ("x-other", "1")])).expect("valid");
        assert_eq!(good, BTreeMap::from([("author".to_owned(), "me & you".to_owned())]));
        assert!(metadata_of(&headers(&[("x-metadata-a", &"v".repeat(4096))])).is_err());
        assert!(metadata_of(&headers(&[("x-metadata-a", "é")])).is_err());
    }

    #[tokio::test]
    async fn a_form_is_whole_whenever_its_bytes_arrive() {
        const FORM: &[u8] =
            b"--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a\"\r\n\r\ncontent\r\n--x--\r\n";
        for cut in 0..FORM.len() {
            for waits in 0..4 {
                let pieces =
                    [&FORM[..cut], &FORM[cut..]].map(|piece| Ok::<_, std::io::Error>(Bytes::from_static(piece)));
                let mut pieces = pieces.into_iter();
                let mut turn = 0;
                // What is not there at first is there when asked once more, all of it and the end.
                let body = futures::stream::poll_fn(move |context| {
                    turn += 1;
                    if turn == waits {
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    Poll::Ready(pieces.next())
                });
                let mut form = multer::Multipart::new(PieceByPiece::of(body), "x");
                let part = form.next_field().await.expect("is whole").expect("a part");
                assert_eq!(part.bytes().await.expect("read"), "content", "{cut}, {waits}");
                assert!(form.next_field().await.expect("is whole").is_none());
            }
        }
    }
}
