//! The network outside of the guests: where they may connect, under which names, and which credentials are put on
//! the wire for them.
//!
//! ```text
//! QEMU -netdev stream ── frames ──> net (Ethernet, ARP, DNS, TCP in user space)
//!                                     │ flows                     ┌─ policy: may it? (pure)
//!                                     └──> proxy ── asks ─────────┼─ broker: which values, where
//!                                            │                    └─ audit: one record per decision
//!                                            └── dials ──> upstream (resolver, dialer) ──> the world
//! ```
//!
//! A guest's packet never reaches a socket of the host except through a decision. The crate never opens the store:
//! policies, secrets, names and the certificate authority are handed in, records are handed out.

pub mod audit;
pub mod broker;
mod dial;
pub mod dns;
mod fetch;
mod gateway;
mod host_port;
mod limits;
pub mod net;
pub mod policy;
pub mod proxy;
mod proxy_client;
mod routes;
mod sandbox;
mod traffic;
mod udp;
mod upstream;
mod upstream_proxy;

pub use fetch::{Asker, FetchError, Fetcher, check_https_url};
pub use gateway::{
    AttachError, AttachSpec, Attachment, Control, Gateway, GatewayConfig, GatewayError, Inbound, Stats, tls_towards,
};
pub use host_port::HostPort;
pub use limits::Limits;
pub use net::Framing;
pub use proxy::{AuthorityError, CertificateAuthority};
pub use routes::{RouteError, Routes};
pub use traffic::Traffic;
pub use upstream::{BoxIo, Dialer, Io, ResolveError, Resolver, SystemDialer, SystemResolver};
pub use upstream_proxy::{UpstreamProxy, UpstreamProxyConfig};
