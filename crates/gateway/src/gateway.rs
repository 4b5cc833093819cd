//! The gateway of a node and the sandboxes attached to it.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    ops::Deref,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use rustls::{ClientConfig, RootCertStore};
use serde::Serialize;
use stockade_model::SandboxId;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
    task::JoinHandle,
};

use crate::{
    HostPort, Traffic,
    audit::{AuditSink, NoAudit},
    broker::{NoSecrets, SecretProvider},
    dns::{NameTable, NameTableRecord, TableError},
    limits::{Limits, Pace},
    net::{FlowStream, Framing, Link, LinkOptions},
    policy::{CompiledPolicy, Explanation, Floor, Policy, PolicyError},
    proxy::{AuthorityError, CertificateAuthority},
    routes::Routes,
    sandbox::Sandbox,
    udp,
    upstream::{Dialer, HostAddresses, Outward, Resolver, SystemDialer, SystemResolver},
    upstream_proxy::UpstreamProxy,
};

/// How to make a gateway.
pub struct GatewayConfig {
    /// How names are resolved.
    pub resolver: Arc<dyn Resolver>,
    /// How connections are made.
    pub dialer: Arc<dyn Dialer>,
    /// Signs for intercepted hosts.
    pub authority: CertificateAuthority,
    /// Whom intercepted hosts have to be signed by.
    pub upstream_roots: RootCertStore,
    /// Where secrets come from.
    pub secrets: Arc<dyn SecretProvider>,
    /// Where records go.
    pub audit: Arc<dyn AuditSink>,
    /// What no tenant's policy opens.
    pub floor: Floor,
    /// Addresses that are the host's besides those of its interfaces (behind NAT, virtual ones).
    pub host_addresses: Vec<IpAddr>,
    /// Names the operator leads somewhere.
    pub routes: Routes,
    /// What everything else is dialled through.
    pub upstream_proxy: Option<Arc<UpstreamProxy>>,
}

impl GatewayConfig {
    /// The host's resolver and TCP, no secrets, no audit, the default floor.
    pub fn new(authority: CertificateAuthority, upstream_roots: RootCertStore) -> Self {
        Self {
            resolver: Arc::new(SystemResolver),
            dialer: Arc::new(SystemDialer),
            authority,
            upstream_roots,
            secrets: Arc::new(NoSecrets),
            audit: Arc::new(NoAudit),
            floor: Floor::default(),
            host_addresses: Vec::new(),
            routes: Routes::default(),
            upstream_proxy: None,
        }
    }

    pub(crate) fn outward(&self) -> Outward {
        Outward {
            resolver: Arc::clone(&self.resolver),
            dialer: Arc::clone(&self.dialer),
            routes: self.routes.clone(),
            host_addresses: HostAddresses::new(self.host_addresses.clone()),
            proxy: self.upstream_proxy.clone(),
        }
    }
}

/// TLS towards hosts signed by `roots`, offering these protocols.
///
/// # Errors
/// TLS cannot be set up.
pub fn tls_towards(roots: &RootCertStore, protocols: &[&[u8]]) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
    tls.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(tls))
}

/// What all sandboxes of a gateway use.
pub(crate) struct Shared {
    pub(crate) out: Outward,
    pub(crate) authority: CertificateAuthority,
    pub(crate) secrets: Arc<dyn SecretProvider>,
    pub(crate) audit: Arc<dyn AuditSink>,
    pub(crate) floor: Floor,
    /// One for each flow of datagrams.
    pub(crate) udp_sockets: Arc<Semaphore>,
    /// Towards upstream, with HTTP/2 and without.
    pub(crate) tls_any: Arc<ClientConfig>,
    pub(crate) tls_http1: Arc<ClientConfig>,
}

/// A sandbox to attach.
pub struct AttachSpec {
    /// Its id.
    pub sandbox: SandboxId,
    /// Labels for records and secret providers (workspace, user, ...).
    pub owner: BTreeMap<String, String>,
    /// The layers of its policy, outermost first; the last is its own.
    pub policy: Vec<Policy>,
    /// The names its guest already knows: those of the snapshot it comes from.
    pub names: NameTableRecord,
    /// What it may use.
    pub limits: Limits,
    /// How its link frames.
    pub framing: Framing,
    /// Where what it sends is counted.
    pub traffic: Arc<Traffic>,
}

impl AttachSpec {
    /// A sandbox with a policy of its own and no past.
    pub fn new(sandbox: SandboxId, policy: Policy) -> Self {
        Self {
            sandbox,
            owner: BTreeMap::new(),
            policy: vec![policy],
            names: NameTableRecord::default(),
            limits: Limits::default(),
            framing: Framing::LengthPrefixed,
            traffic: Arc::default(),
        }
    }
}

