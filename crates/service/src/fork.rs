//! Forks: children of a live sandbox, memory and disk included.
//!
//! ```text
//! room for all of them -> one ephemeral snapshot -> children made from it side by side -> snapshot removed
//! ```
//!
//! The snapshot's record stays `creating` for its short life: a server that comes after us removes it, and the
//! children that were not made by then are recorded as failed.

use std::{collections::BTreeMap, sync::Arc};

use stockade_engine::SnapshotScope;
use stockade_model::{EndCause, Lineage, Sandbox, SandboxId, SandboxState};
use stockade_store::{SnapshotPurpose, SnapshotRecord};
use tracing::info;

use crate::{
    ForkRequest, Principal, Service, ServiceError,
    clock::deadline_after,
    core::{Core, Ticket},
    create::{Created, Order},
    dirs::Kind,
    error::store_error,
    live::{Live, SnapshotPlan, Source, Take, Verb},
    owner::Owner,
    request,
};

type Children = Vec<Result<Sandbox, ServiceError>>;

#[expect(clippy::missing_errors_doc, reason = "as for the other verbs")]
impl Service {
    /// Makes children of a running sandbox; returns when each runs or has failed, in order of their index.
    /// With `all_or_nothing` one failure ends the others and is the answer.
    pub async fn fork(
        &self,
        who: &Principal,
        id: &SandboxId,
        request: ForkRequest,
    ) -> Result<Vec<Result<Sandbox, ServiceError>>, ServiceError> {
        let core = &self.handle.core;
        let most = core.config.max_fork;
        if request.count == 0 || request.count > most {
            return Err(ServiceError::Invalid { field: "count", problem: format!("must be 1 to {most}") });
        }
        if let Some(lifetime) = request.lifetime {
            request::check_lifetime(lifetime, core.config.max_lifetime)?;
        }
        if let Some(metadata) = &request.metadata {
            request::check_labels("metadata", metadata)?;
        }
        let parent = self.get(who, id).await?;
        let live = match self.find(who, id).await? {
            crate::service::Found::Live(live) if parent.state == SandboxState::Running => live,
            crate::service::Found::Live(_) => {
                return Err(ServiceError::WrongState { id: id.clone(), state: parent.state });
            }
            crate::service::Found::Ended(sandbox) => return Err(crate::service::ended(*sandbox)),
        };
        let tickets = (0..request.count).map(|_| core.admit()).collect::<Result<Vec<_>, _>>()?;
        // What the parent holds of its own is what the children will share.
        let machine = live.view.borrow().machine.clone();
        let held = machine.and_then(|machine| machine.counters().ok()).map_or(0, |counters| counters.anonymous_bytes);
        core.engine().check_fork_capacity(&parent.shape, request.count, held)?;
        // Carried through also for a caller that goes away.
        let (done, outcome) = tokio::sync::oneshot::channel();
        let (task, service) = (Arc::clone(core), Arc::downgrade(&self.handle));
        let who = who.clone();
        core.spawn(async move {
            let children = fork(&task, live, &parent, &request, tickets).await;
            let children = match (children, service.upgrade()) {
                (Ok(children), Some(handle)) if request.all_or_nothing => {
                    Self { handle }.all_or_none(&who, children).await
                }
                (children, _) => children,
            };
            done.send(children).ok();
        });
        outcome.await.unwrap_or_else(|_| Err(self.cut_off("fork")))
    }

