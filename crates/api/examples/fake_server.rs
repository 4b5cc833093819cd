//! The whole API over the fake engine: no machine, no wall. Clients' test suites start in a moment.
//!
//!     cargo run -p stockade-api --example fake_server -- DATA_DIR
//!
//! Serves HTTP and HTTPS on free ports until it is ended, and writes `DATA_DIR/ready.json` as
//! `stockade up` does. Every command runs on this very host as the user who started this: never give it
//! an address others can reach.

use std::{error::Error, net::SocketAddr, path::PathBuf, time::Duration};

use serde_json::json;
use stockade_api::{ServeConfig, Tls, serve};
use stockade_engine::fake::FakeHost;
use stockade_model::{MachineShape, Template};
use stockade_service::fake;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

const BASE_DOMAIN: &str = "stockade.localhost";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let directory = PathBuf::from(std::env::args().nth(1).ok_or("name a data directory")?);
    std::fs::create_dir_all(&directory)?;
    let (service, _) = fake::serve(&directory, &FakeHost::hosting()?, |_| ()).await?;
    let shape = MachineShape { vcpus: 2, memory_mib: 512, disk_mib: 4096 };
    fake::register(&service, &directory, Template { shape, ..fake::template("base") }).await?;
    let key_file = directory.join("api-key");
    std::fs::write(&key_file, fake::key(&service, "default").await?.expose())?;

    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    let http = TcpListener::bind(any_port).await?;
    let tls = Tls::OwnCa { directory: directory.join("tls") };
    let https = Some((TcpListener::bind(any_port).await?, tls));
    let server = serve(ServeConfig { http, https, base_domain: BASE_DOMAIN.to_owned(), ssh: None }, service)?;
    let ready = json!({
        "http_url": format!("http://{}", server.http_address()),
        "https_url": server.https_address().map(|address| format!("https://{address}")),
        "base_domain": BASE_DOMAIN,
        "api_key_file": key_file,
        "ca_file": server.ca_file(),
        "pid": std::process::id(),
        "accel": "none",
    });
    std::fs::write(directory.join("ready.json.new"), serde_json::to_vec_pretty(&ready)?)?;
    std::fs::rename(directory.join("ready.json.new"), directory.join("ready.json"))?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    server.stop(Duration::from_secs(2)).await;
    Ok(())
}
