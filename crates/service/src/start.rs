//! From records and leftovers to a service, and back.

use std::{sync::Arc, time::Duration};

use tracing::{info, warn};

use crate::{
    Service, ServiceConfig, ServiceError, adopt, core::Core, janitor, meter, metrics, pool, service::Handle, templates,
};

/// How long a shutdown waits for creates, pauses, snapshots and the like that are under way.
const WAIT_FOR_CREATES: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Service {
    /// Takes over what an earlier server left, then serves.
    ///
    /// # Errors
    /// The store cannot be read or written.
    pub async fn start(config: ServiceConfig) -> Result<Self, ServiceError> {
        let core = Arc::new(Core::new(config)?);
        // Made before anything is adopted: if this fails half-way, the owner tasks end with it.
        let service = Self { handle: Arc::new(Handle { core: Arc::clone(&core) }) };
        core.dirs.prepare().await?;
        if let Some(network) = &core.network {
            core.spawn(Arc::clone(&network.audit).write(core.store().clone()));
            core.spawn(Arc::clone(network).keep_names());
        }
        adopt::adopt_all(&core).await?;
        templates::fill_pool(&core).await?;
        if core.config.pool_size > 0 {
            core.spawn(pool::refill(Arc::clone(&core)));
        }
        if !core.config.metrics_period.is_zero() {
            core.spawn(metrics::sample_all(Arc::clone(&core), core.config.metrics_period));
        }
        if !core.config.meter_period.is_zero() {
            core.spawn(meter::run(Arc::clone(&core), core.config.meter_period));
        }
        core.spawn(janitor::expire_snapshots(Arc::clone(&core)));
        core.spawn(janitor::sweep_records(Arc::clone(&core)));
        info!("serving");
        Ok(service)
    }

    /// Takes no new sandboxes, lets those being made, paused, resumed or snapshotted arrive, removes the pool and
    /// ends. Sandboxes run on; the next server adopts them.
    pub async fn shutdown(&self) {
        let core = &self.handle.core;
        core.close();
        let creates = async {
            while core.creates_in_flight() + core.moves_in_flight() > 0 {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        if tokio::time::timeout(WAIT_FOR_CREATES, creates).await.is_err() {
            warn!("what is under way is cut off; the next start finishes or undoes it");
        }
        for machine in core.pool.drain() {
            if let Err(error) = machine.kill().await {
                warn!(machine = %machine.id(), error = &error as &dyn std::error::Error, "pool machine not removed; the next start does");
            }
        }
        // A refill under way holds a permit until its machine, for which there is no pool now, is removed.
        let all = u32::try_from(core.config.concurrent_restores.max(1)).unwrap_or(u32::MAX);
        let restores = core.restores.acquire_many(all);
        if tokio::time::timeout(WAIT_FOR_CREATES, restores).await.is_err() {
            warn!("a restore under way is cut off; the next start cleans up");
        }
        core.engine().close().await;
        if let Err(error) = core.meter.flush(core).await {
            warn!(error = &error as &dyn std::error::Error, "last usage not written");
        }
        if let Some(network) = &core.network {
            network.store_all_names().await;
            network.audit.flush().await;
        }
        self.cut().await;
    }

    /// Cuts all work off where it stands, as a kill of the process would; the next start cleans up.
    pub async fn cut(&self) {
        let core = &self.handle.core;
        core.cut();
        core.all_tasks_ended().await;
    }
}
