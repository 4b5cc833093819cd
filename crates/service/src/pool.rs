//! Restored, paused machines, ready to be claimed: of templates and of snapshots.
//!
//! A pool machine has no record: after a crash the sweep at start removes it. Claiming takes it out of
//! the pool under a lock, so it has one owner at most; the owner writes the record before it resumes
//! it. Refilling waits until no client's create is under way, under emulation also until who claimed last has had
//! its first command, and then takes one restore at a time.
//!
//! How many are kept: of a template the configured number, of a snapshot none; more of either, the more were asked
//! for in the last minutes; and of all together no more than the budget of memory holds.

use std::{
    collections::{BTreeMap, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use stockade_engine::{Machine, Urgency};
use stockade_model::{Accelerator, MachineId, SnapshotId, Template, TemplateId};
use tokio::{sync::Notify, time::Instant};
use tracing::{debug, warn};

use crate::{
    core::{Core, Pauses},
    identity,
    live::{Source, Take},
};

/// How often a refill that gave way to creates looks again, should it miss their end.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// From a claim on, an emulated machine has the processors for so long before the next one is made: a restore and a
/// rehearsal take a second of them, and the first command of who has just been given a sandbox would wait for it.
const CLAIMANTS_TIME: Duration = Duration::from_secs(1);
/// How often it is looked whether there are more than are still wanted.
const SHRINK_EVERY: Duration = Duration::from_secs(15);
/// The most of one kind.
const MOST: usize = 32;
/// What a machine is taken to hold that cannot be looked at.
const USUAL_BYTES: u64 = 32 << 20;

pub(crate) struct Pool {
    size: usize,
    budget_bytes: u64,
    kinds: Mutex<BTreeMap<Kind, Ready>>,
    last_claim: Mutex<Option<Instant>>,
    wanted: Notify,
}

/// What a pool machine was restored from.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Kind {
    Template(TemplateId),
    Snapshot(SnapshotId),
}

impl Kind {
    /// What a sandbox made from these would claim. `None`: such machines are not kept ready.
    pub(crate) fn of(template: &TemplateId, source: Option<&Source>) -> Option<Self> {
        match source {
            None => Some(Self::Template(template.clone())),
            Some(source) if source.is_recorded && source.has_memory && source.take == Take::All => {
                Some(Self::Snapshot(source.id.clone()))
            }
            Some(_) => None,
        }
    }
}

/// The directories a kind is restored from.
#[derive(Clone, Debug)]
struct Place {
    template: PathBuf,
    snapshot: Option<PathBuf>,
    /// Of what an emulated machine is told to be a sandbox while it waits to be claimed. `None`: it rehearses nothing.
    rehearses: Option<Arc<Template>>,
}

struct Ready {
    place: Place,
    /// Kept whatever the demand.
    least: usize,
    demand: Demand,
    machines: VecDeque<Held>,
    /// After a failure: when to try again, and how long to wait after the next one.
    retry_at: Option<Instant>,
    pauses: Pauses,
}

struct Held {
    machine: Arc<dyn Machine>,
    private_bytes: u64,
}

/// How many were asked for lately: each counts for less the longer it is ago.
struct Demand {
    count: f64,
    at: Instant,
}

impl Demand {
    /// After this time one asked for counts half.
    const HALF_LIFE: Duration = Duration::from_secs(60);
    /// One machine is kept for so many that were asked for.
    const PER_MACHINE: f64 = 4.0;
    /// Less than this is none.
    const LEAST: f64 = 0.2;

    fn none() -> Self {
        Self { count: 0.0, at: Instant::now() }
    }

    fn now(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at);
        self.count * (-age.as_secs_f64() / Self::HALF_LIFE.as_secs_f64()).exp2()
    }

    fn add_one(&mut self) {
        let now = Instant::now();
        *self = Self { count: self.now(now) + 1.0, at: now };
    }

    fn machines(&self, now: Instant) -> usize {
        let count = self.now(now);
        if count < Self::LEAST { 0 } else { (count / Self::PER_MACHINE).ceil() as usize }
    }
}

impl Ready {
    fn new(place: Place, least: usize) -> Self {
        let (machines, retry_at, pauses) = <_>::default();
        Self { place, least, demand: Demand::none(), machines, retry_at, pauses }
    }

    fn target(&self, now: Instant) -> usize {
        self.demand.machines(now).max(self.least).min(MOST.max(self.least))
    }

    fn lacks(&self, now: Instant) -> bool {
        self.machines.len() < self.target(now)
    }
}

impl Pool {
    pub(crate) fn new(size: usize, budget_bytes: u64) -> Self {
        Self { size, budget_bytes, kinds: Mutex::default(), last_claim: Mutex::default(), wanted: Notify::new() }
    }

