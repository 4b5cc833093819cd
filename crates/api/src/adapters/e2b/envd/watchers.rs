//! Watches that a client polls instead of listening to: each is a guest watch that one task empties
//! into a queue.
//!
//! A client polls right after a change of its own and expects to see it, while events come over a stream
//! of their own. So a poll first asks the guest for anything (what came before is then on its way), and
//! then waits until the queue has been quiet for a moment measured by that answer.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::StreamExt;
use stockade_engine::{GuestClient, guest::Events};
use stockade_model::{SandboxId, Secret};
use tokio::{sync::Notify, task::AbortHandle, time::Instant};

use super::{
    super::connect::{Code, ConnectError},
    filesystem::{FilesystemEvent, Watched},
};

const MAX_WATCHERS_PER_SANDBOX: usize = 64;
const MAX_QUEUED_EVENTS: usize = 16_384;
const QUIET: Duration = Duration::from_millis(25);
const MAX_WAIT: Duration = Duration::from_secs(2);

/// All polled watches of this server.
#[derive(Default)]
pub(crate) struct Watchers {
    by_id: Mutex<HashMap<String, Watcher>>,
}

struct Watcher {
    sandbox: SandboxId,
    queue: Arc<Queue>,
    task: AbortHandle,
}

#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Notify,
}

#[derive(Default)]
struct QueueState {
    events: VecDeque<FilesystemEvent>,
    /// Why there will be no more.
    ended: Option<ConnectError>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchers {
    pub(super) fn add(self: &Arc<Self>, sandbox: &SandboxId, events: Events) -> Result<String, ConnectError> {
        let mut by_id = lock(&self.by_id);
        let taken = by_id.values().filter(|watcher| watcher.sandbox == *sandbox).count();
        if taken >= MAX_WATCHERS_PER_SANDBOX {
            let message = format!("the sandbox has {taken} watchers, which is the most; stop some first");
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        let id = Secret::random_hex("wat", 16).expose().to_owned();
        let queue = Arc::new(Queue::default());
        let task = tokio::spawn(fill(Arc::clone(self), id.clone(), events, Arc::clone(&queue))).abort_handle();
        by_id.insert(id.clone(), Watcher { sandbox: sandbox.clone(), queue, task });
        Ok(id)
    }

    fn find(&self, sandbox: &SandboxId, id: &str) -> Result<Arc<Queue>, ConnectError> {
        let by_id = lock(&self.by_id);
        match by_id.get(id) {
            Some(watcher) if watcher.sandbox == *sandbox => Ok(Arc::clone(&watcher.queue)),
            _ => Err(not_found(id)),
        }
    }

    pub(super) async fn drain(
        &self,
        sandbox: &SandboxId,
        id: &str,
        guest: &GuestClient,
    ) -> Result<Vec<FilesystemEvent>, ConnectError> {
        let queue = self.find(sandbox, id)?;
        let asked = Instant::now();
        // Whether it answers or not, what is queued is handed out.
        let _ = tokio::time::timeout(MAX_WAIT, guest.health()).await;
        let quiet = QUIET.max(asked.elapsed() * 2).min(MAX_WAIT);
        queue.settle(quiet, asked + MAX_WAIT).await;
        let mut state = lock(&queue.state);
        if state.events.is_empty()
            && let Some(error) = state.ended.clone()
        {
            return Err(error);
        }
        Ok(state.events.drain(..).collect())
    }

    pub(super) fn remove(&self, sandbox: &SandboxId, id: &str) -> Result<(), ConnectError> {
        self.find(sandbox, id)?;
        if let Some(watcher) = lock(&self.by_id).remove(id) {
            watcher.task.abort();
        }
        Ok(())
    }
}

fn not_found(id: &str) -> ConnectError {
    ConnectError::new(Code::NotFound, format!("watcher with id {id} not found"))
}

impl Queue {
    /// Returns when nothing has come for `quiet`, or at `latest`.
    async fn settle(&self, quiet: Duration, latest: Instant) {
        loop {
            let until = (Instant::now() + quiet).min(latest);
            if tokio::time::timeout_at(until, self.changed.notified()).await.is_err() {
                return;
            }
            if Instant::now() >= latest {
                return;
            }
        }
    }

    /// Whether there is room for more.
    fn push(&self, event: FilesystemEvent) -> bool {
        let mut state = lock(&self.state);
        if state.events.len() >= MAX_QUEUED_EVENTS {
            let message =
                format!("{MAX_QUEUED_EVENTS} events were not fetched in time; list the directory and watch it again");
            state.ended = Some(ConnectError::new(Code::ResourceExhausted, message));
            return false;
        }
        state.events.push_back(event);
        drop(state);
        self.changed.notify_one();
        true
    }
}

/// Empties a guest watch into its queue. A watch whose guest is gone leaves nothing behind.
async fn fill(watchers: Arc<Watchers>, id: String, mut events: Events, queue: Arc<Queue>) {
    loop {
        match Watched::of(events.events.next().await) {
            Watched::Event(event) => {
                if !queue.push(event) {
                    return;
                }
            }
            Watched::Nothing => {}
            Watched::Ended(Ok(error)) => {
                lock(&queue.state).ended = Some(error);
                return;
            }
            Watched::Ended(Err(_)) => {
                lock(&watchers.by_id).remove(&id);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use stockade_engine::EngineError;
    use stockade_wire::{
        event::Event,
        files::{FileChange, FileEvent},
    };

    use super::*;

    fn created(name: &str) -> Result<Event, EngineError> {
        Ok(Event::File(FileEvent { name: name.to_owned(), change: FileChange::Create, entry: None }))
    }

    fn events(items: Vec<Result<Event, EngineError>>) -> Events {
        Events { started: None, events: Box::pin(futures::stream::iter(items).chain(futures::stream::pending())) }
    }

    #[tokio::test]
    async fn a_watcher_belongs_to_one_sandbox() {
        let watchers = Arc::new(Watchers::default());
        let (mine, other) = (SandboxId::random(), SandboxId::random());
        let id = watchers.add(&mine, events(vec![created("a")])).expect("the first watcher");
        assert_eq!(watchers.remove(&other, &id).expect_err("not theirs").code, Code::NotFound);
        watchers.remove(&mine, &id).expect("ours");
        assert_eq!(watchers.remove(&mine, &id).expect_err("removed").code, Code::NotFound);
    }

    #[tokio::test]
    async fn a_sandbox_has_a_bounded_number_of_watchers() {
        let watchers = Arc::new(Watchers::default());
        let sandbox = SandboxId::random();
        for _ in 0..MAX_WATCHERS_PER_SANDBOX {
            watchers.add(&sandbox, events(vec![])).expect("within the limit");
        }
        assert_eq!(watchers.add(&sandbox, events(vec![])).expect_err("one too many").code, Code::ResourceExhausted);
        watchers.add(&SandboxId::random(), events(vec![])).expect("another sandbox has its own limit");
    }
}
