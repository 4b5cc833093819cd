//! The verbs as their callers see them.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use stockade_engine::{EngineError, EngineInfo, GuestClient, Machine, MachineUsage};
use stockade_model::{
    EndCause, Ending, LifeRules, Lineage, Sandbox, SandboxId, SandboxState, Secret, TemplateState, Tier, quoted,
};
use stockade_store::{
    Idempotency, IdempotencyRecord, NetworkRecord, SandboxEvent, SandboxQuery, SnapshotRecord, Store, TemplateRecord,
};

use crate::{
    CreateSandbox, LifeChange, ListFilter, MetricsSample, NetworkSpec, Page, PauseMode, Principal, ServiceError,
    clock::deadline_after,
    core::Core,
    create::{Created, Order},
    error::store_error,
    live::{Live, Source, Take, Target, Verb},
    metrics,
    owner::Owner,
    pool::Kind,
    request,
};

/// How long a caller waits for the record of a machine that was seen to have ended.
const WAIT_FOR_END: Duration = Duration::from_secs(2);
const LARGEST_PAGE: u32 = 1000;

/// The verbs. Cheap to clone; when the last clone is dropped, all work is cut off where it stands.
#[derive(Clone)]
pub struct Service {
    pub(crate) handle: Arc<Handle>,
}

pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.cut();
    }
}

/// A sandbox in the caller's sight.
pub(crate) enum Found {
    Live(Live),
    Ended(Box<Sandbox>),
}

