//! A gateway with a network namespace as its guest, and servers on loopback as its world.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use nix::sched::{CloneFlags, unshare};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use stockade_gateway::{
    AttachSpec, Attachment, BoxIo, CertificateAuthority, Dialer, Framing, Gateway, GatewayConfig, ResolveError,
    Resolver,
    dns::NameTableRecord,
    net::tap,
    policy::{DefaultAction, InterceptPolicy, Policy},
};
use stockade_model::SandboxId;

use super::ends;

/// A name whose TLS passes through.
pub(super) const PASSED: &str = "passed.bench.example";
/// A name whose TLS is read.
pub(super) const INTERCEPTED: &str = "read.bench.example";

const PUBLIC: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);
const RAW_PORT: u16 = 9_000;
const IDLE_PORT: u16 = 9_001;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that carries out jobs where it is: on the host, or in the namespace.
pub(super) struct Worker(mpsc::Sender<Job>);

impl Worker {
    fn start() -> (Self, mpsc::Receiver<Job>) {
        let (jobs, todo) = mpsc::channel();
        (Self(jobs), todo)
    }

    pub(super) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
        let (answer, answered) = mpsc::channel();
        let gone = |_| io::Error::other("the thread that measures is gone");
        let job: Job = Box::new(move || drop(answer.send(job())));
        self.0.send(job).map_err(|_| io::Error::other("the thread that measures is gone"))?;
        answered.recv().map_err(gone)?
    }
}

/// Everything that is measured.
pub(super) struct Lab {
    pub(super) host: Worker,
    pub(super) inside: Worker,
    /// The plain server, from the host and from inside.
    pub(super) direct: SocketAddr,
    pub(super) raw: SocketAddr,
    /// The server that holds connections, from the host and from inside.
    pub(super) direct_idle: SocketAddr,
    pub(super) idle: SocketAddr,
    /// The TLS server, from the host and by its two names from inside.
    pub(super) direct_tls: SocketAddr,
    pub(super) passed: SocketAddr,
    pub(super) intercepted: SocketAddr,
    /// Trusts the server itself, and the gateway's authority.
    pub(super) servers_tls: Arc<ClientConfig>,
    pub(super) guests_tls: Arc<ClientConfig>,
    attachment: Attachment,
    _runtime: tokio::runtime::Runtime,
}

/// Leads everything to our servers.
struct ToLoopback {
    plain: u16,
    idle: u16,
    tls: u16,
}

#[async_trait::async_trait]
impl Dialer for ToLoopback {
    async fn dial(&self, address: SocketAddr) -> io::Result<BoxIo> {
        let port = match address.port() {
            RAW_PORT => self.plain,
            IDLE_PORT => self.idle,
            _ => self.tls,
        };
        let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }

    async fn dial_udp(&self, _: SocketAddr) -> io::Result<tokio::net::UdpSocket> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

struct OneAddress;

#[async_trait::async_trait]
impl Resolver for OneAddress {
    async fn resolve(&self, _: &str) -> Result<(Vec<IpAddr>, Duration), ResolveError> {
        Ok((vec![PUBLIC.into()], Duration::from_secs(600)))
    }
}

impl Lab {
    /// Connections the gateway has now.
    pub(super) fn flows(&self) -> usize {
        self.attachment.stats().flows
    }

    pub(super) fn start() -> io::Result<Self> {
        let (inside, device) = enter_namespace()?;
        let (host, todo) = Worker::start();
        thread::spawn(move || todo.into_iter().for_each(|job| job()));
        let (roots, server) = tls().map_err(io::Error::other)?;
        let ports = ToLoopback { plain: ends::serve()?, idle: ends::hold()?, tls: ends::serve_tls(server)? };
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let (direct, direct_idle, direct_tls) = (loopback(ports.plain), loopback(ports.idle), loopback(ports.tls));
        let (certificate, key) = CertificateAuthority::generate("Stockade bench").map_err(io::Error::other)?;
        let guests_tls = client(&trusting(&certificate)?)?;
        let authority = CertificateAuthority::from_pem(&certificate, &key).map_err(io::Error::other)?;
        let mut config = GatewayConfig::new(authority, roots.clone());
        (config.dialer, config.resolver) = (Arc::new(ports), Arc::new(OneAddress));
        let gateway = Gateway::new(config).map_err(io::Error::other)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let attachment = {
            let _entered = runtime.enter();
            let (reader, writer) = tap::split(device)?;
            gateway.attach_halves(reader, writer, spec()).map_err(io::Error::other)?
        };
        let by_name = |place: u8| SocketAddr::from((Ipv4Addr::new(198, 18, 0, 1 + place), 443));
        Ok(Self {
            host,
            inside,
            direct,
            raw: SocketAddr::from((PUBLIC, RAW_PORT)),
            direct_idle,
            idle: SocketAddr::from((PUBLIC, IDLE_PORT)),
            direct_tls,
            passed: by_name(0),
            intercepted: by_name(1),
            servers_tls: client(&roots)?,
            guests_tls,
            attachment,
            _runtime: runtime,
        })
    }
}

fn spec() -> AttachSpec {
    let policy = Policy {
        default: DefaultAction::AllowPublic,
        intercept: InterceptPolicy { always: vec![INTERCEPTED.to_owned()], never: Vec::new() },
        ..Policy::default()
    };
    let mut spec = AttachSpec::new(SandboxId::random(), policy);
    spec.names = NameTableRecord { names: vec![(0, PASSED.to_owned()), (1, INTERCEPTED.to_owned())], next: 2 };
    spec.framing = Framing::OnePerCallWithVnetHeader;
    // What is measured is how fast it is, not where it stops.
    spec.limits.new_flows_per_second = 1_000_000;
    spec.limits.flows = 65_536;
    spec
}

/// A namespace whose only way out is a device of ours, and a thread in it.
fn enter_namespace() -> io::Result<(Worker, OwnedFd)> {
    let (worker, todo) = Worker::start();
    let (made, device) = mpsc::channel();
    thread::spawn(move || {
        let entered = make_namespace();
        let failed = entered.is_err();
        if made.send(entered).is_ok() && !failed {
            todo.into_iter().for_each(|job| job());
        }
    });
    let device = device.recv().map_err(|_| io::Error::other("the thread in the namespace is gone"))??;
    Ok((worker, device))
}

fn make_namespace() -> io::Result<OwnedFd> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    tap::open_as_guest()
}

/// A server's own authority and its certificate for both names.
fn tls() -> Result<(RootCertStore, Arc<ServerConfig>), Box<dyn std::error::Error + Send + Sync>> {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let certificate = authority.self_signed(&key)?;
    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone())?;
    let issuer = Issuer::new(authority, key);
    let leaf_key = KeyPair::generate()?;
    let names = vec![PASSED.to_owned(), INTERCEPTED.to_owned()];
    let leaf = CertificateParams::new(names)?.signed_by(&leaf_key, &issuer)?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], PrivateKeyDer::Pkcs8(leaf_key.serialize_der().into()))?;
    Ok((roots, Arc::new(config)))
}

fn trusting(pem: &str) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).map_err(io::Error::other)?).map_err(io::Error::other)?;
    Ok(roots)
}

fn client(roots: &RootCertStore) -> io::Result<Arc<ClientConfig>> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
    Ok(Arc::new(config))
}
