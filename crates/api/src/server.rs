//! The sockets: accepts connections on HTTP and HTTPS, reads requests as HTTP/1.1 or HTTP/2, and hands
//! each to the router its host name asks for.
//!
//! What one client can hold is bounded: connections (all together), headers (count, bytes and the time
//! to send them), the TLS handshake, streams per HTTP/2 connection. Bodies are bounded by the routes.
//!
//! A stop is graceful: no new connections; idle ones are closed; streams end with an error line that
//! says so; what is still running after the grace time is cut.

use std::{
    io,
    net::SocketAddr,
    panic::AssertUnwindSafe,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, SystemTime},
};

use axum::{
    Json, Router,
    body::Body,
    http::{Request, StatusCode},
    response::{IntoResponse as _, Response},
};
use futures::FutureExt as _;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use stockade_service::Service;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{Instant, Sleep},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use crate::{
    ApiError, AppState, adapters, edge,
    hosts::{self, Destination, HostError},
    native,
    tls::{Certificate, Tls, TlsError},
};

/// Connections of all clients together; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4096;
/// Time to send a request's headers; also how long an idle HTTP/1.1 connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(75);
/// Time to say which protocol is spoken, and to finish a TLS handshake.
const GREETING_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_HEADERS: usize = 100;
const MAX_HEADER_BYTES: usize = 64 << 10;
/// How often the certificate's age is looked at.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(12 * 3600);

/// What to serve, and where.
#[derive(Debug)]
pub struct ServeConfig {
    /// Where plain HTTP is taken.
    pub http: TcpListener,
    /// Where HTTPS is taken, with which certificate.
    pub https: Option<(TcpListener, Tls)>,
    /// The domain all host names end in, such as `stockade.localhost`.
    pub base_domain: String,
    /// Where SSH is spoken beside it, for clients that ask.
    pub ssh: Option<SshEndpoint>,
}

/// Where SSH is spoken, and by whom.
#[derive(Clone, Debug)]
pub struct SshEndpoint {
    /// The address it listens on.
    pub address: SocketAddr,
    /// Its public key, as in `known_hosts`.
    pub host_key: String,
    /// The same, as `ssh` shows it.
    pub fingerprint: String,
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Not a domain name.
    #[error(
        "{} is not a base domain: use a name such as stockade.localhost, without port or scheme",
        stockade_model::quoted(.0)
    )]
    BaseDomain(String),
    /// A listener has no address.
    #[error("cannot read the address of a listener")]
    Listener(#[source] io::Error),
    /// The certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A server that runs until it is stopped. Dropping it leaves it running.
#[derive(Debug)]
pub struct Server {
    http: SocketAddr,
    https: Option<SocketAddr>,
    ca_file: Option<PathBuf>,
    lifecycle: Lifecycle,
}

/// Ends everything a server runs: who serves a long stream watches `stopping`.
#[derive(Clone, Debug, Default)]
pub struct Lifecycle {
    /// Cancelled when the server is to stop; streams then end by themselves.
    pub stopping: CancellationToken,
    /// Cancelled when the grace time is over.
    pub(crate) cut: CancellationToken,
    /// What must have ended before the server has.
    pub tasks: TaskTracker,
}

/// How a request came in. In the extensions of each.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The client's address.
    pub address: SocketAddr,
    /// It came over TLS.
    pub is_secure: bool,
}

/// A base domain as it is compared: in lower case, without the last dot.
///
/// # Errors
/// It is none.
pub fn check_base_domain(text: &str) -> Result<String, ServeError> {
    let base_domain = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    if !hosts::is_host_name(&base_domain) || hosts::is_address(&base_domain) {
        return Err(ServeError::BaseDomain(text.to_owned()));
    }
    Ok(base_domain)
}

/// Starts to serve; returns as soon as connections are taken.
///
/// # Errors
/// The base domain is none, or the certificate cannot be read or made.
pub fn serve(config: ServeConfig, service: Service) -> Result<Server, ServeError> {
    let base_domain = check_base_domain(&config.base_domain)?;
    let lifecycle = Lifecycle::default();
    let state = AppState {
        service,
        base_domain: base_domain.as_str().into(),
        ssh: config.ssh.map(Arc::new),
        lifecycle: lifecycle.clone(),
    };
    let front = Arc::new(Front::new(&state));
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let accept = |listener, tls| {
        let acceptor = Acceptor {
            listener,
            tls,
            front: Arc::clone(&front),
            connections: Arc::clone(&connections),
            lifecycle: lifecycle.clone(),
        };
        lifecycle.tasks.spawn(acceptor.run());
    };

    let http = config.http.local_addr().map_err(ServeError::Listener)?;
    let (mut https, mut ca_file) = (None, None);
    if let Some((listener, tls)) = config.https {
        let certificate = Certificate::load(&tls, &base_domain)?;
        https = Some(listener.local_addr().map_err(ServeError::Listener)?);
        ca_file = certificate.ca_file().map(Path::to_owned);
        accept(listener, Some(TlsAcceptor::from(certificate.server_config()?)));
        lifecycle.tasks.spawn(renew(certificate, lifecycle.stopping.clone()));
    }
    accept(config.http, None);
    Ok(Server { http, https, ca_file, lifecycle })
}

