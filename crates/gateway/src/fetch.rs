//! Questions the gateway asks by itself: of token endpoints and of callbacks that make secrets. One request over
//! HTTPS, one answer of bounded size in bounded time; redirects are not followed, so that what was judged is what
//! is asked.

use std::{net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::{
    HostPort,
    gateway::{GatewayConfig, GatewayError, tls_towards},
    policy::{CompiledPolicy, DefaultAction, Destination, HttpQuestion, Policy, Scheme},
    upstream::{BoxIo, Outward},
};

const LARGEST_ANSWER: usize = 64 << 10;

/// Whose word the address of a question is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Asker {
    /// The operator's: it may lead anywhere.
    Operator,
    /// A user's: it is judged as a connection to the open internet is, by the operator's floor and bounds. Private
    /// addresses and the host's own are closed, unless a route of the operator's leads there.
    User,
}

/// Why there is no answer. Holds nothing of what was sent or received.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum FetchError {
    /// The URL cannot be asked.
    #[error("its URL {0}")]
    Url(&'static str),
    /// The operator's floor or bounds do not allow it.
    #[error("{host} may not be asked: {why}")]
    Denied {
        /// Who.
        host: String,
        /// Why.
        why: String,
    },
    /// It was not reached, or broke off.
    #[error("{host} did not answer: {problem}")]
    Failed {
        /// Who.
        host: String,
        /// Why.
        problem: String,
    },
    /// It took too long.
    #[error("{host} did not answer in time")]
    Late {
        /// Who.
        host: String,
    },
}

/// Asks.
pub struct Fetcher {
    out: Outward,
    policy: CompiledPolicy,
    tls: Arc<ClientConfig>,
}

/// Where a URL leads.
type Place = HostPort<u16>;

/// Whether a text is a URL that can be asked: `https`, a host, no credentials, no fragment. The URL and where it leads.
///
/// # Errors
/// It is not; the text says why.
pub fn check_https_url(text: &str) -> Result<(Uri, HostPort<u16>), &'static str> {
    if text.contains('#') {
        return Err("has a fragment");
    }
    let url: Uri = text.parse().map_err(|_| "is no URL")?;
    let place = place(&url)?;
    Ok((url, place))
}

fn place(url: &Uri) -> Result<Place, &'static str> {
    if url.scheme_str() != Some("https") {
        return Err("is not https");
    }
    Ok(HostPort::of(url.authority().ok_or("names no host")?)?.or(443))
}

impl Fetcher {
    /// Asks by the same way out as a gateway of this configuration, under its floor and `bounds`.
    ///
    /// # Errors
    /// Floor or bounds cannot be honoured, or TLS cannot be set up.
    pub fn new(config: &GatewayConfig, bounds: Option<&Policy>) -> Result<Self, GatewayError> {
        let open = Policy { default: DefaultAction::AllowPublic, ..Policy::default() };
        let layers: Vec<Policy> = bounds.cloned().into_iter().chain([open]).collect();
        let policy = CompiledPolicy::compile_layers(&config.floor, &layers).map_err(GatewayError::Floor)?;
        let tls = tls_towards(&config.upstream_roots, &[b"http/1.1"]).map_err(GatewayError::Tls)?;
        Ok(Self { out: config.outward(), policy, tls })
    }

    /// Sends a request, whose target is a whole URL, and reads the answer, whatever its status.
    ///
    /// # Errors
    /// There is none.
    pub async fn fetch(
        &self,
        asker: Asker,
        patience: Duration,
        request: Request<Vec<u8>>,
    ) -> Result<Response<Bytes>, FetchError> {
        let place = place(request.uri()).map_err(FetchError::Url)?;
        if asker == Asker::User {
            self.judge_request(&place, &request)?;
        }
        match timeout(patience, self.exchange(asker, &place, request)).await {
            Ok(answered) => answered,
            Err(_) => Err(FetchError::Late { host: place.host }),
        }
    }

    async fn exchange(
        &self,
        asker: Asker,
        place: &Place,
        request: Request<Vec<u8>>,
    ) -> Result<Response<Bytes>, FetchError> {
        let failed = |problem: String| FetchError::Failed { host: place.host.clone(), problem };
        let stream = self.connect(asker, place).await?;
        let name = ServerName::try_from(place.host.clone()).map_err(|error| failed(error.to_string()))?;
        let tls = TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream).await;
        let tls = tls.map_err(|error| failed(format!("TLS: {error}")))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(tls)).await.map_err(|error| failed(error.to_string()))?;
        let connection = tokio::spawn(connection);
        let answered = async {
            let response =
                sender.send_request(origin_form(request)).await.map_err(|error| failed(error.to_string()))?;
            let (head, body) = response.into_parts();
            // The cause may quote what was received.
            let body = Limited::new(body, LARGEST_ANSWER).collect().await;
            let body = body.map_err(|_| failed("its answer broke off or is too long".to_owned()))?;
            Ok(Response::from_parts(head, body.to_bytes()))
        };
        let answered = answered.await;
        connection.abort();
        answered
    }

    /// What bounds say of requests holds for these, too.
    fn judge_request(&self, place: &Place, request: &Request<Vec<u8>>) -> Result<(), FetchError> {
        let decision = self.policy.http(&HttpQuestion {
            scheme: Scheme::Https,
            host: &place.host,
            port: place.port,
            method: request.method(),
            path: request.uri().path(),
            query: request.uri().query(),
            headers: &HeaderMap::new(),
        });
        let why = || format!("rule {}", decision.rule.unwrap_or("unnamed"));
        if decision.is_forwarded() { Ok(()) } else { Err(FetchError::Denied { host: place.host.clone(), why: why() }) }
    }

    async fn connect(&self, asker: Asker, place: &Place) -> Result<BoxIo, FetchError> {
        let HostPort { host, port } = place;
        let failed = |problem: String| FetchError::Failed { host: host.clone(), problem };
        let literal = host.parse::<IpAddr>().ok();
        let judge = |destination| {
            let decision = self.policy.connect(destination, *port, &self.out.host_addresses.get());
            let why = || FetchError::Denied { host: host.clone(), why: decision.reason.to_string() };
            if asker == Asker::Operator || decision.allowed { Ok(()) } else { Err(why()) }
        };
        if let Some(route) = self.out.routes.get(host, *port) {
            judge(Destination::Name(host))?;
            return self.out.dial_route(route).await.map_err(|error| failed(error.to_string()));
        }
        let addresses = match literal {
            Some(address) => vec![address],
            None => {
                judge(Destination::Name(host))?;
                self.out.resolver.resolve(host).await.map_err(|error| failed(error.to_string()))?.0
            }
        };
        let mut problem = failed("its name has no address".to_owned());
        for address in addresses {
            let destination = match literal {
                Some(_) => Destination::Address(address),
                None => Destination::Resolved(host, address),
            };
            if let Err(denied) = judge(destination) {
                problem = denied;
                continue;
            }
            match self.out.dial((address, *port).into()).await {
                Ok(stream) => return Ok(stream),
                Err(error) => problem = failed(error.to_string()),
            }
        }
        Err(problem)
    }
}

/// As it is written on a connection to its host.
fn origin_form(request: Request<Vec<u8>>) -> Request<Full<Bytes>> {
    let (mut head, body) = request.into_parts();
    if let Some(host) = head.uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        head.headers.insert(header::HOST, host);
    }
    head.headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
    head.uri = target.parse().unwrap_or_default();
    Request::from_parts(head, Full::new(Bytes::from(body)))
}
