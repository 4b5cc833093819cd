//! How a proxy between this host and the world is spoken to.
//!
//! ```text
//! name ──resolved here──> address ──judged here──> CONNECT / SOCKS5 203.0.114.7:443 ──proxy──> the world
//! ```
//!
//! A proxy is asked for addresses, never for names: a name that it resolved could lead into a private network or to
//! metadata, and nothing here could see it.

use std::{io, net::SocketAddr, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderValue, Request, Uri, header};
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use stockade_model::Secret;
use tokio_rustls::TlsConnector;
use tokio_socks::{TargetAddr, tcp::Socks5Stream};
use zeroize::Zeroizing;

use crate::{HostPort, upstream::BoxIo};

/// What a user name and a password may be long in SOCKS5.
const LONGEST: usize = 255;

/// A proxy: where it is and what it speaks.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct ProxyPlace {
    kind: Kind,
    /// A name, or an address without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// CONNECT in clear text, and over TLS.
    Http,
    Https,
    Socks5,
}

/// Who we say we are.
#[derive(Clone, Debug)]
pub(crate) struct Login {
    pub(crate) username: String,
    pub(crate) password: Secret,
}

impl Login {
    /// Whether a proxy can be told.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let (name, password) = (self.username.as_str(), self.password.expose());
        let control = |text: &str| text.bytes().any(|byte| byte < 0x20 || byte == 0x7f);
        if name.is_empty() || name.contains(':') || name.len() > LONGEST || control(name) {
            return Err("username: takes 1 to 255 bytes without a colon");
        }
        if password.is_empty() || password.len() > LONGEST || control(password) {
            return Err("password: takes 1 to 255 bytes without control characters");
        }
        Ok(())
    }

    fn basic(&self) -> io::Result<HeaderValue> {
        let pair = Zeroizing::new(format!("{}:{}", self.username, self.password.expose()));
        let text = Zeroizing::new(format!("Basic {}", STANDARD.encode(pair.as_bytes())));
        let mut value = HeaderValue::from_str(&text).map_err(io::Error::other)?;
        value.set_sensitive(true);
        Ok(value)
    }
}

impl ProxyPlace {
    /// Reads `http://proxy.example:3128`, `https://…` (the way to the proxy itself is TLS) or `socks5://…:1080`.
    pub(crate) fn parse(url: &str) -> Result<Self, &'static str> {
        let url: Uri = url.parse().map_err(|_| "is no URL")?;
        let (kind, default) = match url.scheme_str() {
            Some("http") => (Kind::Http, 80),
            Some("https") => (Kind::Https, 443),
            Some("socks5") => (Kind::Socks5, 1080),
            Some("socks5h") => return Err("names are resolved here alone, so use socks5://"),
            _ => return Err("use http://, https:// or socks5://"),
        };
        let HostPort { host, port } = HostPort::of(url.authority().ok_or("names no host")?)?.or(default);
        if !matches!(url.path(), "" | "/") || url.query().is_some() {
            return Err("takes a host and a port alone");
        }
        Ok(Self { kind, host, port })
    }

    /// Asks the proxy at the other end of `stream` for an address. Errors say what it answered and nothing of what it
    /// was told.
    pub(crate) async fn ask(
        &self,
        stream: BoxIo,
        tls: &Arc<ClientConfig>,
        login: Option<&Login>,
        address: SocketAddr,
    ) -> io::Result<BoxIo> {
        match self.kind {
            Kind::Http => connect(stream, login, address).await,
            Kind::Https => {
                let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
                let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?;
                connect(Box::new(stream), login, address).await
            }
            Kind::Socks5 => socks5(stream, login, address).await,
        }
    }
}

async fn connect(stream: BoxIo, login: Option<&Login>, address: SocketAddr) -> io::Result<BoxIo> {
    let broke = |error: hyper::Error| io::Error::other(format!("broke off: {error}"));
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broke)?;
    tokio::spawn(connection.with_upgrades());
    let mut request = Request::connect(address.to_string()).header(header::HOST, address.to_string());
    if let Some(login) = login {
        request = request.header(header::PROXY_AUTHORIZATION, login.basic()?);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(io::Error::other)?;
    let answer = sender.send_request(request).await.map_err(broke)?;
    if !answer.status().is_success() {
        return Err(io::Error::other(format!("answered with {}", answer.status().as_u16())));
    }
    Ok(Box::new(TokioIo::new(hyper::upgrade::on(answer).await.map_err(broke)?)))
}

async fn socks5(stream: BoxIo, login: Option<&Login>, address: SocketAddr) -> io::Result<BoxIo> {
    let target = TargetAddr::Ip(address);
    let asked = match login {
        Some(Login { username, password }) => {
            Socks5Stream::connect_with_password_and_socket(stream, target, username, password.expose()).await
        }
        None => Socks5Stream::connect_with_socket(stream, target).await,
    };
    let asked = asked.map_err(|error| io::Error::other(format!("answered: {error}")))?;
    Ok(asked.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_read_from_its_url() {
        let place = ProxyPlace::parse("socks5://Proxy.example").expect("a proxy");
        assert_eq!((place.kind, place.host.as_str(), place.port), (Kind::Socks5, "proxy.example", 1080));
        assert_eq!(ProxyPlace::parse("https://[2600:1f00::1]").map(|place| place.host), Ok("2600:1f00::1".to_owned()));
        for bad in ["", "proxy.example:1080", "socks4://a.example", "socks5h://a.example", "socks5://u:p@a.example"] {
            assert!(ProxyPlace::parse(bad).is_err(), "{bad}");
        }
        for bad in ["socks5://a.example/x", "http://a.example/?q", "http://a b", "http://-"] {
            assert!(ProxyPlace::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_login_is_one_that_every_proxy_can_be_told() {
        let check = |username: &str, password: &str| {
            Login { username: username.to_owned(), password: Secret::new(password) }.check()
        };
        assert_eq!(check("u", "p:w"), Ok(()));
        let long = "x".repeat(256);
        for (username, password) in [("", "p"), ("u", ""), ("u:v", "p"), (&long, "p"), ("u", &long), ("u", "a\r\nb")] {
            assert!(check(username, password).is_err());
        }
    }
}
