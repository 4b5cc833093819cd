//! Carries a build out.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sha2::{Digest as _, Sha256};
use stockade_engine::GuestClient;
use stockade_model::{Sandbox, SnapshotId, Template, TemplateState, quoted};
use stockade_store::{Built, SnapshotPurpose, SnapshotQuery, TemplateRecord};
use stockade_wire::process::Command;

use super::{
    BUILD_LABEL, Build, BuildAction, BuildPlace, BuildPlan, BuildState, LogLevel, STEPS_KEPT,
    guest::{self, Copying, Place},
    uploads,
};
use crate::{CreateSandbox, Service, ServiceError, error::chain, error::store_error};

/// The build's sandbox ends by itself this long after its server has.
const LIFETIME: Duration = Duration::from_secs(900);
const EXTEND_EVERY: Duration = Duration::from_secs(300);
const READY_INTERVAL: Duration = Duration::from_secs(2);
const READY_PATIENCE: Duration = Duration::from_secs(600);
/// What a start command gets at least to fail in: a ready command may succeed without looking.
const START_TIME: Duration = Duration::from_secs(5);
const STEP_LABEL: &str = "stockade.build-step";
const DELETED: &str = "the template was deleted";

type Failed = (BuildPlace, String);

fn at(place: BuildPlace) -> impl FnOnce(ServiceError) -> Failed {
    move |error| (place, chain(&error))
}

/// Runs a build to its end, whatever that is.
pub(super) async fn run(service: &Service, build: &Arc<Build>, plan: BuildPlan) {
    let mut sandbox = None;
    let done = match build.cancel.is_cancelled() {
        true => Err((BuildPlace::Base, DELETED.to_owned())),
        false => work(service, build, &plan, &mut sandbox).await,
    };
    if let Some(sandbox) = sandbox
        && let Err(error) = service.kill(&build.owner, &sandbox.id).await
    {
        tracing::warn!(build = build.id, error = chain(&error), "a build's sandbox is left to its deadline");
    }
    match done {
        Ok(()) => {
            build.log.say(LogLevel::Info, BuildPlace::Finalize, "[finalize] template is ready");
            build.set(BuildState::Ready);
        }
        Err((place, message)) => build.fail(place, message),
    }
}

async fn work(
    service: &Service,
    build: &Arc<Build>,
    plan: &BuildPlan,
    kept: &mut Option<Sandbox>,
) -> Result<(), Failed> {
    let base = at(BuildPlace::Base);
    let parent = service.parent_of(build, &plan.from).await.map_err(base)?;
    build.log.say(LogLevel::Info, BuildPlace::Base, &format!("[base] FROM {}", plan.from));
    let digests = digests(&parent.digest, plan);
    let known = service.known_step(build, plan, &digests).await.map_err(at(BuildPlace::Base))?;
    let create = CreateSandbox {
        template: known.as_ref().map_or_else(|| plan.from.clone(), |(_, snapshot)| snapshot.to_string()),
        lifetime: LIFETIME,
        metadata: BTreeMap::from([(BUILD_LABEL.to_owned(), build.id.clone())]),
        ..CreateSandbox::default()
    };
    let sandbox = service.create(&build.owner, create).await.map_err(at(BuildPlace::Base))?;
    let _keeper = Keeper::of(service, build, &sandbox);
    *kept = Some(sandbox.clone());
    let guest = service.guest(&build.owner, &sandbox.id).await.map_err(at(BuildPlace::Base))?;
    let place = Place {
        user: parent.template.default_user.clone(),
        cwd: parent.template.default_cwd.clone(),
        env: BTreeMap::new(),
    };
    let mut builder = Builder { service, build, sandbox: &sandbox, guest: &guest, place, count: plan.steps.len() };
    let known = known.map_or(0, |(count, _)| count);
    tokio::select! {
        () = build.cancel.cancelled() => return Err((BuildPlace::Finalize, DELETED.to_owned())),
        carried_out = builder.carry_out(plan, &digests, known) => carried_out?,
    }
    builder.finish(&parent, digests.last().unwrap_or(&parent.digest)).await.map_err(at(BuildPlace::Finalize))
}

/// Moves the sandbox's deadline on, until dropped.
struct Keeper(tokio::task::JoinHandle<()>);

