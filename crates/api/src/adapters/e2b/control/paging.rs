//! Lists in pages: how many there may be in one, and where the next one begins.

use axum::{
    Json,
    response::{IntoResponse as _, Response},
};
use http::{HeaderName, HeaderValue};
use serde::Serialize;

use super::super::error::HttpError;

const MAX_PAGE: u32 = 100;

/// How many are wanted; as many as there may be, where nothing is said.
pub(super) fn limit(wanted: Option<i64>) -> Result<u32, HttpError> {
    let Some(wanted) = wanted else { return Ok(MAX_PAGE) };
    let limit = u32::try_from(wanted).ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
    limit.ok_or_else(|| HttpError::bad_request(format!("limit is {wanted}; 1 to {MAX_PAGE} are possible")))
}

/// A page, and in its header where the next one begins, if there is more.
pub(super) fn answer(items: Vec<impl Serialize>, next: Option<&str>) -> Response {
    let mut response = Json(items).into_response();
    let token = next.and_then(|next| HeaderValue::from_str(next).ok());
    response.headers_mut().extend(token.map(|token| (HeaderName::from_static("x-next-token"), token)));
    response
}
