//! What a new server does with what the last one left.
//!
//! | record says | machine is there | machine is gone |
//! |---|---|---|
//! | creating | reaped, `failed` | `failed` |
//! | killing | reaped, `gone` with the recorded cause | the same |
//! | running | resumed, adopted (and its deadline obeyed if it has passed) | `gone`, host lost |
//! | pausing | the pause is undone: runs on, or stands by if it did | paused or stopped if its directory is whole, else `gone` |
//! | paused, standby | halted, adopted | `gone`, host lost |
//! | paused, hibernated; stopped | (none in the record) | adopted if its directory is there, else `gone` |
//! | paused or stopped, archived | (none in the record) | adopted as it is |
//! | resuming, archived (of an earlier version) | reaped, paused | paused |
//! | resuming, machine whole | brought up | back to its directory |
//! | resuming | reaped, back to its directory | back to its directory |
//!
//! Then every machine and directory without a record is swept. Requests are taken after that only.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::StreamExt;
use stockade_engine::{Machine, SnapshotScope};
use stockade_model::{EndCause, Ending, MachineId, OnTimeout, Sandbox, SandboxState, Tier};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    ServiceError,
    core::Core,
    create::{step, wake},
    dirs::{Kind, bytes_of},
    error::{chain, store_error},
    live::Live,
    meter::{self, Past},
    network::Names,
    owner::{Owner, Place},
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
    sweep_directories(core, &adopted).await?;
    let keep: BTreeSet<MachineId> =
        adopted.iter().filter_map(|live: &Live| live.view.borrow().sandbox.machine.clone()).collect();
    match core.engine().sweep(&keep).await {
        Ok(swept) if swept.is_empty() => {}
        Ok(swept) => info!(machines = swept.len(), "removed machines without a sandbox"),
        // They hold resources, but nobody's sandbox: no reason to refuse service.
        Err(error) => warn!(error = &error as &dyn std::error::Error, "not all machines without a sandbox are removed"),
    }
    let now = core.now();
    // Its owner may have begun already.
    let is_over = |sandbox: &Sandbox| {
        matches!(sandbox.state, SandboxState::Running | SandboxState::Killing)
            && sandbox.rules.on_timeout == OnTimeout::Kill
            && sandbox.deadline <= now
    };
    let expired = adopted.iter().filter(|live| is_over(&live.view.borrow().sandbox));
    let ends = futures::future::join_all(expired.map(Live::ended));
    if tokio::time::timeout(WAIT_FOR_EXPIRED, ends).await.is_err() {
        warn!("sandboxes whose deadline has passed are still being ended");
    }
    Ok(())
}

/// Finishes deletes, removes what was never finished, and what has no record.
async fn sweep_directories(core: &Arc<Core>, adopted: &[Live]) -> Result<(), ServiceError> {
    let mut kept = Vec::new();
    for (snapshot, is_ready) in core.store().all_snapshots().await.map_err(store_error)? {
        if is_ready {
            kept.push(snapshot);
        } else {
            core.remove_snapshot(&snapshot.id).await?;
        }
    }
    let snapshots = kept.iter().map(|snapshot| snapshot.id.clone()).collect();
    let is_archived = |sandbox: &Sandbox| sandbox.tier == Some(Tier::Archived);
    let saved = |live: &Live| live.view.borrow().sandbox.saved.clone();
    let (archived, paused): (Vec<_>, Vec<_>) =
        adopted.iter().partition(|live| is_archived(&live.view.borrow().sandbox));
    let paused = paused.into_iter().filter_map(saved).collect();
    if let Err(error) = core.sweep_archive(&archived.into_iter().filter_map(saved).collect()).await {
        warn!(error = &error as &dyn std::error::Error, "what nobody needs in the archive stays");
    }
    for (kind, keep) in [(Kind::Snapshot, snapshots), (Kind::Paused, paused)] {
        match core.dirs.sweep(kind, keep).await {
            Ok(0) => {}
            Ok(swept) => info!(?kind, swept, "removed saved state without a record"),
            Err(error) => warn!(?kind, error = &error as &dyn std::error::Error, "saved state without a record stays"),
        }
    }
    meter::adopt_snapshots(core, kept).await
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
    let place = match (sandbox.state, machine) {
        (SandboxState::Creating | SandboxState::Killing, machine) => {
            reap(machine).await;
            return finish(core, &sandbox, intended, "the server ended while it was being made".to_owned()).await;
        }
        (state, machine) => find_place(core, sandbox.clone(), state, machine).await?,
    };
    let Some((sandbox, place)) = place else {
        let detail = "its machine, or what was kept of it, was not there when the server came back";
        return finish(core, &sandbox, intended, detail.to_owned()).await;
    };
    info!(id = %sandbox.id, state = %sandbox.state, "adopted");
    let past = Past::of(core, &sandbox).await?;
    let bytes = match (&sandbox.saved, &core.config.archive) {
        (Some(saved), Some(archive)) if sandbox.tier == Some(Tier::Archived) => {
            match past.held(&sandbox) {
                // Asking the archive for each would keep the server from starting.
                Some(bytes) => bytes,
                // Not known is not free of charge, but no reason not to start.
                None => archive.bytes(saved).await.ok().flatten().unwrap_or_default(),
            }
        }
        (Some(saved), _) => bytes_of(&core.dirs.path(Kind::Paused, saved)),
        (None, _) => 0,
    };
    let machine = match &place {
        Place::Running(machine) | Place::Standby(machine) | Place::Resuming(machine) => Some(machine),
        _ => None,
    };
    core.meter.adopt(&sandbox, machine, bytes, past, core.now());
    Ok(Some(Owner::spawn_adopted(core, sandbox, place)))
}

