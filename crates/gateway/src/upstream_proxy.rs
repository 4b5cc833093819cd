//! The operator's HTTP proxy between this host and the world.
//!
//! ```text
//! name ──resolved here──> address ──judged here──> CONNECT 203.0.114.7:443 ──proxy──> the world
//! ```
//!
//! The proxy is asked for addresses, never for names: a name that the proxy resolved could lead into a private network
//! or to metadata, and nothing here could see it. So this host has to be able to resolve names, and a proxy that takes
//! names alone cannot be used. A proxy that does not answer or refuses is an error: nothing is ever dialled past it but
//! the operator's routes and `direct_cidrs`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderValue, Request, Uri, header};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use rustls::{ClientConfig, pki_types::ServerName};
use serde::Deserialize;
use stockade_model::Secret;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use crate::{
    policy::normalize_name,
    upstream::{BoxIo, Dialer, Resolver},
};

/// A proxy as the operator writes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpstreamProxyConfig {
    /// `http://proxy.example:3128`, or `https://` where the way to the proxy itself is TLS.
    pub url: String,
    /// Who we say we are; needs a password.
    #[serde(default)]
    pub username: Option<String>,
    /// The environment variable of the server that holds the password.
    #[serde(default)]
    pub password_env: Option<String>,
    /// The file that holds the password.
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// Networks that are reached without it.
    #[serde(default)]
    pub direct_cidrs: Vec<IpNet>,
}

/// A proxy that everything is dialled through.
pub struct UpstreamProxy {
    host: String,
    port: u16,
    tls: Option<Arc<ClientConfig>>,
    authorization: Option<HeaderValue>,
    direct: Vec<IpNet>,
}

impl UpstreamProxyConfig {
    /// Reads the password and checks the rest. `tls`: how the proxy is spoken to where its URL is `https`.
    ///
    /// # Errors
    /// It cannot be used; the text names the field.
    pub fn open(&self, tls: Arc<ClientConfig>) -> Result<UpstreamProxy, String> {
        let wrong = |problem: &str| format!("upstream_proxy.{problem}");
        let url: Uri = self.url.parse().map_err(|_| wrong("url: is no URL"))?;
        let tls = match url.scheme_str() {
            Some("http") => None,
            Some("https") => Some(tls),
            _ => return Err(wrong("url: use http:// or https://; other kinds of proxies are not offered")),
        };
        let authority = url.authority().ok_or_else(|| wrong("url: names no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("url: holds credentials; use username and password_env or password_file"));
        }
        if !matches!(url.path(), "" | "/") || url.query().is_some() {
            return Err(wrong("url: takes a host and a port alone"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        if host.parse::<IpAddr>().is_err() && normalize_name(&host).is_none() {
            return Err(wrong("url: its host is no name"));
        }
        let port = url.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
        Ok(UpstreamProxy { host, port, tls, authorization: self.authorization()?, direct: self.direct_cidrs.clone() })
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        let wrong = |problem: String| format!("upstream_proxy.{problem}");
        let password = match (&self.password_env, &self.password_file) {
            (None, None) => None,
            (Some(name), None) => {
                let value = std::env::var(name).map_err(|_| wrong(format!("password_env: {name} is not set")))?;
                Some(Secret::new(value))
            }
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path).map(Zeroizing::new);
                let text = text.map_err(|error| wrong(format!("password_file: {}: {error}", path.display())))?;
                Some(Secret::new(text.trim_end_matches(['\r', '\n'])))
            }
            (Some(_), Some(_)) => return Err(wrong("password_env: is there besides password_file".to_owned())),
        };
        let (username, password) = match (&self.username, password) {
            (None, None) => return Ok(None),
            (Some(username), Some(password)) if !username.contains(':') => (username, password),
            _ => return Err(wrong("username: takes a name without a colon, and a password".to_owned())),
        };
        let pair = Zeroizing::new(format!("{username}:{}", password.expose()));
        let text = Zeroizing::new(format!("Basic {}", STANDARD.encode(pair.as_bytes())));
        let mut value = HeaderValue::from_str(&text).map_err(|_| wrong("password: cannot be sent".to_owned()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

impl UpstreamProxy {
    /// Whether an address is reached without it.
    pub(crate) fn is_direct(&self, address: IpAddr) -> bool {
        self.direct.iter().any(|network| network.contains(&address))
    }

    /// A connection to an address that was judged.
    pub(crate) async fn dial(
        &self,
        resolver: &dyn Resolver,
        dialer: &dyn Dialer,
        address: SocketAddr,
    ) -> io::Result<BoxIo> {
        let failed = |problem: String| io::Error::other(format!("the deployment's proxy {problem}"));
        let stream = self.reach(resolver, dialer).await.map_err(|error| failed(format!("was not reached: {error}")))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.to_string()))?;
        tokio::spawn(connection.with_upgrades());
        let mut request = Request::connect(address.to_string()).header(header::HOST, address.to_string());
        if let Some(authorization) = &self.authorization {
            request = request.header(header::PROXY_AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(io::Error::other)?;
        let answer = sender.send_request(request).await.map_err(|error| failed(format!("broke off: {error}")))?;
        if !answer.status().is_success() {
            return Err(failed(format!("answered with {}", answer.status().as_u16())));
        }
        let stream = hyper::upgrade::on(answer).await.map_err(|error| failed(format!("broke off: {error}")))?;
        Ok(Box::new(TokioIo::new(stream)))
    }

    async fn reach(&self, resolver: &dyn Resolver, dialer: &dyn Dialer) -> io::Result<BoxIo> {
        let addresses = match self.host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => resolver.resolve(&self.host).await.map_err(io::Error::other)?.0,
        };
        let mut problem = io::Error::other("its name has no address");
        for address in addresses {
            let stream = match dialer.dial((address, self.port).into()).await {
                Ok(stream) => stream,
                Err(error) => {
                    problem = error;
                    continue;
                }
            };
            let Some(tls) = &self.tls else { return Ok(stream) };
            let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
            return Ok(Box::new(TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?));
        }
        Err(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_honoured_is_refused_by_its_field() {
        let tls = || crate::gateway::tls_towards(&rustls::RootCertStore::empty(), &[b"http/1.1"]).expect("TLS");
        let open = |text: &str| serde_json::from_str::<UpstreamProxyConfig>(text).expect(text).open(tls()).map(drop);
        assert_eq!(open(r#"{"url": "http://proxy.example:3128", "direct_cidrs": ["10.0.0.0/8"]}"#), Ok(()));
        assert_eq!(open(r#"{"url": "https://10.0.0.7"}"#), Ok(()));
        assert_eq!(open(r#"{"url": "http://a.example", "username": "u", "password_env": "PATH"}"#), Ok(()));
        for (bad, field) in [
            (r#"{"url": "socks5://a.example:1080"}"#, "url"),
            (r#"{"url": "http://u:p@a.example"}"#, "url"),
            (r#"{"url": "http://a.example/path"}"#, "url"),
            (r#"{"url": "a.example:3128"}"#, "url"),
            (r#"{"url": "http://a.example", "username": "u"}"#, "username"),
            (r#"{"url": "http://a.example", "username": "u:v", "password_env": "PATH"}"#, "username"),
            (r#"{"url": "http://a.example", "username": "u", "password_env": "NOT_SET_ANYWHERE"}"#, "password_env"),
            (r#"{"url": "http://a.example", "username": "u", "password_file": "/nowhere"}"#, "password_file"),
        ] {
            let problem = open(bad).expect_err(bad);
            assert!(problem.starts_with(&format!("upstream_proxy.{field}")), "{problem}");
        }
    }
}
