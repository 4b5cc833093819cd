//! `<port>-<id>.e2b.<base>`: finds the sandbox, then hands port 49983 to [`envd`](super::envd) and tunnels
//! every other one to whatever listens in the guest, through the guest link.
//!
//! The SDKs tell a dead sandbox from a closed port by the sentences in [`Refusal::message`]; they are
//! never to be changed.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{Request, State},
    response::{Html, IntoResponse, Response},
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, Version, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use stockade_engine::{EngineError, GuestClient, guest::PortStream};
use stockade_model::{Sandbox, SandboxState};
use stockade_service::ServiceError;
use stockade_wire::ErrorCode;
use tower::ServiceExt as _;

use super::{
    ENVD_PORT,
    access::check_token,
    envd::{self, Entered, Watchers},
    error::{HttpError, chain},
};
use crate::{AppState, SandboxHost, native::CODE_INTERPRETER_PORT};

/// A server that is just starting is still reached: pauses between tries, about a second in all.
const RETRY_PAUSES: [Duration; 4] =
    [Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(300), Duration::from_millis(400)];

#[derive(Clone)]
struct Edge {
    app: AppState,
    envd: Router,
    watchers: Arc<Watchers>,
}

pub(super) fn router(app: AppState) -> Router {
    let edge = Edge { app, envd: envd::router(), watchers: Arc::default() };
    Router::new().fallback(enter).with_state(edge)
}

async fn enter(State(edge): State<Edge>, mut request: Request) -> Response {
    let Some(SandboxHost { port, sandbox: id }) = request.extensions().get::<SandboxHost>().cloned() else {
        return Refusal::InvalidHost.respond(request.headers());
    };
    let refuse =
        |reason: Reason, headers: &HeaderMap| Refusal::Sandbox { id: id.clone(), port, reason }.respond(headers);
    // A browser asks for leave without a token, and whether or not the sandbox lives.
    if port == ENVD_PORT && request.method() == http::Method::OPTIONS {
        return into_response(edge.envd.oneshot(request).await);
    }
    let (sandbox, guest) = match find(&edge.app, &id).await {
        Ok(found) => found,
        Err(reason) => return refuse(reason, request.headers()),
    };
    if port == ENVD_PORT {
        request.extensions_mut().insert(Entered { sandbox, guest, watchers: edge.watchers });
        return into_response(edge.envd.oneshot(request).await);
    }
    if let Err(error) = code_needs_token(&sandbox, port, &request) {
        return error.into_response();
    }
    let headers = request.headers().clone();
    match forward(&guest, port, request).await {
        Ok(response) => response,
        Err(reason) => refuse(reason, &headers),
    }
}

/// Running code is what a secured sandbox's token is for, and every client sends it. The interpreter's other
/// routes are open to whoever knows the address, as other ports are: clients have no token there.
fn code_needs_token(sandbox: &Sandbox, port: u16, request: &Request) -> Result<(), HttpError> {
    if port == CODE_INTERPRETER_PORT && request.uri().path() == "/execute" && request.method() != http::Method::OPTIONS
    {
        return check_token(sandbox, request.headers());
    }
    Ok(())
}

fn into_response(result: Result<Response, std::convert::Infallible>) -> Response {
    result.unwrap_or_else(|never| match never {})
}

async fn find(app: &AppState, id: &str) -> Result<(Sandbox, GuestClient), Reason> {
    let Ok(id) = id.parse() else { return Err(Reason::NotFound) };
    match app.service.guest_by_token(&id, None).await {
        Ok((_, guest)) if !guest.is_open() => Err(Reason::PortClosed),
        Ok(found) => Ok(found),
        Err(ServiceError::SandboxNotFound { .. } | ServiceError::SandboxEnded { .. }) => Err(Reason::NotFound),
        Err(ServiceError::WrongState { state: SandboxState::Creating, .. }) => Err(Reason::InTransition),
        Err(ServiceError::WrongState { .. }) => Err(Reason::NotFound),
        Err(ServiceError::Engine(error)) => {
            tracing::warn!(sandbox = id.as_str(), error = chain(&error), "a sandbox's guest is out of reach");
            Err(Reason::PortClosed)
        }
        Err(error) => {
            tracing::error!(sandbox = id.as_str(), error = chain(&error), "a sandbox could not be looked up");
            Err(Reason::Internal)
        }
    }
}

