//! One sandbox's owner: the task that alone changes its state.
//!
//! ```text
//! create --> [make] --ok--> running <--> standby / hibernated / stopped ---+--> end --> gone
//!               |              ^                                           |
//!               +--failed-->   +--- adopted (at its recorded place)        +--> its machine ended: gone
//!            record `failed`                                               +--> promoted: gone
//! ```
//!
//! Everybody else reads [`View`] or sends a [`Verb`] and waits. A caller that stops waiting changes
//! nothing: the verb is carried through here. A life is a walk from [`Place`] to [`Place`]; each has a
//! method that serves verbs until the next. Whatever takes long is attended: a kill cuts it short, all other
//! verbs wait for its outcome.

use std::{collections::VecDeque, panic::AssertUnwindSafe, pin::pin, sync::Arc};

use futures::FutureExt;
use jiff::Timestamp;
use stockade_engine::{Machine, MachineExit};
use stockade_model::{EndCause, Ending, MachineId, Sandbox, SandboxId, SandboxState, Tier};
use stockade_store::Inserted;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info, info_span, warn};

use crate::{
    ServiceError,
    activity::Activity,
    clock::deadline_after,
    core::{Core, Pauses, Ticket},
    create::{self, Created, Order, Unmade},
    error::{chain, store_error},
    live::{Live, Reply, Session, Verb, View},
    pool,
};

/// Verbs kept while a sandbox is busy.
const WAITING: usize = 64;

pub(crate) struct Owner {
    pub(crate) core: Arc<Core>,
    pub(crate) sandbox: Sandbox,
    publish: watch::Sender<View>,
    pub(crate) inbox: mpsc::Receiver<Verb>,
    pub(crate) waiting: VecDeque<Verb>,
    pub(crate) activity: Arc<Activity>,
    pub(crate) session: Session,
    /// When its record was last written: what the meter takes for the time of a change.
    pub(crate) changed_at: Timestamp,
    /// After a pause of our own that failed: not again before this, and how long to wait after the next.
    pub(crate) not_before: Option<Instant>,
    pub(crate) pauses: Pauses,
    _registered: Registered,
    _sandbox_ticket: Ticket,
}

/// Where a sandbox is between two steps of its life.
pub(crate) enum Place {
    Running(Arc<dyn Machine>),
    /// Paused; the halted machine is there.
    Standby(Arc<dyn Machine>),
    /// Hibernated or stopped: there is no machine, `sandbox.saved` names the directory.
    Saved,
    /// The machine is restored and whole, but not up yet.
    Resuming(Arc<dyn Machine>),
    Ending {
        machine: Option<Arc<dyn Machine>>,
        ending: Ending,
        caller: Option<Reply<()>>,
    },
    MachineEnded {
        machine: Arc<dyn Machine>,
        exit: MachineExit,
    },
    /// Its machine is another's now, and its record says so.
    Taken(Ending),
}

/// Where a verb led; an error leads somewhere, too.
pub(crate) type Moved = Result<Place, (Place, ServiceError)>;

