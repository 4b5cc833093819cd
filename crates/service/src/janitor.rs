use std::{sync::Arc, time::Duration};

use jiff::SignedDuration;
use tokio::time::interval;
use tracing::{debug, warn};

use crate::core::Core;

const PERIOD: Duration = Duration::from_secs(600);

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
            Ok::<_, stockade_store::StoreError>((sandboxes, core.store().purge_idempotency(core.now()).await?))
        };
        match purged.await {
            Ok((sandboxes, keys)) => debug!(sandboxes, keys, "old records purged"),
            Err(error) => warn!(error = &error as &dyn std::error::Error, "old records not purged"),
        }
    }
}