impl Keeper {
    fn of(service: &Service, build: &Build, sandbox: &Sandbox) -> Self {
        let (handle, who, id) = (Arc::downgrade(&service.handle), build.owner.clone(), sandbox.id.clone());
        Self(tokio::spawn(async move {
            loop {
                tokio::time::sleep(EXTEND_EVERY).await;
                let Some(handle) = handle.upgrade() else { return };
                // One that fails is made up for by the next.
                let _ = Service { handle }.extend(&who, &id, LIFETIME).await;
            }
        }))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a build starts from.
struct Parent {
    /// The template whose defaults hold.
    template: Template,
    directory: std::path::PathBuf,
    env: BTreeMap<String, String>,
    /// Over what it is.
    digest: String,
}

impl Service {
    async fn parent_of(&self, build: &Build, from: &str) -> Result<Parent, ServiceError> {
        let who = &build.owner;
        match self.template_record(who, from).await {
            Ok(record) => Ok(Parent {
                env: record.template.env.clone(),
                digest: digest_of(&[record.template.id.as_str()]),
                directory: record.directory,
                template: record.template,
            }),
            Err(unknown @ ServiceError::TemplateNotFound { .. }) => {
                let snapshot = match self.snapshot_record(who, from).await {
                    Err(ServiceError::SnapshotNotFound { .. }) => return Err(unknown),
                    found => found?,
                };
                let below = self.template_record(who, snapshot.snapshot.template.as_str()).await?;
                let mut env = below.template.env.clone();
                env.extend(snapshot.env);
                let digest = digest_of(&[snapshot.snapshot.id.as_str()]);
                Ok(Parent { env, digest, directory: below.directory, template: below.template })
            }
            Err(error) => Err(error),
        }
    }

    /// How many steps need not be carried out again, and what is left of them.
    async fn known_step(
        &self,
        build: &Build,
        plan: &BuildPlan,
        digests: &[String],
    ) -> Result<Option<(usize, SnapshotId)>, ServiceError> {
        let free = plan.steps.iter().position(|step| plan.force || step.force).unwrap_or(plan.steps.len());
        for index in (0..free).rev().filter(|index| is_layer(&plan.steps[*index].action)) {
            let query = SnapshotQuery {
                purpose: SnapshotPurpose::Step,
                labels: BTreeMap::from([(STEP_LABEL.to_owned(), digests[index].clone())]),
                limit: 1,
                ..SnapshotQuery::default()
            };
            let now = self.handle.core.now();
            let found = self.store().list_snapshots(&build.owner.workspace, &query, now).await.map_err(store_error)?;
            if let Some(snapshot) = found.items.into_iter().next() {
                return Ok(Some((index + 1, snapshot.id)));
            }
        }
        Ok(None)
    }
}

/// Steps that change the guest, and are worth a snapshot.
fn is_layer(action: &BuildAction) -> bool {
    matches!(action, BuildAction::Run { .. } | BuildAction::Copy { .. })
}

/// Each step's digest, over all before it.
fn digests(parent: &str, plan: &BuildPlan) -> Vec<String> {
    let mut before = parent.to_owned();
    let digest = |step: &super::BuildStep| {
        before = digest_of(&[&before, &format!("{:?}", step.action)]);
        before.clone()
    };
    plan.steps.iter().map(digest).collect()
}

fn digest_of(fields: &[&str]) -> String {
    let mut hash = Sha256::new();
    for field in fields {
        hash.update((field.len() as u64).to_be_bytes());
        hash.update(field);
    }
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

struct Builder<'a> {
    service: &'a Service,
    build: &'a Arc<Build>,
    sandbox: &'a Sandbox,
    guest: &'a GuestClient,
    /// As the steps so far have set it.
    place: Place,
    count: usize,
}

impl Builder<'_> {
    /// All steps, of which the first `known` need not be carried out again, then the start command.
    async fn carry_out(&mut self, plan: &BuildPlan, digests: &[String], known: usize) -> Result<(), Failed> {
        for (index, step) in plan.steps.iter().enumerate() {
            let number = index + 1;
            let result = self.step(number, &step.action, index < known).await;
            result.map_err(|message| (BuildPlace::Step(number), message))?;
            if index >= known && is_layer(&step.action) {
                self.keep_step(&digests[index]).await.map_err(at(BuildPlace::Step(number)))?;
            }
        }
        self.start(plan).await.map_err(|message| (BuildPlace::Finalize, message))
    }

    /// Carries a step out; of a known one only what it sets for those after it.
    async fn step(&mut self, number: usize, action: &BuildAction, is_known: bool) -> Result<(), String> {
        let cached = if is_known { "CACHED " } else { "" };
        let line = format!("{cached}[builder {number}/{}] {}", self.count, title(action));
        self.build.log.say(LogLevel::Info, BuildPlace::Step(number), &line);
        match action {
            BuildAction::Run { command, user } if !is_known => self.run(number, command, user.as_deref()).await,
            BuildAction::Copy { .. } if !is_known => self.copy(action).await,
            BuildAction::Run { .. } | BuildAction::Copy { .. } => Ok(()),
            BuildAction::Env(pairs) => self.set_env(pairs).await,
            BuildAction::WorkDir(path) => {
                let path = self.absolute(path).await?;
                if !is_known {
                    guest::make_directory(self.guest, &path, &self.place.user).await?;
                }
                self.place.cwd = Some(path);
                Ok(())
            }
            BuildAction::User { name, sudo } => {
                if !is_known {
                    guest::make_user(self.guest, name, *sudo).await?;
                }
                self.place.user.clone_from(name);
                Ok(())
            }
        }
    }

    async fn run(&self, number: usize, command: &str, user: Option<&str>) -> Result<(), String> {
        let request = self.place.request(Command::Shell(command.to_owned()), user);
        let failed = |why: String| format!("failed to run command '{command}': {why}");
        let place = BuildPlace::Step(number);
        let exit = guest::run(self.guest, &request, |is_error, line| {
            let (level, stream) = if is_error { (LogLevel::Warn, "stderr") } else { (LogLevel::Info, "stdout") };
            self.build.log.say(level, place, &format!("[builder {number}/{}] [{stream}]: {line}", self.count));
        });
        match guest::failure(&exit.await.map_err(failed)?) {
            None => Ok(()),
            Some(why) => Err(failed(why)),
        }
    }

    async fn copy(&self, action: &BuildAction) -> Result<(), String> {
        let BuildAction::Copy { source, destination, owner, mode, archive } = action else { return Ok(()) };
        let found = self.service.upload(&self.build.owner, archive).await.map_err(|error| chain(&error))?;
        let upload = found.ok_or_else(|| format!("the files of '{source}' have not been uploaded"))?;
        let copying = Copying {
            archive: &upload,
            source,
            destination: &self.absolute(destination).await?,
            owner: owner.as_deref().unwrap_or(&self.place.user),
            mode: mode.as_deref().unwrap_or_default(),
        };
        let done = guest::copy(self.guest, &copying).await;
        if done.is_err() {
            // It may be what is wrong; the next build's client sends it again.
            uploads::forget(&self.service.handle.core, &self.build.owner.workspace, archive).await;
        }
        done.map_err(|why| format!("failed to copy '{source}' to '{destination}': {why}"))
    }

    async fn set_env(&mut self, pairs: &[(String, String)]) -> Result<(), String> {
        let mut known = guest::login_env(self.guest, &self.place).await?;
        for (name, value) in pairs {
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(format!("{} cannot be a variable's name", quoted(name)));
            }
            if value.contains('\0') {
                return Err(format!("the value of {} has a NUL byte", quoted(name)));
            }
            let value = guest::expand(value, &known);
            known.insert(name.clone(), value.clone());
            self.place.env.insert(name.clone(), value);
        }
        Ok(())
    }