impl Server {
    /// Where HTTP is served.
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// Where HTTPS is served.
    pub fn https_address(&self) -> Option<SocketAddr> {
        self.https
    }

    /// The certificate clients must trust, where it is ours.
    pub fn ca_file(&self) -> Option<&Path> {
        self.ca_file.as_deref()
    }

    /// Stops: lets what runs finish for at most `grace`. Returns whether all of it did.
    pub async fn stop(self, grace: Duration) -> bool {
        let Lifecycle { stopping, cut, tasks } = self.lifecycle;
        stopping.cancel();
        tasks.close();
        let finished = tokio::time::timeout(grace, tasks.wait()).await.is_ok();
        cut.cancel();
        tasks.wait().await;
        finished
    }
}

async fn renew(certificate: Arc<Certificate>, stopping: CancellationToken) {
    while stopping.run_until_cancelled(tokio::time::sleep(RENEWAL_INTERVAL)).await.is_some() {
        match certificate.renew_if_due(SystemTime::now()) {
            Ok(true) => tracing::info!("renewed the server's certificate"),
            Ok(false) => {}
            Err(error) => tracing::error!(error = &error as &dyn std::error::Error, "certificate not renewed"),
        }
    }
}

struct Acceptor {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    front: Arc<Front>,
    connections: Arc<Semaphore>,
    lifecycle: Lifecycle,
}

impl Acceptor {
    async fn run(self) {
        let stopping = self.lifecycle.stopping.clone();
        let accept = async || {
            let permit = Arc::clone(&self.connections).acquire_owned().await.expect("never closed");
            (permit, self.listener.accept().await)
        };
        while let Some((permit, accepted)) = stopping.run_until_cancelled(accept()).await {
            match accepted {
                Ok((stream, address)) => {
                    let connection = Connection {
                        front: Arc::clone(&self.front),
                        peer: Peer { address, is_secure: self.tls.is_some() },
                        lifecycle: self.lifecycle.clone(),
                    };
                    let (tls, cut) = (self.tls.clone(), self.lifecycle.cut.clone());
                    self.lifecycle.tasks.spawn(async move {
                        cut.run_until_cancelled(connection.greet(stream, tls)).await;
                        drop(permit);
                    });
                }
                // A client that went away before it was accepted, or no descriptors left: both pass.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

struct Connection {
    front: Arc<Front>,
    peer: Peer,
    lifecycle: Lifecycle,
}

impl Connection {
    async fn greet(self, stream: TcpStream, tls: Option<TlsAcceptor>) {
        // Small frames of a stream must not wait for each other.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot switch off Nagle's algorithm");
        }
        let Some(tls) = tls else {
            return self.serve(stream).await;
        };
        match tokio::time::timeout(GREETING_TIMEOUT, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(peer = %self.peer.address, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(peer = %self.peer.address, "TLS handshake took too long"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let (front, peer) = (self.front, self.peer);
        let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
            let front = Arc::clone(&front);
            async move {
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(peer);
                Ok::<_, std::convert::Infallible>(front.answer(request).await)
            }
        });
        let builder = builder();
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(Greeting::new(stream)), service);
        let mut connection = std::pin::pin!(connection);
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = self.lifecycle.stopping.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = result {
            tracing::debug!(peer = %peer.address, %error, "connection ended");
        }
    }
}

fn builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEADER_BYTES.max(128 << 10));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20))
        .max_concurrent_streams(1024)
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .initial_stream_window_size(256 << 10)
        .initial_connection_window_size(4 << 20)
        .max_send_buf_size(256 << 10);
    builder
}

/// The routers, by destination.
struct Front {
    native: Router,
    e2b_control: Router,
    e2b_sandbox: Router,
    preview: Router,
    base_domain: Arc<str>,
}

