//! Snapshots: taken by the sandbox's owner, everything else by the service.
//!
//! ```text
//! take:    record `creating` -> the engine writes the directory, whole or not at all -> record `ready`
//! delete:  record `deleting` -> wait for machines that are being started from it -> directory -> record
//! ```
//!
//! The layers of a snapshot are hard links: machines that run, other snapshots and hibernated sandboxes hold
//! what they need of it themselves, so that only a start under way needs the directory. What a crash leaves
//! half-way, in either direction, the next server removes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use stockade_engine::{Machine, SnapshotScope};
use stockade_model::{SNAPSHOT_NAME, Sandbox, SandboxId, Snapshot, SnapshotId};
use stockade_store::{SnapshotPurpose, SnapshotQuery, SnapshotRecord};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    Page, Principal, Service, ServiceError, SnapshotFilter, SnapshotRequest,
    clock::deadline_after,
    core::Core,
    create::{step, wake},
    dirs::{Kind, bytes_of},
    error::{check_name, store_error},
    live::{SnapshotPlan, Source, Take, Verb},
    owner::{Killer, Owner},
    pool, request,
};

const LARGEST_PAGE: u32 = 1000;

impl Owner {
    /// Takes a snapshot of the running machine, which goes on.
    pub(crate) async fn take_snapshot(
        &mut self,
        machine: &Arc<dyn Machine>,
        plan: SnapshotPlan,
    ) -> (Result<SnapshotRecord, ServiceError>, Option<Killer>) {
        let _move = self.core.begin_move();
        let core = Arc::clone(&self.core);
        let mut record = SnapshotRecord {
            snapshot: first_record(&self.sandbox, &plan, core.now()),
            env: self.sandbox.env.clone(),
            purpose: plan.purpose,
        };
        let id = record.snapshot.id.clone();
        if let Err(error) = core.store().insert_snapshot(&record).await {
            return (Err(store_error(error)), None);
        }
        let directory = core.dirs.path(Kind::Snapshot, &id);
        let cancel = CancellationToken::new();
        let taking = async {
            match plan.is_ephemeral {
                true => machine.snapshot_for_forks(&directory).await,
                false => machine.snapshot(&directory, plan.scope).await,
            }
        };
        let taking = step(machine, "snapshot", core.config.snapshot_patience, &cancel, taking);
        let (taken, killed) = self.attend(&cancel, taking).await;
        let taken = match taken {
            Ok(report) => {
                record.snapshot.memory_bytes = report.memory_bytes;
                record.snapshot.disk_bytes = report.disk_bytes;
                record.snapshot.paused = report.paused;
                let ready = async {
                    if let Some(network) = &core.network {
                        network.keep_for(&self.sandbox.id, &id).await?;
                    }
                    if plan.is_ephemeral {
                        return Ok(());
                    }
                    core.store().mark_snapshot_ready(&record.snapshot).await.map_err(store_error)
                };
                ready.await
            }
            Err(unmade) => Err(unmade.into_error()),
        };
        match taken {
            Ok(()) => {
                if !plan.is_ephemeral {
                    info!(snapshot = %id, paused = ?record.snapshot.paused, "snapshot taken");
                    core.meter.enter_snapshot(&record.snapshot, bytes_of(&directory));
                }
                (Ok(record), killed)
            }
            Err(error) => {
                if killed.is_none() {
                    // A snapshot that was cut off may have left it halted.
                    wake(&core, machine).await;
                }
                core.remove_snapshot_soon(id);
                (Err(error), killed)
            }
        }
    }
}

fn first_record(sandbox: &Sandbox, plan: &SnapshotPlan, now: Timestamp) -> Snapshot {
    Snapshot {
        id: SnapshotId::random(),
        workspace: sandbox.workspace.clone(),
        name: plan.name.clone(),
        labels: plan.labels.clone(),
        sandbox: sandbox.id.clone(),
        parent: sandbox.lineage.snapshot.clone(),
        template: sandbox.template.clone(),
        template_name: sandbox.template_name.clone(),
        shape: sandbox.shape,
        has_memory: plan.scope == SnapshotScope::MemoryAndDisk,
        memory_bytes: 0,
        disk_bytes: 0,
        paused: Duration::ZERO,
        created_at: now,
        expires_at: plan.expires_after.map(|after| deadline_after(now, after)),
    }
}

impl Core {
    /// Removes a snapshot's directory and record, once nobody starts from it.
    pub(crate) async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), ServiceError> {
        for machine in self.pool.remove(&pool::Kind::Snapshot(id.clone())) {
            self.remove_for_certain(machine).await;
        }
        self.dirs.unleased(id).await;
        self.dirs.remove(Kind::Snapshot, id).await?;
        self.meter.end_snapshot(id, self.now());
        self.meter.settle(self).await;
        self.store().remove_snapshot(id).await.map_err(store_error)
    }

    /// The same, behind the caller's back; if it fails the next start does it.
    pub(crate) fn remove_snapshot_soon(self: &Arc<Self>, id: SnapshotId) {
        let core = Arc::clone(self);
        self.spawn(async move {
            if let Err(error) = core.remove_snapshot(&id).await {
                warn!(snapshot = %id, error = &error as &dyn std::error::Error, "not removed; the next start does");
            }
        });
    }
}

