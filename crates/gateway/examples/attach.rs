//! A gateway for one QEMU by hand: prints the certificate guests have to trust and then every decision as JSON.
//!
//! ```text
//! qemu-system-x86_64 -M microvm … -netdev stream,id=n0,server=on,addr.type=unix,addr.path=net.sock \
//!     -device virtio-net-device,netdev=n0,mac=02:53:54:4b:00:02,host_mtu=65520
//! cargo run -p stockade-gateway --example attach -- net.sock '{"default": "allow_web"}'
//! ```
#![allow(clippy::unwrap_used, reason = "a tool for the bench stops at the first error")]

use std::sync::Arc;

use stockade_gateway::{
    AttachSpec, CertificateAuthority, Gateway, GatewayConfig,
    audit::{AuditRecord, AuditSink},
};
use stockade_model::SandboxId;
use tokio::net::UnixStream;

struct Print;

impl AuditSink for Print {
    fn record(&self, record: AuditRecord) {
        println!("{}", serde_json::to_string(&record).unwrap());
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, socket, policy] = arguments.as_slice() else { panic!("usage: attach SOCKET POLICY") };
    let (certificate, key) = CertificateAuthority::generate("Stockade by hand").unwrap();
    let authority = CertificateAuthority::from_pem(&certificate, &key).unwrap();
    let mut config = GatewayConfig::new(authority, rustls::RootCertStore::empty());
    config.audit = Arc::new(Print);
    let gateway = Gateway::new(config).unwrap();
    println!("{}", gateway.certificate_pem());
    let (reader, writer) = UnixStream::connect(socket).await.unwrap().into_split();
    let spec = AttachSpec::new(SandboxId::random(), serde_json::from_str(policy).unwrap());
    let mut attachment = gateway.attach_halves(reader, writer, spec).unwrap();
    attachment.ended().await;
    eprintln!("{}", serde_json::to_string(&attachment.stats()).unwrap());
}
