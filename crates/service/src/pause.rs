//! Going down a tier. One way for whoever asks: a client, the deadline, an idle rule.
//!
//! ```text
//! standby:     halt -> record `paused`, standby -> streams end
//! hibernated:  record `pausing` + directory -> halt -> snapshot into it -> record `paused`, hibernated
//!              -> streams end -> machine removed
//! stopped:     record `pausing` + directory -> streams end -> file systems written out, disk into the directory
//!              -> record `stopped` -> machine removed
//! ```
//!
//! Until the last record the machine is whole and a failure lets it run on (or stand by) as before; a server
//! that comes after us does the same. From that record on the directory is what counts, and a machine that is
//! still there is swept. A halted machine loses nothing; for a stop the streams end first, so that nothing is
//! acknowledged that the disk does not hold.

use std::{path::Path, sync::Arc, time::Duration};

use stockade_engine::{Machine, SnapshotScope};
use stockade_model::{Sandbox, SandboxState, SnapshotId, Tier};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    ServiceError,
    core::Core,
    create::{self, Unmade, step, wake},
    dirs::{Kind, bytes_of},
    live::Target,
    owner::{Moved, Owner, Place},
};

impl Owner {
    /// From running, or deeper from standby.
    pub(crate) async fn put_down(&mut self, machine: Arc<dyn Machine>, target: Target) -> Moved {
        let _move = self.core.begin_move();
        match target {
            Target::Standby => self.enter_standby(machine).await,
            Target::Hibernated | Target::Stopped => self.enter_saved(machine, target).await,
            Target::Archived => match self.enter_saved(machine, Target::Hibernated).await? {
                Place::Saved => self.archive().await,
                place => Ok(place),
            },
        }
    }

    async fn enter_standby(&mut self, machine: Arc<dyn Machine>) -> Moved {
        let core = Arc::clone(&self.core);
        self.show_as(SandboxState::Pausing);
        let cancel = CancellationToken::new();
        let halt = step(&machine, "pause", core.config.step_patience, &cancel, machine.pause());
        let (halted, killed) = self.attend(&cancel, halt).await;
        if let Some(killer) = killed {
            return Ok(self.killed(Some(machine), killer));
        }
        let halted = match halted {
            Ok(()) => self.put(self.at_rest(SandboxState::Paused, Some(Tier::Standby))).await,
            Err(unmade) => Err(unmade.into_error()),
        };
        if let Err(error) = halted {
            wake(&core, &machine).await;
            self.show(Some(Arc::clone(&machine)));
            return Err((Place::Running(machine), error));
        }
        self.session.close();
        core.meter.enter(&self.sandbox, Some(&machine), 0, self.changed_at);
        self.show(None);
        Ok(Place::Standby(machine))
    }

    async fn enter_saved(&mut self, machine: Arc<dyn Machine>, target: Target) -> Moved {
        let core = Arc::clone(&self.core);
        let before = self.sandbox.clone();
        let saved = SnapshotId::random();
        let (state, tier) = match target {
            Target::Stopped => (SandboxState::Stopped, None),
            _ => (SandboxState::Paused, Some(Tier::Hibernated)),
        };
        let pausing = Sandbox { state: SandboxState::Pausing, tier, saved: Some(saved.clone()), ..before.clone() };
        if let Err(error) = self.put(pausing).await {
            self.show(Some(Arc::clone(&machine)).filter(|_| before.state == SandboxState::Running));
            return Err((self.place(Some(machine)), error));
        }
        self.show(None);
        if target == Target::Stopped {
            self.session.close();
        }
        let directory = core.dirs.path(Kind::Paused, &saved);
        let cancel = CancellationToken::new();
        let (put_away, killed) = self.attend(&cancel, put_away(&core, &machine, &directory, target, &cancel)).await;
        if let Some(killer) = killed {
            return Ok(self.killed(Some(machine), killer));
        }
        if let Err(unmade) = put_away {
            return self.undo(before, machine, unmade.into_error()).await;
        }
        if let Some(network) = &core.network {
            network.store_names_of(&self.sandbox.id).await;
        }
        let rested = Sandbox { machine: None, saved: Some(saved), ..self.at_rest(state, tier) };
        if let Err(error) = self.put(rested).await {
            return self.undo(before, machine, error).await;
        }
        self.session.close();
        core.meter.enter(&self.sandbox, None, bytes_of(&directory), self.changed_at);
        self.show(None);
        create::remove_soon(&core, machine).await;
        Ok(Place::Saved)
    }

    /// As it was before: the machine is whole.
    async fn undo(&mut self, before: Sandbox, machine: Arc<dyn Machine>, error: ServiceError) -> Moved {
        let core = Arc::clone(&self.core);
        let was_running = before.state == SandboxState::Running;
        if was_running {
            wake(&core, &machine).await;
        } else {
            let never = CancellationToken::new();
            // A machine that does not even halt is found dead by whoever needs it next.
            step(&machine, "pause", core.config.step_patience, &never, machine.pause()).await.ok();
        }
        if let Some(saved) = &self.sandbox.saved
            && let Err(error) = core.dirs.remove(Kind::Paused, saved).await
        {
            warn!(%saved, error = &error as &dyn std::error::Error, "half a pause not removed; the next start does");
        }
        self.put_for_certain(before).await;
        if was_running {
            self.show(Some(Arc::clone(&machine)));
        }
        Err((self.place(Some(machine)), error))
    }

    /// The record of a sandbox that no longer runs. Its deadline stands still from when it first did so.
    fn at_rest(&self, state: SandboxState, tier: Option<Tier>) -> Sandbox {
        let now = self.core.now();
        let left = Duration::try_from(self.sandbox.deadline.duration_since(now)).unwrap_or_default();
        let idle_since = now.checked_sub(jiff::SignedDuration::try_from(self.activity.idle()).unwrap_or_default());
        Sandbox {
            state,
            tier,
            saved: None,
            remaining: self.sandbox.remaining.or(Some(left)),
            idle_since: self.sandbox.idle_since.or(Some(idle_since.unwrap_or(now))),
            ..self.sandbox.clone()
        }
    }
}

async fn put_away(
    core: &Core,
    machine: &Arc<dyn Machine>,
    directory: &Path,
    target: Target,
    cancel: &CancellationToken,
) -> Result<(), Unmade> {
    let (quick, long) = (core.config.step_patience, core.config.snapshot_patience);
    let scope = if target == Target::Stopped {
        // The guest's help is needed, also of one in standby.
        step(machine, "resume", quick, cancel, machine.resume()).await?;
        SnapshotScope::DiskOnly
    } else {
        step(machine, "pause", quick, cancel, machine.pause()).await?;
        SnapshotScope::MemoryAndDisk
    };
    step(machine, "snapshot", long, cancel, machine.snapshot(directory, scope)).await.map(drop)
}
