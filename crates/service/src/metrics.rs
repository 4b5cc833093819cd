//! How running sandboxes did lately: one sample each few seconds, bounded, in memory.

use std::{
    collections::VecDeque,
    sync::{Arc, PoisonError},
    time::Duration,
};

use futures::StreamExt;
use jiff::Timestamp;
use stockade_engine::EngineError;
use stockade_model::SandboxState;
use stockade_wire::machine::Stats;
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;

use crate::{ServiceError, core::Core, live::Live};

/// An hour at one sample each five seconds.
const KEPT: usize = 720;
/// Guests asked at the same time.
const ASKED_AT_ONCE: usize = 8;
const PATIENCE: Duration = Duration::from_secs(2);

/// One look at a sandbox.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricsSample {
    /// When, by the host's clock.
    pub at: Timestamp,
    /// What the guest said.
    pub stats: Stats,
}

/// The last samples of one sandbox, oldest first.
#[derive(Default)]
pub(crate) struct History {
    samples: VecDeque<MetricsSample>,
}

impl History {
    fn push(&mut self, sample: MetricsSample) {
        if self.samples.len() == KEPT {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    fn between(&self, start: Option<Timestamp>, end: Option<Timestamp>) -> Vec<MetricsSample> {
        let within = |at| start.is_none_or(|start| at >= start) && end.is_none_or(|end| at <= end);
        self.samples.iter().filter(|sample| within(sample.at)).cloned().collect()
    }
}

/// The sampler's task: never ends by itself.
pub(crate) async fn sample_all(core: Arc<Core>, period: Duration) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let running =
            core.registry.all().into_iter().filter(|live| live.view.borrow().sandbox.state == SandboxState::Running);
        let core = &core;
        futures::stream::iter(running)
            .for_each_concurrent(ASKED_AT_ONCE, async |live| {
                if let Err(error) = sample(core, &live).await {
                    debug!(error = &error as &dyn std::error::Error, "no sample");
                }
            })
            .await;
    }
}

/// The samples of a time; takes one now if the newest is older than the period.
pub(crate) async fn of(
    core: &Core,
    live: &Live,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
) -> Result<Vec<MetricsSample>, ServiceError> {
    let newest = lock(live).samples.back().map(|sample| sample.at);
    let stale = newest.is_none_or(|at| at.duration_since(core.now()).unsigned_abs() > Duration::from_secs(5));
    if stale {
        sample(core, live).await?;
    }
    Ok(lock(live).between(start, end))
}

async fn sample(core: &Core, live: &Live) -> Result<(), EngineError> {
    let Some(machine) = live.view.borrow().machine.clone() else { return Ok(()) };
    let asked = async { machine.guest().await?.stats().await };
    let stats = tokio::time::timeout(PATIENCE, asked)
        .await
        .map_err(|_| EngineError::GuestSilent { waited: PATIENCE, console: machine.console_tail() })??;
    lock(live).push(MetricsSample { at: core.now(), stats });
    Ok(())
}

fn lock(live: &Live) -> std::sync::MutexGuard<'_, History> {
    live.history.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_bounded_and_cut_to_the_time_asked_for() {
        let mut history = History::default();
        let at = |second| Timestamp::from_second(second).expect("in range");
        for second in 0..1000 {
            history.push(MetricsSample { at: at(second), stats: Stats::default() });
        }
        assert_eq!(history.between(None, None).len(), KEPT);
        assert_eq!(history.between(Some(at(990)), Some(at(994))).len(), 5);
    }
}