/// Why there is no gateway.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The floor cannot be honoured.
    #[error("the operator's floor cannot be honoured")]
    Floor(#[source] PolicyError),
    /// TLS cannot be set up.
    #[error("TLS towards upstream cannot be set up")]
    Tls(#[source] rustls::Error),
    /// The authority cannot sign.
    #[error("the certificate authority cannot sign")]
    Authority(#[source] AuthorityError),
}

/// Why a sandbox is not attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Its policy cannot be honoured.
    #[error("the policy of sandbox {sandbox} cannot be honoured")]
    Policy {
        /// The sandbox.
        sandbox: SandboxId,
        /// Why.
        #[source]
        source: PolicyError,
    },
    /// Its names cannot be read.
    #[error("the names of sandbox {sandbox} cannot be read")]
    Names {
        /// The sandbox.
        sandbox: SandboxId,
        /// Why.
        #[source]
        source: TableError,
    },
}

/// Where all egress of a node goes through.
#[derive(Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
}

impl Gateway {
    /// A gateway.
    pub fn new(config: GatewayConfig) -> Result<Self, GatewayError> {
        CompiledPolicy::compile(&config.floor, &Policy::default()).map_err(GatewayError::Floor)?;
        config.authority.server_config("stockade.invalid").map_err(GatewayError::Authority)?;
        let tls = |protocols: &[&[u8]]| tls_towards(&config.upstream_roots, protocols).map_err(GatewayError::Tls);
        Ok(Self {
            shared: Arc::new(Shared {
                tls_any: tls(&[b"h2", b"http/1.1"])?,
                tls_http1: tls(&[b"http/1.1"])?,
                out: config.outward(),
                authority: config.authority,
                secrets: config.secrets,
                audit: config.audit,
                floor: config.floor,
                udp_sockets: Arc::new(Semaphore::new(udp::MOST_SOCKETS)),
            }),
        })
    }

    /// The certificate guests have to trust.
    pub fn certificate_pem(&self) -> &str {
        self.shared.authority.certificate_pem()
    }

    /// The name that directories of certificates list it under, where it has one.
    pub fn certificate_subject_hash(&self) -> Option<String> {
        self.shared.authority.subject_hash()
    }

    /// The operator's floor.
    pub fn floor(&self) -> &Floor {
        &self.shared.floor
    }

    /// Checks a policy as [`Gateway::attach`] would.
    pub fn check_policy(&self, layers: &[Policy]) -> Result<(), PolicyError> {
        CompiledPolicy::compile_layers(&self.shared.floor, layers).map(drop)
    }

    /// Checks a policy somebody has just written: besides, what it opens must not be closed by the floor.
    pub fn check_new_policy(&self, layers: &[Policy]) -> Result<(), PolicyError> {
        let compiled = CompiledPolicy::compile_layers(&self.shared.floor, layers)?;
        layers.last().map_or(Ok(()), |own| compiled.refuse_closed(own))
    }

    /// What a policy would do with a request; names are resolved as they would be for a connection.
    pub async fn explain(
        &self,
        layers: &[Policy],
        method: &http::Method,
        url: &http::Uri,
    ) -> Result<Explanation, PolicyError> {
        let policy = CompiledPolicy::compile_layers(&self.shared.floor, layers)?;
        let place = url.authority().and_then(|authority| HostPort::after_user(authority).ok());
        let name = place.filter(|place| place.address().is_none()).map(|place| place.host);
        let addresses = match &name {
            // A name that is not allowed is not asked for upstream, not even here.
            Some(name) if self.shared.out.routes.knows(name) => Ok(Vec::new()),
            Some(name) if policy.may_reach(name) => self.shared.out.resolver.resolve(name).await.map(|(list, _)| list),
            _ => Ok(Vec::new()),
        };
        Ok(policy.explain(method, url, &addresses.unwrap_or_default(), &self.shared.out.host_addresses.get()))
    }

    /// Attaches a sandbox to one end of its link. Nothing is read before the policy is compiled; a policy that cannot
    /// be honoured leaves the link unread, and so the guest without a network.
    pub fn attach(
        &self,
        link: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        spec: AttachSpec,
    ) -> Result<Attachment, AttachError> {
        let (reader, writer) = tokio::io::split(link);
        self.attach_halves(reader, writer, spec)
    }

