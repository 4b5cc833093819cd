//! Another machine under the same id: a rollback to a snapshot, or a child that is promoted.
//!
//! ```text
//! rollback:  old machine halted -> new one started from the snapshot -> resume, link, identity
//!            -> record names the new machine -> old machine and saved state removed
//! promote:   child goes into standby and gives its machine away -> resume, link, identity of the parent
//!            -> one transaction: the child is gone, the parent has its machine -> old machine removed
//! ```
//!
//! Until the record the old machine is whole; a failure lets it go on as before, and the new one is removed or
//! goes back to the child. A server that comes after us sweeps a machine no record names.

use std::sync::Arc;

use stockade_engine::Machine;
use stockade_model::{EndCause, Lineage, MachineId, Sandbox, SandboxId, SandboxState, SnapshotId, Tier};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    ServiceError,
    create::{self, StartFrom, Unmade, bring_up, step, wake},
    error::store_error,
    live::{HandedOver, Live, Reply, Source, Take, Verb},
    owner::{Moved, Owner, Place},
};

impl Owner {
    pub(crate) async fn roll_back(&mut self, old: Option<Arc<dyn Machine>>, source: Source) -> Moved {
        let _move = self.core.begin_move();
        let core = Arc::clone(&self.core);
        let template = match self.template().await {
            Ok(template) => template,
            Err(error) => return Err((self.place(old), error)),
        };
        if let Err(error) = core.engine().check_capacity(&self.sandbox.shape) {
            return Err((self.place(old), error.into()));
        }
        self.show_as(SandboxState::Resuming);
        let running = old.clone().filter(|_| self.sandbox.state == SandboxState::Running);
        let (sandbox, cancel) = (self.sandbox.clone(), CancellationToken::new());
        let steps = async {
            if let Some(running) = &running {
                step(running, "pause", core.config.step_patience, &cancel, running.pause()).await?;
            }
            let id = MachineId::random();
            let new = create::start(&core, &id, &template.directory, StartFrom::of_snapshot(&source), &cancel).await?;
            match bring_up(&core, &new, &sandbox, &template.template, &cancel).await {
                Ok(()) => Ok(new),
                Err(unmade) => {
                    create::remove_soon(&core, new).await;
                    Err(unmade)
                }
            }
        };
        let (made, killed) = self.attend(&cancel, steps).await;
        if let Some(killer) = killed {
            if let Ok(new) = made {
                create::remove_soon(&core, new).await;
            }
            return Ok(self.killed(old, killer));
        }
        let new = match made {
            Ok(new) => new,
            Err(unmade) => return self.keep_old(old, unmade.into_error()).await,
        };
        let lineage =
            Lineage { snapshot: source.is_recorded.then(|| source.id.clone()), ..self.sandbox.lineage.clone() };
        let left_saved = (self.sandbox.saved.clone(), self.sandbox.tier);
        if let Err(error) = self.put(Sandbox { lineage, ..self.with(new.id()) }).await {
            create::remove_soon(&core, new).await;
            return self.keep_old(old, error).await;
        }
        Ok(self.replaced(old, left_saved, new).await)
    }

    pub(crate) async fn promote(&mut self, old: Option<Arc<dyn Machine>>, child: &Live, child_id: &SandboxId) -> Moved {
        let _move = self.core.begin_move();
        let core = Arc::clone(&self.core);
        let template = match self.template().await {
            Ok(template) => template,
            Err(error) => return Err((self.place(old), error)),
        };
        self.show_as(SandboxState::Resuming);
        let (sandbox, cancel) = (self.sandbox.clone(), CancellationToken::new());
        let steps = async {
            let handed = ask_for_machine(child, child_id, &cancel).await?;
            bring_up(&core, &handed.machine, &sandbox, &template.template, &cancel).await?;
            Ok::<_, Unmade>(handed)
        };
        // A machine that is not taken goes back to the child when `handed` is dropped.
        let (handed, killed) = self.attend(&cancel, steps).await;
        if let Some(killer) = killed {
            return Ok(self.killed(old, killer));
        }
        let handed = match handed {
            Ok(handed) => handed,
            Err(unmade) => return self.keep_old(old, unmade.into_error()).await,
        };
        let new = Arc::clone(&handed.machine);
        let promoted = self.with(new.id());
        let ending = self.ending(EndCause::Promoted { into: self.sandbox.id.clone() }, String::new());
        let recorded = core.store().promote(&promoted, self.sandbox.state, child_id, &ending).await;
        if let Err(error) = recorded.map_err(store_error) {
            return self.keep_old(old, error).await;
        }
        info!(child = %child_id, machine = %new.id(), "promoted");
        let left_saved = (self.sandbox.saved.take(), self.sandbox.tier);
        (self.sandbox, self.changed_at) = (promoted, ending.at);
        handed.taken.send(ending).ok();
        Ok(self.replaced(old, left_saved, new).await)
    }

