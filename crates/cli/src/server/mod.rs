//! `stockade up`: from a directory to a server.
//!
//! ```text
//! look at the arguments and the data directory   what is wrong shows before anything is made
//! take the ports and the data directory          its records are opened, its key is there
//! prepare: kernel, initramfs, base root disk     once; kept in the cache
//! start the engine and the service               adopts the machines an earlier server left
//! make sure of the base template                 booted once; kept as disk + warm memory
//! serve, run a first sandbox, say so             ready.json appears
//! SIGTERM or SIGINT: stop                        machines run on; the next server adopts them
//! ```

use std::{
    future::Future,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use stockade_api::{ServeConfig, Server, SshEndpoint};
use stockade_engine::Engine;
use stockade_images::Images;
use stockade_model::Prices;
use stockade_service::{NetworkConfig, Service, ServiceConfig};
use stockade_store::{Archive, SecretFile, Store, StoreError};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    args::{Common, Up},
    failure::{Failure, chain},
    guest_binary::GUEST_AGENT,
    local_paths::{Ready, default_data_dir},
    ui::Ui,
};

mod checks;
pub(crate) mod data_dir;
pub(crate) mod engine;
mod greeting;
mod listen;
mod progress;
mod self_check;
mod ssh;
mod template;

use data_dir::DataDir;
use progress::Display;

/// How long requests under way may take when the server is told to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Serves until told to stop.
pub(crate) async fn up(common: &Common, args: Up, ui: Ui) -> Result<(), Failure> {
    start_log();
    let begun = Instant::now();
    let checked = checks::check(&common.data_dir.clone().unwrap_or_else(default_data_dir), &args)?;
    let http = listen::listen(args.http, "--http").await?;
    let https = listen::listen(args.https, "--https").await?;
    let data_dir = DataDir::take(&checked.data_dir)?;
    // Left by a server that was killed: nobody must take it for ours.
    data_dir.remove_ready();
    let store = open_store(&data_dir).await?;
    data_dir.api_key()?;
    let ssh = match args.ssh {
        Some(address) => Some(ssh::Listening::at(address, &data_dir).await?),
        None => None,
    };
    let cache = common.template_cache.clone().unwrap_or_else(|| data_dir.join("cache"));
    let mut stop = Stop::listen()?;
    let prepared = stop.or(prepare(&data_dir, &cache, &args, (store, checked.network), ui)).await;
    if let Some(Err(failure)) = &prepared
        && failure.code == engine::UNSUPPORTED
    {
        data_dir.give_up();
        return prepared.transpose().map(drop);
    }
    let Some(Prepared { service, accel }) = prepared.transpose()? else { return Ok(()) };
    let (ssh, endpoint) = ssh.map(|ssh| ssh.serve(service.clone())).transpose()?.unzip();
    let config = ServeConfig {
        http,
        https: Some((https, checked.tls)),
        base_domain: args.base_domain.clone(),
        ssh: endpoint.clone(),
    };
    let server = stockade_api::serve(config, service.clone());
    let server = server.map_err(|error| Failure::new("cannot_serve", chain(&error)))?;
    let ready = ready(&data_dir, &args, &server, endpoint, accel);
    let announced = stop.or(announce(&data_dir, &ready, &args, begun, ui)).await.transpose();
    if let Ok(Some(())) = announced {
        stop.told().await;
        ui.note("stopping; sandboxes run on and the next `stockade up` takes them over");
    }
    data_dir.remove_ready();
    if let Some(ssh) = ssh {
        ssh.stop().await;
    }
    server.stop(GRACE).await;
    service.shutdown().await;
    announced.map(drop)
}

struct Prepared {
    service: Service,
    accel: String,
}

/// All that takes long the first time.
async fn prepare(
    data_dir: &DataDir,
    cache: &Path,
    args: &Up,
    kept: (Store, NetworkConfig),
    ui: Ui,
) -> Result<Prepared, Failure> {
    let display = Display::new(ui);
    let images = Images::open(cache).map_err(template::image_failure)?;
    let boot = images.boot_files(GUEST_AGENT, &display).await.map_err(template::image_failure)?;
    boot.install(&data_dir.join("kernel")).await.map_err(template::image_failure)?;
    display.begin("starting the engine");
    let engine = engine::open(data_dir.path(), &data_dir.join("kernel"), args.accel, args.spare_emulators).await?;
    let info = engine.info();
    let service = start_service(data_dir, engine.clone(), args, kept).await?;
    let workshop = template::Workshop {
        service: &service,
        engine: engine.as_ref(),
        images: &images,
        boot: &boot,
        data_dir,
        display: &display,
    };
    workshop.ensure_base().await?;
    for extra in &args.with {
        workshop.ensure_extra(*extra).await?;
    }
    display.finish();
    Ok(Prepared { service, accel: info.accelerator.to_string() })
}

