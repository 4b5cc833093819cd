//! WebSocket connections to the server, plain or TLS.

use std::{path::Path, sync::Arc};

use reqwest::Url;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, client::IntoClientRequest as _, http::HeaderValue},
};

use super::{CONNECT_TIMEOUT, Client, error_from};
use crate::failure::{Failure, chain};

/// A byte stream to a server.
pub(super) trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// An open WebSocket.
pub(super) type Socket = WebSocketStream<Box<dyn Transport>>;

/// Trusts the usual authorities and those in `ca_file`.
pub(super) fn tls_config(ca_file: Option<&Path>) -> Result<rustls::ClientConfig, Failure> {
    let mut roots = rustls::RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = ca_file {
        let unreadable = |error: &dyn std::fmt::Display| {
            Failure::host(format!("read certificates from {}", path.display()), error)
                .hint("check --ca-file or STOCKADE_CA_FILE")
        };
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| unreadable(&error))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| unreadable(&error))?;
            roots.add(certificate).map_err(|error| unreadable(&error))?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::new("internal", chain(&error)))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

impl Client {
    /// Opens a WebSocket on a route.
    pub(super) async fn socket(&self, segments: &[&str], query: Option<&str>) -> Result<Socket, Failure> {
        let mut url = self.route(segments);
        url.set_query(query);
        let transport = self.dial(&url).await?;
        let scheme = if url.scheme() == "https" { "wss" } else { "ws" };
        // The scheme of an http URL can always become that of a WebSocket's.
        let address = url.as_str().replacen(url.scheme(), scheme, 1);
        let internal = |error: &dyn std::error::Error| Failure::new("internal", chain(error));
        let mut request = address.into_client_request().map_err(|error| internal(&error))?;
        let bearer =
            HeaderValue::from_str(&format!("Bearer {}", self.key.expose())).map_err(|error| internal(&error))?;
        request.headers_mut().insert("authorization", bearer);
        match tokio_tungstenite::client_async(request, transport).await {
            Ok((socket, _)) => Ok(socket),
            Err(tungstenite::Error::Http(response)) => {
                Err(error_from(response.status(), response.body().as_deref().unwrap_or_default()))
            }
            Err(error) => Err(self.broken(&error)),
        }
    }

    /// The WebSocket broke.
    pub(super) fn broken(&self, error: &tungstenite::Error) -> Failure {
        Failure::new("connection_lost", format!("the connection to {} broke: {}", self.url(), chain(error)))
    }

    async fn dial(&self, url: &Url) -> Result<Box<dyn Transport>, Failure> {
        let unreachable = |why: &dyn std::fmt::Display| {
            Failure::new("unreachable", format!("cannot reach the server at {}: {why}", self.url()))
                .hint("is it running? `stockade up` starts one")
        };
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = url.port_or_known_default().unwrap_or(80);
        let connect = timeout(CONNECT_TIMEOUT, TcpStream::connect((host.as_str(), port)));
        let stream = connect.await.map_err(|_| unreachable(&"no answer"))?.map_err(|error| unreachable(&error))?;
        // Keystrokes are small and must not wait for more.
        stream.set_nodelay(true).map_err(|error| unreachable(&error))?;
        if url.scheme() != "https" {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(host).map_err(|error| unreachable(&error))?;
        let tls = tokio_rustls::TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream);
        Ok(Box::new(
            timeout(CONNECT_TIMEOUT, tls)
                .await
                .map_err(|_| unreachable(&"no answer"))?
                .map_err(|error| unreachable(&error))?,
        ))
    }
}
