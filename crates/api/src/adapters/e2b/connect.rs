//! The Connect protocol as E2B's clients speak it: JSON only, POST only.
//!
//! ```text
//! one answer    application/json           body = message; an error is an HTTP status and {code, message}
//! a stream      application/connect+json   frames: flags u8, length u32 big-endian, payload
//!                                          flag 0x02 = the end: {} or {"error": {code, message}}
//! ```
//!
//! E2B's SDKs and CLI send no other encoding. What does (`application/proto`, gRPC) is told which there is, with status 415.
//!
//! A stream's HTTP status is 200 once its request could be read; a stream cut before its end frame is an error to
//! every client.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    response::{IntoResponse, Response},
};
use bytes::{Buf, BufMut, BytesMut};
use futures::{Stream, StreamExt};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::{Serialize, de::DeserializeOwned};
use stockade_model::shortened;
use tokio_util::codec::Decoder;

use super::envd::Caller;
use crate::parse_json;

/// Largest message we take. Input to a process comes in one message each.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 20;

const END_OF_STREAM: u8 = 0x02;
const COMPRESSED: u8 = 0x01;
const HEADER_BYTES: usize = 5;

/// Why a call failed, in the protocol's words.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl Code {
    fn word(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::ResourceExhausted => "resource_exhausted",
            Self::FailedPrecondition => "failed_precondition",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::DataLoss => "data_loss",
            Self::Unauthenticated => "unauthenticated",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Internal | Self::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// An error on its way to a client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ConnectError {
    pub(super) code: Code,
    pub(super) message: String,
}

#[derive(Serialize)]
struct ErrorJson<'a> {
    code: &'a str,
    message: &'a str,
}

#[derive(Default, Serialize)]
struct EndJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorJson<'a>>,
}

impl ConnectError {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    fn json(&self) -> ErrorJson<'_> {
        ErrorJson { code: self.code.word(), message: &self.message }
    }

    /// The whole answer of a stream that failed before its first message.
    fn into_stream_response(self) -> Response {
        stream_response(Body::from(end_frame(Some(&self))))
    }
}

impl IntoResponse for ConnectError {
    fn into_response(self) -> Response {
        json_response(self.code.status(), &self.json())
    }
}

/// A call with one message in and one out.
pub(super) struct Unary<T> {
    pub(super) caller: Caller,
    pub(super) message: T,
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Unary<T> {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let caller = Caller::of(&request).map_err(IntoResponse::into_response)?;
        expect_content_type(request.headers(), "application/json")?;
        let body = whole_body(request).await.map_err(IntoResponse::into_response)?;
        let message = parse(if body.is_empty() { b"{}" } else { &body }).map_err(IntoResponse::into_response)?;
        Ok(Self { caller, message })
    }
}

/// The one message that answers a [`Unary`] call.
pub(super) struct Reply<T>(pub(super) T);

impl<T: Serialize> IntoResponse for Reply<T> {
    fn into_response(self) -> Response {
        json_response(StatusCode::OK, &self.0)
    }
}

/// A call with one message in and a stream out.
pub(super) struct ServerStream<T> {
    pub(super) caller: Caller,
    pub(super) message: T,
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for ServerStream<T> {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let caller = Caller::of(&request).map_err(ConnectError::into_stream_response)?;
        expect_content_type(request.headers(), "application/connect+json")?;
        let body = whole_body(request).await.map_err(ConnectError::into_stream_response)?;
        let message = first_message(&body).map_err(ConnectError::into_stream_response)?;
        Ok(Self { caller, message })
    }
}

fn first_message<T: DeserializeOwned>(body: &[u8]) -> Result<T, ConnectError> {
    let mut buffer = BytesMut::from(body);
    match FrameDecoder.decode(&mut buffer)? {
        Some(payload) => parse(&payload),
        None => Err(ConnectError::new(Code::InvalidArgument, "the request holds no complete message frame")),
    }
}

/// A call with a stream in and one message out.
pub(super) struct ClientStream {
    pub(super) caller: Caller,
    body: Body,
}

impl<S: Send + Sync> FromRequest<S> for ClientStream {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let caller = Caller::of(&request).map_err(ConnectError::into_stream_response)?;
        expect_content_type(request.headers(), "application/connect+json")?;
        Ok(Self { caller, body: request.into_body() })
    }
}

impl ClientStream {
    /// The messages, one by one.
    pub(super) fn split<T: DeserializeOwned>(self) -> (Caller, Messages<T>) {
        let body = Box::pin(self.body.into_data_stream());
        (self.caller, Messages { body, buffer: BytesMut::new(), message: std::marker::PhantomData })
    }
}

