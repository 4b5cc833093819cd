//! One sandbox's owner: the task that alone changes its state.
//!
//! ```text
//! create --> [make] --ok--> live: inbox, deadline, machine's end --> end --> gone
//!               |                                                     ^
//!               +--failed--> record `failed`      adopted ------------+--(deadline passed, killing)
//! ```
//!
//! Everybody else reads [`View`] or sends a [`Verb`] and waits. A caller that stops waiting changes
//! nothing: the verb is carried through here. Later tiers (paused, hibernated) are further states of
//! [`Owner::live`], with verbs of their own and another machine under the same sandbox.

use std::{collections::VecDeque, panic::AssertUnwindSafe, pin::pin, sync::Arc};

use futures::FutureExt;
use stockade_engine::Machine;
use stockade_model::{EndCause, Ending, MachineId, Sandbox, SandboxId, SandboxState};
use stockade_store::Inserted;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info, info_span};

use crate::{
    ServiceError,
    clock::{Deadline, deadline_after},
    core::{Core, Pauses, Ticket},
    create::{self, Created, Order, Unmade},
    error::{chain, store_error},
    live::{Live, Reply, Verb, View},
    pool,
};

/// Verbs kept while a sandbox is being made.
const WAITING: usize = 64;

pub(crate) struct Owner {
    pub(crate) core: Arc<Core>,
    pub(crate) sandbox: Sandbox,
    publish: watch::Sender<View>,
    pub(crate) inbox: mpsc::Receiver<Verb>,
    waiting: VecDeque<Verb>,
    _registered: Registered,
    _sandbox_ticket: Ticket,
}

/// Takes the sandbox out of the registry, also when the owner is cut off.
struct Registered {
    core: Arc<Core>,
    id: SandboxId,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.core.registry.remove(&self.id);
    }
}

impl Owner {
    fn new(core: &Arc<Core>, sandbox: Sandbox, ticket: Ticket) -> (Self, Live) {
        let (live, publish, inbox) = Live::new(sandbox.clone());
        core.registry.insert(sandbox.id.clone(), live.clone());
        let registered = Registered { core: Arc::clone(core), id: sandbox.id.clone() };
        let waiting = VecDeque::new();
        let core = Arc::clone(core);
        (Self { core, sandbox, publish, inbox, waiting, _registered: registered, _sandbox_ticket: ticket }, live)
    }

    /// Makes a new sandbox.
    pub(crate) fn spawn_create(
        core: &Arc<Core>,
        sandbox: Sandbox,
        order: Order,
        tickets: (Ticket, Ticket),
    ) -> oneshot::Receiver<Result<Created, ServiceError>> {
        let (reply, answer) = oneshot::channel();
        let (create_ticket, sandbox_ticket) = tickets;
        let (owner, _) = Self::new(core, sandbox, sandbox_ticket);
        owner.spawn(move |owner| owner.create(order, create_ticket, reply));
        answer
    }

    /// Goes on with a sandbox whose machine was found again.
    pub(crate) fn spawn_adopted(core: &Arc<Core>, sandbox: Sandbox, machine: Arc<dyn Machine>) -> Live {
        let (owner, live) = Self::new(core, sandbox, core.count_adopted());
        owner.show(Some(Arc::clone(&machine)));
        owner.spawn(move |owner| owner.live(machine));
        live
    }

