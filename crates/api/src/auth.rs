//! Who asks. A layer around the whole native router looks the key up, so a route added later cannot
//! be forgotten; handlers take the answer from [`Caller`].
//!
//! The key comes as `Authorization: Bearer KEY` or `X-API-Key: KEY`. Sent twice, both must be the same:
//! a proxy and a server that read different ones would disagree about who asks.

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, Method, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use stockade_service::Principal;

use crate::{ApiError, AppState};

/// The one route that answers without a key.
pub(crate) const HEALTH_PATH: &str = "/v1/health";

/// The principal of the request's key.
#[derive(Clone, Debug)]
pub(crate) struct Caller(pub(crate) Principal);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| unauthorized("no API key was checked"))
    }
}

/// Lets requests with a valid key through, and those for the health route.
pub(crate) async fn require_key(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let is_health = request.uri().path() == HEALTH_PATH && matches!(*request.method(), Method::GET | Method::HEAD);
    if is_health {
        return next.run(request).await;
    }
    match authenticate(&state, request.headers()).await {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

async fn authenticate(state: &AppState, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let key = presented_key(headers)?;
    let principal = state.service.authenticate(key).await?;
    principal.map(Caller).ok_or_else(|| unauthorized("the API key is not valid"))
}

/// The key a request carries.
fn presented_key(headers: &HeaderMap) -> Result<&str, ApiError> {
    let mut key = None;
    for value in headers.get_all(header::AUTHORIZATION) {
        let bearer = value.to_str().ok().and_then(bearer_token);
        let bearer = bearer.ok_or_else(|| unauthorized("the Authorization header is not \"Bearer KEY\""))?;
        agree(&mut key, bearer)?;
    }
    for value in headers.get_all("x-api-key") {
        agree(&mut key, value.to_str().map_err(|_| unauthorized("the API key is not valid"))?.trim())?;
    }
    key.filter(|key| !key.is_empty()).ok_or_else(|| unauthorized("an API key is needed"))
}

pub(crate) fn bearer_token(value: &str) -> Option<&str> {
    let (scheme, token) = value.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn agree<'a>(key: &mut Option<&'a str>, other: &'a str) -> Result<(), ApiError> {
    match key {
        Some(known) if *known != other => Err(unauthorized("the request carries two different API keys")),
        _ => {
            *key = Some(other);
            Ok(())
        }
    }
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
        .hint("send Authorization: Bearer KEY; the key is in the file that `stockade up` named when it started")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(headers: &[(&'static str, &'static str)]) -> Option<String> {
        let headers = headers
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), header::HeaderValue::from_static(value)));
        let mut map = HeaderMap::new();
        headers.for_each(|(name, value)| {
            map.append(name, value);
        });
        presented_key(&map).ok().map(str::to_owned)
    }

    #[test]
    fn a_key_is_found_in_either_header_and_never_in_two_that_differ() {
        assert_eq!(key_of(&[("authorization", "Bearer e2b_1")]), Some("e2b_1".into()));
        assert_eq!(key_of(&[("authorization", "bEARER  e2b_1 ")]), Some("e2b_1".into()));
        assert_eq!(key_of(&[("x-api-key", "e2b_1")]), Some("e2b_1".into()));
        assert_eq!(key_of(&[("x-api-key", "e2b_1"), ("authorization", "Bearer e2b_1")]), Some("e2b_1".into()));
        assert_eq!(key_of(&[("x-api-key", "e2b_1"), ("authorization", "Bearer e2b_2")]), None);
        assert_eq!(key_of(&[("x-api-key", "e2b_1"), ("x-api-key", "e2b_2")]), None);
        for none in ["", "e2b_1", "Basic ZTJiXzE6", "Bearer", "Bearer "] {
            assert_eq!(key_of(&[("authorization", none)]), None, "{none:?}");
        }
        assert_eq!(key_of(&[("x-api-key", " ")]), None);
        assert_eq!(key_of(&[]), None);
    }
}
