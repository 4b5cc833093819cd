//! Emulators that wait for a machine. What takes an emulator's start out of the way of whoever wakes a sandbox, forks
//! one or makes one where no machine is ready: its program loaded and linked, its jail and control group made, its
//! memory and disk opened. It has run nothing and knows nothing of any sandbox.
//!
//! One kind a template. How many wait follows what is asked for: one more after each start that found none, one
//! fewer after each [`FADE`] without a start, and none of a template that nobody has started from for [`FORGET`].
//! They are started one at a time, when nobody else has started anything for [`QUIET`].

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use stockade_model::MachineId;
use tokio::{sync::Notify, task::AbortHandle, time::Instant};

use super::{
    Host,
    emulator::{Emulator, Source},
    machine_dir::MemoryBase,
    manifest::Manifest,
    memory::SealedMemory,
    usage,
};
use crate::EngineError;

/// What has just been started has the processors for so long.
const QUIET: Duration = Duration::from_secs(1);
/// After so long without a start one fewer is kept.
const FADE: Duration = Duration::from_secs(60);
/// After so long without a start none is.
const FORGET: Duration = Duration::from_secs(3600);
/// How long after a failure the next one is tried.
const RETRY: Duration = Duration::from_secs(30);
/// How often it is looked whether there are more than are still wanted.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
/// Each kind keeps a template's memory loaded.
const MOST_KINDS: usize = 4;
/// Kept of a template that was started from, whether or not they were asked for at once.
const LEAST: usize = 1;

#[derive(Debug)]
pub(crate) struct Spares {
    shared: Arc<Shared>,
    refill: Option<AbortHandle>,
}

#[derive(Debug)]
struct Shared {
    /// The most that are kept of a template.
    most: usize,
    kinds: Mutex<Vec<Kind>>,
    changed: Notify,
}

/// Emulators with one template's memory.
#[derive(Debug)]
struct Kind {
    template: PathBuf,
    manifest: Manifest,
    memory: Arc<SealedMemory>,
    waiting: Vec<Emulator>,
    demand: Demand,
    retry: Option<Instant>,
}

/// How many of one kind are wanted.
#[derive(Debug)]
struct Demand {
    wanted: usize,
    started: Instant,
    faded: Instant,
}

impl Demand {
    fn new(now: Instant) -> Self {
        Self { wanted: LEAST, started: now, faded: now }
    }

    /// A start, which found one or did not.
    fn note(&mut self, found: bool, most: usize, now: Instant) {
        (self.started, self.faded) = (now, now);
        if !found {
            self.wanted = (self.wanted + 1).min(most);
        }
    }

    fn fade(&mut self, now: Instant) {
        if self.is_over(now) {
            self.wanted = 0;
        }
        while self.wanted > LEAST && now.duration_since(self.faded) >= FADE {
            self.wanted -= 1;
            self.faded += FADE;
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.started) >= FORGET
    }
}

impl Kind {
    fn new(source: &Source<'_>, now: Instant) -> Self {
        Self {
            template: source.template.to_owned(),
            manifest: source.manifest.clone(),
            memory: Arc::clone(&source.memory),
            waiting: Vec::new(),
            demand: Demand::new(now),
            retry: None,
        }
    }

    fn is_of(&self, source: &Source<'_>) -> bool {
        Arc::ptr_eq(&self.memory, &source.memory) && self.template == source.template
    }

    /// Counts a start and gives it what waits.
    fn take(&mut self, most: usize, now: Instant) -> Option<Emulator> {
        self.waiting.retain(Emulator::is_alive);
        let spare = self.waiting.pop();
        self.demand.note(spare.is_some(), most, now);
        spare
    }

    /// Returns what is no longer wanted.
    fn fade(&mut self, now: Instant) -> Vec<Emulator> {
        self.waiting.retain(Emulator::is_alive);
        self.demand.fade(now);
        let kept = if self.is_forgotten(now) { 0 } else { self.demand.wanted };
        self.waiting.split_off(kept.min(self.waiting.len()))
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        self.demand.is_over(now) || !self.template.exists()
    }

    fn lacks(&self, now: Instant) -> bool {
        self.waiting.len() < self.demand.wanted && self.retry.is_none_or(|retry| retry <= now)
    }
}

impl Spares {
    /// Keeps at most so many of each template; with 0 there are none.
    pub(crate) fn new(host: &Arc<Host>, most: usize) -> Self {
        let shared = Arc::new(Shared { most, kinds: Mutex::default(), changed: Notify::new() });
        let refill = (most > 0).then(|| tokio::spawn(refill(Arc::clone(host), Arc::clone(&shared))).abort_handle());
        Self { shared, refill }
    }

