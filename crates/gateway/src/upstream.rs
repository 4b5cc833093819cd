//! The world's side: how names become addresses and addresses connections.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UdpSocket},
};

use crate::{routes::Routes, upstream_proxy::UpstreamProxy};

/// A byte stream.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A byte stream of some kind.
pub type BoxIo = Box<dyn Io>;

/// Why a name has no address.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ResolveError {
    /// It does not exist or has no address.
    #[error("the name does not exist")]
    NotFound,
    /// Nobody could say.
    #[error("the name cannot be resolved now: {0}")]
    Failed(String),
}

/// Gives addresses of names.
#[async_trait]
pub trait Resolver: Send + Sync + 'static {
    /// The addresses of `name`, the best first, and for how long they hold.
    async fn resolve(&self, name: &str) -> Result<(Vec<IpAddr>, Duration), ResolveError>;
}

/// Makes connections. It is given addresses that were judged and must connect to these and no others.
#[async_trait]
pub trait Dialer: Send + Sync + 'static {
    /// Connects.
    async fn dial(&self, address: SocketAddr) -> io::Result<BoxIo>;

    /// A socket that sends datagrams to the address and hears from it alone.
    async fn dial_udp(&self, address: SocketAddr) -> io::Result<UdpSocket>;
}

/// The host's own resolver (`getaddrinfo`).
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, name: &str) -> Result<(Vec<IpAddr>, Duration), ResolveError> {
        // The dot keeps the host's search domains out of it.
        let absolute = format!("{name}.");
        match tokio::net::lookup_host((absolute.as_str(), 0)).await {
            Ok(found) => {
                let mut addresses: Vec<IpAddr> = found.map(|address| address.ip()).collect();
                addresses.dedup();
                if addresses.is_empty() {
                    Err(ResolveError::NotFound)
                } else {
                    Ok((addresses, Duration::from_secs(30)))
                }
            }
            Err(error) => {
                let text = error.to_string();
                // glibc's texts for EAI_NONAME and EAI_NODATA.
                let absent = ["not known", "No address associated"].iter().any(|known| text.contains(known));
                Err(if absent { ResolveError::NotFound } else { ResolveError::Failed(text) })
            }
        }
    }
}

/// The host's own TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDialer;

#[async_trait]
impl Dialer for SystemDialer {
    async fn dial(&self, address: SocketAddr) -> io::Result<BoxIo> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }

    async fn dial_udp(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0)).await?;
        socket.connect(address).await?;
        Ok(socket)
    }
}

/// The way out of the host: for guests' connections and for what the gateway asks by itself.
pub(crate) struct Outward {
    pub(crate) resolver: Arc<dyn Resolver>,
    pub(crate) dialer: Arc<dyn Dialer>,
    pub(crate) routes: Routes,
    pub(crate) host_addresses: HostAddresses,
    pub(crate) proxy: Option<Arc<UpstreamProxy>>,
}

impl Outward {
    /// Connects to an address that was judged, by the operator's proxy where there is one.
    pub(crate) async fn dial(&self, address: SocketAddr) -> io::Result<BoxIo> {
        match &self.proxy {
            Some(proxy) if !proxy.is_direct(address.ip()) => {
                proxy.dial(self.resolver.as_ref(), self.dialer.as_ref(), address).await
            }
            _ => self.dialer.dial(address).await,
        }
    }

    /// As [`Outward::dial`], for datagrams. The operator's proxy takes none, and nothing goes past it.
    pub(crate) async fn dial_udp(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        match &self.proxy {
            Some(proxy) if !proxy.is_direct(address.ip()) => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "the deployment's proxy takes no UDP"))
            }
            _ => self.dialer.dial_udp(address).await,
        }
    }

    /// Connects to where a route of the operator's leads.
    pub(crate) async fn dial_route(&self, address: SocketAddr) -> io::Result<BoxIo> {
        self.dialer.dial(address).await
    }

    /// As [`Outward::dial_route`], for datagrams.
    pub(crate) async fn dial_udp_route(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        self.dialer.dial_udp(address).await
    }
}

const HOST_ADDRESSES_HOLD: Duration = Duration::from_secs(5);

/// The host's addresses, read anew when they are old: interfaces come and go.
pub(crate) struct HostAddresses {
    extra: Vec<IpAddr>,
    known: Mutex<Option<(Instant, Arc<[IpAddr]>)>>,
}

impl HostAddresses {
    pub(crate) fn new(extra: Vec<IpAddr>) -> Self {
        Self { extra, known: Mutex::new(None) }
    }

    pub(crate) fn get(&self) -> Arc<[IpAddr]> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((read, addresses)) = known.as_ref().filter(|(read, _)| read.elapsed() < HOST_ADDRESSES_HOLD) {
            let _ = read;
            return addresses.clone();
        }
        let read = crate::policy::host_addresses();
        let before = known.take();
        let addresses = match (read, before) {
            (Ok(found), _) => found.into_iter().chain(self.extra.iter().copied()).collect(),
            (Err(error), before) => {
                tracing::warn!(%error, "cannot read the host's addresses; the last known ones stay closed");
                before.map_or_else(|| self.extra.as_slice().into(), |(_, addresses)| addresses)
            }
        };
        *known = Some((Instant::now(), Arc::clone(&addresses)));
        addresses
    }
}
