//! A sandbox that stands still: in standby (its machine is there, halted), hibernated or stopped.

use std::{sync::Arc, time::Duration};

use stockade_engine::Machine;
use stockade_model::{EndCause, Sandbox, Tier};
use tokio::time::Instant;
use tracing::warn;

use crate::{
    ServiceError,
    clock::{Deadline, deadline_after},
    core::Core,
    live::{Take, Target, Verb},
    owner::{Moved, Owner, Place},
};

enum Due {
    Hibernate,
    Archive,
    Unused,
}

impl Owner {
    /// `machine`: it is in standby.
    pub(crate) async fn paused(&mut self, machine: Option<Arc<dyn Machine>>) -> Place {
        let core = Arc::clone(&self.core);
        loop {
            let verb = match self.waiting.pop_front() {
                Some(verb) => verb,
                None => tokio::select! {
                    biased;
                    exit = exited(machine.as_ref()) => match machine {
                        Some(machine) => return Place::MachineEnded { machine, exit },
                        None => unreachable!("what is not there does not end"),
                    },
                    Some(verb) = self.inbox.recv() => verb,
                    due = due(&self.sandbox, self.not_before, &core) => match (due, &machine) {
                        (Due::Hibernate, Some(machine)) => return self.go_deeper(Arc::clone(machine)).await,
                        (Due::Archive, None) => return self.archive_by_rule().await,
                        (Due::Hibernate, None) | (Due::Archive, Some(_)) => continue,
                        (Due::Unused, _) => {
                            let ending = self.ending(EndCause::Idle, String::new());
                            return Place::Ending { machine, ending, caller: None };
                        }
                    },
                },
            };
            match verb {
                Verb::Kill { cause, reply } => return self.killed(machine, (cause, reply)),
                Verb::SetLifetime { lifetime, only_later, reply } => {
                    let set = self.set_remaining(lifetime, only_later).await;
                    reply.send(set).ok();
                }
                Verb::SetRules { change, reply } => {
                    let set = self.set_rules(change).await;
                    self.show(None);
                    reply.send(set).ok();
                }
                Verb::Machine { wake: true, reply } if self.sandbox.rules.auto_resume => {
                    return self.wake_for(machine, reply).await;
                }
                Verb::Pause { target, reply } => match (&machine, target) {
                    (Some(machine), Target::Hibernated | Target::Archived | Target::Stopped) => {
                        let moved = self.put_down(Arc::clone(machine), target).await;
                        return self.arrive(moved, reply);
                    }
                    (None, Target::Archived) if self.sandbox.tier != Some(Tier::Archived) => {
                        let moved = self.archive().await;
                        return self.arrive(moved, reply);
                    }
                    _ => Verb::Pause { target, reply }.refuse(&self.sandbox),
                },
                Verb::Resume { lifetime, take, reply } => {
                    let moved = self.resume(machine, lifetime, take).await;
                    return self.arrive(moved, reply);
                }
                Verb::Rollback { source, reply } => {
                    let moved = self.roll_back(machine, source).await;
                    return self.arrive(moved, reply);
                }
                Verb::Promote { child, child_id, reply } => {
                    let moved = self.promote(machine, &child, &child_id).await;
                    return self.arrive(moved, reply);
                }
                Verb::HandOver { reply } => match machine {
                    Some(machine) => return self.hand_over(machine, reply, false).await,
                    None => Verb::HandOver { reply }.refuse(&self.sandbox),
                },
                verb @ (Verb::Machine { .. } | Verb::Snapshot { .. }) => verb.refuse(&self.sandbox),
            }
        }
    }

    /// A request that waits for the sandbox; those behind it find it running.
    async fn wake_for(
        &mut self,
        machine: Option<Arc<dyn Machine>>,
        reply: crate::live::Reply<Arc<dyn Machine>>,
    ) -> Place {
        match self.resume(machine, None, Take::All).await {
            Ok(Place::Running(machine)) => {
                reply.send(Ok(Arc::clone(&machine))).ok();
                Place::Running(machine)
            }
            Ok(place) => {
                Verb::Machine { wake: true, reply }.refuse(&self.sandbox);
                place
            }
            Err((place, error)) => {
                reply.send(Err(error)).ok();
                place
            }
        }
    }

    async fn go_deeper(&mut self, machine: Arc<dyn Machine>) -> Place {
        let moved = self.put_down(machine, Target::Hibernated).await;
        self.went_by_rule(moved)
    }

    async fn archive_by_rule(&mut self) -> Place {
        let moved = self.archive().await;
        self.went_by_rule(moved)
    }

    fn went_by_rule(&mut self, moved: Moved) -> Place {
        match moved {
            Ok(place) => {
                (self.not_before, self.pauses) = (None, <_>::default());
                place
            }
            Err((place, error)) => {
                warn!(error = &error as &dyn std::error::Error, "not taken down by its rules, trying again later");
                self.not_before = Some(Instant::now() + self.pauses.next());
                place
            }
        }
    }

    /// The lifetime it will have when it runs again.
    async fn set_remaining(&mut self, lifetime: Duration, only_later: bool) -> Result<Sandbox, ServiceError> {
        if !only_later || Some(lifetime) > self.sandbox.remaining {
            let mut changed = Sandbox { remaining: Some(lifetime), ..self.sandbox.clone() };
            changed.deadline = deadline_after(self.core.clock().now(), lifetime);
            if !only_later {
                changed.lifetime = lifetime;
            }
            self.put(changed).await?;
            self.show(None);
        }
        Ok(self.sandbox.clone())
    }
}

async fn exited(machine: Option<&Arc<dyn Machine>>) -> stockade_engine::MachineExit {
    match machine {
        Some(machine) => machine.exited().await,
        None => std::future::pending().await,
    }
}

/// Waits until one of the sandbox's rules asks for something. Cancel-safe.
async fn due(sandbox: &Sandbox, not_before: Option<Instant>, core: &Core) -> Due {
    let (clock, idle) = (core.clock(), &sandbox.rules.idle);
    let since = sandbox.idle_since.unwrap_or_else(|| clock.now());
    let passed = async |after: Option<Duration>| match after {
        Some(after) => Deadline::at(deadline_after(since, after), clock).passed(clock).await,
        None => std::future::pending().await,
    };
    let deeper = async {
        if let Some(at) = not_before {
            tokio::time::sleep_until(at).await;
        }
        match sandbox.tier {
            Some(Tier::Standby) => passed(idle.hibernate_after.or(core.config.longest_standby)).await,
            _ => passed(idle.archive_after).await,
        }
    };
    tokio::select! {
        biased;
        () = passed(idle.delete_after) => Due::Unused,
        // Hibernated and stopped ones go the same way.
        () = deeper, if sandbox.tier != Some(Tier::Archived) => match sandbox.tier {
            Some(Tier::Standby) => Due::Hibernate,
            _ => Due::Archive,
        },
    }
}
