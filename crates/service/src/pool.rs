//! Restored, paused machines, ready to be claimed.
//!
//! A pool machine has no record: after a crash the sweep at start removes it. Claiming takes it out of
//! the pool under a lock, so it has one owner at most; the owner writes the record before it resumes
//! it. Refilling waits until no client's create is under way and then takes one restore at a time.

use std::{
    collections::{BTreeMap, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use stockade_engine::Machine;
use stockade_model::{MachineId, TemplateId};
use tokio::{sync::Notify, time::Instant};
use tracing::{debug, warn};

use crate::core::{Core, Pauses};

/// How often a refill that gave way to creates looks again, should it miss their end.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

pub(crate) struct Pool {
    size: usize,
    templates: Mutex<BTreeMap<TemplateId, Ready>>,
    wanted: Notify,
}

struct Ready {
    directory: PathBuf,
    machines: VecDeque<Arc<dyn Machine>>,
    /// After a failure: when to try again, and how long to wait after the next one.
    retry_at: Option<Instant>,
    pauses: Pauses,
}

impl Ready {
    fn new(directory: PathBuf) -> Self {
        Self { directory, machines: VecDeque::new(), retry_at: None, pauses: Pauses::default() }
    }
}

impl Pool {
    pub(crate) fn new(size: usize) -> Self {
        Self { size, templates: Mutex::default(), wanted: Notify::new() }
    }

    /// Keeps machines of a template ready from now on.
    pub(crate) fn add_template(&self, id: TemplateId, directory: PathBuf) {
        self.lock().entry(id).or_insert_with(|| Ready::new(directory));
        self.wake();
    }

    /// No longer keeps machines of a template ready; returns those there are.
    pub(crate) fn remove_template(&self, id: &TemplateId) -> Vec<Arc<dyn Machine>> {
        self.lock().remove(id).map(|ready| ready.machines.into()).unwrap_or_default()
    }

    /// A machine that nobody else will get.
    pub(crate) fn claim(&self, id: &TemplateId) -> Option<Arc<dyn Machine>> {
        let machine = self.lock().get_mut(id)?.machines.pop_front();
        self.wake();
        machine
    }

    /// Takes a machine (back) in; gives it back if there is no place for it.
    fn put(&self, id: &TemplateId, machine: Arc<dyn Machine>) -> Result<(), Arc<dyn Machine>> {
        match self.lock().get_mut(id) {
            Some(ready) if ready.machines.len() < self.size => {
                ready.machines.push_back(machine);
                Ok(())
            }
            _ => Err(machine),
        }
    }

    /// How many machines are ready.
    pub(crate) fn ready(&self, id: &TemplateId) -> usize {
        self.lock().get(id).map_or(0, |ready| ready.machines.len())
    }

    pub(crate) fn wake(&self) {
        self.wanted.notify_one();
    }

    /// Takes everything out, for good.
    pub(crate) fn drain(&self) -> Vec<Arc<dyn Machine>> {
        std::mem::take(&mut *self.lock()).into_values().flat_map(|ready| ready.machines).collect()
    }

    /// The template with the fewest machines ready, of those that have too few and are not to be left
    /// alone after a failure.
    fn neediest(&self) -> Option<(TemplateId, PathBuf)> {
        let (templates, now) = (self.lock(), Instant::now());
        let needy = templates.iter().filter(|(_, ready)| ready.machines.len() < self.size);
        let (id, ready) = needy
            .filter(|(_, ready)| ready.retry_at.is_none_or(|at| at <= now))
            .min_by_key(|(_, ready)| ready.machines.len())?;
        Some((id.clone(), ready.directory.clone()))
    }

    /// When a template that failed may be tried again.
    fn next_retry(&self) -> Option<Instant> {
        let templates = self.lock();
        let needy = templates.values().filter(|ready| ready.machines.len() < self.size);
        needy.filter_map(|ready| ready.retry_at).min()
    }

    fn note(&self, id: &TemplateId, is_ok: bool) {
        if let Some(ready) = self.lock().get_mut(id) {
            if is_ok {
                (ready.retry_at, ready.pauses) = (None, Pauses::default());
            } else {
                ready.retry_at = Some(Instant::now() + ready.pauses.next());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<TemplateId, Ready>> {
        self.templates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claimed machine that was not used after all goes back, or away.
pub(crate) async fn give_back(core: &Core, template: &TemplateId, machine: Arc<dyn Machine>) {
    if let Err(machine) = core.pool.put(template, machine) {
        core.remove_for_certain(machine).await;
    }
}

/// The pool's task: never ends by itself.
pub(crate) async fn refill(core: Arc<Core>) {
    loop {
        let wanted = core.pool.wanted.notified();
        drop_dead(&core).await;
        let Some((template, directory)) = core.pool.neediest() else {
            match core.pool.next_retry() {
                Some(at) => drop(tokio::time::timeout_at(at, wanted).await),
                None => wanted.await,
            }
            continue;
        };
        while core.creates_in_flight() > 0 {
            tokio::time::timeout(LOOK_AGAIN, core.pool.wanted.notified()).await.ok();
        }
        let restored = restore(&core, &template, &directory).await;
        core.pool.note(&template, restored.is_ok());
        if let Err(error) = restored {
            warn!(%template, error = &*error as &dyn std::error::Error, "pool machine not restored, trying again later");
        }
    }
}

async fn restore(
    core: &Core,
    template: &TemplateId,
    directory: &std::path::Path,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _permit = core.restores.acquire().await?;
    let id = MachineId::random();
    let started = tokio::time::timeout(core.config.step_patience, core.engine().start(&id, directory)).await;
    let machine = match started {
        Ok(started) => started?,
        Err(late) => {
            core.reap_for_certain(&id).await;
            return Err(late.into());
        }
    };
    debug!(%template, machine = %id, "pool machine ready");
    give_back(core, template, machine).await;
    Ok(())
}

/// Machines that ended while they waited.
async fn drop_dead(core: &Core) {
    let mut dead = Vec::new();
    for ready in core.pool.lock().values_mut() {
        let (alive, ended): (VecDeque<_>, VecDeque<_>) =
            ready.machines.drain(..).partition(|machine| machine.exited().now_or_never().is_none());
        ready.machines = alive;
        dead.extend(ended);
    }
    for machine in dead {
        core.remove_for_certain(machine).await;
    }
}