/// Where a sandbox that has run goes on, and its record as it is then; `None`: nothing is left of it.
async fn find_place(
    core: &Arc<Core>,
    sandbox: Sandbox,
    state: SandboxState,
    machine: Option<Arc<dyn Machine>>,
) -> Result<Option<(Sandbox, Place)>, ServiceError> {
    if let (Some(network), Some(machine)) = (&core.network, &machine) {
        // Its old connections are reset by the gateway as they are used.
        if let Err(error) = network.attach(core, machine, &sandbox, Names::AfterCrash).await {
            warn!(id = %sandbox.id, error = &error as &dyn std::error::Error, "goes on without a network");
        }
    }
    let found = match (state, machine) {
        (SandboxState::Running, Some(machine)) => {
            // A snapshot that was cut off has left it halted.
            wake(core, &machine).await;
            Some((sandbox, Place::Running(machine)))
        }
        (SandboxState::Pausing, Some(machine)) if sandbox.remaining.is_none() => {
            wake(core, &machine).await;
            Some((
                Sandbox { state: SandboxState::Running, tier: None, saved: None, ..sandbox },
                Place::Running(machine),
            ))
        }
        (SandboxState::Paused | SandboxState::Pausing, Some(machine)) => {
            halt(core, &machine).await;
            let tier = Some(Tier::Standby);
            Some((Sandbox { state: SandboxState::Paused, tier, saved: None, ..sandbox }, Place::Standby(machine)))
        }
        (SandboxState::Resuming, Some(machine)) if sandbox.tier == Some(Tier::Standby) => {
            Some((sandbox, Place::Resuming(machine)))
        }
        (SandboxState::Resuming, machine) if sandbox.tier == Some(Tier::Archived) => {
            reap(machine).await;
            Some((Sandbox { state: SandboxState::Paused, machine: None, ..sandbox }, Place::Saved))
        }
        (SandboxState::Pausing | SandboxState::Resuming, machine) => {
            reap(machine).await;
            saved(core, sandbox).await
        }
        // That it is there is found out when it is wanted: asking for each would keep the server from starting.
        (SandboxState::Paused | SandboxState::Stopped, None) if sandbox.tier == Some(Tier::Archived) => {
            Some((sandbox, Place::Saved))
        }
        (SandboxState::Paused | SandboxState::Stopped, None) => {
            let is_there = |id| core.dirs.path(Kind::Paused, id).is_dir();
            sandbox.saved.as_ref().is_some_and(is_there).then_some((sandbox, Place::Saved))
        }
        _ => None,
    };
    if let Some((sandbox, _)) = &found
        && sandbox.state != state
    {
        core.store().put_life(sandbox, state, core.now()).await.map_err(store_error)?;
    }
    Ok(found)
}

/// A sandbox whose machine is gone, from its directory if that is whole.
async fn saved(core: &Core, sandbox: Sandbox) -> Option<(Sandbox, Place)> {
    let directory = core.dirs.path(Kind::Paused, sandbox.saved.as_ref()?);
    let template = core.store().template(&sandbox.workspace, sandbox.template.as_str()).await.ok()??;
    let report = core.engine().check_snapshot(&template.directory, &directory).await.ok()?;
    let (state, tier) = match report.scope {
        SnapshotScope::MemoryAndDisk => (SandboxState::Paused, Some(Tier::Hibernated)),
        SnapshotScope::DiskOnly => (SandboxState::Stopped, None),
    };
    let left = Duration::try_from(sandbox.deadline.duration_since(core.now())).unwrap_or_default();
    let sandbox = Sandbox {
        state,
        tier,
        machine: None,
        remaining: sandbox.remaining.or(Some(left)),
        idle_since: sandbox.idle_since.or(Some(core.now())),
        ..sandbox
    };
    Some((sandbox, Place::Saved))
}

async fn halt(core: &Core, machine: &Arc<dyn Machine>) {
    let never = CancellationToken::new();
    if step(machine, "pause", core.config.step_patience, &never, machine.pause()).await.is_err() {
        warn!(machine = %machine.id(), "a machine in standby was not halted");
    }
}

async fn reap(machine: Option<Arc<dyn Machine>>) {
    if let Some(machine) = machine {
        // What this leaves is swept: the machine is not kept.
        if let Err(error) = machine.kill().await {
            warn!(machine = %machine.id(), error = &error as &dyn std::error::Error, "machine not removed");
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
    core.meter.adopt_ended(sandbox, Past::of(core, sandbox).await?);
    core.meter.settle(core).await;
    core.store().finish(&sandbox.id, state, &ending).await.map_err(store_error)?;
    Ok(None)
}
