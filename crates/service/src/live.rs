//! Sandboxes that have an owner task, and how to reach it.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use stockade_engine::{GuestClient, Machine, SnapshotScope};
use stockade_model::{EndCause, Ending, Sandbox, SandboxId, SnapshotId};
use stockade_store::{SnapshotPurpose, SnapshotRecord};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{LifeChange, ServiceError, activity::Activity, dirs::Lease, metrics::History};

/// Requests an owner keeps waiting; whoever sends more waits in its stead.
const INBOX: usize = 32;

pub(crate) type Reply<T> = oneshot::Sender<Result<T, ServiceError>>;

/// What an owner can be asked for.
pub(crate) enum Verb {
    /// End the sandbox; answered when nothing is left of it.
    Kill { cause: EndCause, reply: Reply<()> },
    /// Move the deadline.
    SetLifetime { lifetime: Duration, only_later: bool, reply: Reply<Sandbox> },
    /// Change the rules it lives by.
    SetRules { change: LifeChange, reply: Reply<Sandbox> },
    /// The machine, once it takes commands. `wake`: a paused sandbox that resumes by itself does so.
    Machine { wake: bool, reply: Reply<Arc<dyn Machine>> },
    /// Take a snapshot.
    Snapshot { plan: SnapshotPlan, reply: Reply<SnapshotRecord> },
    /// Go down.
    Pause { target: Target, reply: Reply<Sandbox> },
    /// Come back.
    Resume { lifetime: Option<Duration>, take: Take, reply: Reply<Sandbox> },
    /// Go on from a snapshot.
    Rollback { source: Source, reply: Reply<Sandbox> },
    /// Go on as the child does, which ends.
    Promote { child: Live, child_id: SandboxId, reply: Reply<Sandbox> },
    /// Give the machine away, for [`Verb::Promote`].
    HandOver { reply: Reply<HandedOver> },
}

/// A snapshot to be taken.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotPlan {
    pub(crate) name: Option<String>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) scope: SnapshotScope,
    pub(crate) expires_after: Option<Duration>,
    pub(crate) purpose: SnapshotPurpose,
    /// Seen by nobody but whoever asked for it.
    pub(crate) is_ephemeral: bool,
}

/// How far down.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Target {
    Standby,
    Hibernated,
    Archived,
    Stopped,
}

/// A snapshot to start from.
pub(crate) struct Source {
    pub(crate) id: SnapshotId,
    /// False: it is the moment between a parent and its children, which has no record.
    pub(crate) is_recorded: bool,
    pub(crate) directory: PathBuf,
    pub(crate) has_memory: bool,
    pub(crate) take: Take,
    pub(crate) _lease: Option<Lease>,
}

/// What of saved state is started from.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Take {
    /// All there is.
    #[default]
    All,
    /// The disk alone, which boots.
    Disk,
}

/// A halted machine that another sandbox may take.
pub(crate) struct HandedOver {
    pub(crate) machine: Arc<dyn Machine>,
    /// Dropped: it was not taken.
    pub(crate) taken: oneshot::Sender<Ending>,
}

/// What everybody may know of a live sandbox without asking its owner.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) sandbox: Sandbox,
    /// Present while it takes commands.
    pub(crate) machine: Option<Arc<dyn Machine>>,
}

impl View {
    fn serves(&self, machine: &Arc<dyn Machine>) -> bool {
        self.machine.as_ref().is_some_and(|now| Arc::ptr_eq(now, machine))
    }
}

/// The way to one owner.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) inbox: mpsc::Sender<Verb>,
    pub(crate) view: watch::Receiver<View>,
    pub(crate) history: Arc<Mutex<History>>,
    pub(crate) activity: Arc<Activity>,
    pub(crate) session: Session,
}

/// The link session clients were last given.
#[derive(Clone, Default)]
pub(crate) struct Session(Arc<Mutex<Option<GuestClient>>>);

impl Session {
    pub(crate) fn note(&self, guest: &GuestClient) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(guest.clone());
    }

    /// Ends it and every stream in it: they belong to a machine that no longer runs.
    pub(crate) fn close(&self) {
        if let Some(guest) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            guest.close();
        }
    }
}

impl Live {
    /// A mailbox for a new owner, and what the owner keeps of it.
    pub(crate) fn new(sandbox: Sandbox) -> (Self, watch::Sender<View>, mpsc::Receiver<Verb>) {
        let (inbox, verbs) = mpsc::channel(INBOX);
        let (publish, view) = watch::channel(View { sandbox, machine: None });
        let live =
            Self { inbox, view, history: Arc::default(), activity: Activity::new(), session: Session::default() };
        (live, publish, verbs)
    }

    /// Asks the owner. `None`: it has ended without an answer, and the sandbox with it.
    pub(crate) async fn ask<T>(&self, verb: impl FnOnce(Reply<T>) -> Verb) -> Option<Result<T, ServiceError>> {
        let (reply, answer) = oneshot::channel();
        self.inbox.send(verb(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Waits until it is no longer being made; `None` if its owner ended first.
    pub(crate) async fn settled(&self) -> Option<Sandbox> {
        let mut view = self.view.clone();
        let settled = view.wait_for(|view| view.sandbox.state != stockade_model::SandboxState::Creating).await;
        settled.ok().map(|view| view.sandbox.clone())
    }

    /// Waits until its owner has ended.
    pub(crate) async fn ended(&self) {
        let mut view = self.view.clone();
        while view.changed().await.is_ok() {}
    }

    /// Whether a machine is the one that takes commands.
    pub(crate) fn serves(&self, machine: &Arc<dyn Machine>) -> bool {
        self.view.borrow().serves(machine)
    }

    /// Waits until a machine is no longer the one that takes commands.
    pub(crate) async fn replaced(&self, machine: &Arc<dyn Machine>) {
        let mut view = self.view.clone();
        view.wait_for(|view| !view.serves(machine)).await.ok();
    }
}

impl Verb {
    /// Answers that this is not the time.
    pub(crate) fn refuse(self, sandbox: &Sandbox) {
        self.fail(ServiceError::WrongState { id: sandbox.id.clone(), state: sandbox.state });
    }

    fn fail(self, error: ServiceError) {
        // A caller that has gone away needs no answer.
        match self {
            Self::Kill { reply, .. } => drop(reply.send(Err(error))),
            Self::SetLifetime { reply, .. }
            | Self::SetRules { reply, .. }
            | Self::Pause { reply, .. }
            | Self::Resume { reply, .. }
            | Self::Rollback { reply, .. }
            | Self::Promote { reply, .. } => drop(reply.send(Err(error))),
            Self::Machine { reply, .. } => drop(reply.send(Err(error))),
            Self::Snapshot { reply, .. } => drop(reply.send(Err(error))),
            Self::HandOver { reply } => drop(reply.send(Err(error))),
        }
    }
}

/// All sandboxes that have an owner.
#[derive(Default)]
pub(crate) struct Registry {
    live: Mutex<HashMap<SandboxId, Live>>,
}

impl Registry {
    pub(crate) fn insert(&self, id: SandboxId, live: Live) {
        self.lock().insert(id, live);
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.lock().remove(id);
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Live> {
        self.lock().get(id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Live> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
