//! A sandbox that takes commands.

use std::{sync::Arc, time::Duration};

use stockade_engine::Machine;
use stockade_model::{EndCause, OnTimeout, Sandbox, SandboxState};
use tokio::time::Instant;
use tracing::warn;

use crate::{
    LifeChange, ServiceError,
    activity::Activity,
    clock::{Clock, Deadline, deadline_after},
    live::{Target, Verb},
    owner::{Owner, Place},
};

/// How long a guest's processor time is looked at before it counts as idle.
const BUSY_WINDOW: Duration = Duration::from_secs(2);

/// What the sandbox's own rules ask for.
enum Due {
    Deadline,
    Idle(Target, Duration),
    Unused,
}

impl Owner {
    pub(crate) async fn running(&mut self, machine: Arc<dyn Machine>) -> Place {
        let core = Arc::clone(&self.core);
        loop {
            // The machine's end first: nobody is served from a machine that is gone. Then verbs, so that an
            // extension that has arrived beats the deadline.
            let verb = match self.waiting.pop_front() {
                Some(verb) => verb,
                None => tokio::select! {
                    biased;
                    exit = machine.exited() => return Place::MachineEnded { machine, exit },
                    Some(verb) = self.inbox.recv() => verb,
                    due = due(&self.sandbox, &machine, &self.activity, self.not_before, core.clock()) => {
                        match self.obey(&machine, due).await {
                            Some(place) => return place,
                            None => continue,
                        }
                    }
                },
            };
            if let Some(place) = self.serve(&machine, verb).await {
                return place;
            }
        }
    }

    /// Does what is due; `None`: it no longer is.
    async fn obey(&mut self, machine: &Arc<dyn Machine>, due: Due) -> Option<Place> {
        if self.core.is_stopping() {
            // The next server does it; begun now it might be cut off in the middle.
            std::future::pending::<()>().await;
        }
        let end = |cause| Place::Ending {
            machine: Some(Arc::clone(machine)),
            ending: self.ending(cause, String::new()),
            caller: None,
        };
        let target = match due {
            Due::Unused => return Some(end(EndCause::Idle)),
            Due::Deadline => match self.sandbox.rules.on_timeout {
                OnTimeout::Kill => return Some(end(EndCause::Expired)),
                OnTimeout::Pause => Target::Hibernated,
                OnTimeout::Stop => Target::Stopped,
            },
            Due::Idle(target, after) => {
                // From here on nobody gets the machine; whoever has got it until here is seen.
                self.show_as(SandboxState::Pausing);
                if self.activity.idle() < after {
                    self.show(Some(Arc::clone(machine)));
                    return None;
                }
                target
            }
        };
        match self.put_down(Arc::clone(machine), target).await {
            Ok(place) => {
                (self.not_before, self.pauses) = (None, <_>::default());
                Some(place)
            }
            Err((place, error)) => {
                warn!(error = &error as &dyn std::error::Error, "not paused by its rules, trying again later");
                self.not_before = Some(Instant::now() + self.pauses.next());
                Some(place)
            }
        }
    }

    async fn serve(&mut self, machine: &Arc<dyn Machine>, verb: Verb) -> Option<Place> {
        match verb {
            Verb::Kill { cause, reply } => return Some(self.killed(Some(Arc::clone(machine)), (cause, reply))),
            Verb::SetLifetime { lifetime, only_later, reply } => {
                let set = self.set_deadline(machine, lifetime, only_later).await;
                reply.send(set).ok();
            }
            Verb::SetRules { change, reply } => {
                let set = self.set_rules(change).await;
                self.not_before = None;
                self.show(Some(Arc::clone(machine)));
                reply.send(set).ok();
            }
            Verb::Machine { reply, .. } => drop(reply.send(Ok(Arc::clone(machine)))),
            Verb::Snapshot { plan, reply } => {
                let (taken, killed) = self.take_snapshot(machine, plan).await;
                reply.send(taken).ok();
                return killed.map(|killer| self.killed(Some(Arc::clone(machine)), killer));
            }
            Verb::Pause { target, reply } => {
                let moved = self.put_down(Arc::clone(machine), target).await;
                return Some(self.arrive(moved, reply));
            }
            Verb::Resume { lifetime, reply, .. } => {
                let extended = match lifetime {
                    Some(lifetime) => self.set_deadline(machine, lifetime, true).await,
                    None => Ok(self.sandbox.clone()),
                };
                reply.send(extended).ok();
            }
            Verb::Rollback { source, reply } => {
                let moved = self.roll_back(Some(Arc::clone(machine)), source).await;
                return Some(self.arrive(moved, reply));
            }
            Verb::Promote { child, child_id, reply } => {
                let moved = self.promote(Some(Arc::clone(machine)), &child, &child_id).await;
                return Some(self.arrive(moved, reply));
            }
            Verb::HandOver { reply } => match self.put_down(Arc::clone(machine), Target::Standby).await {
                Ok(Place::Standby(machine)) => return Some(self.hand_over(machine, reply, true).await),
                Ok(place) => {
                    Verb::HandOver { reply }.refuse(&self.sandbox);
                    return Some(place);
                }
                Err((place, error)) => {
                    reply.send(Err(error)).ok();
                    return Some(place);
                }
            },
        }
        None
    }