async fn open_store(data_dir: &DataDir) -> Result<Store, Failure> {
    let failed = |error: StoreError| match error {
        StoreError::NewerDatabase { database, build, .. } => {
            data_dir::too_new(data_dir.path(), &format!("database version {database}, this one knows {build}"))
        }
        error => Failure::new("store_failed", chain(&error)),
    };
    let secret = SecretFile::open_or_create(&data_dir.join("secret")).map_err(failed)?;
    Store::open(&data_dir.join("stockade.db"), secret).await.map_err(failed)
}

async fn start_service(
    data_dir: &DataDir,
    engine: Arc<dyn Engine>,
    args: &Up,
    (store, network): (Store, NetworkConfig),
) -> Result<Service, Failure> {
    let prices = Prices {
        vcpu_second: args.prices.price_vcpu_second,
        memory_gib_second: args.prices.price_memory_gib_second,
        disk_gib_hour: args.prices.price_disk_gib_hour,
        snapshot_gib_hour: args.prices.price_snapshot_gib_hour,
        egress_gib: args.prices.price_egress_gib,
    };
    let archive = match &args.archive {
        Some(url) => Archive::at(url),
        None => Archive::at_directory(&data_dir.join("archive")),
    };
    let archive = archive.map_err(|error| Failure::new("archive_failed", chain(&error)))?;
    let config = ServiceConfig {
        archive: Some(archive),
        pool_size: args.pool,
        pool_memory_mib: args.pool_memory,
        longest_standby: Some(Duration::from_secs(args.longest_standby)).filter(|longest| !longest.is_zero()),
        prices,
        network: Some(network),
        guest_files: stockade_api::adapters::e2b::guest_files(),
        ..ServiceConfig::new(engine, store)
    };
    let failed = |error: stockade_service::ServiceError| Failure::new("service_failed", chain(&error));
    let service = Service::start(config).await.map_err(failed)?;
    let (key, _) = data_dir.api_key()?;
    let workspace = service.default_workspace().await.map_err(failed)?;
    service.take_key_file(&workspace, &key).await.map_err(failed)?;
    Ok(service)
}

fn ready(data_dir: &DataDir, args: &Up, server: &Server, ssh: Option<SshEndpoint>, accel: String) -> Ready {
    let https = server.https_address().map_or_else(String::new, |address| format!("https://{address}"));
    Ready {
        http_url: format!("http://{}", server.http_address()),
        https_url: https,
        base_domain: args.base_domain.clone(),
        api_key_file: data_dir.key_file(),
        ca_file: server.ca_file().map_or_else(|| data_dir.join("tls/ca.pem"), Path::to_owned),
        ssh_addr: ssh.as_ref().map(|ssh| ssh.address),
        ssh_host_key: ssh.map(|ssh| ssh.fingerprint),
        pid: std::process::id(),
        accel,
    }
}

/// Runs the first sandbox, then tells the world.
async fn announce(data_dir: &DataDir, ready: &Ready, args: &Up, begun: Instant, ui: Ui) -> Result<(), Failure> {
    let timing = if args.no_self_check { None } else { Some(self_check::run_first_sandbox(ready, ui).await?) };
    data_dir.write_ready(ready)?;
    greeting::greet(data_dir, ready, timing.as_ref(), begun.elapsed(), ui)
}

/// The signals that tell a server to stop.
struct Stop {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Stop {
    fn listen() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(|error| Failure::host("listen for signals", error));
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn told(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The work's result; `None` if told to stop before it was done.
    async fn or<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            result = work => Some(result),
            () = self.told() => None,
        }
    }
}

/// The server's log goes to standard error; `STOCKADE_LOG` says how much, as in `info,stockade_service=debug`.
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("STOCKADE_LOG").unwrap_or_else(|_| "warn".into());
    // Another one may be there, in tests.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).try_init();
}