    /// One that fits what a machine is made from. Found or not, one more start is counted.
    pub(crate) fn take(&self, source: &Source<'_>) -> Option<Emulator> {
        if self.shared.most == 0 || source.base != MemoryBase::Template || source.state().is_none() {
            return None;
        }
        let now = Instant::now();
        let taken = {
            let mut kinds = self.shared.lock();
            let at = kinds.iter().position(|kind| kind.is_of(source)).unwrap_or_else(|| {
                kinds.push(Kind::new(source, now));
                kinds.len() - 1
            });
            kinds[at].take(self.shared.most, now)
        };
        self.shared.changed.notify_one();
        taken
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.lock().iter().map(|kind| kind.waiting.len()).sum()
    }

    /// Ends all that wait, and keeps no more.
    pub(crate) async fn close(&self) {
        self.stop_refill();
        let kinds = std::mem::take(&mut *self.shared.lock());
        for spare in kinds.into_iter().flat_map(|kind| kind.waiting) {
            spare.remove().await;
        }
    }

    fn stop_refill(&self) {
        if let Some(refill) = &self.refill {
            refill.abort();
        }
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        self.stop_refill();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Kind>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out what is no longer wanted.
    fn fade(&self) -> Vec<Emulator> {
        let (mut kinds, now) = (self.lock(), Instant::now());
        let mut surplus: Vec<_> = kinds.iter_mut().flat_map(|kind| kind.fade(now)).collect();
        kinds.retain(|kind| !kind.is_forgotten(now));
        while kinds.len() > MOST_KINDS
            && let Some(oldest) = (0..kinds.len()).min_by_key(|at| kinds[*at].demand.started)
        {
            surplus.extend(kinds.swap_remove(oldest).waiting);
        }
        surplus
    }

    /// What to start next and when; `None`: nothing is lacking.
    fn next(&self) -> Option<(PathBuf, Manifest, Arc<SealedMemory>, Instant)> {
        let (kinds, now) = (self.lock(), Instant::now());
        let last = kinds.iter().map(|kind| kind.demand.started).max()?;
        let kind = kinds.iter().filter(|kind| kind.lacks(now)).max_by_key(|kind| kind.demand.started)?;
        Some((kind.template.clone(), kind.manifest.clone(), Arc::clone(&kind.memory), last + QUIET))
    }

    /// Gives it back if it is not wanted any more.
    fn put(&self, memory: &Arc<SealedMemory>, spare: Emulator) -> Option<Emulator> {
        let mut kinds = self.lock();
        match kinds.iter_mut().find(|kind| Arc::ptr_eq(&kind.memory, memory)) {
            Some(kind) if kind.waiting.len() < kind.demand.wanted => {
                kind.waiting.push(spare);
                None
            }
            _ => Some(spare),
        }
    }

    fn failed(&self, memory: &Arc<SealedMemory>) {
        if let Some(kind) = self.lock().iter_mut().find(|kind| Arc::ptr_eq(&kind.memory, memory)) {
            kind.retry = Some(Instant::now() + RETRY);
        }
    }
}

/// Not where a machine would find no room.
async fn start(host: &Arc<Host>, source: &Source<'_>) -> Result<Emulator, EngineError> {
    usage::check_capacity(&source.manifest.shape, 0, &host.limits, &host.machines_dir)?;
    Emulator::start(host, &MachineId::random(), source).await
}

async fn refill(host: Arc<Host>, shared: Arc<Shared>) {
    loop {
        let changed = shared.changed.notified();
        for spare in shared.fade() {
            spare.remove().await;
        }
        match shared.next() {
            Some((template, manifest, memory, at)) if at <= Instant::now() => {
                let source = Source::template(&template, &manifest, Arc::clone(&memory));
                match start(&host, &source).await {
                    Ok(spare) => {
                        if let Some(spare) = shared.put(&memory, spare) {
                            spare.remove().await;
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, template = %template.display(), "no emulator started ahead of need");
                        shared.failed(&memory);
                    }
                }
            }
            next => {
                let at = next.map_or_else(|| Instant::now() + LOOK_AGAIN, |(.., at)| at);
                drop(tokio::time::timeout_at(at, changed).await);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_is_wanted_after_a_start_that_found_none_and_one_fewer_after_each_quiet_minute() {
        let begin = Instant::now();
        let mut demand = Demand::new(begin);
        assert_eq!(demand.wanted, LEAST);
        (0..9).for_each(|_| demand.note(false, 8, begin));
        assert_eq!(demand.wanted, 8);
        demand.note(true, 8, begin);
        assert_eq!(demand.wanted, 8, "those who found one are served");
        let after = |fades: u32| begin + FADE * fades;
        for (at, wanted) in [(after(1) - Duration::from_millis(1), 8), (after(1), 7), (after(3), 5), (after(50), LEAST)]
        {
            demand.fade(at);
            assert_eq!(demand.wanted, wanted);
        }
        demand.note(true, 8, after(50));
        demand.fade(begin + FORGET);
        assert_eq!(demand.wanted, LEAST, "the last start counts");
        demand.fade(after(50) + FORGET);
        assert_eq!(demand.wanted, 0);
    }
}