/// Why a request did not reach what it was meant for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Reason {
    NotFound,
    PortClosed,
    InTransition,
    /// The server in the guest was reached and then broke off.
    BadAnswer,
    Internal,
}

enum Refusal {
    InvalidHost,
    Sandbox { id: String, port: u16, reason: Reason },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RefusalJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<&'a str>,
    message: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::InvalidHost => StatusCode::BAD_REQUEST,
            Self::Sandbox { reason: Reason::InTransition, .. } => StatusCode::CONFLICT,
            Self::Sandbox { reason: Reason::Internal, .. } => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Sandbox { .. } => StatusCode::BAD_GATEWAY,
        }
    }

    fn message(&self) -> &'static str {
        match self {
            Self::InvalidHost => "Invalid host",
            Self::Sandbox { reason, .. } => match reason {
                Reason::NotFound => "The sandbox was not found",
                Reason::PortClosed => "The sandbox is running but port is not open",
                Reason::InTransition => "The sandbox is still being made; try again",
                Reason::BadAnswer => "The server in the sandbox broke off before it answered",
                Reason::Internal => "The sandbox could not be looked up",
            },
        }
    }

    fn respond(&self, headers: &HeaderMap) -> Response {
        let status = self.status();
        let mut json = RefusalJson { sandbox_id: None, message: self.message(), port: None, code: status.as_u16() };
        if let Self::Sandbox { id, port, reason } = self {
            json.sandbox_id = Some(id);
            json.port = (*reason == Reason::PortClosed).then_some(*port);
        }
        if is_navigation(headers) {
            return (status, Html(page(&json))).into_response();
        }
        (status, Json(json)).into_response()
    }
}

/// A person looking at a page, as opposed to a program: a browser that does not fetch for a script.
fn is_navigation(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let browser = text(header::USER_AGENT).contains("Mozilla/");
    let json = text(header::ACCEPT).contains("application/json");
    let script = text(HeaderName::from_static("sec-fetch-mode")) == "cors";
    browser && !json && !script
}

/// Everything shown is ours or of `[a-z0-9]`, so nothing needs escaping.
fn page(json: &RefusalJson<'_>) -> String {
    let id = json.sandbox_id.unwrap_or_default();
    let hint = match json.port {
        Some(port) => format!("Nothing listens on port {port}. Start a server there and load this page again."),
        None => "It has ended, or its address is wrong.".to_owned(),
    };
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{message}</title>\
         <style>body{{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:20vh auto;padding:0 1rem}}\
         code{{color:#666}}</style><h1>{message}</h1><p>{hint}</p><p><code>{id}</code></p></html>\n",
        message = json.message,
    )
}

async fn connect(guest: &GuestClient, port: u16) -> Result<Box<dyn PortStream>, Reason> {
    let mut pauses = RETRY_PAUSES.iter();
    loop {
        match guest.connect_port(port).await {
            Ok(stream) => return Ok(stream),
            Err(EngineError::Guest(body)) if body.code == ErrorCode::PortClosed => match pauses.next() {
                Some(pause) => tokio::time::sleep(*pause).await,
                None => return Err(Reason::PortClosed),
            },
            Err(error) => {
                tracing::debug!(port, error = chain(&error), "a guest port could not be reached");
                return Err(if guest.is_open() { Reason::PortClosed } else { Reason::NotFound });
            }
        }
    }
}

/// One request, one connection into the guest: HTTP/1.1 there, whatever it is here.
async fn forward(guest: &GuestClient, port: u16, mut request: Request) -> Result<Response, Reason> {
    let stream = connect(guest, port).await?;
    let bad_answer = |error: hyper::Error| {
        tracing::debug!(port, error = chain(&error), "a server in a guest broke off");
        Reason::BadAnswer
    };
    let handshake = http1::Builder::new().preserve_header_case(true).handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(bad_answer)?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(error = chain(&error), "a connection into a guest ended early");
        }
    });
    let upgrade = upgrade_of(request.headers());
    let ours = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    rewrite(&mut request, upgrade.as_ref());
    let mut response = sender.send_request(request).await.map_err(bad_answer)?;
    match ours {
        Some(ours) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
            let theirs = hyper::upgrade::on(&mut response);
            tokio::spawn(join(ours, theirs));
        }
        _ => strip_hop_by_hop(response.headers_mut(), None),
    }
    Ok(response.map(Body::new))
}