    /// The caller shows it.
    pub(crate) async fn set_rules(&mut self, change: LifeChange) -> Result<Sandbox, ServiceError> {
        let rules = change.apply(self.sandbox.rules);
        self.put(Sandbox { rules, ..self.sandbox.clone() }).await?;
        Ok(self.sandbox.clone())
    }

    async fn set_deadline(
        &mut self,
        machine: &Arc<dyn Machine>,
        lifetime: Duration,
        only_later: bool,
    ) -> Result<Sandbox, ServiceError> {
        let wanted = deadline_after(self.core.clock().now(), lifetime);
        if !only_later || wanted > self.sandbox.deadline {
            let mut changed = Sandbox { deadline: wanted, ..self.sandbox.clone() };
            if !only_later {
                changed.lifetime = lifetime;
            }
            self.put(changed).await?;
            self.not_before = None;
            self.show(Some(Arc::clone(machine)));
        }
        Ok(self.sandbox.clone())
    }
}

/// Waits until one of the sandbox's rules asks for something. Cancel-safe.
async fn due(
    sandbox: &Sandbox,
    machine: &Arc<dyn Machine>,
    activity: &Activity,
    not_before: Option<Instant>,
    clock: &dyn Clock,
) -> Due {
    let deadline = Deadline::at(sandbox.deadline, clock);
    let idle = sandbox.rules.idle;
    let idle_for = async |after: Option<Duration>| {
        let Some(after) = after else { return std::future::pending().await };
        loop {
            activity.idle_for(after).await;
            match idle.busy_percent {
                Some(percent) if is_busy(machine, percent).await => activity.touch(),
                _ => return,
            }
        }
    };
    let later = async {
        if let Some(at) = not_before {
            tokio::time::sleep_until(at).await;
        }
    };
    let down = async {
        later.await;
        tokio::select! {
            biased;
            () = deadline.passed(clock), if sandbox.rules.on_timeout != OnTimeout::Kill => Due::Deadline,
            () = idle_for(idle.hibernate_after) => {
                Due::Idle(Target::Hibernated, idle.hibernate_after.unwrap_or_default())
            }
            () = idle_for(idle.standby_after) => Due::Idle(Target::Standby, idle.standby_after.unwrap_or_default()),
        }
    };
    tokio::select! {
        biased;
        () = deadline.passed(clock), if sandbox.rules.on_timeout == OnTimeout::Kill => Due::Deadline,
        () = idle_for(idle.delete_after) => Due::Unused,
        due = down => due,
    }
}

/// Whether a guest works by itself: looks at its processor time for a while. One that cannot be read is about to
/// be found gone.
async fn is_busy(machine: &Arc<dyn Machine>, percent: u32) -> bool {
    let read = || machine.counters().map(|counters| (counters.cpu_micros, Instant::now()));
    let Ok((before, begin)) = read() else { return false };
    tokio::time::sleep(BUSY_WINDOW).await;
    let Ok((after, end)) = read() else { return false };
    let used = u128::from(after.saturating_sub(before)) * 100;
    used >= u128::from(percent) * (end - begin).as_micros()
}