impl Front {
    fn new(state: &AppState) -> Self {
        Self {
            native: native::router(state.clone()),
            e2b_control: adapters::e2b::control_router(state.clone()),
            e2b_sandbox: adapters::e2b::sandbox_router(state.clone()),
            preview: edge::router(state.clone()),
            base_domain: Arc::clone(&state.base_domain),
        }
    }

    /// A handler that panics costs its own request, not the connection and the streams beside it.
    async fn answer(&self, request: Request<Body>) -> Response {
        // Without the query: signed URLs carry their token there.
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let begun = Instant::now();
        let response = AssertUnwindSafe(self.route(request)).catch_unwind().await.unwrap_or_else(|_| {
            let message = "the server failed at this request";
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
                .hint("this is a defect of the server; its log has the place")
                .into_response()
        });
        tracing::debug!(%method, path, status = response.status().as_u16(), elapsed = ?begun.elapsed(), "answered");
        response
    }

    async fn route(&self, mut request: Request<Body>) -> Response {
        let router = match hosts::destination(&self.base_domain, request.uri(), request.headers()) {
            Ok(Destination::Native) => &self.native,
            Ok(Destination::E2bControl) => &self.e2b_control,
            Ok(Destination::E2bSandbox(sandbox)) => {
                request.extensions_mut().insert(sandbox);
                &self.e2b_sandbox
            }
            Ok(Destination::Preview(sandbox)) => {
                request.extensions_mut().insert(sandbox);
                &self.preview
            }
            Err(error) => return refuse_host(error),
        };
        router.clone().oneshot(request).await.unwrap_or_else(|never| match never {})
    }
}

/// Our shape, with E2B's two fields beside it: at this point nobody knows which client it is.
fn refuse_host(error: HostError) -> Response {
    let status = match error {
        HostError::Unknown => StatusCode::NOT_FOUND,
        _ => StatusCode::BAD_REQUEST,
    };
    let code = if error == HostError::Unknown { "unknown_host" } else { "invalid_host" };
    let message = error.to_string();
    let hint = "the API is at the server's own address; E2B's at api.e2b.<base domain>";
    let body = serde_json::json!({
        "error": { "code": code, "message": message, "hint": hint },
        "code": status.as_u16(),
        "message": message,
    });
    (status, Json(body)).into_response()
}

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A stream that fails if its first bytes do not settle in time whether HTTP/1.1 or HTTP/2 is spoken:
/// hyper's own timers begin only after that.
struct Greeting<S> {
    stream: S,
    /// How much of the preface has been seen; `None`: settled.
    pending: Option<(usize, Pin<Box<Sleep>>)>,
}

impl<S> Greeting<S> {
    fn new(stream: S) -> Self {
        Self { stream, pending: Some((0, Box::pin(tokio::time::sleep(GREETING_TIMEOUT)))) }
    }

    fn see(&mut self, bytes: &[u8]) {
        if let Some((seen, _)) = &mut self.pending {
            let expected = &HTTP2_PREFACE[*seen..];
            let matches = expected.starts_with(bytes) && bytes.len() < expected.len();
            *seen += bytes.len();
            if !matches {
                self.pending = None;
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Greeting<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(result) => {
                self.see(&buf.filled()[before..]);
                Poll::Ready(result)
            }
            Poll::Pending => {
                if let Some((_, deadline)) = &mut self.pending {
                    ready!(deadline.as_mut().poll(cx));
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client said nothing")));
                }
                Poll::Pending
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Greeting<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    async fn read_after(first: &'static [u8]) -> io::Result<Vec<u8>> {
        let (mut client, server) = duplex(1024);
        client.write_all(first).await.expect("room");
        let mut greeting = Greeting::new(server);
        let mut seen = vec![0; first.len()];
        greeting.read_exact(&mut seen).await?;
        tokio::spawn(async move {
            tokio::time::sleep(GREETING_TIMEOUT * 4).await;
            client.write_all(b"rest").await.expect("room");
        });
        let mut rest = Vec::new();
        greeting.read_to_end(&mut rest).await?;
        Ok(rest)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_say_what_it_speaks_is_cut_off() {
        for first in [&b""[..], b"PRI * HT", &HTTP2_PREFACE[..23]] {
            let error = read_after(first).await.expect_err("cut off");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{}", String::from_utf8_lossy(first));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_has_said_it_may_take_its_time() {
        for first in [&b"G"[..], b"PRIX", b"GET / HTTP/1.0\r\n\r\n", HTTP2_PREFACE] {
            assert_eq!(read_after(first).await.expect("not cut off"), b"rest", "{}", String::from_utf8_lossy(first));
        }
    }
}