async fn join(ours: hyper::upgrade::OnUpgrade, theirs: hyper::upgrade::OnUpgrade) {
    let (Ok(ours), Ok(theirs)) = (ours.await, theirs.await) else { return };
    // However it ends, both sides are closed, which is all there is to say.
    let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(ours), &mut TokioIo::new(theirs)).await;
}

/// The protocol asked for, where the request is for an upgrade.
fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let connection = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let asked = connection.flat_map(|value| value.split(',')).any(|token| token.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

/// Makes the request one for a server on its own: origin-form target, `Host`, no hop-by-hop headers.
fn rewrite(request: &mut Request, upgrade: Option<&HeaderValue>) {
    if !request.headers().contains_key(header::HOST) {
        let authority = request.uri().authority().and_then(|name| HeaderValue::from_str(name.as_str()).ok());
        request.headers_mut().extend(authority.map(|authority| (header::HOST, authority)));
    }
    let target = request.uri().path_and_query().cloned();
    *request.uri_mut() = target.map_or_else(|| Uri::from_static("/"), Uri::from);
    *request.version_mut() = Version::HTTP_11;
    strip_hop_by_hop(request.headers_mut(), upgrade);
    if let Some(host) = request.headers().get(header::HOST).cloned() {
        request.headers_mut().insert("x-forwarded-host", host);
    }
}

fn strip_hop_by_hop(headers: &mut HeaderMap, upgrade: Option<&HeaderValue>) {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(|name| name.trim().to_ascii_lowercase()))
        .collect();
    for name in named.iter().map(String::as_str).filter(|name| !name.is_empty()) {
        headers.remove(name);
    }
    for name in ["connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"] {
        headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    async fn body_of(response: Response) -> String {
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 16).await.expect("a short body");
        String::from_utf8(bytes.to_vec()).expect("text")
    }

    #[tokio::test]
    async fn the_two_sentences_the_sdks_look_for_are_as_they_expect() {
        let refusal = |reason| Refusal::Sandbox { id: "sbx1".to_owned(), port: 8080, reason };
        let gone = refusal(Reason::NotFound).respond(&HeaderMap::new());
        assert_eq!(gone.status(), 502);
        assert_eq!(body_of(gone).await, r#"{"sandboxId":"sbx1","message":"The sandbox was not found","code":502}"#);
        let closed = body_of(refusal(Reason::PortClosed).respond(&HeaderMap::new())).await;
        let expected =
            r#"{"sandboxId":"sbx1","message":"The sandbox is running but port is not open","port":8080,"code":502}"#;
        assert_eq!(closed, expected);
    }

    #[tokio::test]
    async fn people_get_a_page_and_programs_get_json() {
        let browser = ("user-agent", "Mozilla/5.0 (X11)");
        let refusal = Refusal::Sandbox { id: "sbx1".to_owned(), port: 80, reason: Reason::PortClosed };
        let page = refusal.respond(&headers(&[browser, ("accept", "text/html,*/*")]));
        assert_eq!(page.status(), 502);
        assert!(body_of(page).await.contains("port is not open"));
        for pairs in [
            &[("user-agent", "curl/8")][..],
            &[browser, ("accept", "application/json")],
            &[browser, ("sec-fetch-mode", "cors")],
        ] {
            assert!(body_of(refusal.respond(&headers(pairs))).await.starts_with('{'), "{pairs:?}");
        }
    }

    #[test]
    fn hop_by_hop_headers_end_here_and_an_upgrade_goes_on() {
        let pairs = [("connection", "Upgrade, X-Mine"), ("upgrade", "websocket"), ("x-mine", "1"), ("x-kept", "2")];
        let mut map = headers(&pairs);
        let upgrade = upgrade_of(&map);
        strip_hop_by_hop(&mut map, upgrade.as_ref());
        assert_eq!(map, headers(&[("x-kept", "2"), ("connection", "upgrade"), ("upgrade", "websocket")]));
    }
}