/// Messages of a [`ClientStream`].
pub(super) struct Messages<T> {
    body: std::pin::Pin<Box<axum::body::BodyDataStream>>,
    buffer: BytesMut,
    message: std::marker::PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Messages<T> {
    /// The next message; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<T>, ConnectError> {
        loop {
            if let Some(payload) = FrameDecoder.decode(&mut self.buffer)? {
                return parse(&payload).map(Some);
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.buffer.extend_from_slice(&bytes),
                Some(Err(error)) => {
                    return Err(ConnectError::new(Code::Unavailable, format!("the request stream broke: {error}")));
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(ConnectError::new(Code::InvalidArgument, "the last message frame is cut short")),
            }
        }
    }
}

/// The answer to a [`ClientStream`] call.
pub(super) fn client_stream_response<T: Serialize>(result: Result<T, ConnectError>) -> Response {
    match result {
        Ok(message) => {
            let mut out = message_frame(&message);
            out.extend_from_slice(&end_frame(None));
            stream_response(Body::from(out.freeze()))
        }
        Err(error) => error.into_stream_response(),
    }
}

/// What a stream handler yields: frames ready to send, an error to end with, or a break.
pub(super) enum Item {
    /// A message frame.
    Frame(Bytes),
    /// The end, with or without an error.
    End(Option<ConnectError>),
    /// The connection to the guest broke: the client must see its stream reset, not ended.
    Break(std::io::Error),
}

/// Sends `items` up to the first end or break.
pub(super) fn stream(items: Result<impl Stream<Item = Item> + Send + 'static, ConnectError>) -> Response {
    let items = match items {
        Ok(items) => items,
        Err(error) => return error.into_stream_response(),
    };
    let bytes = items.map(|item| match item {
        Item::Frame(frame) => Ok(frame),
        Item::End(error) => Ok(end_frame(error.as_ref())),
        Item::Break(error) => Err(error),
    });
    stream_response(Body::from_stream(bytes))
}

/// One message as a frame.
pub(super) fn message_frame<T: Serialize>(message: &T) -> BytesMut {
    let mut out = BytesMut::with_capacity(128);
    out.put_bytes(0, HEADER_BYTES);
    serde_json::to_writer((&mut out).writer(), message).expect("messages are plain data and memory takes them");
    seal(&mut out, 0);
    out
}

fn end_frame(error: Option<&ConnectError>) -> Bytes {
    let end = EndJson { error: error.map(ConnectError::json) };
    let mut out = message_frame(&end);
    out[0] = END_OF_STREAM;
    out.freeze()
}

/// Fills in the header of a frame whose payload follows [`HEADER_BYTES`] of room.
fn seal(frame: &mut [u8], flags: u8) {
    let length = (frame.len() - HEADER_BYTES) as u32;
    frame[0] = flags;
    frame[1..HEADER_BYTES].copy_from_slice(&length.to_be_bytes());
}

/// `prefix`, the bytes in base64, `suffix`, as one frame: output is the hot path of every command.
pub(super) fn base64_frame(prefix: &str, bytes: &[u8], suffix: &str) -> Bytes {
    use base64::Engine as _;
    let mut text = String::with_capacity(HEADER_BYTES + prefix.len() + bytes.len().div_ceil(3) * 4 + suffix.len());
    text.push_str("\0\0\0\0\0");
    text.push_str(prefix);
    base64::engine::general_purpose::STANDARD.encode_string(bytes, &mut text);
    text.push_str(suffix);
    let mut frame = text.into_bytes();
    seal(&mut frame, 0);
    Bytes::from(frame)
}

struct FrameDecoder;

impl Decoder for FrameDecoder {
    type Item = Bytes;
    type Error = ConnectError;

    fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Bytes>, ConnectError> {
        if input.len() < HEADER_BYTES {
            return Ok(None);
        }
        let flags = input[0];
        let length = u32::from_be_bytes([input[1], input[2], input[3], input[4]]) as usize;
        if length > MAX_MESSAGE_BYTES {
            let message =
                format!("a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}; send it in pieces");
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        if flags & COMPRESSED != 0 {
            let message = "compressed messages are not supported; send Connect-Content-Encoding: identity";
            return Err(ConnectError::new(Code::Unimplemented, message));
        }
        if input.len() < HEADER_BYTES + length {
            input.reserve(HEADER_BYTES + length - input.len());
            return Ok(None);
        }
        input.advance(HEADER_BYTES);
        Ok(Some(input.split_to(length).freeze()))
    }
}

impl From<std::io::Error> for ConnectError {
    fn from(error: std::io::Error) -> Self {
        Self::new(Code::Unavailable, error.to_string())
    }
}

/// `Connect-Timeout-Ms`; absent: no limit.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    let Some(value) = headers.get("connect-timeout-ms") else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    let digits = !text.is_empty() && text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(milliseconds) if digits => Ok(Some(Duration::from_millis(milliseconds))),
        _ => Err(ConnectError::new(Code::InvalidArgument, "Connect-Timeout-Ms must be a number of at most 10 digits")),
    }
}

fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, ConnectError> {
    parse_json(json)
        .map_err(|error| ConnectError::new(Code::InvalidArgument, format!("the message is malformed: {error}")))
}

async fn whole_body(request: Request) -> Result<Bytes, ConnectError> {
    if request.headers().get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        let message = "compressed requests are not supported; send Content-Encoding: identity";
        return Err(ConnectError::new(Code::Unimplemented, message));
    }
    axum::body::to_bytes(request.into_body(), MAX_MESSAGE_BYTES + HEADER_BYTES).await.map_err(|error| {
        let message = format!("the request body broke or is over {MAX_MESSAGE_BYTES} bytes: {error}");
        ConnectError::new(Code::ResourceExhausted, message)
    })
}

#[expect(clippy::result_large_err, reason = "axum's rejection is a response")]
fn expect_content_type(headers: &HeaderMap, expected: &'static str) -> Result<(), Response> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(expected) {
        return Ok(());
    }
    let error = ConnectError::new(Code::Unimplemented, wrong_content_type(essence, expected));
    let mut response = json_response(StatusCode::UNSUPPORTED_MEDIA_TYPE, &error.json());
    response.headers_mut().insert("accept-post", HeaderValue::from_static(expected));
    Err(response)
}

fn wrong_content_type(given: &str, expected: &str) -> String {
    // Whoever has generated a client from the schema has to be told that there is another encoding to set.
    let hint = match given.rsplit(['/', '+']).next() {
        Some("proto" | "grpc" | "grpc-web" | "grpc-web-text") => {
            "; messages in protobuf's binary form and gRPC are not supported: set the client to Connect with JSON"
        }
        _ => "",
    };
    match given {
        "" => format!("there is no Content-Type; it must be {expected}"),
        given => format!("Content-Type is {}; it must be {expected}{hint}", shortened(given)),
    }
}

fn json_response<T: Serialize>(status: StatusCode, value: &T) -> Response {
    let body = serde_json::to_vec(value).expect("messages are plain data");
    with_type(status, "application/json", Body::from(body))
}

fn stream_response(body: Body) -> Response {
    with_type(StatusCode::OK, "application/connect+json", body)
}

fn with_type(status: StatusCode, content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_read_back_whole_however_they_are_cut() {
        let frame = message_frame(&serde_json::json!({"a": 1}));
        let mut buffer = BytesMut::new();
        for (index, byte) in frame.iter().enumerate() {
            buffer.put_u8(*byte);
            let decoded = FrameDecoder.decode(&mut buffer).expect("well formed");
            assert_eq!(decoded.is_some(), index + 1 == frame.len());
        }
        assert!(buffer.is_empty());
    }

    #[test]
    fn the_end_frame_carries_the_error_as_the_protocol_says() {
        let error = ConnectError::new(Code::NotFound, "process 7 not found");
        let frame = end_frame(Some(&error));
        assert_eq!(frame[0], END_OF_STREAM);
        assert_eq!(&frame[HEADER_BYTES..], br#"{"error":{"code":"not_found","message":"process 7 not found"}}"#);
        assert_eq!(&end_frame(None)[..], b"\x02\0\0\0\x02{}");
    }

    #[test]
    fn output_is_framed_as_the_same_json_a_serializer_would_write() {
        let frame = base64_frame(r#"{"event":{"data":{"stdout":""#, b"hi\xff", r#""}}}"#);
        assert_eq!(&frame[HEADER_BYTES..], br#"{"event":{"data":{"stdout":"aGn/"}}}"#);
        assert_eq!(u32::from_be_bytes([frame[1], frame[2], frame[3], frame[4]]) as usize, frame.len() - HEADER_BYTES);
    }

    #[test]
    fn a_frame_over_the_limit_or_compressed_is_refused_before_its_payload_comes() {
        let mut huge = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0xff][..]);
        assert_eq!(FrameDecoder.decode(&mut huge).expect_err("too long").code, Code::ResourceExhausted);
        let mut packed = BytesMut::from(&[1, 0, 0, 0, 9][..]);
        assert_eq!(FrameDecoder.decode(&mut packed).expect_err("compressed").code, Code::Unimplemented);
    }

    #[test]
    fn timeouts_are_plain_numbers_of_milliseconds() {
        let with = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("connect-timeout-ms", HeaderValue::from_str(text).expect("ascii"));
            timeout(&headers)
        };
        assert_eq!(timeout(&HeaderMap::new()), Ok(None));
        assert_eq!(with("1500"), Ok(Some(Duration::from_millis(1500))));
        for bad in ["", "-1", "1e3", "99999999999", "x"] {
            assert!(with(bad).is_err(), "{bad}");
        }
    }
}