    /// Keeps machines of a template ready from now on.
    pub(crate) fn add_template(&self, template: Template, directory: PathBuf) {
        let kind = Kind::Template(template.id.clone());
        let place = Place { template: directory, snapshot: None, rehearses: Some(Arc::new(template)) };
        self.lock().entry(kind).or_insert_with(|| Ready::new(place, self.size));
        self.wake();
    }

    /// No longer keeps machines of a kind ready; returns those there are.
    pub(crate) fn remove(&self, kind: &Kind) -> Vec<Arc<dyn Machine>> {
        let ready = self.lock().remove(kind);
        ready.map(|ready| ready.machines.into_iter().map(|held| held.machine).collect()).unwrap_or_default()
    }

    /// A machine that nobody else will get. From now on one of its kind is more likely to be ready.
    pub(crate) fn claim(&self, kind: &Kind, template: &Path, snapshot: Option<&Path>) -> Option<Arc<dyn Machine>> {
        if self.size == 0 {
            return None;
        }
        let held = {
            let mut kinds = self.lock();
            if matches!(kind, Kind::Snapshot(_)) && !kinds.contains_key(kind) {
                // What runs in a snapshot must not run before somebody has it.
                let (template, snapshot) = (template.to_owned(), snapshot.map(Path::to_owned));
                let place = Place { template, snapshot, rehearses: None };
                kinds.insert(kind.clone(), Ready::new(place, 0));
            }
            let ready = kinds.get_mut(kind)?;
            ready.demand.add_one();
            ready.machines.pop_front()
        };
        if held.is_some() {
            *self.last_claim.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        self.wake();
        held.map(|held| held.machine)
    }

    /// Until when who claimed last has the processors.
    fn claimants_time(&self) -> Option<Instant> {
        self.last_claim.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at + CLAIMANTS_TIME)
    }

    /// Takes a machine (back) in; gives it back if there is no place for it.
    fn put(&self, kind: &Kind, machine: Arc<dyn Machine>) -> Result<(), Arc<dyn Machine>> {
        let private_bytes = machine.counters().map_or(USUAL_BYTES, |counters| counters.anonymous_bytes);
        match self.lock().get_mut(kind) {
            Some(ready) if ready.lacks(Instant::now()) => {
                ready.machines.push_back(Held { machine, private_bytes });
                Ok(())
            }
            _ => Err(machine),
        }
    }

    /// How many machines are ready.
    pub(crate) fn ready(&self, kind: &Kind) -> usize {
        self.lock().get(kind).map_or(0, |ready| ready.machines.len())
    }

    pub(crate) fn wake(&self) {
        self.wanted.notify_one();
    }

    /// Takes everything out, for good.
    pub(crate) fn drain(&self) -> Vec<Arc<dyn Machine>> {
        let all = std::mem::take(&mut *self.lock());
        all.into_values().flat_map(|ready| ready.machines).map(|held| held.machine).collect()
    }

    /// The kind that has the smallest share of what it should have, of those that are not to be left alone after a
    /// failure. None, if one more machine would go over the budget.
    fn neediest(&self) -> Option<(Kind, Place)> {
        let (kinds, now) = (self.lock(), Instant::now());
        let held = || kinds.values().flat_map(|ready| &ready.machines).map(|held| held.private_bytes);
        let all: u64 = held().sum();
        // The first is made to be looked at.
        let one = all.checked_div(held().count() as u64).unwrap_or_default();
        if all + one > self.budget_bytes {
            return None;
        }
        let share = |ready: &Ready| ready.machines.len() as f64 / ready.target(now).max(1) as f64;
        let needy = kinds.iter().filter(|(_, ready)| ready.lacks(now));
        let (kind, ready) = needy
            .filter(|(_, ready)| ready.retry_at.is_none_or(|at| at <= now))
            .min_by(|one, other| share(one.1).total_cmp(&share(other.1)))?;
        Some((kind.clone(), ready.place.clone()))
    }

    /// Takes out what is no longer wanted.
    fn surplus(&self) -> Vec<Arc<dyn Machine>> {
        let (mut kinds, now) = (self.lock(), Instant::now());
        let mut surplus = Vec::new();
        for ready in kinds.values_mut() {
            let target = ready.target(now).min(ready.machines.len());
            surplus.extend(ready.machines.split_off(target).into_iter().map(|held| held.machine));
        }
        kinds.retain(|kind, ready| matches!(kind, Kind::Template(_)) || ready.target(now) > 0);
        surplus
    }

    /// When a kind that failed may be tried again.
    fn next_retry(&self) -> Option<Instant> {
        let (kinds, now) = (self.lock(), Instant::now());
        kinds.values().filter(|ready| ready.lacks(now)).filter_map(|ready| ready.retry_at).filter(|at| *at > now).min()
    }

