//! What all tasks of a service share.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use jiff::Timestamp;
use stockade_engine::{Engine, EngineError, Machine};
use stockade_model::MachineId;
use stockade_store::Store;
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::warn;

use crate::{
    ServiceConfig, ServiceError,
    builds::Builds,
    clock::{Clock, whole_millis},
    dirs::StateDirs,
    live::Registry,
    meter::Meter,
    network::Network,
    pool::Pool,
};

/// Waits between two tries of a step that has to succeed in the end.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

pub(crate) struct Core {
    pub(crate) config: ServiceConfig,
    pub(crate) registry: Registry,
    pub(crate) pool: Pool,
    pub(crate) builds: Builds,
    pub(crate) dirs: StateDirs,
    pub(crate) meter: Meter,
    /// Where guests get out, if anywhere.
    pub(crate) network: Option<Arc<Network>>,
    /// One permit per restore under way, creates and the pool's alike.
    pub(crate) restores: Semaphore,
    creates: Arc<Count>,
    sandboxes: Arc<Count>,
    moves: Arc<Count>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

/// How many of something there are; [`Ticket`]s count themselves.
struct Count {
    now: AtomicUsize,
    max: usize,
}

/// One of them, until dropped.
pub(crate) struct Ticket(Arc<Count>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Core {
    pub(crate) fn new(config: ServiceConfig) -> Result<Self, ServiceError> {
        let count = |max| Arc::new(Count { now: AtomicUsize::new(0), max });
        let network = config
            .network
            .clone()
            .map(|network| Network::open(network, config.store.clone(), &config.state_dir).map(Arc::new));
        Ok(Self {
            network: network.transpose()?,
            registry: Registry::default(),
            pool: Pool::new(config.pool_size, config.pool_memory_mib << 20),
            builds: Builds::default(),
            dirs: StateDirs::new(config.state_dir.clone()),
            meter: Meter::default(),
            restores: Semaphore::new(config.concurrent_restores.max(1)),
            creates: count(config.max_creates_in_flight),
            sandboxes: count(config.max_sandboxes),
            moves: count(usize::MAX),
            tracker: TaskTracker::new(),
            stop: CancellationToken::new(),
            config,
        })
    }

    pub(crate) fn engine(&self) -> &dyn Engine {
        &*self.config.engine
    }

    pub(crate) fn store(&self) -> &Store {
        &self.config.store
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.config.clock
    }

    /// Now, as it is recorded.
    pub(crate) fn now(&self) -> Timestamp {
        whole_millis(self.clock().now())
    }

    /// Room for one more create and one more sandbox.
    pub(crate) fn admit(&self) -> Result<(Ticket, Ticket), ServiceError> {
        let retry_after = Duration::from_secs(1);
        let busy = |what| ServiceError::Busy { what, retry_after };
        if self.is_stopping() {
            return Err(busy("it is shutting down".to_owned()));
        }
        let create = take(&self.creates)
            .ok_or_else(|| busy(format!("{} creates are under way, the most allowed", self.creates.max)))?;
        let sandbox = take(&self.sandboxes)
            .ok_or_else(|| busy(format!("{} sandboxes are alive, the most allowed", self.sandboxes.max)))?;
        Ok((create, sandbox))
    }

    /// Room for a sandbox that is there already.
    pub(crate) fn count_adopted(&self) -> Ticket {
        self.sandboxes.now.fetch_add(1, Ordering::SeqCst);
        Ticket(Arc::clone(&self.sandboxes))
    }

    /// To be held while a sandbox is on its way from one tier or machine to another: a shutdown waits for that.
    pub(crate) fn begin_move(&self) -> Ticket {
        self.moves.now.fetch_add(1, Ordering::SeqCst);
        Ticket(Arc::clone(&self.moves))
    }

    pub(crate) fn moves_in_flight(&self) -> usize {
        self.moves.now.load(Ordering::SeqCst)
    }

    pub(crate) fn creates_in_flight(&self) -> usize {
        self.creates.now.load(Ordering::SeqCst)
    }

    /// Runs a task of this service: it is cut off when the service stops.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.tracker.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = task => {}
            }
        });
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.tracker.is_closed()
    }

    /// From here on no new sandboxes.
    pub(crate) fn close(&self) {
        self.tracker.close();
    }

    /// Cuts every task off where it stands, without waiting.
    pub(crate) fn cut(&self) {
        self.tracker.close();
        self.stop.cancel();
    }

    pub(crate) async fn all_tasks_ended(&self) {
        self.tracker.wait().await;
    }

    /// Ends a machine and removes all of it, however long that takes; the machine's sandbox is recorded
    /// as ended already, so a server that comes after us would sweep it.
    pub(crate) async fn remove_for_certain(&self, machine: Arc<dyn Machine>) {
        let mut pauses = Pauses::default();
        while let Err(error) = machine.kill().await {
            warn!(machine = %machine.id(), error = &error as &dyn std::error::Error, "machine not removed, trying again");
            pauses.wait().await;
        }
    }

    /// Ends and removes what there is of a machine nobody holds.
    pub(crate) async fn reap(&self, id: &MachineId) -> Result<(), EngineError> {
        match self.engine().adopt(id).await? {
            Some(machine) => machine.kill().await,
            None => Ok(()),
        }
    }

    /// [`Core::reap`], however long that takes.
    pub(crate) async fn reap_for_certain(&self, id: &MachineId) {
        let mut pauses = Pauses::default();
        while let Err(error) = self.reap(id).await {
            warn!(machine = %id, error = &error as &dyn std::error::Error, "machine not removed, trying again");
            pauses.wait().await;
        }
    }
}

fn take(count: &Arc<Count>) -> Option<Ticket> {
    let add = |now: usize| (now < count.max).then_some(now + 1);
    count.now.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).ok().map(|_| Ticket(Arc::clone(count)))
}

/// Longer and longer pauses.
#[derive(Default)]
pub(crate) struct Pauses {
    last: Option<Duration>,
}

impl Pauses {
    pub(crate) fn next(&mut self) -> Duration {
        let next = self.last.map_or(FIRST_PAUSE, |last| (last * 2).min(LONGEST_PAUSE));
        self.last = Some(next);
        next
    }

    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.next()).await;
    }
}
