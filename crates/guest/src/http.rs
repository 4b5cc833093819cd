//! Requests taken apart, answers put together.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{Request, Response, StatusCode, body::Incoming};
use serde::{Serialize, de::DeserializeOwned};
use stockade_wire::{ErrorBody, ErrorCode, MAX_JSON_BYTES};

use crate::{
    failure::{Result, invalid},
    process::Reader,
};

/// The body of an answer.
pub(crate) enum Reply {
    Full(Full<Bytes>),
    Output(Reader),
    Stream(UnsyncBoxBody<Bytes, io::Error>),
}

impl Reply {
    /// A body made by code that reads from something.
    pub(crate) fn stream(body: impl Body<Data = Bytes, Error = io::Error> + Send + 'static) -> Self {
        Self::Stream(body.boxed_unsync())
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, io::Error>>> {
        fn never(error: Infallible) -> io::Error {
            match error {}
        }
        match self.get_mut() {
            Self::Full(body) => Pin::new(body).poll_frame(context).map_err(never),
            Self::Output(body) => Pin::new(body).poll_frame(context).map_err(never),
            Self::Stream(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(body) => body.is_end_stream(),
            Self::Output(body) => body.is_end_stream(),
            Self::Stream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// 200 with JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<Response<Reply>> {
    let bytes = serde_json::to_vec(value)
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("cannot write the answer: {error}")))?;
    Ok(Response::new(Reply::Full(Full::new(Bytes::from(bytes)))))
}

/// 200 with `{}`.
pub(crate) fn done() -> Response<Reply> {
    Response::new(Reply::Full(Full::new(Bytes::from_static(b"{}"))))
}

/// The answer to a request that failed.
pub(crate) fn error(error: &ErrorBody) -> Response<Reply> {
    let body = serde_json::to_vec(error).unwrap_or_default();
    let mut response = Response::new(Reply::Full(Full::new(Bytes::from(body))));
    *response.status_mut() = StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}

/// Reads a JSON body of bounded size.
pub(crate) async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let mut body = request.into_body();
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| invalid(format!("request body broke off: {error}")))?;
        if let Ok(data) = frame.into_data() {
            if bytes.len() + data.len() > MAX_JSON_BYTES {
                return Err(ErrorBody::new(
                    ErrorCode::TooLong,
                    format!("request is over the limit of {MAX_JSON_BYTES} bytes"),
                ));
            }
            bytes.extend_from_slice(&data);
        }
    }
    serde_json::from_slice(&bytes).map_err(|error| invalid(format!("malformed request: {error}")))
}

/// The query of a request, percent-decoded.
#[derive(Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    pub(crate) fn parse(query: Option<&str>) -> Result<Self> {
        let decode = |text: &str| {
            percent_encoding::percent_decode_str(text)
                .decode_utf8()
                .map(std::borrow::Cow::into_owned)
                .map_err(|_| invalid("query is not valid UTF-8"))
        };
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        pairs
            .map(|pair| {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                Ok((decode(key)?, decode(value)?))
            })
            .collect::<Result<_>>()
            .map(Self)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    pub(crate) fn parsed<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>> {
        let Some(text) = self.text(key) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| invalid(format!("`{key}` cannot be '{text}'")))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        Ok(self.parsed(key)?.unwrap_or(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_gives_back_what_was_encoded() {
        let query = Query::parse(Some("path=%2Ftmp%2Fa%26b%3D%25&close=true&offset=7")).expect("a good query");
        assert_eq!(query.text("path"), Some("/tmp/a&b=%"));
        assert!(query.flag("close").expect("a flag"));
        assert_eq!(query.parsed::<u64>("offset").expect("a number"), Some(7));
        assert!(query.parsed::<u64>("path").is_err());
        assert!(Query::parse(Some("path=%ff")).is_err());
    }
}
