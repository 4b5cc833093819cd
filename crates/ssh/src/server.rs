//! The socket: takes connections, bounds them, ends them.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use russh::{Disconnect, MethodKind, MethodSet, Preferred, SshId, keys::Algorithm, server::Config};
use stockade_model::SandboxId;
use stockade_service::Service;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    HostKey,
    client::Client,
    intake::{Intake, Metered},
};

/// Connections of all clients together; those beyond are closed at once.
const MOST_CONNECTIONS: usize = 1024;
/// Connections whose client has not proved yet who it is.
const MOST_STRANGERS: usize = 64;
/// Connections to one sandbox.
const MOST_PER_SANDBOX: usize = 32;
/// Time from the connection to a proved key.
const LOGIN_TIME: Duration = Duration::from_secs(30);
/// Signatures that may be wrong before the connection is closed.
const MOST_ATTEMPTS: usize = 6;
const REJECTION_TIME: Duration = Duration::from_millis(200);
const KEEPALIVE: Duration = Duration::from_secs(30);
const FAREWELL: Duration = Duration::from_secs(1);

/// A server that runs until it is stopped. Dropping it leaves it running.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// What all clients share.
pub(crate) struct Shared {
    pub(crate) service: Service,
    tasks: TaskTracker,
    stopping: CancellationToken,
    cut: CancellationToken,
    places: Mutex<HashMap<SandboxId, Weak<Semaphore>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// One connection, from its first byte.
pub(crate) struct Entry {
    pub(crate) peer: SocketAddr,
    known: CancellationToken,
}

impl Entry {
    /// Its client has proved who it is.
    pub(crate) fn is_known(&self) {
        self.known.cancel();
    }
}

/// Serves; returns at once.
///
/// # Errors
/// The listener has no address.
pub fn serve(listener: TcpListener, key: HostKey, service: Service) -> std::io::Result<Server> {
    let address = listener.local_addr()?;
    let shared = Arc::new(Shared {
        service,
        tasks: TaskTracker::new(),
        stopping: CancellationToken::new(),
        cut: CancellationToken::new(),
        places: Mutex::default(),
    });
    let acceptor = accept(listener, Arc::new(config(key)), Arc::clone(&shared));
    shared.tasks.spawn(shared.stopping.clone().run_until_cancelled_owned(acceptor));
    Ok(Server { address, shared })
}

fn config(key: HostKey) -> Config {
    let without_rsa =
        Preferred::DEFAULT.key.iter().filter(|key| !matches!(key, Algorithm::Rsa { .. })).cloned().collect();
    Config {
        server_id: SshId::Standard(concat!("SSH-2.0-Stockade_", env!("CARGO_PKG_VERSION")).into()),
        methods: MethodSet::from(&[MethodKind::PublicKey][..]),
        auth_rejection_time: REJECTION_TIME,
        // Every client asks first what there is.
        auth_rejection_time_initial: Some(Duration::ZERO),
        keys: vec![key.private],
        preferred: Preferred { key: without_rsa, ..Preferred::DEFAULT },
        max_auth_attempts: MOST_ATTEMPTS,
        inactivity_timeout: None,
        keepalive_interval: Some(KEEPALIVE),
        nodelay: true,
        ..Config::default()
    }
}

impl Server {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Tells clients, ends their connections, and returns when all have ended. What they started hangs up as when they
    /// leave.
    pub async fn stop(self) {
        self.shared.stopping.cancel();
        self.shared.tasks.close();
        if tokio::time::timeout(FAREWELL, self.shared.tasks.wait()).await.is_err() {
            self.shared.cut.cancel();
            self.shared.tasks.wait().await;
        }
    }
}

impl Shared {
    /// Runs a channel's work until it is done or the server ends.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let cut = self.cut.clone();
        self.tasks.spawn(async move {
            cut.run_until_cancelled(work).await;
        });
    }

    /// A place among a sandbox's connections; `None`: all are taken.
    pub(crate) fn place_in(&self, sandbox: &SandboxId) -> Option<OwnedSemaphorePermit> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.retain(|_, place| place.strong_count() > 0);
        let place = places.get(sandbox).and_then(Weak::upgrade).unwrap_or_else(|| {
            let place = Arc::new(Semaphore::new(MOST_PER_SANDBOX));
            places.insert(sandbox.clone(), Arc::downgrade(&place));
            place
        });
        // The permit keeps the place from being forgotten.
        place.try_acquire_owned().ok()
    }
}

async fn accept(listener: TcpListener, config: Arc<Config>, shared: Arc<Shared>) {
    let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let strangers = Arc::new(Semaphore::new(MOST_STRANGERS));
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let permits =
                    (Arc::clone(&connections).try_acquire_owned(), Arc::clone(&strangers).try_acquire_owned());
                let (Ok(connection), Ok(stranger)) = permits else {
                    tracing::warn!(%peer, "too many SSH connections at once; one more was closed");
                    continue;
                };
                let (config, shared) = (Arc::clone(&config), Arc::clone(&shared));
                shared.clone().tasks.spawn(async move {
                    attend(stream, peer, config, shared, stranger).await;
                    drop(connection);
                });
            }
            // A client that went away before it was accepted, or no descriptors left: both pass.
            Err(error) => {
                tracing::warn!(%error, "cannot accept an SSH connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// One connection to its end.
async fn attend(
    stream: TcpStream,
    peer: SocketAddr,
    config: Arc<Config>,
    shared: Arc<Shared>,
    stranger: OwnedSemaphorePermit,
) {
    // Keys typed must not wait for each other.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot switch off Nagle's algorithm");
    }
    let (known, cut) = (CancellationToken::new(), shared.cut.child_token());
    let late = tokio::time::sleep(LOGIN_TIME);
    tokio::pin!(late);
    let intake = Arc::new(Intake::default());
    let entry = Arc::new(Entry { peer, known: known.clone() });
    let client = Client::new(Arc::clone(&shared), Arc::clone(&intake), entry);
    let stream = Metered::new(stream, intake, cut.clone());
    let session = tokio::select! {
        session = russh::server::run_stream(config, stream, client) => session,
        () = &mut late => return tracing::debug!(%peer, "an SSH client did not say what it is"),
        () = shared.stopping.cancelled() => return,
    };
    let mut session = match session {
        Ok(session) => session,
        Err(error) => return tracing::debug!(%peer, %error, "no SSH client"),
    };
    let handle = session.handle();
    let mut stranger = Some(stranger);
    let mut is_stopping = false;
    loop {
        tokio::select! {
            ended = &mut session => {
                if let Err(error) = ended {
                    tracing::debug!(%peer, %error, "an SSH connection ended");
                }
                return;
            }
            () = known.cancelled(), if stranger.is_some() => drop(stranger.take()),
            () = &mut late, if stranger.is_some() => {
                tracing::debug!(%peer, "an SSH client did not log in in time");
                cut.cancel();
                stranger = None;
            }
            () = shared.stopping.cancelled(), if !is_stopping => {
                is_stopping = true;
                // It may not be read; it is cut then.
                let farewell = handle.disconnect(Disconnect::ByApplication, "the server is stopping".into(), "en".into());
                let _ = tokio::time::timeout(FAREWELL, farewell).await;
            }
        }
    }
}
