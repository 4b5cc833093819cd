//! From a request to whatever listens on a port in a guest, through the guest link.

use std::time::Duration;

use axum::{body::Body, extract::Request, response::Response};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, Version, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use stockade_engine::{EngineError, GuestClient, guest::PortStream};
use stockade_model::{Sandbox, SandboxState};
use stockade_service::ServiceError;
use stockade_wire::ErrorCode;

use crate::{AppState, error::chain, server::Peer};

const FORWARDED_HOST: &str = "x-forwarded-host";
const FORWARDED_PROTO: &str = "x-forwarded-proto";

/// A server that is just starting is still reached: pauses between tries, about a second in all.
const RETRY_PAUSES: [Duration; 4] =
    [Duration::from_millis(100), Duration::from_millis(200), Duration::from_millis(300), Duration::from_millis(400)];

/// Why a request did not reach what it was meant for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reason {
    NotFound,
    PortClosed,
    InTransition,
    /// The server in the guest was reached and then broke off.
    BadAnswer,
    Internal,
}

impl Reason {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::NotFound | Self::PortClosed | Self::BadAnswer => StatusCode::BAD_GATEWAY,
            Self::InTransition => StatusCode::CONFLICT,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// E2B's SDKs look for the first two sentences; they are never to be changed.
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::NotFound => "The sandbox was not found",
            Self::PortClosed => "The sandbox is running but port is not open",
            Self::InTransition => "The sandbox is still being made; try again",
            Self::BadAnswer => "The server in the sandbox broke off before it answered",
            Self::Internal => "The sandbox could not be looked up",
        }
    }
}

pub(crate) async fn find(app: &AppState, id: &str) -> Result<(Sandbox, GuestClient), Reason> {
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

pub(crate) async fn connect(guest: &GuestClient, port: u16) -> Result<Box<dyn PortStream>, Reason> {
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

/// One request, one connection into the guest: HTTP/1.1 there, whatever it is here. `host`: what the server there
/// sees as the host instead of the one that was asked for.
pub(crate) async fn forward(
    guest: &GuestClient,
    port: u16,
    host: Option<HeaderValue>,
    mut request: Request,
) -> Result<Response, Reason> {
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
    rewrite(&mut request, upgrade.as_ref(), host);
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
fn rewrite(request: &mut Request, upgrade: Option<&HeaderValue>, mask: Option<HeaderValue>) {
    if !request.headers().contains_key(header::HOST) {
        let authority = request.uri().authority().and_then(|name| HeaderValue::from_str(name.as_str()).ok());
        request.headers_mut().extend(authority.map(|authority| (header::HOST, authority)));
    }
    let target = request.uri().path_and_query().cloned();
    *request.uri_mut() = target.map_or_else(|| Uri::from_static("/"), Uri::from);
    *request.version_mut() = Version::HTTP_11;
    strip_hop_by_hop(request.headers_mut(), upgrade);
    if let Some(host) = request.headers().get(header::HOST).cloned() {
        request.headers_mut().insert(FORWARDED_HOST, host);
    }
    if request.extensions().get::<Peer>().is_some_and(|peer| peer.is_secure) {
        request.headers_mut().insert(FORWARDED_PROTO, HeaderValue::from_static("https"));
    } else {
        // Somebody in front may have ended the TLS, and says so.
        request.headers_mut().entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    }
    if let Some(mask) = mask {
        request.headers_mut().insert(header::HOST, mask);
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
    use http::HeaderName;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn a_masked_host_replaces_the_one_that_was_asked_for() {
        let make = || Request::builder().uri("/x").header("host", "8000-a.example").body(Body::empty()).expect("one");
        let mut request = make();
        rewrite(&mut request, None, Some(HeaderValue::from_static("localhost:8000")));
        let expected = [("host", "localhost:8000"), (FORWARDED_HOST, "8000-a.example"), (FORWARDED_PROTO, "http")];
        assert_eq!(request.headers(), &headers(&expected));
        let mut request = make();
        rewrite(&mut request, None, None);
        assert_eq!(request.headers()["host"], "8000-a.example");
    }

    #[test]
    fn the_guest_learns_whether_the_request_came_by_tls() {
        let seen = |is_secure: bool, said: Option<&str>| {
            let mut request = Request::builder().uri("/x").header("host", "8000-a.example");
            if let Some(said) = said {
                request = request.header(FORWARDED_PROTO, said);
            }
            let mut request = request.body(Body::empty()).expect("one");
            request.extensions_mut().insert(Peer { address: ([127, 0, 0, 1], 1).into(), is_secure });
            rewrite(&mut request, None, None);
            request.headers()[FORWARDED_PROTO].to_str().expect("text").to_owned()
        };
        assert_eq!(seen(true, None), "https");
        assert_eq!(seen(true, Some("http")), "https");
        assert_eq!(seen(false, None), "http");
        assert_eq!(seen(false, Some("https")), "https");
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
