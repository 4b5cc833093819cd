//! Making a sandbox: the steps between its first record and its first command.
//!
//! ```text
//! claim or name a machine -> record `creating` -> start -> resume -> link -> identity -> record `running`
//! ```
//!
//! The record names the machine before the machine is started or resumed; whatever stops us in between,
//! the next server finds the record and reaps the machine. A claimed machine that turns out dead is
//! replaced by a fresh one, once. Every way out of [`make`] but success leaves no machine.

use std::{path::Path, sync::Arc, time::Duration};

use stockade_engine::{EngineError, Machine, Urgency};
use stockade_model::{MachineId, Sandbox, Template};
use stockade_store::{Idempotency, IdempotencyRecord, NetworkRecord, TemplateRecord};
use stockade_wire::machine::Identity;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    ServiceError, StateOf,
    core::{Core, Pauses},
    error::store_error,
    identity::identity,
    live::{Source, Take},
    network::{Names, Told},
};

/// Tries to remove a machine before the caller is answered; further ones go on behind its back.
const TRIES_BEFORE_ANSWER: usize = 3;

/// What an owner needs to make its sandbox.
pub(crate) struct Order {
    pub(crate) template: TemplateRecord,
    /// A snapshot to start from, over the template.
    pub(crate) source: Option<Source>,
    pub(crate) lifetime: Duration,
    /// Its network and the names its guest knows, to be kept with its record.
    pub(crate) network: Option<NetworkRecord>,
    pub(crate) key: Option<Idempotency>,
}

/// What came of a request.
pub(crate) enum Created {
    New(Box<Sandbox>),
    /// The idempotency key stands for an earlier request.
    Existing(IdempotencyRecord),
}

/// Why there is no machine.
pub(crate) enum Unmade {
    Cancelled,
    Failed(ServiceError),
}

impl<E: Into<ServiceError>> From<E> for Unmade {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Unmade {
    /// As an error, for verbs that go on after a cancel.
    pub(crate) fn into_error(self) -> ServiceError {
        match self {
            Self::Failed(error) => error,
            Self::Cancelled => ServiceError::Busy {
                what: "the sandbox is being ended".to_owned(),
                retry_after: Duration::from_secs(1),
            },
        }
    }
}

/// Gives a recorded sandbox its machine; the record names it already.
pub(crate) async fn make(
    core: &Arc<Core>,
    sandbox: &mut Sandbox,
    order: &Order,
    claimed: Option<Arc<dyn Machine>>,
    cancel: &CancellationToken,
) -> Result<Arc<dyn Machine>, Unmade> {
    let template = &order.template;
    if let Some(machine) = claimed {
        match bring_up(core, &machine, sandbox, &template.template, cancel).await {
            Ok(()) => return Ok(machine),
            Err(unmade) => {
                remove_soon(core, Arc::clone(&machine)).await;
                let Unmade::Failed(error) = unmade else { return Err(unmade) };
                warn!(machine = %machine.id(), error = &error as &dyn std::error::Error, "pool machine was of no use");
            }
        }
        let fresh = MachineId::random();
        core.store().set_machine(&sandbox.id, &fresh).await.map_err(store_error)?;
        sandbox.machine = Some(fresh);
    }
    let id = sandbox.machine.clone().expect("a sandbox is recorded with the machine it will have");
    let from = order.source.as_ref().map_or(StartFrom::Template, StartFrom::of_snapshot);
    let machine = start(core, &id, &template.directory, from, cancel).await?;
    match bring_up(core, &machine, sandbox, &template.template, cancel).await {
        Ok(()) => Ok(machine),
        Err(unmade) => {
            remove_soon(core, machine).await;
            Err(unmade)
        }
    }
}

/// What a machine is started from, beside its template.
pub(crate) enum StartFrom<'a> {
    Template,
    State { directory: &'a Path, take: Take, of: StateOf },
}

impl<'a> StartFrom<'a> {
    pub(crate) fn of_snapshot(source: &'a Source) -> Self {
        Self::State { directory: &source.directory, take: source.take, of: StateOf::Snapshot(source.id.clone()) }
    }

