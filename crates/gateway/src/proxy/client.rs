//! Connections to the one host a session speaks to: HTTP/2 if it offers it, else one HTTP/1.1 connection per request
//! under way, kept for the next.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri, Version, header, uri};
use hyper::{body::Incoming, client::conn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::{
    BoxBody,
    bulk::{self, Joined},
};
use crate::{
    dial::DialError,
    policy::{CompiledForward, Scheme},
    sandbox::{Sandbox, Target},
    upstream::BoxIo,
};

const IDLE_AT_MOST: usize = 8;
const MAX_HEAD: usize = 256 << 10;

type Http1 = conn::http1::SendRequest<BoxBody>;
type Http2 = conn::http2::SendRequest<BoxBody>;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum ClientError {
    Dial(DialError),
    Failed(String),
}

#[derive(Default)]
struct Open {
    http1: Vec<(Http1, SocketAddr)>,
    http2: Option<(Http2, SocketAddr)>,
}

/// Where a client's requests go.
pub(super) enum Way {
    /// To the host the guest connected to.
    Host(Target),
    /// To the proxy of a rule.
    Forward(CompiledForward),
}

impl Way {
    fn place(&self) -> (String, u16) {
        match self {
            Self::Host(target) => (target.host(), target.port),
            Self::Forward(proxy) => (proxy.host.clone(), proxy.port),
        }
    }
}

pub(super) struct Client {
    sandbox: Arc<Sandbox>,
    way: Way,
    scheme: Scheme,
    open: Mutex<Open>,
}

enum Connection {
    Http1(Http1),
    Http2(Http2),
}

impl Client {
    pub(super) fn new(sandbox: Arc<Sandbox>, way: Way, scheme: Scheme) -> Self {
        Self { sandbox, way, scheme, open: Mutex::default() }
    }

    /// Sends a request and waits for the head of the answer. `alone`: on a connection of its own, in HTTP/1.1 (for an
    /// upgrade).
    pub(super) async fn send(
        self: &Arc<Self>,
        mut request: Request<BoxBody>,
        alone: bool,
    ) -> Result<(Response<Incoming>, SocketAddr), ClientError> {
        if !alone && let Some((connection, address)) = self.take() {
            match self.send_on(connection, address, request, alone).await {
                Ok(response) => return Ok((response, address)),
                Err((_, Some(back))) => request = back,
                Err((problem, None)) => return Err(ClientError::Failed(problem)),
            }
        }
        let (connection, address) = self.connect(alone).await?;
        let sent = self.send_on(connection, address, request, alone).await;
        sent.map(|response| (response, address)).map_err(|(problem, _)| ClientError::Failed(problem))
    }

    fn take(&self) -> Option<(Connection, SocketAddr)> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((http2, address)) = &open.http2 {
            if http2.is_ready() {
                return Some((Connection::Http2(http2.clone()), *address));
            }
            open.http2 = None;
        }
        while let Some((http1, address)) = open.http1.pop() {
            if http1.is_ready() {
                return Some((Connection::Http1(http1), address));
            }
        }
        None
    }

    async fn connect(&self, alone: bool) -> Result<(Connection, SocketAddr), ClientError> {
        let dialled = match &self.way {
            Way::Host(target) => self.sandbox.dial(target).await,
            Way::Forward(proxy) => self.sandbox.dial_forward(proxy).await,
        };
        let (stream, address) = dialled.map_err(ClientError::Dial)?;
        let failed = |error: hyper::Error| ClientError::Failed(error.to_string());
        let (io, http2) = match self.scheme {
            Scheme::Http => (stream, false),
            Scheme::Https => self.wrap_in_tls(stream, alone).await?,
        };
        let io = TokioIo::new(io);
        if http2 {
            let (http2, connection) = conn::http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_header_list_size(MAX_HEAD as u32)
                .handshake(io)
                .await
                .map_err(failed)?;
            // Its errors reach the requests on it.
            tokio::spawn(async move { drop(connection.await) });
            self.open.lock().unwrap_or_else(PoisonError::into_inner).http2 = Some((http2.clone(), address));
            return Ok((Connection::Http2(http2), address));
        }
        let (http1, connection) =
            conn::http1::Builder::new().max_buf_size(MAX_HEAD).handshake(io).await.map_err(failed)?;
        tokio::spawn(async move { drop(connection.with_upgrades().await) });
        Ok((Connection::Http1(http1), address))
    }

    async fn wrap_in_tls(&self, stream: BoxIo, alone: bool) -> Result<(BoxIo, bool), ClientError> {
        let shared = &self.sandbox.shared;
        let config = if alone { &shared.tls_http1 } else { &shared.tls_any };
        let name = ServerName::try_from(self.way.place().0).map_err(|error| ClientError::Failed(error.to_string()))?;
        let handshake = TlsConnector::from(Arc::clone(config)).connect(name, bulk::below(stream));
        let tls = match timeout(self.sandbox.limits.dial_timeout(), handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(error)) => return Err(ClientError::Failed(format!("TLS: {error}"))),
            Err(_) => return Err(ClientError::Failed("TLS: it did not answer in time".to_owned())),
        };
        let http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok((Box::new(Joined::new(tls)), http2))
    }

    async fn send_on(
        self: &Arc<Self>,
        connection: Connection,
        address: SocketAddr,
        mut request: Request<BoxBody>,
        alone: bool,
    ) -> Result<Response<Incoming>, (String, Option<Request<BoxBody>>)> {
        match connection {
            Connection::Http2(mut http2) => {
                self.prepare(&mut request, true);
                http2.try_send_request(request).await.map_err(|mut error| {
                    let back = error.take_message();
                    (error.into_error().to_string(), back)
                })
            }
            Connection::Http1(mut http1) => {
                self.prepare(&mut request, false);
                let response = http1.try_send_request(request).await.map_err(|mut error| {
                    let back = error.take_message();
                    (error.into_error().to_string(), back)
                })?;
                if !alone {
                    self.keep_when_ready(http1, address);
                }
                Ok(response)
            }
        }
    }

    /// Keeps a connection once its answer was read to the end.
    fn keep_when_ready(self: &Arc<Self>, mut http1: Http1, address: SocketAddr) {
        let client = Arc::downgrade(self);
        tokio::spawn(async move {
            if http1.ready().await.is_err() {
                return;
            }
            let Some(client) = client.upgrade() else { return };
            let mut open = client.open.lock().unwrap_or_else(PoisonError::into_inner);
            if open.http1.len() < IDLE_AT_MOST {
                open.http1.push((http1, address));
            }
        });
    }

    /// Gives a request the form of the protocol it will travel in.
    fn prepare(&self, request: &mut Request<BoxBody>, http2: bool) {
        let authority = self.authority();
        let target = request.uri().path_and_query().cloned();
        let headers = request.headers_mut();
        let mut parts = uri::Parts::default();
        if http2 {
            headers.remove(header::HOST);
            parts.scheme = Some(uri::Scheme::HTTPS);
            parts.authority = authority.parse().ok();
        } else {
            join_cookies(headers);
            if let Ok(host) = HeaderValue::from_str(&authority) {
                headers.insert(header::HOST, host);
            }
        }
        let options = request.method() == Method::OPTIONS;
        parts.path_and_query = match target {
            Some(target) if !(http2 && options && target == "*") => Some(target),
            _ => Some(uri::PathAndQuery::from_static("/")),
        };
        *request.version_mut() = if http2 { Version::HTTP_2 } else { Version::HTTP_11 };
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }

    fn authority(&self) -> String {
        let default = if self.scheme == Scheme::Http { 80 } else { 443 };
        let (host, port) = self.way.place();
        if port == default { host } else { format!("{host}:{port}") }
    }
}

/// HTTP/2 sends cookies one by one, HTTP/1.1 has one header for all.
fn join_cookies(headers: &mut HeaderMap) {
    let all: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if all.len() > 1
        && let Ok(mut joined) = HeaderValue::from_bytes(&all.join(&b"; "[..]))
    {
        joined.set_sensitive(true);
        headers.insert(header::COOKIE, joined);
    }
}