    fn note(&self, kind: &Kind, is_ok: bool) {
        if let Some(ready) = self.lock().get_mut(kind) {
            if is_ok {
                (ready.retry_at, ready.pauses) = (None, Pauses::default());
            } else {
                ready.retry_at = Some(Instant::now() + ready.pauses.next());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, Ready>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claimed machine that was not used after all goes back, or away.
pub(crate) async fn give_back(core: &Core, kind: &Kind, machine: Arc<dyn Machine>) {
    if let Err(machine) = core.pool.put(kind, machine) {
        core.remove_for_certain(machine).await;
    }
}

/// The pool's task: never ends by itself.
pub(crate) async fn refill(core: Arc<Core>) {
    loop {
        let wanted = core.pool.wanted.notified();
        drop_dead(&core).await;
        for machine in core.pool.surplus() {
            core.remove_for_certain(machine).await;
        }
        let Some((kind, place)) = core.pool.neediest() else {
            let shrink = Instant::now() + SHRINK_EVERY;
            let at = core.pool.next_retry().map_or(shrink, |retry| retry.min(shrink));
            drop(tokio::time::timeout_at(at, wanted).await);
            continue;
        };
        give_way(&core).await;
        let restored = restore(&core, &kind, &place).await;
        core.pool.note(&kind, restored.is_ok());
        if let Err(error) = restored {
            warn!(?kind, error = &*error as &dyn std::error::Error, "pool machine not restored, trying again later");
        }
    }
}

/// Waits until nobody would have to wait for a refill.
async fn give_way(core: &Core) {
    let is_emulated = core.engine().info().accelerator == Accelerator::Tcg;
    loop {
        while core.creates_in_flight() > 0 {
            tokio::time::timeout(LOOK_AGAIN, core.pool.wanted.notified()).await.ok();
        }
        match core.pool.claimants_time().filter(|until| is_emulated && *until > Instant::now()) {
            Some(until) => tokio::time::sleep_until(until).await,
            None => return,
        }
    }
}

async fn restore(core: &Core, kind: &Kind, place: &Place) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _permit = core.restores.acquire().await?;
    let id = MachineId::random();
    let start = async {
        match &place.snapshot {
            Some(snapshot) => core.engine().start_from_snapshot(&id, &place.template, snapshot, Urgency::Ahead).await,
            None => core.engine().start(&id, &place.template, Urgency::Ahead).await,
        }
    };
    let machine = match tokio::time::timeout(core.config.step_patience, start).await {
        Ok(started) => started?,
        Err(late) => {
            core.reap_for_certain(&id).await;
            return Err(late.into());
        }
    };
    if let Some(template) = &place.rehearses
        && core.engine().info().accelerator == Accelerator::Tcg
        && let Err(error) = rehearse(core, &machine, template).await
    {
        core.remove_for_certain(machine).await;
        return Err(error);
    }
    debug!(?kind, machine = %id, "pool machine ready");
    give_back(core, kind, machine).await;
    Ok(())
}

/// Goes through what a claim and a first command go through, and halts the machine again. An emulator translates what
/// its guest runs when it runs it first; a claimed machine would spend half a second on that before its first output.
/// Nothing is left of it but what the template's own programs do in that time, without a network.
async fn rehearse(
    core: &Core,
    machine: &Arc<dyn Machine>,
    template: &Template,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let identity = identity::in_waiting(core, machine.id(), &template.default_user, template.default_cwd.as_deref());
    let steps = async {
        machine.resume().await?;
        let guest = machine.guest().await?;
        guest.set_identity(&identity).await?;
        guest.rehearse().await?;
        machine.pause().await
    };
    Ok(tokio::time::timeout(core.config.step_patience, steps).await??)
}

/// Machines that ended while they waited.
async fn drop_dead(core: &Core) {
    let mut dead = Vec::new();
    for ready in core.pool.lock().values_mut() {
        let (alive, ended): (VecDeque<_>, VecDeque<_>) =
            ready.machines.drain(..).partition(|held| held.machine.exited().now_or_never().is_none());
        ready.machines = alive;
        dead.extend(ended);
    }
    for held in dead {
        core.remove_for_certain(held.machine).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_grows_with_what_is_asked_for_and_fades() {
        let mut demand = Demand::none();
        let now = Instant::now();
        assert_eq!(demand.machines(now), 0);
        demand.add_one();
        assert_eq!(demand.machines(demand.at), 1);
        (0..39).for_each(|_| demand.add_one());
        assert_eq!(demand.machines(demand.at), 10);
        assert_eq!(demand.machines(demand.at + Demand::HALF_LIFE), 5);
        assert_eq!(demand.machines(demand.at + Demand::HALF_LIFE * 10), 0);
    }
}
