//! Coming back from a tier.
//!
//! ```text
//! from standby:  resume -> link -> identity -> record `running`
//! from files:    record `resuming` + machine -> start from the directory -> record that it is whole
//!                -> resume -> link -> identity -> record `running` -> directory removed
//! from the archive: first the directory (see archive.rs), then as from files
//! ```
//!
//! The identity brings the clock up to date, and in what was saved and may be there twice fresh random numbers, before
//! anybody is served; a halted machine is who it was and is told the time alone. A failure leaves the sandbox as paused as it was. Once the machine is recorded as whole (`resuming`, tier `standby`) a
//! server that comes after us goes on with it instead of starting another from the same instant: what the guest
//! has done since does not happen twice.

use std::{sync::Arc, time::Duration};

use stockade_engine::Machine;
use stockade_model::{MachineId, Sandbox, SandboxState, SnapshotId, Tier};
use stockade_store::TemplateRecord;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    ServiceError, StateOf,
    clock::deadline_after,
    create::{self, StartFrom, Unmade, bring_up, step},
    dirs::Kind,
    error::store_error,
    live::{Take, Target},
    owner::{Killer, Moved, Owner, Place},
};

impl Owner {
    /// `standby`: the halted machine; else there is saved state.
    pub(crate) async fn resume(
        &mut self,
        standby: Option<Arc<dyn Machine>>,
        lifetime: Option<Duration>,
        take: Take,
    ) -> Moved {
        let _move = self.core.begin_move();
        match standby {
            Some(machine) if take == Take::Disk => {
                // Only a disk that was written out is without its memory whole.
                let moved = self.put_down(machine, Target::Stopped).await?;
                if matches!(moved, Place::Saved) { self.leave_saved(lifetime, Take::All).await } else { Ok(moved) }
            }
            Some(machine) => self.leave_standby(machine, lifetime).await,
            None => self.leave_saved(lifetime, take).await,
        }
    }

    async fn leave_standby(&mut self, machine: Arc<dyn Machine>, lifetime: Option<Duration>) -> Moved {
        let core = Arc::clone(&self.core);
        let template = match self.template().await {
            Ok(template) => template,
            Err(error) => return Err((Place::Standby(machine), error)),
        };
        self.show_as(SandboxState::Resuming);
        let (sandbox, cancel) = (self.sandbox.clone(), CancellationToken::new());
        let (up, killed) = self.attend(&cancel, bring_up(&core, &machine, &sandbox, &template.template, &cancel)).await;
        if let Some(killer) = killed {
            return Ok(self.killed(Some(machine), killer));
        }
        let up = match up {
            Ok(()) => self.put(self.awake(machine.id().clone(), lifetime)).await,
            Err(unmade) => Err(unmade.into_error()),
        };
        if let Err(error) = up {
            let never = CancellationToken::new();
            if step(&machine, "pause", core.config.step_patience, &never, machine.pause()).await.is_err() {
                warn!(machine = %machine.id(), "not resumed and not halted again either");
            }
            self.show(None);
            return Err((Place::Standby(machine), error));
        }
        self.arrived(&machine);
        Ok(Place::Running(machine))
    }

    async fn leave_saved(&mut self, lifetime: Option<Duration>, take: Take) -> Moved {
        let core = Arc::clone(&self.core);
        let saved = self.sandbox.saved.clone().expect("a sandbox without a machine is saved");
        let cancel = CancellationToken::new();
        if self.sandbox.tier == Some(Tier::Archived) {
            let (brought, killed) = self.bring_from_archive(&saved, &cancel).await;
            if let Some(killer) = killed {
                return Ok(self.killed(None, killer));
            }
            if let Err(unmade) = brought {
                self.show(None);
                return Err((Place::Saved, unmade.into_error()));
            }
        }
        let has_memory = self.sandbox.tier.is_some() && take == Take::All;
        let machine = MachineId::random();
        let prepared = async {
            let template = self.template().await?;
            core.engine().check_capacity(&self.sandbox.shape)?;
            let (state, id) = (SandboxState::Resuming, Some(machine.clone()));
            self.put(Sandbox { state, machine: id, ..self.sandbox.clone() }).await?;
            Ok(template)
        };
        let template = match prepared.await {
            Ok(template) => template,
            Err(error) => return Err((Place::Saved, error)),
        };
        self.show(None);
        let directory = core.dirs.path(Kind::Paused, &saved);
        let from = StartFrom::State { directory: &directory, take, of: StateOf::Sandbox(self.sandbox.id.clone()) };
        let start = create::start(&core, &machine, &template.directory, from, &cancel);
        let (started, killed) = self.attend(&cancel, start).await;
        if let Some(killer) = killed {
            return Ok(self.killed(started.ok(), killer));
        }
        let machine = match started {
            Ok(machine) => machine,
            Err(unmade) => return self.back_to_saved(unmade.into_error()).await,
        };
        if has_memory && let Err(error) = self.put(Sandbox { tier: Some(Tier::Standby), ..self.sandbox.clone() }).await
        {
            create::remove_soon(&core, machine).await;
            return self.back_to_saved(error).await;
        }
        self.bring_back(machine, lifetime).await
    }