    /// A path from where the build is; a trailing slash stays.
    async fn absolute(&self, path: &str) -> Result<String, String> {
        if path.starts_with('/') {
            return Ok(path.to_owned());
        }
        let home = async || {
            let env = guest::login_env(self.guest, &Place { cwd: None, ..self.place.clone() }).await?;
            Ok::<_, String>(env.get("HOME").cloned().unwrap_or_else(|| "/".to_owned()))
        };
        if let Some(rest) = path.strip_prefix('~') {
            return Ok(format!("{}{rest}", home().await?));
        }
        let base = match &self.place.cwd {
            Some(cwd) => cwd.clone(),
            None => home().await?,
        };
        let path = path.strip_prefix("./").unwrap_or(path);
        Ok(if path == "." { base } else { format!("{}/{path}", base.trim_end_matches('/')) })
    }

    /// Keeps the guest as it is for builds that begin with the same steps.
    async fn keep_step(&self, digest: &str) -> Result<(), ServiceError> {
        let labels = BTreeMap::from([(STEP_LABEL.to_owned(), digest.to_owned())]);
        let (who, id) = (&self.build.owner, &self.sandbox.id);
        self.service.internal_snapshot(who, id, SnapshotPurpose::Step, labels, Some(STEPS_KEPT)).await.map(drop)
    }