    /// As [`Gateway::attach`], for links whose halves need no lock between them.
    pub fn attach_halves(
        &self,
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        spec: AttachSpec,
    ) -> Result<Attachment, AttachError> {
        let AttachSpec { sandbox: id, owner, policy, names, limits, framing, traffic } = spec;
        let policy = CompiledPolicy::compile_layers(&self.shared.floor, &policy)
            .map_err(|source| AttachError::Policy { sandbox: id.clone(), source })?;
        let names = NameTable::restore(limits.names, &names)
            .map_err(|source| AttachError::Names { sandbox: id.clone(), source })?;
        let options = LinkOptions {
            framing,
            traffic,
            max_flows: limits.flows,
            max_half_open: limits.half_open_flows,
            from_guest: Arc::new(Pace::new(limits.bytes_per_second)),
            to_guest: Arc::new(Pace::new(limits.bytes_per_second)),
        };
        let sandbox = Sandbox::new(id, owner, Arc::clone(&self.shared), limits, names, policy);
        let link = Link::new(options, Arc::clone(&sandbox) as _);
        sandbox.set_link(&link);
        let run = tokio::spawn(Arc::clone(&link).run(reader, writer));
        let flush = tokio::spawn(flush_records(Arc::clone(&sandbox)));
        Ok(Attachment { control: Control { sandbox, link }, run, flush })
    }
}

async fn flush_records(sandbox: Arc<Sandbox>) {
    let mut ticks = tokio::time::interval(Duration::from_secs(10));
    loop {
        ticks.tick().await;
        sandbox.auditor.flush();
    }
}

/// Numbers of one attachment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Stats {
    /// Bytes of frames from the guest.
    pub bytes_from_guest: u64,
    /// Bytes of frames to the guest.
    pub bytes_to_guest: u64,
    /// Connections now.
    pub flows: usize,
    /// Of these, with a handshake under way.
    pub half_open_flows: usize,
    /// Flows of datagrams now.
    pub udp_flows: usize,
    /// Names known.
    pub names: usize,
    /// Frames dropped.
    pub dropped_frames: u64,
}

/// The way to an attached sandbox, for as many as need it. It does not keep the sandbox attached.
#[derive(Clone)]
pub struct Control {
    sandbox: Arc<Sandbox>,
    link: Arc<Link>,
}

impl Control {
    /// Puts a policy in force, at once and as a whole: connections and requests are judged by it from now on, and
    /// open connections it does not allow are reset before this returns, flows of datagrams ended. Returns how many. A policy that cannot be
    /// honoured changes nothing.
    pub fn set_policy(&self, layers: &[Policy]) -> Result<usize, PolicyError> {
        let policy = CompiledPolicy::compile_layers(&self.sandbox.shared.floor, layers)?;
        Ok(self.sandbox.set_policy(policy))
    }

    /// The names the guest knows, to be stored with a snapshot.
    pub fn name_table(&self) -> NameTableRecord {
        self.sandbox.names.record()
    }

    /// Counts up whenever the names have changed.
    pub fn name_changes(&self) -> u64 {
        self.sandbox.names.changes()
    }

    /// Numbers.
    pub fn stats(&self) -> Stats {
        Stats {
            bytes_from_guest: self.link.bytes_from_guest.load(Ordering::Relaxed),
            bytes_to_guest: self.link.bytes_to_guest.load(Ordering::Relaxed),
            flows: self.link.flow_count(),
            half_open_flows: self.link.half_open_count(),
            udp_flows: self.sandbox.udp.count(),
            names: self.sandbox.names.len(),
            dropped_frames: self.link.drops.total(),
        }
    }

    /// Opens a connection to a port of the guest, which has to listen on its network address.
    pub async fn open_inbound(&self, port: u16) -> io::Result<Inbound> {
        self.link.connect(port).await.map(Inbound)
    }
}

/// An attached sandbox. Dropped, it is detached: the guest has no network until it is attached again.
pub struct Attachment {
    control: Control,
    run: JoinHandle<()>,
    flush: JoinHandle<()>,
}

impl Attachment {
    /// A way to it for others.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Waits until the link ends (the machine stopped, or sent what no machine sends).
    pub async fn ended(&mut self) {
        // The task is never cancelled while this is borrowed; a panic in it is an end too.
        let _ = (&mut self.run).await;
    }

    /// Ends the link and resets its connections.
    pub fn detach(self) {
        drop(self);
    }
}

impl Deref for Attachment {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let was_running = !self.run.is_finished();
        self.run.abort();
        self.flush.abort();
        if was_running {
            self.control.link.end(None);
        }
    }
}

/// A connection to a port of the guest.
pub struct Inbound(FlowStream);

impl AsyncRead for Inbound {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Inbound {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &[u8],
    ) -> std::task::Poll<io::Result<usize>> {
        std::pin::Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
