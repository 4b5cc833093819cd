//! `<port>-<id>.<base>`: a preview of whatever listens on a port of a sandbox.
//!
//! ```text
//! public sandbox ------------------------------------------------------> port in the guest
//! token of a link (query, header or cookie), or the API key of its owner -> the same, without them
//! ```
//!
//! A token in the query is kept as a cookie, so that a page's further requests come through. The guest never sees
//! what opens doors, whether or not it was needed.

use axum::{
    Json, Router,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use serde_json::json;
use stockade_model::SandboxId;
use stockade_service::{Ingress, Previews, Principal};

use super::{Reason, find, forward, keys};
use crate::{AppState, SandboxHost, server::Peer};

/// The header, cookie and query field a link's token comes in.
const HEADER: &str = "x-stockade-token";
const FIELD: &str = "stockade_token";

/// The router of previews.
pub(crate) fn router(app: AppState) -> Router {
    Router::new().fallback(enter).with_state(app)
}

async fn enter(State(app): State<AppState>, mut request: Request) -> Response {
    let Some(SandboxHost { port, sandbox }) = request.extensions().get::<SandboxHost>().cloned() else {
        return refuse(StatusCode::BAD_REQUEST, "invalid_host", "the host names no port of a sandbox");
    };
    // What is no id is no sandbox, and not told from one of others.
    let Ok(id) = sandbox.parse::<SandboxId>() else { return closed() };
    let ingress = match app.service.ingress(&id).await {
        Ok(ingress) => ingress,
        Err(error) => return crate::ApiError::from(error).into_response(),
    };
    let keys = match keys::withhold(&app, request.headers_mut()).await {
        Ok(keys) => keys,
        Err(error) => return error.into_response(),
    };
    let door = open(&app, &id, port, request.uri(), request.headers(), &keys, &ingress).await;
    let Some(door) = door else { return closed() };
    let is_secure = request.extensions().get::<Peer>().is_some_and(|peer| peer.is_secure);
    strip(&mut request);
    let guest = match find(&app, id.as_str()).await {
        Ok((_, guest)) => guest,
        Err(reason) => return unreachable(reason, port),
    };
    let mut response = match forward(&guest, port, ingress.host_for(port), request).await {
        Ok(response) => response,
        Err(reason) => return unreachable(reason, port),
    };
    if let Door::Link(token) = door {
        let secure = if is_secure { "; Secure" } else { "" };
        let cookie = format!("{FIELD}={token}; Path=/; HttpOnly; SameSite=Lax{secure}");
        // A valid token has nothing in it that a header cannot hold.
        response.headers_mut().extend(HeaderValue::from_str(&cookie).map(|cookie| (header::SET_COOKIE, cookie)));
    }
    response
}

/// What let a request in.
enum Door {
    /// A token in the query, to be remembered.
    Link(String),
    /// Whatever else will do, or nothing.
    Open,
}

async fn open(
    app: &AppState,
    id: &SandboxId,
    port: u16,
    uri: &Uri,
    headers: &HeaderMap,
    keys: &[Principal],
    ingress: &Ingress,
) -> Option<Door> {
    let service = &app.service;
    let valid = |token: &String| service.check_preview_token(id, port, token);
    if let Some(token) = from_query(uri).filter(valid) {
        return Some(Door::Link(token));
    }
    if from_headers(headers).iter().any(valid) {
        return Some(Door::Open);
    }
    for who in keys {
        if service.get(who, id).await.is_ok() {
            return Some(Door::Open);
        }
    }
    (ingress.previews == Previews::Public).then_some(Door::Open)
}

fn from_query(uri: &Uri) -> Option<String> {
    let pairs = uri.query()?.split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(name, _)| *name == FIELD).map(|(_, value)| value.to_owned())
}

fn from_headers(headers: &HeaderMap) -> Vec<String> {
    let own = headers.get_all(HEADER).iter().filter_map(|value| value.to_str().ok()).map(str::to_owned);
    own.chain(cookies(headers).filter(|(name, _)| *name == FIELD).map(|(_, value)| value.to_owned())).collect()
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let values = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(';')).map(|pair| pair.trim().split_once('=').unwrap_or((pair.trim(), "")))
}

/// Takes out whatever could open a door again.
fn strip(request: &mut Request) {
    if let Some(query) = request.uri().query().filter(|query| query.contains(FIELD)) {
        let kept: Vec<_> = query.split('&').filter(|pair| pair.split('=').next() != Some(FIELD)).collect();
        let path = request.uri().path();
        let target = if kept.is_empty() { path.to_owned() } else { format!("{path}?{}", kept.join("&")) };
        let mut parts = request.uri().clone().into_parts();
        parts.path_and_query = target.parse().ok();
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
    let headers = request.headers_mut();
    headers.remove(HEADER);
    if cookies(headers).any(|(name, _)| name == FIELD) {
        let kept: Vec<_> = cookies(headers)
            .filter(|(name, _)| *name != FIELD)
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        headers.remove(header::COOKIE);
        let kept = HeaderValue::from_str(&kept.join("; ")).ok().filter(|value| !value.is_empty());
        headers.extend(kept.map(|value| (header::COOKIE, value)));
    }
}

fn refuse(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(json!({"error": {"code": code, "message": message, "hint": ""}}))).into_response()
}

fn closed() -> Response {
    let hint = "POST /v1/sandboxes/{id}/previews makes a link; a sandbox whose network says `\"previews\": \"public\"` needs none";
    let error = json!({"code": "preview_closed", "message": "this preview needs a link of its owner's", "hint": hint});
    (StatusCode::UNAUTHORIZED, Json(json!({"error": error}))).into_response()
}

fn unreachable(reason: Reason, port: u16) -> Response {
    let code = match reason {
        Reason::NotFound => "sandbox_not_found",
        Reason::PortClosed => "port_closed",
        Reason::InTransition => "wrong_state",
        Reason::BadAnswer => "guest_broke_off",
        Reason::Internal => "internal",
    };
    let named = format!("The sandbox is running but port {port} is not open");
    let message = if reason == Reason::PortClosed { named.as_str() } else { reason.message() };
    refuse(reason.status(), code, message)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(uri: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Body::empty()).expect("a request")
    }

    #[test]
    fn a_token_is_found_wherever_it_may_be() {
        assert_eq!(from_query(&"/a?x=1&stockade_token=t".parse().expect("a URI")).as_deref(), Some("t"));
        let headers = request("/", &[("cookie", "a=b; stockade_token=one"), ("x-stockade-token", "two")]);
        assert_eq!(from_headers(headers.headers()), ["two", "one"]);
    }

    #[test]
    fn the_guest_sees_nothing_of_what_opened_the_door() {
        let headers = [("cookie", "a=b; stockade_token=one; c=d"), ("x-stockade-token", "two")];
        let mut seen = request("/p?stockade_token=t&x=1", &headers);
        strip(&mut seen);
        assert_eq!(seen.uri(), "/p?x=1");
        assert_eq!(seen.headers().get("cookie").expect("others stay"), "a=b; c=d");
        assert!(seen.headers().get("x-stockade-token").is_none());
        let mut seen = request("/p?stockade_token=t", &[("cookie", "stockade_token=one")]);
        strip(&mut seen);
        assert_eq!(seen.uri(), "/p");
        assert!(seen.headers().get("cookie").is_none());
    }
}