#[expect(
    clippy::missing_errors_doc,
    reason = "as for the other verbs; `SnapshotNotFound` also for what belongs to others"
)]
impl Service {
    /// Takes a snapshot of a running sandbox, which goes on with its streams; returns when it is durable.
    pub async fn snapshot(
        &self,
        who: &Principal,
        id: &SandboxId,
        request: SnapshotRequest,
    ) -> Result<Snapshot, ServiceError> {
        check(&request)?;
        let SnapshotRequest { name, labels, scope, expires_after } = request;
        let purpose = SnapshotPurpose::Kept;
        let plan = SnapshotPlan { name, labels, scope, expires_after, purpose, is_ephemeral: false };
        Ok(self.ask(who, id, |reply| Verb::Snapshot { plan, reply }).await?.snapshot)
    }

    /// Takes a snapshot that is no client's own.
    pub(crate) async fn internal_snapshot(
        &self,
        who: &Principal,
        id: &SandboxId,
        purpose: SnapshotPurpose,
        labels: BTreeMap<String, String>,
        expires_after: Option<Duration>,
    ) -> Result<Snapshot, ServiceError> {
        let scope = SnapshotScope::MemoryAndDisk;
        let plan = SnapshotPlan { name: None, labels, scope, expires_after, purpose, is_ephemeral: false };
        Ok(self.ask(who, id, |reply| Verb::Snapshot { plan, reply }).await?.snapshot)
    }

    /// Lists snapshots.
    pub async fn snapshots(&self, who: &Principal, filter: &SnapshotFilter) -> Result<Page<Snapshot>, ServiceError> {
        if filter.limit == 0 || filter.limit > LARGEST_PAGE {
            let problem = format!("must be 1 to {LARGEST_PAGE}");
            return Err(ServiceError::Invalid { field: "limit", problem });
        }
        let query = SnapshotQuery {
            sandbox: filter.sandbox.clone(),
            purpose: SnapshotPurpose::Kept,
            name: filter.name.clone(),
            labels: filter.labels.clone(),
            ascending: filter.ascending,
            limit: filter.limit,
            cursor: filter.cursor.clone(),
        };
        let now = self.handle.core.now();
        let page = self.store().list_snapshots(&who.workspace, &query, now).await.map_err(store_error)?;
        Ok(Page { items: page.items, cursor: page.cursor })
    }

    /// One snapshot, by id or the newest by name.
    pub async fn get_snapshot(&self, who: &Principal, name_or_id: &str) -> Result<Snapshot, ServiceError> {
        Ok(self.snapshot_record(who, name_or_id).await?.snapshot)
    }

    pub(crate) async fn snapshot_record(&self, who: &Principal, name: &str) -> Result<SnapshotRecord, ServiceError> {
        let found = self.store().snapshot(&who.workspace, name, self.handle.core.now()).await.map_err(store_error)?;
        found.ok_or_else(|| ServiceError::SnapshotNotFound { name: name.to_owned() })
    }

    /// A living sandbox that was made from a snapshot, if there is one.
    pub async fn made_from_snapshot(
        &self,
        who: &Principal,
        snapshot: &SnapshotId,
    ) -> Result<Option<SandboxId>, ServiceError> {
        self.store().made_from_snapshot(&who.workspace, snapshot).await.map_err(store_error)
    }

    /// Deletes a snapshot; returns when nothing is left of it. What was made from it lives on.
    pub async fn delete_snapshot(&self, who: &Principal, id: &SnapshotId) -> Result<(), ServiceError> {
        let core = &self.handle.core;
        let record = self.snapshot_record(who, id.as_str()).await?;
        let id = record.snapshot.id;
        if core.dirs.is_leased(&id) {
            return Err(ServiceError::SnapshotInUse { id });
        }
        if !core.store().begin_snapshot_delete(&id).await.map_err(store_error)? {
            return Err(ServiceError::SnapshotNotFound { name: id.to_string() });
        }
        // A caller that goes away does not stop it.
        let (removing, task) = (Arc::clone(core), id.clone());
        let (done, outcome) = tokio::sync::oneshot::channel();
        core.spawn(async move {
            let removed = removing.remove_snapshot(&task).await;
            done.send(removed).ok();
        });
        outcome.await.unwrap_or_else(|_| Err(self.cut_off("delete")))
    }

    /// A snapshot to start from: found, and kept until it has been.
    pub(crate) async fn source(&self, who: &Principal, name: &str) -> Result<(SnapshotRecord, Source), ServiceError> {
        let found = self.snapshot_record(who, name).await?;
        // Leased first, then looked at again: one that is there now stays.
        let lease = self.handle.core.dirs.lease(&found.snapshot.id);
        let record = self.snapshot_record(who, found.snapshot.id.as_str()).await?;
        let directory = self.handle.core.dirs.path(Kind::Snapshot, &record.snapshot.id);
        let source = Source {
            id: record.snapshot.id.clone(),
            is_recorded: true,
            directory,
            has_memory: record.snapshot.has_memory,
            take: Take::All,
            _lease: Some(lease),
        };
        Ok((record, source))
    }
}

impl Service {
    /// A built template's snapshot, which stays as long as the template's record does.
    pub(crate) fn source_of_template(&self, snapshot: &SnapshotId) -> Source {
        let dirs = &self.handle.core.dirs;
        let lease = dirs.lease(snapshot);
        Source {
            id: snapshot.clone(),
            is_recorded: true,
            directory: dirs.path(Kind::Snapshot, snapshot),
            has_memory: true,
            take: Take::All,
            _lease: Some(lease),
        }
    }
}

fn check(request: &SnapshotRequest) -> Result<(), ServiceError> {
    request::check_labels("labels", &request.labels)?;
    request.name.as_deref().map(|name| check_name("name", SNAPSHOT_NAME, name)).transpose()?;
    if request.expires_after.is_some_and(|after| after.is_zero()) {
        return Err(ServiceError::Invalid { field: "expires_after", problem: "must be over zero".to_owned() });
    }
    Ok(())
}
