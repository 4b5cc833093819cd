use std::{sync::Arc, time::Duration};

use jiff::SignedDuration;
use tokio::time::interval;
use tracing::{debug, info, warn};

use crate::{ServiceError, core::Core, error::store_error};

const PERIOD: Duration = Duration::from_secs(600);
/// Expired snapshots cannot be used from the moment on; this is about their bytes.
const EXPIRY_PERIOD: Duration = Duration::from_secs(15);

/// Forgets records that are older than anybody asks for: never ends by itself.
pub(crate) async fn sweep_records(core: Arc<Core>) {
    let mut ticks = interval(PERIOD);
    loop {
        ticks.tick().await;
        let kept = SignedDuration::try_from(core.config.keep_ended).unwrap_or(SignedDuration::MAX);
        // A time before all times: nothing is that old.
        let before = core.now().checked_sub(kept).unwrap_or(jiff::Timestamp::MIN);
        let purged = async {
            let sandboxes = core.store().purge_ended(before).await?;
            let kept = SignedDuration::try_from(core.config.keep_usage).unwrap_or(SignedDuration::MAX);
            core.store().purge_usage(core.now().checked_sub(kept).unwrap_or(jiff::Timestamp::MIN)).await?;
            core.store().purge_ssh_keys(core.now()).await?;
            if let Some(network) = &core.network {
                let (age, most) = network.keep_audit;
                let age = SignedDuration::try_from(age).unwrap_or(SignedDuration::MAX);
                core.store().purge_audit(core.now().checked_sub(age).unwrap_or(jiff::Timestamp::MIN), most).await?;
            }
            Ok::<_, stockade_store::StoreError>((sandboxes, core.store().purge_idempotency(core.now()).await?))
        };
        match purged.await {
            Ok((sandboxes, keys)) => debug!(sandboxes, keys, "old records purged"),
            Err(error) => warn!(error = &error as &dyn std::error::Error, "old records not purged"),
        }
    }
}

/// Deletes snapshots that have expired: never ends by itself.
pub(crate) async fn expire_snapshots(core: Arc<Core>) {
    let mut ticks = interval(EXPIRY_PERIOD);
    loop {
        ticks.tick().await;
        if let Err(error) = expire(&core).await {
            warn!(error = &error as &dyn std::error::Error, "expired snapshots not deleted, trying again");
        }
    }
}

async fn expire(core: &Core) -> Result<(), ServiceError> {
    for id in core.store().expired_snapshots(core.now()).await.map_err(store_error)? {
        if !core.dirs.is_leased(&id) && core.store().begin_snapshot_delete(&id).await.map_err(store_error)? {
            core.remove_snapshot(&id).await?;
            info!(snapshot = %id, "expired");
        }
    }
    Ok(())
}
