//! What a new server does with what the last one left.
//!
//! | record says | machine is there | machine is gone |
//! |---|---|---|
//! | creating | reaped, `failed` | `failed` |
//! | killing | reaped, `gone` with the recorded cause | the same |
//! | running | adopted (and ended at once if its deadline has passed) | `gone`, host lost |
//!
//! Then every machine without a record is swept. Requests are taken after that only.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::StreamExt;
use stockade_model::{EndCause, Ending, MachineId, Sandbox, SandboxState};
use tracing::{info, warn};

use crate::{
    ServiceError,
    core::Core,
    error::{chain, store_error},
    live::Live,
    owner::Owner,
};

const AT_ONCE: usize = 16;
/// How long the start waits for the end of sandboxes whose deadline passed while no server ran.
const WAIT_FOR_EXPIRED: Duration = Duration::from_secs(30);

pub(crate) async fn adopt_all(core: &Arc<Core>) -> Result<(), ServiceError> {
    let records = core.store().unfinished().await.map_err(store_error)?;
    let found = futures::stream::iter(records)
        .map(async |(sandbox, intended)| settle(core, sandbox, intended).await)
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    let mut adopted = Vec::new();
    for settled in found {
        adopted.extend(settled?);
    }
    let keep: BTreeSet<MachineId> =
        adopted.iter().filter_map(|live: &Live| live.view.borrow().sandbox.machine.clone()).collect();
    match core.engine().sweep(&keep).await {
        Ok(swept) if swept.is_empty() => {}
        Ok(swept) => info!(machines = swept.len(), "removed machines without a sandbox"),
        // They hold resources, but nobody's sandbox: no reason to refuse service.
        Err(error) => warn!(error = &error as &dyn std::error::Error, "not all machines without a sandbox are removed"),
    }
    let now = core.now();
    let expired = adopted.iter().filter(|live| live.view.borrow().sandbox.deadline <= now);
    let ends = futures::future::join_all(expired.map(Live::ended));
    if tokio::time::timeout(WAIT_FOR_EXPIRED, ends).await.is_err() {
        warn!("sandboxes whose deadline has passed are still being ended");
    }
    Ok(())
}

/// One record. `Some`: it has an owner again.
async fn settle(core: &Arc<Core>, sandbox: Sandbox, intended: Option<Ending>) -> Result<Option<Live>, ServiceError> {
    let machine = match &sandbox.machine {
        None => None,
        Some(id) => match core.engine().adopt(id).await {
            Ok(machine) => machine,
            Err(error) => {
                let detail = format!("its machine could not be taken over: {}", chain(&error));
                return finish(core, &sandbox, intended, detail).await;
            }
        },
    };
    match (sandbox.state, machine) {
        (SandboxState::Running, Some(machine)) => {
            info!(id = %sandbox.id, machine = %machine.id(), "adopted");
            Ok(Some(Owner::spawn_adopted(core, sandbox, machine)))
        }
        (_, machine) => {
            if let Some(machine) = machine {
                // What this leaves is swept: the machine is not kept.
                if let Err(error) = machine.kill().await {
                    warn!(machine = %machine.id(), error = &error as &dyn std::error::Error, "machine not removed");
                }
            }
            let detail = match sandbox.state {
                SandboxState::Creating => "the server ended while it was being made",
                _ => "its machine was not there when the server came back",
            };
            finish(core, &sandbox, intended, detail.to_owned()).await
        }
    }
}

async fn finish(
    core: &Core,
    sandbox: &Sandbox,
    intended: Option<Ending>,
    detail: String,
) -> Result<Option<Live>, ServiceError> {
    let found = |cause| Ending { at: core.now(), cause, detail };
    let (state, ending) = match (sandbox.state, intended) {
        (SandboxState::Creating, _) => (SandboxState::Failed, found(EndCause::CreateFailed)),
        (SandboxState::Killing, Some(intended)) => (SandboxState::Gone, intended),
        _ => (SandboxState::Gone, found(EndCause::HostLost)),
    };
    info!(id = %sandbox.id, cause = ?ending.cause, detail = ending.detail, "recorded as {state}");
    core.store().finish(&sandbox.id, state, &ending).await.map_err(store_error)?;
    Ok(None)
}
