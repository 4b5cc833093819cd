use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use stockade_engine::Engine;
use stockade_model::Prices;
use stockade_store::{Archive, Store};

use crate::{
    NetworkConfig,
    clock::{Clock, SystemClock},
};

/// What a service is made of and how much it takes on.
#[derive(Clone)]
pub struct ServiceConfig {
    /// Runs the machines.
    pub engine: Arc<dyn Engine>,
    /// Keeps the records.
    pub store: Store,
    /// Where `snapshots/` and `paused/` are; on the file system of the engine's machines.
    pub state_dir: PathBuf,
    /// Restored, paused machines kept ready per template, at least; more, and some per snapshot, by what was asked
    /// for lately. Zero: none at all.
    pub pool_size: usize,
    /// Memory all of them may hold together, in MiB: what they do not share.
    pub pool_memory_mib: u64,
    /// What stands by for so long is hibernated if it has no rule of its own for it: a halted machine holds its memory.
    pub longest_standby: Option<Duration>,
    /// Longest lifetime a request may ask for.
    pub max_lifetime: Duration,
    /// Creates under way at the same time; more are refused.
    pub max_creates_in_flight: usize,
    /// Sandboxes alive at the same time; more are refused.
    pub max_sandboxes: usize,
    /// Restores under way at the same time; more wait. By default one per processor.
    pub concurrent_restores: usize,
    /// How long one step of a create may take before it counts as failed.
    pub step_patience: Duration,
    /// How long a guest may take to answer in a new session before another one is tried; each time twice as long.
    pub first_answer_patience: Duration,
    /// How long taking a snapshot may take, writing it out included.
    pub snapshot_patience: Duration,
    /// Children one fork may make.
    pub max_fork: u32,
    /// How long the record of an ended sandbox is kept.
    pub keep_ended: Duration,
    /// How often running sandboxes are asked how they do; zero: only when a client asks.
    pub metrics_period: Duration,
    /// How often usage is read and written; what a crash may lose. Zero: only at changes of state.
    pub meter_period: Duration,
    /// Where archived sandboxes are.
    pub archive: Option<Archive>,
    /// How long usage is kept.
    pub keep_usage: Duration,
    /// What usage costs.
    pub prices: Prices,
    /// Where guests get out; `None`: nowhere.
    pub network: Option<NetworkConfig>,
    /// Small files in every guest, by path, for programs that look for their sandbox there; [`ServiceConfig::SANDBOX`]
    /// and [`ServiceConfig::TEMPLATE`] in a text stand for the sandbox's id and the template's name.
    pub guest_files: BTreeMap<String, String>,
    /// The wall clock.
    pub clock: Arc<dyn Clock>,
}

impl ServiceConfig {
    /// How long a sandbox lives if the request does not say.
    pub const DEFAULT_LIFETIME: Duration = Duration::from_secs(300);
    /// The sandbox's id in `guest_files`.
    pub const SANDBOX: &str = "{sandbox}";
    /// The template's name.
    pub const TEMPLATE: &str = "{template}";

    /// The defaults; state is kept beside the store's database.
    pub fn new(engine: Arc<dyn Engine>, store: Store) -> Self {
        Self {
            engine,
            state_dir: store.directory(),
            store,
            pool_size: 2,
            pool_memory_mib: 1024,
            longest_standby: Some(Duration::from_secs(3600)),
            max_lifetime: Duration::from_secs(24 * 3600),
            max_creates_in_flight: 256,
            max_sandboxes: 10_000,
            concurrent_restores: std::thread::available_parallelism().map_or(1, usize::from),
            step_patience: Duration::from_secs(60),
            first_answer_patience: Duration::from_secs(4),
            snapshot_patience: Duration::from_secs(600),
            max_fork: 100,
            keep_ended: Duration::from_secs(7 * 24 * 3600),
            metrics_period: Duration::from_secs(5),
            meter_period: Duration::from_secs(5),
            archive: None,
            keep_usage: Duration::from_secs(400 * 24 * 3600),
            prices: Prices::default(),
            network: Some(NetworkConfig::default()),
            guest_files: BTreeMap::new(),
            clock: Arc::new(SystemClock),
        }
    }
}
