//! Into the archive and back.
//!
//! ```text
//! archived:  directory into the archive -> record that it is there (tier `archived`) -> directory removed
//! back:      directory out of the archive, checked -> record that it is here -> removed from the archive
//! ```
//!
//! One that is hibernated or stopped goes there as what it is: its state stays, its tier says where it is kept. Until the
//! record says so nothing has moved, in either direction; what is in the archive without a record that says so, and what
//! is here of a sandbox that is there, is swept by the next server.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use stockade_engine::EngineError;
use stockade_model::{Sandbox, SandboxId, SandboxState, SnapshotId, Tier};
use stockade_store::{Archive, ArchiveError};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    ServiceError, StateOf,
    core::Core,
    create::Unmade,
    dirs::Kind,
    owner::{Moved, Owner, Place},
};

impl Owner {
    /// From hibernation, or from where it was stopped.
    pub(crate) async fn archive(&mut self) -> Moved {
        let core = Arc::clone(&self.core);
        let _move = core.begin_move();
        let (archive, saved) = match (core.archive(), self.sandbox.saved.clone()) {
            (Ok(archive), Some(saved)) => (archive, saved),
            (Err(error), _) => return Err((Place::Saved, error)),
            (Ok(_), None) => unreachable!("a sandbox without a machine is saved"),
        };
        self.show_as(SandboxState::Pausing);
        let directory = core.dirs.path(Kind::Paused, &saved);
        let cancel = CancellationToken::new();
        let work = bounded(core.config.snapshot_patience, &cancel, archive.put(&saved, &directory));
        let (put, killed) = self.attend(&cancel, work).await;
        if let Some(killer) = killed {
            return Ok(self.killed(None, killer));
        }
        let recorded = match put {
            Ok(bytes) => self.put(Sandbox { tier: Some(Tier::Archived), ..self.sandbox.clone() }).await.map(|()| bytes),
            Err(unmade) => Err(unmade.into_error()),
        };
        self.show(None);
        let bytes = match recorded {
            Ok(bytes) => bytes,
            // The directory is whole.
            Err(error) => return Err((Place::Saved, error)),
        };
        info!(%saved, bytes, "archived");
        core.meter.enter(&self.sandbox, None, bytes, self.changed_at);
        if let Err(error) = core.dirs.remove(Kind::Paused, &saved).await {
            warn!(%saved, error = &error as &dyn std::error::Error, "saved state not removed; the next start does");
        }
        Ok(Place::Saved)
    }
}

impl Core {
    /// Where archived sandboxes are.
    pub(crate) fn archive(&self) -> Result<&Archive, ServiceError> {
        self.config.archive.as_ref().ok_or_else(|| {
            let problem = "`archived` is not to be had: this server has no archive".to_owned();
            ServiceError::Invalid { field: "tier", problem }
        })
    }

    /// Brings the directory of a sandbox back; the archive has it still.
    pub(crate) async fn unarchive(
        &self,
        of: &SandboxId,
        saved: &SnapshotId,
        cancel: &CancellationToken,
    ) -> Result<(), Unmade> {
        // What an earlier try left.
        self.dirs.remove(Kind::Paused, saved).await?;
        let directory = self.dirs.path(Kind::Paused, saved);
        let work = self.archive()?.get(saved, &directory);
        bounded(self.config.snapshot_patience, cancel, work).await.map_err(|unmade| match unmade {
            Unmade::Failed(ServiceError::Archive(ArchiveError::Damaged { file, reason, .. })) => {
                let source = EngineError::Damaged { path: directory.join(file), reason };
                ServiceError::StateUnusable { of: StateOf::Sandbox(of.clone()), source }.into()
            }
            unmade => unmade,
        })
    }

    /// Removes what has been brought back, behind its back; if it fails the next start does it.
    pub(crate) fn remove_from_archive_soon(self: &Arc<Self>, saved: SnapshotId) {
        let core = Arc::clone(self);
        self.spawn(async move {
            let Some(archive) = &core.config.archive else { return };
            if let Err(error) = archive.remove(&saved).await {
                warn!(%saved, error = &error as &dyn std::error::Error, "not removed from the archive; the next start does");
            }
        });
    }

    /// Removes what is kept of a sandbox that no longer needs it, wherever it is. Repeatable.
    pub(crate) async fn forget_saved(&self, saved: &SnapshotId, tier: Option<Tier>) -> Result<(), ServiceError> {
        self.dirs.remove(Kind::Paused, saved).await?;
        if let (Some(Tier::Archived), Some(archive)) = (tier, &self.config.archive) {
            archive.remove(saved).await?;
        }
        Ok(())
    }

    /// Removes from the archive whatever no record says is there.
    pub(crate) async fn sweep_archive(&self, keep: &BTreeSet<SnapshotId>) -> Result<(), ServiceError> {
        let Some(archive) = &self.config.archive else { return Ok(()) };
        for id in archive.ids().await?.difference(keep) {
            archive.remove(id).await?;
            info!(%id, "removed from the archive: nobody needs it");
        }
        Ok(())
    }
}

async fn bounded<T>(
    patience: Duration,
    cancel: &CancellationToken,
    work: impl Future<Output = Result<T, ArchiveError>>,
) -> Result<T, Unmade> {
    tokio::select! {
        done = tokio::time::timeout(patience, work) => match done {
            Ok(done) => done.map_err(|error| ServiceError::from(error).into()),
            Err(_) => {
                let what = format!("the archive did not answer within {patience:?}");
                Err(ServiceError::Busy { what, retry_after: Duration::from_secs(30) }.into())
            }
        },
        () = cancel.cancelled() => Err(Unmade::Cancelled),
    }
}