    async fn all_or_none(&self, who: &Principal, children: Children) -> Result<Children, ServiceError> {
        if children.iter().all(Result::is_ok) {
            return Ok(children);
        }
        let mut first = None;
        for child in children {
            match child {
                // One that has ended by itself meanwhile is as gone as the others.
                Ok(child) => drop(self.end(who, &child.id, EndCause::CreateFailed).await),
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        Err(first.expect("one of them is an error"))
    }

    /// The child lives on under its parent's id; the parent's machine and the child's id end. The parent may be
    /// running or paused, the child running or in standby.
    pub async fn promote(&self, who: &Principal, child: &SandboxId) -> Result<Sandbox, ServiceError> {
        let record = self.get(who, child).await?;
        let Some(parent) = record.lineage.parent.clone() else {
            let problem = format!("{child} was not forked from another sandbox");
            return Err(ServiceError::Invalid { field: "sandbox", problem });
        };
        let live = match self.find(who, child).await? {
            crate::service::Found::Live(live) => live,
            crate::service::Found::Ended(sandbox) => return Err(crate::service::ended(*sandbox)),
        };
        self.ask(who, &parent, |reply| Verb::Promote { child: live, child_id: child.clone(), reply }).await
    }

    /// Puts a sandbox back to one of its snapshots: the same id, another machine. All that happened since is
    /// gone.
    pub async fn rollback(&self, who: &Principal, id: &SandboxId, snapshot: &str) -> Result<Sandbox, ServiceError> {
        let sandbox = self.get(who, id).await?;
        let (record, source) = self.source(who, snapshot).await?;
        let snapshot = &record.snapshot;
        if snapshot.sandbox != *id && sandbox.lineage.snapshot.as_ref() != Some(&snapshot.id) {
            let problem = format!("{} is not one of {id}; create a sandbox from it instead", snapshot.id);
            return Err(ServiceError::Invalid { field: "snapshot", problem });
        }
        self.ask(who, id, |reply| Verb::Rollback { source, reply }).await
    }
}

async fn fork(
    core: &Arc<Core>,
    live: Live,
    parent: &Sandbox,
    request: &ForkRequest,
    tickets: Vec<(Ticket, Ticket)>,
) -> Result<Children, ServiceError> {
    let plan = SnapshotPlan {
        name: None,
        labels: BTreeMap::new(),
        scope: SnapshotScope::MemoryAndDisk,
        expires_after: None,
        purpose: SnapshotPurpose::Kept,
        is_ephemeral: true,
    };
    let taken = live.ask(|reply| Verb::Snapshot { plan, reply }).await;
    let record = taken.ok_or_else(|| ServiceError::SandboxNotFound { id: parent.id.to_string() })??;
    let made = make_children(core, parent, request, tickets, &record).await;
    core.remove_snapshot_soon(record.snapshot.id);
    made
}

async fn make_children(
    core: &Arc<Core>,
    parent: &Sandbox,
    request: &ForkRequest,
    tickets: Vec<(Ticket, Ticket)>,
    record: &SnapshotRecord,
) -> Result<Children, ServiceError> {
    let name = parent.template.as_str();
    let template = core.store().template(&parent.workspace, name).await.map_err(store_error)?;
    let template = template.ok_or_else(|| ServiceError::TemplateNotFound { name: name.to_owned() })?;
    let lifetime = request.lifetime.unwrap_or(parent.lifetime);
    let directory = core.dirs.path(Kind::Snapshot, &record.snapshot.id);
    let network = core.store().network(record.snapshot.id.as_str()).await.map_err(store_error)?;
    let children = (0..request.count).zip(tickets).map(|(index, tickets)| {
        let source = Source {
            id: record.snapshot.id.clone(),
            is_recorded: false,
            directory: directory.clone(),
            has_memory: true,
            take: Take::All,
            _lease: Some(core.dirs.lease(&record.snapshot.id)),
        };
        let (template, network) = (template.clone(), network.clone());
        let order = Order { template, source: Some(source), lifetime, network, key: None };
        let child = child(core, parent, request, index, lifetime);
        Owner::spawn_create(core, child, order, tickets)
    });
    let children: Vec<_> = children.collect();
    info!(parent = %parent.id, count = children.len(), "forking");
    let made = futures::future::join_all(children).await.into_iter().map(|made| match made {
        Ok(Ok(Created::New(sandbox))) => Ok(*sandbox),
        Ok(Ok(Created::Existing(_))) => unreachable!("a child has no idempotency key"),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(ServiceError::Busy {
            what: "the fork was cut off".to_owned(),
            retry_after: std::time::Duration::from_secs(1),
        }),
    });
    Ok(made.collect())
}

fn child(core: &Core, parent: &Sandbox, request: &ForkRequest, index: u32, lifetime: std::time::Duration) -> Sandbox {
    let id = SandboxId::random();
    Sandbox {
        access_token: core.store().access_token(&id),
        id,
        state: SandboxState::Creating,
        machine: None,
        metadata: request.metadata.clone().unwrap_or_else(|| parent.metadata.clone()),
        created_at: core.now(),
        started_at: None,
        deadline: deadline_after(core.clock().now(), lifetime),
        lifetime,
        remaining: None,
        tier: None,
        saved: None,
        idle_since: None,
        lineage: Lineage {
            snapshot: parent.lineage.snapshot.clone(),
            parent: Some(parent.id.clone()),
            fork_index: Some(index),
        },
        ending: None,
        ..parent.clone()
    }
}