    /// Starts what is to run in the template, and waits until it is ready.
    async fn start(&self, plan: &BuildPlan) -> Result<(), String> {
        let say = |text: String| self.build.log.say(LogLevel::Info, BuildPlace::Finalize, &text);
        let mut pid = None;
        let started_at = tokio::time::Instant::now();
        if let Some(command) = &plan.start {
            say(format!("[finalize] Running start command: {command}"));
            let request = self.place.request(Command::Shell(command.clone()), None);
            let started = self.guest.start(&request).await;
            let started = started.map_err(|error| format!("failed to run start command '{command}': {error}"))?;
            pid = started.started.map(|started| started.pid);
        }
        if let Some(ready) = &plan.ready {
            self.wait_until_ready(ready, plan.start.as_ref().zip(pid)).await?;
        }
        if let (Some(command), Some(pid)) = (&plan.start, pid) {
            tokio::time::sleep(START_TIME.saturating_sub(started_at.elapsed())).await;
            self.check_running(command, pid).await?;
        }
        Ok(())
    }

    async fn wait_until_ready(&self, ready: &str, started: Option<(&String, u32)>) -> Result<(), String> {
        let say = |text: String| self.build.log.say(LogLevel::Info, BuildPlace::Finalize, &text);
        say(format!("[finalize] Running ready command: {ready}"));
        let request = self.place.request(Command::Shell(ready.to_owned()), None);
        let wait = async {
            loop {
                let exit = guest::run(self.guest, &request, |_, line| {
                    self.build.log.say(LogLevel::Info, BuildPlace::Finalize, &format!("[finalize] [ready]: {line}"));
                });
                if guest::failure(&exit.await?).is_none() {
                    return Ok(());
                }
                if let Some((command, pid)) = started {
                    self.check_running(command, pid).await?;
                }
                tokio::time::sleep(READY_INTERVAL).await;
            }
        };
        match tokio::time::timeout(READY_PATIENCE, wait).await {
            Ok(done) => done,
            Err(_) => Err(format!("ready command '{ready}' did not succeed within {READY_PATIENCE:?}")),
        }
    }

    /// A start command may end with success (it started a service); a failure is the build's.
    async fn check_running(&self, command: &str, pid: u32) -> Result<(), String> {
        let known = self.guest.processes().await.map_err(|error| chain(&error))?.processes;
        let exit = known.iter().find(|known| known.pid == pid).and_then(|known| known.exit.as_ref());
        match exit.and_then(guest::failure) {
            Some(why) => Err(format!("start command '{command}': {why}")),
            None => Ok(()),
        }
    }

    /// Makes the template.
    async fn finish(&self, parent: &Parent, digest: &str) -> Result<(), ServiceError> {
        self.guest.sync().await?;
        let (service, build) = (self.service, self.build);
        let (who, id) = (&build.owner, &self.sandbox.id);
        let snapshot = service.internal_snapshot(who, id, SnapshotPurpose::Template, BTreeMap::new(), None).await?;
        let mut env = parent.env.clone();
        env.extend(self.place.env.clone());
        let template = Template {
            id: build.template.clone(),
            workspace: Some(who.workspace.clone()),
            name: build.name.clone(),
            state: TemplateState::Ready,
            shape: self.sandbox.shape,
            recipe_digest: digest.to_owned(),
            env,
            default_user: self.place.user.clone(),
            default_cwd: self.place.cwd.clone(),
            created_at: service.handle.core.now(),
        };
        let built = Some(Built { snapshot: snapshot.id.clone(), build: build.id.clone() });
        let record = TemplateRecord { template, directory: parent.directory.clone(), built };
        let recorded = async {
            service.store().put_template(&record).await?;
            let now = service.handle.core.now();
            service.store().tag_template(&who.workspace, &build.name, &build.tags, &build.template, now).await
        };
        if let Err(error) = recorded.await {
            service.handle.core.remove_snapshot_soon(snapshot.id);
            return Err(store_error(error));
        }
        Ok(())
    }
}

/// A step in a line.
fn title(action: &BuildAction) -> String {
    match action {
        BuildAction::Run { command, .. } => format!("RUN {command}"),
        BuildAction::Copy { source, destination, .. } => format!("COPY {source} {destination}"),
        // Values may be secrets.
        BuildAction::Env(pairs) => {
            let names: Vec<_> = pairs.iter().map(|(name, _)| name.as_str()).collect();
            format!("ENV {}", names.join(" "))
        }
        BuildAction::WorkDir(path) => format!("WORKDIR {path}"),
        BuildAction::User { name, .. } => format!("USER {name}"),
    }
}
