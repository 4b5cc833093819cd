//! The world of a test: made-up public names and addresses, and servers on loopback behind them.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use rustls::{RootCertStore, pki_types::CertificateDer, pki_types::pem::PemObject};
use stockade_gateway::{
    AttachSpec, Attachment, BoxIo, CertificateAuthority, Dialer, Gateway, GatewayConfig, ResolveError, Resolver,
    audit::{AuditRecord, MemoryAudit},
    broker::{SecretError, SecretProvider, SecretRequest},
    policy::Policy,
};
use stockade_model::{SandboxId, Secret};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket, UnixStream},
};

use super::guest::Guest;

#[derive(Default)]
pub struct Net {
    names: Mutex<HashMap<String, Vec<IpAddr>>>,
    servers: Mutex<HashMap<SocketAddr, SocketAddr>>,
    pub asked: Mutex<Vec<String>>,
    pub dialled: Mutex<Vec<SocketAddr>>,
    /// Holds dials back while locked.
    pub gate: tokio::sync::RwLock<()>,
}

impl Net {
    /// The server behind a public address.
    pub fn dial_target(&self, public: &str) -> SocketAddr {
        self.servers.lock().unwrap()[&public.parse().unwrap()]
    }
}

#[async_trait]
impl Resolver for Net {
    async fn resolve(&self, name: &str) -> Result<(Vec<IpAddr>, Duration), ResolveError> {
        self.asked.lock().unwrap().push(name.to_owned());
        let known = self.names.lock().unwrap().get(name).cloned();
        known.map(|list| (list, Duration::ZERO)).ok_or(ResolveError::NotFound)
    }
}

#[async_trait]
impl Dialer for Net {
    async fn dial(&self, address: SocketAddr) -> io::Result<BoxIo> {
        self.dialled.lock().unwrap().push(address);
        let _open = self.gate.read().await;
        let server = self.servers.lock().unwrap().get(&address).copied();
        let stream = TcpStream::connect(server.ok_or(io::ErrorKind::ConnectionRefused)?).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }

    async fn dial_udp(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        self.dialled.lock().unwrap().push(address);
        let _open = self.gate.read().await;
        let server = self.servers.lock().unwrap().get(&address).copied();
        let socket = UdpSocket::bind("127.0.0.1:0").await?;
        socket.connect(server.ok_or(io::ErrorKind::ConnectionRefused)?).await?;
        Ok(socket)
    }
}

#[derive(Default)]
pub struct Secrets(pub Mutex<BTreeMap<String, String>>);

#[async_trait]
impl SecretProvider for Secrets {
    async fn value(&self, request: &SecretRequest) -> Result<Secret, SecretError> {
        let value = self.0.lock().unwrap().get(&request.secret).cloned();
        value.map(Secret::new).ok_or_else(|| SecretError::Unknown(request.secret.clone()))
    }
}

pub struct World {
    pub net: Arc<Net>,
    pub audit: Arc<MemoryAudit>,
    pub secrets: Arc<Secrets>,
    pub gateway: Gateway,
    /// Signs the servers.
    pub server_ca: rcgen::Issuer<'static, rcgen::KeyPair>,
    pub server_ca_pem: String,
}

pub fn roots(pem: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
    roots
}

impl World {
    pub fn new() -> Self {
        Self::with(|_| ())
    }

    pub fn with(change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let (server_ca_pem, server_key) = CertificateAuthority::generate("test servers").unwrap();
        let (guest_ca_pem, guest_key) = CertificateAuthority::generate("test deployment").unwrap();
        let (net, audit, secrets) = (Arc::new(Net::default()), Arc::new(MemoryAudit::default()), Arc::default());
        let authority = CertificateAuthority::from_pem(&guest_ca_pem, &guest_key).unwrap();
        let mut config = GatewayConfig::new(authority, roots(&server_ca_pem));
        config.resolver = Arc::clone(&net) as _;
        config.dialer = Arc::clone(&net) as _;
        config.audit = Arc::clone(&audit) as _;
        let secrets: Arc<Secrets> = secrets;
        config.secrets = Arc::clone(&secrets) as _;
        change(&mut config);
        let gateway = Gateway::new(config).unwrap();
        let server_key = rcgen::KeyPair::from_pem(server_key.expose()).unwrap();
        let server_ca = rcgen::Issuer::from_ca_cert_pem(&server_ca_pem, server_key).unwrap();
        Self { net, audit, secrets, gateway, server_ca, server_ca_pem }
    }

    pub fn name(&self, name: &str, addresses: &[&str]) {
        let list = addresses.iter().map(|address| address.parse().unwrap()).collect();
        self.net.names.lock().unwrap().insert(name.to_owned(), list);
    }

    /// Puts a server on loopback behind a public address.
    pub fn serve(&self, public: &str, server: SocketAddr) {
        self.net.servers.lock().unwrap().insert(public.parse().unwrap(), server);
    }

    pub fn secret(&self, name: &str, value: &str) {
        self.secrets.0.lock().unwrap().insert(name.to_owned(), value.to_owned());
    }

    pub fn attach(&self, policy: serde_json::Value) -> (Guest, Attachment) {
        self.attach_with(policy, |_| ())
    }

    pub fn attach_with(&self, policy: serde_json::Value, change: impl FnOnce(&mut AttachSpec)) -> (Guest, Attachment) {
        let policy: Policy = serde_json::from_value(policy).unwrap();
        let mut spec = AttachSpec::new(SandboxId::random(), policy);
        change(&mut spec);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (reader, writer) = ours.into_split();
        let attachment = self.gateway.attach_halves(reader, writer, spec).unwrap();
        (Guest::start(theirs), attachment)
    }

    pub fn records(&self) -> Vec<AuditRecord> {
        self.audit.records()
    }

    /// The reasons of refusals, in order.
    pub fn denials(&self) -> Vec<&'static str> {
        let denied = |record: &AuditRecord| record.verdict == stockade_gateway::audit::Verdict::Deny;
        self.records().iter().filter(|record| denied(record)).map(|record| record.reason).collect()
    }

    /// Waits for a record; there is always one more thing going on in another task.
    pub async fn record(&self, reason: &str) -> AuditRecord {
        loop {
            if let Some(record) = self.records().into_iter().find(|record| record.reason == reason) {
                return record;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// A server that sends back what it gets and closes when the client does.
pub async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
                let _ = writer.shutdown().await;
            });
        }
    });
    address
}

/// A server that sends `count` bytes and closes.
pub async fn source_server(count: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let block: Vec<u8> = (0..=255).cycle().take(64 << 10).collect();
                let mut left = count;
                while left > 0 {
                    let now = left.min(block.len());
                    if stream.write_all(&block[..now]).await.is_err() {
                        return;
                    }
                    left -= now;
                }
                // Closed with bytes unread, it would reset the connection and lose the last ones sent.
                let _ = stream.shutdown().await;
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            });
        }
    });
    address
}

pub async fn read_to_end(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    bytes
}