    /// Its directory, out of the archive; then it is hibernated or stopped as it was before.
    async fn bring_from_archive(
        &mut self,
        saved: &SnapshotId,
        cancel: &CancellationToken,
    ) -> (Result<(), Unmade>, Option<Killer>) {
        let (core, of) = (Arc::clone(&self.core), self.sandbox.id.clone());
        if let Err(error) = core.engine().check_capacity(&self.sandbox.shape) {
            return (Err(error.into()), None);
        }
        self.show_as(SandboxState::Resuming);
        let (brought, killed) = self.attend(cancel, core.unarchive(&of, saved, cancel)).await;
        if killed.is_some() || brought.is_err() {
            return (brought, killed);
        }
        let tier = (self.sandbox.state == SandboxState::Paused).then_some(Tier::Hibernated);
        let put = self.put(Sandbox { tier, ..self.sandbox.clone() }).await;
        if put.is_ok() {
            // Should it go back to its directory from here on, the archive has no part in it.
            core.remove_from_archive_soon(saved.clone());
        }
        (put.map_err(Unmade::from), None)
    }

    /// From a machine that is restored and whole to one that takes commands.
    pub(crate) async fn bring_back(&mut self, machine: Arc<dyn Machine>, lifetime: Option<Duration>) -> Moved {
        let core = Arc::clone(&self.core);
        let sandbox = self.sandbox.clone();
        let cancel = CancellationToken::new();
        let template = self.template().await;
        let steps = async {
            let template = template?;
            bring_up(&core, &machine, &sandbox, &template.template, &cancel).await
        };
        let (up, killed) = self.attend(&cancel, steps).await;
        if let Some(killer) = killed {
            return Ok(self.killed(Some(machine), killer));
        }
        if let Err(unmade) = up {
            create::remove_soon(&core, machine).await;
            return self.back_to_saved(unmade.into_error()).await;
        }
        let saved = self.sandbox.saved.clone();
        self.put_for_certain(self.awake(machine.id().clone(), lifetime)).await;
        self.arrived(&machine);
        if let Some(saved) = saved
            && let Err(error) = core.dirs.remove(Kind::Paused, &saved).await
        {
            warn!(%saved, error = &error as &dyn std::error::Error, "saved state not removed; the next start does");
        }
        Ok(Place::Running(machine))
    }

    /// As it was before; there is no machine.
    async fn back_to_saved(&mut self, error: ServiceError) -> Moved {
        let (state, tier) = match self.sandbox.tier {
            Some(Tier::Archived) => (SandboxState::Paused, Some(Tier::Archived)),
            Some(_) => (SandboxState::Paused, Some(Tier::Hibernated)),
            None => (SandboxState::Stopped, None),
        };
        self.put_for_certain(Sandbox { state, tier, machine: None, ..self.sandbox.clone() }).await;
        self.show(None);
        Err((Place::Saved, error))
    }

    /// The record of a sandbox that runs again. Its deadline: as asked for, else as much later as it stood
    /// still, else (that had run out) the lifetime it was given.
    pub(crate) fn awake(&self, machine: MachineId, lifetime: Option<Duration>) -> Sandbox {
        let sandbox = &self.sandbox;
        let left = lifetime.or(sandbox.remaining.filter(|left| !left.is_zero())).unwrap_or(sandbox.lifetime);
        Sandbox {
            state: SandboxState::Running,
            machine: Some(machine),
            deadline: deadline_after(self.core.clock().now(), left),
            remaining: None,
            tier: None,
            saved: None,
            idle_since: None,
            ..sandbox.clone()
        }
    }

    /// Shows that it takes commands.
    pub(crate) fn arrived(&mut self, machine: &Arc<dyn Machine>) {
        (self.not_before, self.pauses) = (None, <_>::default());
        self.core.meter.enter(&self.sandbox, Some(machine), 0, self.changed_at);
        self.activity.touch();
        self.show(Some(Arc::clone(machine)));
    }

    pub(crate) async fn template(&self) -> Result<TemplateRecord, ServiceError> {
        let (workspace, id) = (&self.sandbox.workspace, self.sandbox.template.as_str());
        let found = self.core.store().template(workspace, id).await.map_err(store_error)?;
        found.ok_or_else(|| ServiceError::TemplateNotFound { name: id.to_owned() })
    }
}
