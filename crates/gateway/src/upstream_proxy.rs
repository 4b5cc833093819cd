//! The operator's proxy between this host and the world.
//!
//! It is asked for addresses that were resolved and judged here (see [`proxy_client`](crate::proxy_client)), so that
//! this host has to be able to resolve names, and a proxy that takes names alone cannot be used. A proxy that does not
//! answer or refuses is an error: nothing is ever dialled past it but the operator's routes and `direct_cidrs`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use ipnet::IpNet;
use rustls::ClientConfig;
use serde::Deserialize;
use stockade_model::Secret;
use zeroize::Zeroizing;

use crate::{
    proxy_client::{Login, ProxyPlace},
    upstream::{BoxIo, Dialer, Resolver},
};

/// A proxy as the operator writes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpstreamProxyConfig {
    /// `http://proxy.example:3128`, `https://` where the way to the proxy itself is TLS, or `socks5://`.
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
    place: ProxyPlace,
    tls: Arc<ClientConfig>,
    login: Option<Login>,
    direct: Vec<IpNet>,
}

impl UpstreamProxyConfig {
    /// Reads the password and checks the rest. `tls`: how the proxy is spoken to where its URL is `https`.
    ///
    /// # Errors
    /// It cannot be used; the text names the field.
    pub fn open(&self, tls: Arc<ClientConfig>) -> Result<UpstreamProxy, String> {
        let place = ProxyPlace::parse(&self.url).map_err(|problem| format!("upstream_proxy.url: {problem}"))?;
        Ok(UpstreamProxy { place, tls, login: self.login()?, direct: self.direct_cidrs.clone() })
    }

    fn login(&self) -> Result<Option<Login>, String> {
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
        let login = match (&self.username, password) {
            (None, None) => return Ok(None),
            (Some(username), Some(password)) => Login { username: username.clone(), password },
            _ => return Err(wrong("username: takes a name and a password".to_owned())),
        };
        login.check().map_err(|problem| wrong(problem.to_owned()))?;
        Ok(Some(login))
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
        let asked = self.place.ask(stream, &self.tls, self.login.as_ref(), address).await;
        asked.map_err(|error| failed(error.to_string()))
    }

    async fn reach(&self, resolver: &dyn Resolver, dialer: &dyn Dialer) -> io::Result<BoxIo> {
        let addresses = match self.place.host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => resolver.resolve(&self.place.host).await.map_err(io::Error::other)?.0,
        };
        let mut problem = io::Error::other("its name has no address");
        for address in addresses {
            match dialer.dial((address, self.place.port).into()).await {
                Ok(stream) => return Ok(stream),
                Err(error) => problem = error,
            }
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
        assert_eq!(open(r#"{"url": "socks5://10.0.0.7"}"#), Ok(()));
        assert_eq!(open(r#"{"url": "http://a.example", "username": "u", "password_env": "PATH"}"#), Ok(()));
        for (bad, field) in [
            (r#"{"url": "socks5h://a.example:1080"}"#, "url"),
            (r#"{"url": "socks4://a.example:1080"}"#, "url"),
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
