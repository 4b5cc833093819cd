//! Parts of a request, parsed into types, with refusals in E2B's error shape.

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Request},
};
use http::{StatusCode, request::Parts};
use serde::de::DeserializeOwned;

use super::error::HttpError;
use crate::{extract, parse_json};

/// Largest JSON body, in bytes.
pub(super) const MAX_BODY_BYTES: usize = 1 << 20;

/// A JSON body; an empty one counts as `{}`. Unknown fields and wrong types are named, values are not: they may be secrets.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &S) -> Result<Self, HttpError> {
        let body = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
            status @ StatusCode::PAYLOAD_TOO_LARGE => {
                HttpError::new(status, format!("the request body is over {MAX_BODY_BYTES} bytes"))
            }
            status => HttpError::new(status, rejection.body_text()),
        })?;
        parse(&body).map(Self)
    }
}

/// See [`Body`].
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, HttpError> {
    let text: &[u8] = if body.is_empty() { b"{}" } else { body };
    parse_json(text).map_err(|error| HttpError::bad_request(format!("the request body is not valid: {error}")))
}

/// The query.
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let query = extract::Query::from_request_parts(parts, state).await;
        query.map(|extract::Query(query)| Self(query)).map_err(|error| HttpError::bad_request(error.to_string()))
    }
}