    /// An error with the name of what cannot be used, if it is that.
    fn explain(&self, error: EngineError) -> ServiceError {
        let Self::State { directory, of, .. } = self else { return error.into() };
        let is_ours = match &error {
            EngineError::Mismatch { .. } => true,
            EngineError::Damaged { path, .. } => path.starts_with(directory),
            _ => false,
        };
        if is_ours { ServiceError::StateUnusable { of: of.clone(), source: error } } else { error.into() }
    }
}

/// Starts a machine, from saved state over the template if there is some. A cancel does not cut a start short,
/// only the wait for its turn.
pub(crate) async fn start(
    core: &Arc<Core>,
    id: &MachineId,
    template: &Path,
    from: StartFrom<'_>,
    cancel: &CancellationToken,
) -> Result<Arc<dyn Machine>, Unmade> {
    let _permit = tokio::select! {
        permit = core.restores.acquire() => permit.expect("the semaphore is never closed"),
        () = cancel.cancelled() => return Err(Unmade::Cancelled),
    };
    let patience = core.config.step_patience;
    let start = async {
        match &from {
            StartFrom::Template => core.engine().start(id, template, Urgency::Awaited).await,
            StartFrom::State { directory, take: Take::All, .. } => {
                core.engine().start_from_snapshot(id, template, directory, Urgency::Awaited).await
            }
            StartFrom::State { directory, take: Take::Disk, .. } => {
                core.engine().boot_from_snapshot(id, template, directory).await
            }
        }
    };
    match tokio::time::timeout(patience, start).await {
        Ok(started) => Ok(started.map_err(|error| from.explain(error))?),
        Err(_) => {
            let (core, id) = (Arc::clone(core), id.clone());
            core.clone().spawn(async move { core.reap_for_certain(&id).await });
            Err(EngineError::Emulator { step: "start", detail: format!("no answer within {patience:?}") }.into())
        }
    }
}

/// From a paused machine to one that takes this sandbox's commands. Each step may be repeated.
pub(crate) async fn bring_up(
    core: &Core,
    machine: &Arc<dyn Machine>,
    sandbox: &Sandbox,
    template: &Template,
    cancel: &CancellationToken,
) -> Result<(), Unmade> {
    let steps = async {
        // First: the guest never runs without its policy.
        let told = match &core.network {
            Some(network) => network.attach(core, machine, sandbox, Names::Stored).await?,
            None => Told::default(),
        };
        machine.resume().await?;
        introduce(core, machine, || identity(core, sandbox, template, told.clone())).await
    };
    let patience = core.config.step_patience;
    tokio::select! {
        done = tokio::time::timeout(patience, steps) => match done {
            Ok(done) => done,
            Err(_) => Err(EngineError::GuestSilent { waited: patience, console: machine.console_tail() }.into()),
        },
        exit = machine.exited() => {
            Err(EngineError::Gone { machine: machine.id().clone(), reason: format!("{exit:?}") }.into())
        }
        // Safe to cut: a machine that is not brought up is removed, whatever it was doing.
        () = cancel.cancelled() => Err(Unmade::Cancelled),
    }
}

/// Gives a guest its identity, in a session that stands. A guest may have answered the hello of a session and given it up
/// since; it would never answer what is said in it. So no answer in a while means another session, and after
/// each a longer while: a guest that is merely slow comes to its end, too.
async fn introduce(core: &Core, machine: &Arc<dyn Machine>, identity: impl Fn() -> Identity) -> Result<(), Unmade> {
    let mut patience = core.config.first_answer_patience;
    loop {
        let guest = machine.guest().await?;
        match tokio::time::timeout(patience, guest.set_identity(&identity())).await {
            Ok(told) => return Ok(told?),
            Err(_) => guest.close(),
        }
        warn!(machine = %machine.id(), ?patience, "no answer in the guest's session, trying another");
        patience *= 2;
    }
}

/// One step of a verb on a machine: bounded, cut short by a cancel or by the machine's end. Where it was cut
/// the machine is in an unknown state; the caller sets that right or ends it.
pub(crate) async fn step<T>(
    machine: &Arc<dyn Machine>,
    name: &'static str,
    patience: Duration,
    cancel: &CancellationToken,
    work: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, Unmade> {
    tokio::select! {
        done = tokio::time::timeout(patience, work) => match done {
            Ok(done) => Ok(done?),
            Err(_) => Err(EngineError::Emulator { step: name, detail: format!("no answer within {patience:?}") }.into()),
        },
        exit = machine.exited() => {
            Err(EngineError::Gone { machine: machine.id().clone(), reason: format!("{exit:?}") }.into())
        }
        () = cancel.cancelled() => Err(Unmade::Cancelled),
    }
}

/// Lets a machine run again that a step may have left halted.
pub(crate) async fn wake(core: &Core, machine: &Arc<dyn Machine>) {
    let mut pauses = Pauses::default();
    for _ in 0..TRIES_BEFORE_ANSWER {
        let never = CancellationToken::new();
        match step(machine, "resume", core.config.step_patience, &never, machine.resume()).await {
            Ok(()) => return,
            Err(Unmade::Failed(error)) => {
                warn!(machine = %machine.id(), error = &error as &dyn std::error::Error, "machine not resumed");
            }
            Err(Unmade::Cancelled) => unreachable!("nobody cancels"),
        }
        pauses.wait().await;
    }
}

/// Removes a machine; if that does not work at once, goes on trying without keeping the caller.
pub(crate) async fn remove_soon(core: &Arc<Core>, machine: Arc<dyn Machine>) {
    let mut pauses = Pauses::default();
    for _ in 0..TRIES_BEFORE_ANSWER {
        match machine.kill().await {
            Ok(()) => return,
            Err(error) => {
                info!(machine = %machine.id(), error = &error as &dyn std::error::Error, "machine not removed yet");
            }
        }
        pauses.wait().await;
    }
    let core = Arc::clone(core);
    core.clone().spawn(async move { core.remove_for_certain(machine).await });
}
