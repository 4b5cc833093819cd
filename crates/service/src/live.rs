//! Sandboxes that have an owner task, and how to reach it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use stockade_engine::Machine;
use stockade_model::{EndCause, Sandbox, SandboxId};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{ServiceError, metrics::History};

/// Requests an owner keeps waiting; whoever sends more waits in its stead.
const INBOX: usize = 32;

pub(crate) type Reply<T> = oneshot::Sender<Result<T, ServiceError>>;

/// What an owner can be asked for.
pub(crate) enum Verb {
    /// End the sandbox; answered when nothing is left of it.
    Kill { cause: EndCause, reply: Reply<()> },
    /// Move the deadline.
    SetLifetime { lifetime: Duration, only_later: bool, reply: Reply<Sandbox> },
    /// The machine, once it takes commands.
    Machine { reply: Reply<Arc<dyn Machine>> },
}

/// What everybody may know of a live sandbox without asking its owner.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) sandbox: Sandbox,
    /// Present while it takes commands.
    pub(crate) machine: Option<Arc<dyn Machine>>,
}

/// The way to one owner.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) inbox: mpsc::Sender<Verb>,
    pub(crate) view: watch::Receiver<View>,
    pub(crate) history: Arc<Mutex<History>>,
}

impl Live {
    /// A mailbox for a new owner, and what the owner keeps of it.
    pub(crate) fn new(sandbox: Sandbox) -> (Self, watch::Sender<View>, mpsc::Receiver<Verb>) {
        let (inbox, verbs) = mpsc::channel(INBOX);
        let (publish, view) = watch::channel(View { sandbox, machine: None });
        (Self { inbox, view, history: Arc::default() }, publish, verbs)
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
