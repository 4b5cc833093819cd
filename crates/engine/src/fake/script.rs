//! Faults, set by the test before they happen.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::EngineError;

/// A thing the engine does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// Booting a template.
    Boot,
    /// Starting a machine.
    Start,
    /// Resuming it.
    Resume,
    /// Pausing it.
    Pause,
    /// Opening its link.
    Link,
    /// Answering the first request on the link, which is the identity's.
    Identity,
    /// Taking a snapshot of it.
    Snapshot,
    /// The moment in a snapshot in which the machine is halted and the directory half written.
    Halted,
    /// Starting a machine from a snapshot.
    Restore,
    /// Ending it.
    Kill,
    /// Finding it again.
    Adopt,
}

impl Step {
    /// The steps of a create, in order.
    pub const CREATE: [Self; 4] = [Self::Start, Self::Resume, Self::Link, Self::Identity];

    fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Start => "start",
            Self::Resume => "resume",
            Self::Pause => "pause",
            Self::Link => "link",
            Self::Identity => "identity",
            Self::Snapshot | Self::Halted => "snapshot",
            Self::Restore => "restore",
            Self::Kill => "kill",
            Self::Adopt => "adopt",
        }
    }
}

/// Before or after a step's effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Moment {
    /// Nothing has happened yet.
    Before,
    /// The step has had its effect; its caller does not know.
    After,
}

/// A step that hangs until it is released; it stays hung when this is dropped.
#[derive(Debug)]
pub struct Hang {
    reached: watch::Receiver<bool>,
    release: watch::Sender<bool>,
}

impl Hang {
    /// Waits until the step hangs.
    pub async fn reached(&mut self) {
        self.reached.wait_for(|reached| *reached).await.expect("the script lives as long as its host");
    }

    /// Lets the step go on.
    pub fn release(&self) {
        self.release.send_replace(true);
    }
}

#[derive(Clone)]
struct Hung {
    reached: Arc<watch::Sender<bool>>,
    release: watch::Receiver<bool>,
}

/// A link that has fallen silent, for ever.
pub(super) struct Silence(Hung);

impl Silence {
    pub(super) fn reach(&self) {
        self.0.reached.send_replace(true);
    }
}

#[derive(Clone)]
enum Fault {
    Fail,
    Hang(Hung),
}

struct Rule {
    step: Step,
    moment: Moment,
    left: usize,
    fault: Fault,
}

#[derive(Default)]
pub(super) struct Script {
    rules: Mutex<Vec<Rule>>,
}

impl Script {
    pub(super) fn fail(&self, step: Step, moment: Moment, times: usize) {
        self.add(Rule { step, moment, left: times, fault: Fault::Fail });
    }

    pub(super) fn hang(&self, step: Step, moment: Moment) -> Hang {
        let (reached, reached_rx) = watch::channel(false);
        let (release, release_rx) = watch::channel(false);
        let hung = Hung { reached: Arc::new(reached), release: release_rx };
        self.add(Rule { step, moment, left: 1, fault: Fault::Hang(hung) });
        Hang { reached: reached_rx, release }
    }

    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    /// Does what the script says of this point.
    pub(super) async fn pass(&self, step: Step, moment: Moment) -> Result<(), EngineError> {
        match self.take(step, moment) {
            None => Ok(()),
            Some(Fault::Fail) => {
                Err(EngineError::Emulator { step: step.name(), detail: "the test's script says so".to_owned() })
            }
            Some(Fault::Hang(mut hung)) => {
                hung.reached.send_replace(true);
                if hung.release.wait_for(|release| *release).await.is_err() {
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        }
    }

    /// What happens to the first request on a new link: nothing, the link breaks (`Err`), or the link
    /// falls silent (`Ok`: to be told that it has).
    pub(super) fn at_identity(&self) -> Option<Result<Silence, ()>> {
        match self.take(Step::Identity, Moment::Before)? {
            Fault::Fail => Some(Err(())),
            Fault::Hang(hung) => Some(Ok(Silence(hung))),
        }
    }

    fn take(&self, step: Step, moment: Moment) -> Option<Fault> {
        let mut rules = self.lock();
        let at = rules.iter().position(|rule| rule.step == step && rule.moment == moment && rule.left > 0)?;
        rules[at].left -= 1;
        let fault = rules[at].fault.clone();
        rules.retain(|rule| rule.left > 0);
        Some(fault)
    }

    fn add(&self, rule: Rule) {
        self.lock().push(rule);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Rule>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