#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: `SandboxNotFound` also for what belongs to others, `SandboxEnded` for what is no more, \
              `Store` and `Engine` for what is broken below"
)]
impl Service {
    /// Makes a sandbox; returns when it takes commands.
    pub async fn create(&self, who: &Principal, request: CreateSandbox) -> Result<Sandbox, ServiceError> {
        let core = &self.handle.core;
        request::check(&request, core.config.max_lifetime)?;
        let (template, mut source, from) = self.origin(who, &request.template).await?;
        match &mut source {
            Some(source) if request.from_disk => source.take = Take::Disk,
            None if request.from_disk => {
                let problem =
                    format!("{} is a template: only a snapshot's disk can be booted from", quoted(&request.template));
                return Err(ServiceError::Invalid { field: "template", problem });
            }
            _ => {}
        }
        let digest = request::digest(self.store(), &request);
        let key = request.idempotency_key.clone().map(|key| Idempotency { key, digest: digest.clone() });
        if let Some(key) = &key
            && let Some(earlier) = self.store().idempotency(&who.workspace, &key.key).await.map_err(store_error)?
        {
            return self.join(who, &earlier, &digest).await;
        }
        let tickets = core.admit()?;
        core.engine().check_capacity(&template.template.shape)?;
        let name = &template.template.name;
        let network = self.network_of(who, name, request.network.clone(), from.as_ref()).await?;
        let sandbox = self.first_record(who, &request, &template.template, from);
        let order = Order { template, source, lifetime: request.lifetime, network, key };
        match Owner::spawn_create(core, sandbox, order, tickets).await {
            Ok(Ok(Created::New(sandbox))) => Ok(*sandbox),
            Ok(Ok(Created::Existing(earlier))) => self.join(who, &earlier, &digest).await,
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.cut_off("create")),
        }
    }

    /// What to start from: a template, or a snapshot and the template below it. Templates come first by name.
    async fn origin(
        &self,
        who: &Principal,
        name: &str,
    ) -> Result<(TemplateRecord, Option<Source>, Option<SnapshotRecord>), ServiceError> {
        match self.template_record(who, name).await {
            Ok(template) if matches!(template.template.state, TemplateState::Ready | TemplateState::Replaced) => {
                let source = template.built.as_ref().map(|built| self.source_of_template(&built.snapshot));
                Ok((template, source, None))
            }
            Ok(_) => {
                Err(ServiceError::Invalid { field: "template", problem: format!("{} is not ready", quoted(name)) })
            }
            Err(unknown @ ServiceError::TemplateNotFound { .. }) => {
                let (snapshot, source) = match self.source(who, name).await {
                    Err(ServiceError::SnapshotNotFound { .. }) => return Err(unknown),
                    found => found?,
                };
                let template = self.template_record(who, snapshot.snapshot.template.as_str()).await?;
                Ok((template, Some(source), Some(snapshot)))
            }
            Err(error) => Err(error),
        }
    }

    /// The network of a new sandbox. `from`: the snapshot it is made from.
    async fn network_of(
        &self,
        who: &Principal,
        template: &str,
        spec: Option<NetworkSpec>,
        from: Option<&SnapshotRecord>,
    ) -> Result<Option<NetworkRecord>, ServiceError> {
        let core = &self.handle.core;
        if spec.is_none() && core.network.is_none() {
            return Ok(None);
        }
        let network = core.network()?;
        let from = match from {
            Some(from) => self.store().network(from.snapshot.id.as_str()).await.map_err(store_error)?,
            None => None,
        };
        let settings = network.new_settings(&who.workspace, Some(template), spec, from.as_ref()).await?.to_json();
        Ok(Some(NetworkRecord { settings, names: from.map(|from| from.names).unwrap_or_default() }))
    }

    fn first_record(
        &self,
        who: &Principal,
        request: &CreateSandbox,
        template: &stockade_model::Template,
        from: Option<SnapshotRecord>,
    ) -> Sandbox {
        let id = SandboxId::random();
        let lineage = Lineage { snapshot: from.as_ref().map(|from| from.snapshot.id.clone()), ..Lineage::default() };
        let mut env = from.map(|from| from.env).unwrap_or_default();
        env.extend(request.env.clone());
        Sandbox {
            access_token: self.store().access_token(&id),
            workspace: who.workspace.clone(),
            template: template.id.clone(),
            template_name: template.name.clone(),
            state: SandboxState::Creating,
            shape: template.shape,
            machine: None,
            metadata: request.metadata.clone(),
            env,
            created_at: self.handle.core.now(),
            started_at: None,
            deadline: deadline_after(self.handle.core.clock().now(), request.lifetime),
            lifetime: request.lifetime,
            remaining: None,
            tier: None,
            saved: None,
            idle_since: None,
            rules: LifeRules { on_timeout: request.on_timeout, auto_resume: request.auto_resume, idle: request.idle },
            lineage,
            ending: None,
            id,
        }
    }

    /// The sandbox an earlier request with the same idempotency key made or is making.
    async fn join(&self, who: &Principal, earlier: &IdempotencyRecord, digest: &[u8]) -> Result<Sandbox, ServiceError> {
        if earlier.digest != digest {
            return Err(ServiceError::IdempotencyConflict);
        }
        if let Some(live) = self.handle.core.registry.get(&earlier.sandbox) {
            live.settled().await;
        }
        let sandbox = self.get(who, &earlier.sandbox).await?;
        match &sandbox.ending {
            Some(Ending { cause: EndCause::CreateFailed, detail, .. }) => {
                Err(EngineError::Emulator { step: "create", detail: detail.clone() }.into())
            }
            _ => Ok(sandbox),
        }
    }

    /// One sandbox, also one that has ended.
    pub async fn get(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        let record = self.store().sandbox(&who.workspace, id).await.map_err(store_error)?;
        record.ok_or_else(|| not_found(id))
    }

    /// What happened to a sandbox, oldest first.
    pub async fn events(&self, who: &Principal, id: &SandboxId) -> Result<Vec<SandboxEvent>, ServiceError> {
        let events = self.store().events(&who.workspace, id).await.map_err(store_error)?;
        if events.is_empty() { Err(not_found(id)) } else { Ok(events) }
    }

    /// Sandboxes, page by page.
    pub async fn list(&self, who: &Principal, filter: &ListFilter) -> Result<Page<Sandbox>, ServiceError> {
        if !(1..=LARGEST_PAGE).contains(&filter.limit) {
            let problem = format!("is {}: it must be 1 to {LARGEST_PAGE}", filter.limit);
            return Err(ServiceError::Invalid { field: "limit", problem });
        }
        let mut states = filter.states.clone();
        if states.is_empty() {
            states = SandboxState::ALL.into_iter().filter(|state| !state.is_final()).collect();
        }
        let query = SandboxQuery {
            states,
            metadata: filter.metadata.clone(),
            template: filter.template.clone(),
            ascending: filter.ascending,
            limit: filter.limit,
            cursor: filter.cursor.clone(),
        };
        let page = self.store().list_sandboxes(&who.workspace, &query).await.map_err(store_error)?;
        Ok(Page { items: page.items, cursor: page.cursor })
    }

    /// Ends a sandbox; returns when nothing of it is left.
    pub async fn kill(&self, who: &Principal, id: &SandboxId) -> Result<(), ServiceError> {
        self.end(who, id, EndCause::Killed { key: who.key.clone() }).await
    }

    pub(crate) async fn end(&self, who: &Principal, id: &SandboxId, cause: EndCause) -> Result<(), ServiceError> {
        self.ask(who, id, |reply| Verb::Kill { cause, reply }).await
    }

    /// Sets the deadline to now + `lifetime` (zero: at once).
    pub async fn set_lifetime(
        &self,
        who: &Principal,
        id: &SandboxId,
        lifetime: Duration,
    ) -> Result<Sandbox, ServiceError> {
        request::check_longest(lifetime, self.handle.core.config.max_lifetime)?;
        if lifetime.is_zero() {
            self.end(who, id, EndCause::Expired).await?;
            return self.get(who, id).await;
        }
        self.ask(who, id, |reply| Verb::SetLifetime { lifetime, only_later: false, reply }).await
    }

    /// Moves the deadline to now + `lifetime` if that is later.
    pub async fn extend(&self, who: &Principal, id: &SandboxId, lifetime: Duration) -> Result<Sandbox, ServiceError> {
        request::check_longest(lifetime, self.handle.core.config.max_lifetime)?;
        self.ask(who, id, |reply| Verb::SetLifetime { lifetime, only_later: true, reply }).await
    }

    /// Changes the rules a sandbox lives by, whatever state it is in.
    pub async fn set_rules(
        &self,
        who: &Principal,
        id: &SandboxId,
        change: LifeChange,
    ) -> Result<Sandbox, ServiceError> {
        if let Some(idle) = &change.idle {
            request::check_idle(idle)?;
        }
        self.ask(who, id, |reply| Verb::SetRules { change, reply }).await
    }

    /// Halts a running sandbox and keeps it: its memory too, in the tier asked for, or its disk alone. Also
    /// takes one in standby further down. Returns when what is kept is durable.
    pub async fn pause(&self, who: &Principal, id: &SandboxId, mode: PauseMode) -> Result<Sandbox, ServiceError> {
        let target = match mode {
            PauseMode { memory: false, .. } => Target::Stopped,
            PauseMode { tier: Tier::Standby, .. } => Target::Standby,
            PauseMode { tier: Tier::Hibernated, .. } => Target::Hibernated,
            PauseMode { tier: Tier::Archived, .. } => Target::Archived,
        };
        if target == Target::Archived {
            self.handle.core.archive()?;
        }
        self.ask(who, id, |reply| Verb::Pause { target, reply }).await
    }

    /// Brings a paused or stopped sandbox back; returns when it takes commands. Its lifetime from then: as given
    /// here, else what was left of it. One that runs is at most extended.
    pub async fn resume(
        &self,
        who: &Principal,
        id: &SandboxId,
        lifetime: Option<Duration>,
    ) -> Result<Sandbox, ServiceError> {
        self.resume_taking(who, id, lifetime, Take::All).await
    }

    /// Boots a paused or stopped sandbox from its disk and forgets its memory: the way out where that can no
    /// longer be used. A disk that was kept with memory is as after a power failure. One that runs stays as it is.
    pub async fn resume_from_disk(
        &self,
        who: &Principal,
        id: &SandboxId,
        lifetime: Option<Duration>,
    ) -> Result<Sandbox, ServiceError> {
        self.resume_taking(who, id, lifetime, Take::Disk).await
    }

    async fn resume_taking(
        &self,
        who: &Principal,
        id: &SandboxId,
        lifetime: Option<Duration>,
        take: Take,
    ) -> Result<Sandbox, ServiceError> {
        if let Some(lifetime) = lifetime {
            request::check_lifetime(lifetime, self.handle.core.config.max_lifetime)?;
        }
        self.ask(who, id, |reply| Verb::Resume { lifetime, take, reply }).await
    }

    /// Shuts a sandbox down and keeps its disk.
    pub async fn stop(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        self.pause(who, id, PauseMode { memory: false, tier: Tier::Hibernated }).await
    }

    /// Boots a stopped sandbox from its disk.
    pub async fn start_again(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox, ServiceError> {
        self.resume(who, id, None).await
    }

    /// The guest of a sandbox, for commands and files. One that is paused is brought back if its rules say so,
    /// and this waits for it. While the client, or a stream opened with it, is there, the sandbox is in use.
    pub async fn guest(&self, who: &Principal, id: &SandboxId) -> Result<GuestClient, ServiceError> {
        match self.find(who, id).await? {
            Found::Live(live) => self.guest_of(id, &live).await,
            Found::Ended(sandbox) => Err(ended(*sandbox)),
        }
    }

    /// The guest of a running sandbox by its own access token, for APIs that have one per sandbox.
    /// `token` `None`: the caller has checked the right to enter in another way.
    pub async fn guest_by_token(
        &self,
        id: &SandboxId,
        token: Option<&Secret>,
    ) -> Result<(Sandbox, GuestClient), ServiceError> {
        if token.is_some_and(|token| !self.store().access_token(id).matches(token.expose())) {
            return Err(ServiceError::WrongToken);
        }
        if let Some(live) = self.handle.core.registry.get(id) {
            let guest = self.guest_of(id, &live).await?;
            let sandbox = live.view.borrow().sandbox.clone();
            return Ok((sandbox, guest));
        }
        let record = self.store().sandbox_of_any_workspace(id).await.map_err(store_error)?;
        Err(record.map_or_else(|| not_found(id), ended))
    }

    async fn guest_of(&self, id: &SandboxId, live: &Live) -> Result<GuestClient, ServiceError> {
        // Before the machine is looked up: a sandbox that is about to go down by its own rules sees us.
        let hold = live.activity.begin();
        loop {
            let machine = self.machine_of(id, live, true).await?;
            let guest = tokio::select! {
                guest = machine.guest() => guest,
                // It has gone down meanwhile; nothing was asked of the guest yet.
                () = live.replaced(&machine) => continue,
            };
            match guest {
                Ok(guest) => {
                    live.session.note(&guest);
                    // Its owner closes what is noted when it goes down. What was noted too late for that must not be
                    // handed out: a request in it would wait for a guest that stands still.
                    if !live.serves(&machine) {
                        continue;
                    }
                    return Ok(guest.holding(hold));
                }
                Err(error @ EngineError::Gone { .. }) => {
                    return Err(self.end_of(id).await.unwrap_or_else(|| error.into()));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// That a sandbox has ended, for whoever has just lost its guest in the middle of something; `None`: it has not,
    /// as far as is known.
    pub async fn end_of(&self, id: &SandboxId) -> Option<ServiceError> {
        if let Some(live) = self.handle.core.registry.get(id) {
            let machine = live.view.borrow().machine.clone();
            if let Some(machine) = machine {
                // Should it have ended by itself, its owner is about to record why.
                tokio::select! {
                    () = live.ended() => {}
                    () = live.replaced(&machine) => {}
                    () = tokio::time::sleep(WAIT_FOR_END) => {}
                }
            }
            let sandbox = live.view.borrow().sandbox.clone();
            if sandbox.ending.is_some() {
                return Some(ended(sandbox));
            }
        }
        let sandbox = self.store().sandbox_of_any_workspace(id).await.ok()??;
        sandbox.state.is_final().then(|| ended(sandbox))
    }

    /// The machine, straight from the view while it runs; by way of the owner otherwise.
    async fn machine_of(&self, id: &SandboxId, live: &Live, wake: bool) -> Result<Arc<dyn Machine>, ServiceError> {
        let machine = live.view.borrow().machine.clone();
        if let Some(machine) = machine {
            return Ok(machine);
        }
        match live.ask(|reply| Verb::Machine { wake, reply }).await {
            Some(answer) => answer,
            None => match self.store().sandbox_of_any_workspace(id).await.map_err(store_error)? {
                Some(sandbox) => Err(ended(sandbox)),
                None => Err(not_found(id)),
            },
        }
    }

    /// The last lines of the guest's console.
    pub async fn console(&self, who: &Principal, id: &SandboxId) -> Result<String, ServiceError> {
        match self.find(who, id).await? {
            Found::Live(live) => {
                let machine = live.view.borrow().machine.clone();
                Ok(machine.map(|machine| machine.console_tail()).unwrap_or_default())
            }
            Found::Ended(sandbox) => Err(ended(*sandbox)),
        }
    }

    /// What a sandbox holds on the host, read now.
    pub async fn usage(&self, who: &Principal, id: &SandboxId) -> Result<MachineUsage, ServiceError> {
        match self.find(who, id).await? {
            Found::Live(live) => Ok(self.machine_of(id, &live, false).await?.usage()?),
            Found::Ended(sandbox) => Err(ended(*sandbox)),
        }
    }

    /// How a running sandbox did between two times (each optional); at least one sample, up to an hour back.
    pub async fn metrics(
        &self,
        who: &Principal,
        id: &SandboxId,
        start: Option<Timestamp>,
        end: Option<Timestamp>,
    ) -> Result<Vec<MetricsSample>, ServiceError> {
        match self.find(who, id).await? {
            Found::Live(live) => metrics::of(&self.handle.core, &live, start, end).await,
            Found::Ended(sandbox) => Err(ended(*sandbox)),
        }
    }

    /// What runs the machines.
    pub fn engine_info(&self) -> EngineInfo {
        self.handle.core.engine().info()
    }

    /// How many machines of a template are ready to be claimed.
    pub fn pool_ready(&self, template: &stockade_model::TemplateId) -> usize {
        self.handle.core.pool.ready(&Kind::Template(template.clone()))
    }

    /// How many machines of a snapshot are ready to be claimed.
    pub fn pool_ready_of(&self, snapshot: &stockade_model::SnapshotId) -> usize {
        self.handle.core.pool.ready(&Kind::Snapshot(snapshot.clone()))
    }

    pub(crate) fn store(&self) -> &Store {
        self.handle.core.store()
    }

    pub(crate) async fn ask<T>(
        &self,
        who: &Principal,
        id: &SandboxId,
        verb: impl FnOnce(crate::live::Reply<T>) -> Verb,
    ) -> Result<T, ServiceError> {
        let live = match self.find(who, id).await? {
            Found::Live(live) => live,
            Found::Ended(sandbox) => return Err(ended(*sandbox)),
        };
        match live.ask(verb).await {
            Some(answer) => answer,
            None => match self.find(who, id).await? {
                Found::Ended(sandbox) => Err(ended(*sandbox)),
                Found::Live(_) => Err(self.cut_off("request")),
            },
        }
    }

    /// Finds a sandbox, always by way of the record: for a stranger's id and an unknown one the work and the
    /// answer are the same.
    pub(crate) async fn find(&self, who: &Principal, id: &SandboxId) -> Result<Found, ServiceError> {
        let live = self.handle.core.registry.get(id);
        if let Some(live) = live.filter(|live| live.view.borrow().sandbox.workspace == who.workspace) {
            return Ok(Found::Live(live));
        }
        let sandbox = self.get(who, id).await?;
        if sandbox.state.is_final() {
            return Ok(Found::Ended(Box::new(sandbox)));
        }
        // Recorded after we looked at the registry.
        let live = self.handle.core.registry.get(id);
        live.map(Found::Live).ok_or(ServiceError::WrongState { id: id.clone(), state: sandbox.state })
    }

    pub(crate) fn cut_off(&self, what: &str) -> ServiceError {
        let what = format!("the {what} was cut off because the server is shutting down");
        ServiceError::Busy { what, retry_after: Duration::from_secs(1) }
    }
}

fn not_found(id: &SandboxId) -> ServiceError {
    ServiceError::SandboxNotFound { id: id.to_string() }
}

pub(crate) fn ended(sandbox: Sandbox) -> ServiceError {
    match sandbox.ending {
        Some(ending) => ServiceError::SandboxEnded { id: sandbox.id, ending: Box::new(ending) },
        None => ServiceError::WrongState { id: sandbox.id, state: sandbox.state },
    }
}