    /// Runs the owner's life. Should our own code fail in it, the machine must not run on unowned.
    fn spawn<L>(self, life: impl FnOnce(Self) -> L + Send + 'static)
    where
        L: Future<Output = ()> + Send + 'static,
    {
        let (core, id) = (Arc::clone(&self.core), self.sandbox.id.clone());
        let tasks = Arc::clone(&core);
        let view = self.publish.subscribe();
        let span = info_span!("sandbox", %id);
        let task = async move {
            if AssertUnwindSafe(life(self)).catch_unwind().await.is_err() {
                let machine = view.borrow().sandbox.machine.clone();
                after_panic(&core, &id, machine.as_ref()).await;
            }
        };
        tasks.spawn(task.instrument(span));
    }

    async fn create(
        mut self,
        order: Order,
        create_ticket: Ticket,
        reply: oneshot::Sender<Result<Created, ServiceError>>,
    ) {
        let core = Arc::clone(&self.core);
        let template = order.template.template.id.clone();
        let claimed = core.pool.claim(&template);
        let machine = claimed.as_ref().map_or_else(MachineId::random, |machine| machine.id().clone());
        self.sandbox.machine = Some(machine);
        self.show(None);
        match core.store().insert_sandbox(&self.sandbox, order.key.as_ref()).await {
            Ok(Inserted::New) => {}
            other => {
                if let Some(machine) = claimed {
                    pool::give_back(&core, &template, machine).await;
                }
                drop(self);
                let answer = other.map_err(store_error).map(|inserted| match inserted {
                    Inserted::Existing(record) => Created::Existing(record),
                    Inserted::New => unreachable!("matched above"),
                });
                reply.send(answer).ok();
                return;
            }
        }
        let (made, killed) = self.make(&order, claimed).await;
        let made = match made {
            Ok(machine) => self.mark_running(&order, machine).await,
            Err(unmade) => Err(unmade),
        };
        drop(create_ticket);
        core.pool.wake();
        match (made, killed) {
            (Ok(machine), None) => {
                reply.send(Ok(Created::New(Box::new(self.sandbox.clone())))).ok();
                self.live(machine).await;
            }
            (made, Some((cause, killer))) => {
                let ending = self.ending(cause, String::new());
                let told = ServiceError::SandboxEnded { id: self.sandbox.id.clone(), ending: Box::new(ending.clone()) };
                self.end(made.ok(), ending, Some(killer)).await;
                reply.send(Err(told)).ok();
            }
            (Err(Unmade::Failed(error)), None) => self.failed(error, reply).await,
            (Err(Unmade::Cancelled), None) => unreachable!("only a kill cancels"),
        }
    }

    /// Runs the steps to their end while listening for a kill; other verbs wait for the outcome.
    async fn make(
        &mut self,
        order: &Order,
        claimed: Option<Arc<dyn Machine>>,
    ) -> (Result<Arc<dyn Machine>, Unmade>, Option<(EndCause, Reply<()>)>) {
        let cancel = CancellationToken::new();
        let core = Arc::clone(&self.core);
        let mut sandbox = self.sandbox.clone();
        let mut killed = None;
        let made = {
            let mut steps = pin!(create::make(&core, &mut sandbox, &order.template, claimed, &cancel));
            loop {
                tokio::select! {
                    biased;
                    made = &mut steps => break made,
                    Some(verb) = self.inbox.recv() => match verb {
                        Verb::Kill { cause, reply } if killed.is_none() => {
                            killed = Some((cause, reply));
                            cancel.cancel();
                        }
                        verb if self.waiting.len() < WAITING => self.waiting.push_back(verb),
                        verb => verb.refuse(&self.sandbox),
                    },
                }
            }
        };
        self.sandbox = sandbox;
        (made, killed)
    }

    async fn mark_running(&mut self, order: &Order, machine: Arc<dyn Machine>) -> Result<Arc<dyn Machine>, Unmade> {
        let core = &self.core;
        let started_at = core.now();
        let deadline = deadline_after(core.clock().now(), order.lifetime);
        if let Err(error) = core.store().mark_running(&self.sandbox.id, started_at, deadline).await {
            create::remove_soon(core, machine).await;
            return Err(store_error(error).into());
        }
        self.sandbox.state = SandboxState::Running;
        self.sandbox.started_at = Some(started_at);
        self.sandbox.deadline = deadline;
        self.show(Some(Arc::clone(&machine)));
        info!(machine = %machine.id(), template = %self.sandbox.template, "running");
        Ok(machine)
    }

    /// The machine is gone already; what is left is to say so.
    async fn failed(mut self, error: ServiceError, reply: oneshot::Sender<Result<Created, ServiceError>>) {
        let detail = chain(&error);
        info!(detail, "not made");
        let ending = self.ending(EndCause::CreateFailed, detail);
        let finished = self.finish(SandboxState::Failed, &ending).await;
        let retry = finished.is_err();
        if retry {
            reply.send(Err(error)).ok();
            self.finish_for_certain(SandboxState::Failed, &ending).await;
            return;
        }
        drop(self);
        reply.send(Err(error)).ok();
    }

    /// The life of a running sandbox.
    async fn live(mut self, machine: Arc<dyn Machine>) {
        let core = Arc::clone(&self.core);
        let mut deadline = Deadline::at(self.sandbox.deadline, core.clock());
        loop {
            // The machine's end first: nobody is served from a machine that is gone. Then verbs, so that an
            // extension that has arrived beats the deadline.
            let verb = match self.waiting.pop_front() {
                Some(verb) => verb,
                None => tokio::select! {
                    biased;
                    exit = machine.exited() => return self.machine_ended(machine, exit).await,
                    Some(verb) = self.inbox.recv() => verb,
                    () = deadline.passed(core.clock()) => {
                        let ending = self.ending(EndCause::Expired, String::new());
                        return self.end(Some(machine), ending, None).await;
                    }
                },
            };
            match verb {
                Verb::Kill { cause, reply } => {
                    let ending = self.ending(cause, String::new());
                    return self.end(Some(machine), ending, Some(reply)).await;
                }
                Verb::SetLifetime { lifetime, only_later, reply } => {
                    let wanted = deadline_after(core.clock().now(), lifetime);
                    if !only_later || wanted > self.sandbox.deadline {
                        if let Err(error) = core.store().set_deadline(&self.sandbox.id, wanted).await {
                            reply.send(Err(store_error(error))).ok();
                            continue;
                        }
                        self.sandbox.deadline = wanted;
                        deadline = Deadline::at(wanted, core.clock());
                        self.show(Some(Arc::clone(&machine)));
                    }
                    reply.send(Ok(self.sandbox.clone())).ok();
                }
                Verb::Machine { reply } => {
                    reply.send(Ok(Arc::clone(&machine))).ok();
                }
            }
        }
    }

    pub(crate) fn ending(&self, cause: EndCause, detail: String) -> Ending {
        Ending { at: self.core.now(), cause, detail }
    }

    /// Shows the sandbox as it is now.
    pub(crate) fn show(&self, machine: Option<Arc<dyn Machine>>) {
        self.publish.send_replace(View { sandbox: self.sandbox.clone(), machine });
    }

    /// Writes the end and shows it.
    pub(crate) async fn finish(&mut self, state: SandboxState, ending: &Ending) -> Result<(), ServiceError> {
        self.core.store().finish(&self.sandbox.id, state, ending).await.map_err(store_error)?;
        self.sandbox.state = state;
        self.sandbox.ending = Some(ending.clone());
        self.show(None);
        info!(%state, cause = ?ending.cause, "ended");
        Ok(())
    }

    /// [`Owner::finish`], however long that takes; verbs are refused meanwhile.
    pub(crate) async fn finish_for_certain(&mut self, state: SandboxState, ending: &Ending) {
        let mut pauses = Pauses::default();
        while let Err(error) = self.finish(state, ending).await {
            error!(error = &error as &dyn std::error::Error, "end not recorded, trying again");
            let mut pause = pin!(tokio::time::sleep(pauses.next()));
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    Some(verb) = self.inbox.recv() => verb.refuse(&self.sandbox),
                }
            }
        }
    }

    /// Nothing more comes: whoever asks from here on, or has asked, is told by the record.
    pub(crate) fn leave(self) {
        drop(self);
    }
}

impl Verb {
    /// Answers that this is not the time.
    pub(crate) fn refuse(self, sandbox: &Sandbox) {
        let error = || ServiceError::WrongState { id: sandbox.id.clone(), state: sandbox.state };
        // A caller that has gone away needs no answer.
        match self {
            Self::Kill { reply, .. } => drop(reply.send(Err(error()))),
            Self::SetLifetime { reply, .. } => drop(reply.send(Err(error()))),
            Self::Machine { reply } => drop(reply.send(Err(error()))),
        }
    }
}

async fn after_panic(core: &Arc<Core>, id: &SandboxId, machine: Option<&MachineId>) {
    error!("the sandbox's owner failed; the sandbox is ended");
    let detail = "a fault in the server; its log has the details".to_owned();
    let ending = Ending { at: core.now(), cause: EndCause::Crashed, detail };
    if let Some(machine) = machine {
        core.reap_for_certain(machine).await;
    }
    let mut pauses = Pauses::default();
    while let Err(error) = core.store().finish(id, SandboxState::Gone, &ending).await {
        error!(error = &error as &dyn std::error::Error, "end not recorded, trying again");
        pauses.wait().await;
    }
}