/// Who wants the sandbox ended, and why.
pub(crate) type Killer = (EndCause, Reply<()>);

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
        let owner = Self {
            core: Arc::clone(core),
            sandbox,
            publish,
            inbox,
            waiting: VecDeque::new(),
            activity: Arc::clone(&live.activity),
            session: live.session.clone(),
            changed_at: core.now(),
            not_before: None,
            pauses: Pauses::default(),
            _registered: registered,
            _sandbox_ticket: ticket,
        };
        (owner, live)
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

    /// Goes on with a sandbox that was found again.
    pub(crate) fn spawn_adopted(core: &Arc<Core>, sandbox: Sandbox, place: Place) -> Live {
        let (owner, live) = Self::new(core, sandbox, core.count_adopted());
        owner.show(match &place {
            Place::Running(machine) => Some(Arc::clone(machine)),
            _ => None,
        });
        owner.spawn(move |owner| owner.life(place));
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
        let kind = pool::Kind::of(&order.template.template.id, order.source.as_ref());
        let claimed = kind.as_ref().and_then(|kind| {
            let snapshot = order.source.as_ref().map(|source| &*source.directory);
            core.pool.claim(kind, &order.template.directory, snapshot)
        });
        let machine = claimed.as_ref().map_or_else(MachineId::random, |machine| machine.id().clone());
        self.sandbox.machine = Some(machine);
        self.show(None);
        match core.store().insert_sandbox(&self.sandbox, order.key.as_ref()).await {
            Ok(Inserted::New) => {}
            other => {
                if let (Some(kind), Some(machine)) = (&kind, claimed) {
                    pool::give_back(&core, kind, machine).await;
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
        let (made, killed) = match self.keep_network(&order).await {
            Ok(()) => self.make(&order, claimed).await,
            Err(error) => {
                if let Some(machine) = claimed {
                    create::remove_soon(&core, machine).await;
                }
                (Err(Unmade::Failed(error)), None)
            }
        };
        let made = match made {
            Ok(machine) => self.mark_running(&order, machine).await,
            Err(unmade) => Err(unmade),
        };
        drop(create_ticket);
        // A snapshot that was started from is no longer needed.
        drop(order);
        core.pool.wake();
        match (made, killed) {
            (Ok(machine), None) => {
                reply.send(Ok(Created::New(Box::new(self.sandbox.clone())))).ok();
                self.life(Place::Running(machine)).await;
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

    async fn keep_network(&self, order: &Order) -> Result<(), ServiceError> {
        let Some(network) = &order.network else { return Ok(()) };
        self.core.store().put_network(self.sandbox.id.as_str(), network).await.map_err(store_error)
    }

    async fn make(
        &mut self,
        order: &Order,
        claimed: Option<Arc<dyn Machine>>,
    ) -> (Result<Arc<dyn Machine>, Unmade>, Option<Killer>) {
        let cancel = CancellationToken::new();
        let core = Arc::clone(&self.core);
        let mut sandbox = self.sandbox.clone();
        let outcome = self.attend(&cancel, create::make(&core, &mut sandbox, order, claimed, &cancel)).await;
        self.sandbox = sandbox;
        outcome
    }

    /// Runs steps to their end while listening for a kill, which cancels them; other verbs wait for the
    /// outcome.
    pub(crate) async fn attend<T>(
        &mut self,
        cancel: &CancellationToken,
        steps: impl Future<Output = T>,
    ) -> (T, Option<Killer>) {
        let mut killed = None;
        let mut steps = pin!(steps);
        loop {
            tokio::select! {
                biased;
                done = &mut steps => return (done, killed),
                Some(verb) = self.inbox.recv() => match verb {
                    Verb::Kill { cause, reply } if killed.is_none() => {
                        killed = Some((cause, reply));
                        cancel.cancel();
                    }
                    verb => self.keep(verb),
                },
            }
        }
    }

    /// Keeps a verb for later.
    fn keep(&mut self, verb: Verb) {
        if self.waiting.len() < WAITING { self.waiting.push_back(verb) } else { verb.refuse(&self.sandbox) }
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
        core.meter.enter(&self.sandbox, Some(&machine), 0, started_at);
        self.activity.touch();
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

    /// From place to place until the end.
    async fn life(mut self, mut place: Place) {
        loop {
            place = match place {
                Place::Running(machine) => self.running(machine).await,
                Place::Standby(machine) => self.paused(Some(machine)).await,
                Place::Saved => self.paused(None).await,
                Place::Resuming(machine) => match self.bring_back(machine, None).await {
                    Ok(place) | Err((place, _)) => place,
                },
                Place::Ending { machine, ending, caller } => return self.end(machine, ending, caller).await,
                Place::MachineEnded { machine, exit } => return self.machine_ended(machine, exit).await,
                Place::Taken(ending) => {
                    self.core.meter.end(&self.sandbox.id, ending.at);
                    self.core.meter.settle(&self.core).await;
                    self.sandbox.state = SandboxState::Gone;
                    self.sandbox.ending = Some(ending);
                    self.show(None);
                    return self.leave();
                }
            };
        }
    }

    /// The place this sandbox has by its record.
    pub(crate) fn place(&self, machine: Option<Arc<dyn Machine>>) -> Place {
        match machine {
            Some(machine) if self.sandbox.state == SandboxState::Running => Place::Running(machine),
            Some(machine) => Place::Standby(machine),
            None => Place::Saved,
        }
    }

    pub(crate) fn killed(&self, machine: Option<Arc<dyn Machine>>, (cause, reply): Killer) -> Place {
        Place::Ending { machine, ending: self.ending(cause, String::new()), caller: Some(reply) }
    }

    /// Tells the caller where its verb led, and goes there.
    pub(crate) fn arrive(&self, moved: Moved, reply: Reply<Sandbox>) -> Place {
        let (place, answer) = match moved {
            Ok(place @ (Place::Ending { .. } | Place::Taken(_))) => {
                (place, Err(ServiceError::WrongState { id: self.sandbox.id.clone(), state: SandboxState::Killing }))
            }
            Ok(place) => (place, Ok(self.sandbox.clone())),
            Err((place, error)) => {
                warn!(error = &error as &dyn std::error::Error, "not done");
                (place, Err(error))
            }
        };
        reply.send(answer).ok();
        place
    }

    /// Writes a changed life, then takes it for the truth.
    pub(crate) async fn put(&mut self, changed: Sandbox) -> Result<(), ServiceError> {
        let at = self.core.now();
        self.core.store().put_life(&changed, self.sandbox.state, at).await.map_err(store_error)?;
        self.changed_at = at;
        if changed.state != self.sandbox.state {
            info!(state = %changed.state, tier = changed.tier.map(Tier::as_str), "recorded");
        }
        self.sandbox = changed;
        Ok(())
    }

    /// [`Owner::put`], however long that takes: what it says has happened already.
    pub(crate) async fn put_for_certain(&mut self, changed: Sandbox) {
        let mut pauses = Pauses::default();
        while let Err(error) = self.put(changed.clone()).await {
            error!(error = &error as &dyn std::error::Error, "state not recorded, trying again");
            let mut pause = pin!(tokio::time::sleep(pauses.next()));
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    Some(verb) = self.inbox.recv() => self.keep(verb),
                }
            }
        }
    }

    /// Shows it on its way: nobody gets the machine any more.
    pub(crate) fn show_as(&self, state: SandboxState) {
        let sandbox = Sandbox { state, ..self.sandbox.clone() };
        self.publish.send_replace(View { sandbox, machine: None });
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