    /// The record with another machine; a running sandbox keeps its deadline.
    fn with(&self, machine: &MachineId) -> Sandbox {
        let deadline = self.sandbox.deadline;
        let changed = self.awake(machine.clone(), None);
        if self.sandbox.state == SandboxState::Running { Sandbox { deadline, ..changed } } else { changed }
    }

    async fn keep_old(&mut self, old: Option<Arc<dyn Machine>>, error: ServiceError) -> Moved {
        let is_running = self.sandbox.state == SandboxState::Running;
        if let Some(machine) = old.as_ref().filter(|_| is_running) {
            wake(&self.core, machine).await;
        }
        self.show(old.clone().filter(|_| is_running));
        Err((self.place(old), error))
    }

    /// The record names the new machine; what is left of the old one goes.
    async fn replaced(
        &mut self,
        old: Option<Arc<dyn Machine>>,
        (saved, tier): (Option<SnapshotId>, Option<Tier>),
        new: Arc<dyn Machine>,
    ) -> Place {
        let core = Arc::clone(&self.core);
        self.session.close();
        self.arrived(&new);
        if let Some(old) = old {
            create::remove_soon(&core, old).await;
        }
        if let Some(saved) = saved
            && let Err(error) = core.forget_saved(&saved, tier).await
        {
            warn!(%saved, error = &error as &dyn std::error::Error, "saved state not removed; the next start does");
        }
        Place::Running(new)
    }

    /// Gives the halted machine away, and takes it back if it is not wanted after all.
    pub(crate) async fn hand_over(
        &mut self,
        machine: Arc<dyn Machine>,
        reply: Reply<HandedOver>,
        was_running: bool,
    ) -> Place {
        let (taken, outcome) = oneshot::channel();
        reply.send(Ok(HandedOver { machine: Arc::clone(&machine), taken })).ok();
        match self.attend(&CancellationToken::new(), outcome).await {
            (Ok(ending), killed) => {
                if let Some((_, killer)) = killed {
                    let (id, ending) = (self.sandbox.id.clone(), Box::new(ending.clone()));
                    killer.send(Err(ServiceError::SandboxEnded { id, ending })).ok();
                }
                Place::Taken(ending)
            }
            (Err(_), Some(killer)) => self.killed(Some(machine), killer),
            // It may run already, as somebody else: halted and with its own identity it is itself again.
            (Err(_), None) => {
                let never = CancellationToken::new();
                step(&machine, "pause", self.core.config.step_patience, &never, machine.pause()).await.ok();
                if !was_running {
                    return Place::Standby(machine);
                }
                match self.resume(Some(machine), None, Take::All).await {
                    Ok(place) | Err((place, _)) => place,
                }
            }
        }
    }
}

async fn ask_for_machine(child: &Live, id: &SandboxId, cancel: &CancellationToken) -> Result<HandedOver, Unmade> {
    tokio::select! {
        handed = child.ask(|reply| Verb::HandOver { reply }) => match handed {
            Some(handed) => Ok(handed?),
            None => Err(ServiceError::SandboxNotFound { id: id.to_string() }.into()),
        },
        () = cancel.cancelled() => Err(Unmade::Cancelled),
    }
}
