//! Building templates: a sandbox is made from the parent template, steps are carried out in it, and what it is
//! then - memory, disk, running programs - becomes a template.
//!
//! ```text
//! reserve -> waiting --start--> building --+--> ready    a template, under its name and tags
//!                                          +--> failed   which step, and why; also where its template was deleted
//!
//! building: sandbox from the parent or from the last step that is known -> steps, each kept as a snapshot
//!           -> start command, until its ready command succeeds -> snapshot -> record -> sandbox ended
//! ```
//!
//! A step is known by the digest of its parent, of all steps before it and of itself. Builds live in this
//! process: one that a server's end cuts off is gone, its sandbox ends at its deadline, which is kept minutes away.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use stockade_model::{Secret, SnapshotId, TEMPLATE_NAME, TEMPLATE_TAG, Template, TemplateId, WorkspaceId, quoted};
use stockade_store::{DEFAULT_TAG, TemplateTag};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::{
    Principal, Service, ServiceError,
    error::{check_name, store_error},
};

mod guest;
mod log;
mod run;
mod uploads;

use log::Log;
pub use log::{LogEntry, LogLevel};

/// A label of the sandboxes builds are made in; its value is the build's id.
pub const BUILD_LABEL: &str = "stockade.build";

/// Builds that run at once; others wait.
const MOST_AT_ONCE: usize = 4;
/// Builds that are remembered.
const MOST_KEPT: usize = 200;
const MOST_STEPS: usize = 1000;
const MOST_TAGS: usize = 50;

/// A build that is to come.
#[derive(Clone, Debug)]
pub struct NewBuild {
    /// The template's name: lower-case letters, digits, `-`, `_`, `.` and `/`.
    pub name: String,
    /// Tags; none: `default`.
    pub tags: Vec<String>,
}

/// What a build does.
#[derive(Clone, Debug)]
pub struct BuildPlan {
    /// The parent template or snapshot.
    pub from: String,
    /// In order.
    pub steps: Vec<BuildStep>,
    /// Runs on in the template.
    pub start: Option<String>,
    /// Succeeds once `start` is ready; tried again until then.
    pub ready: Option<String>,
    /// Use no step of an earlier build.
    pub force: bool,
}

/// One step.
#[derive(Clone, Debug)]
pub struct BuildStep {
    /// What it does.
    pub action: BuildAction,
    /// Carry it, and all after it, out again even if it is known.
    pub force: bool,
}

/// What a step does.
#[derive(Clone, Debug)]
pub enum BuildAction {
    /// Runs a command line.
    Run {
        /// For `bash -l -c`.
        command: String,
        /// As whom; `None`: the user set before.
        user: Option<String>,
    },
    /// Copies files of an uploaded archive, as Docker does.
    Copy {
        /// Which, a path or a pattern in the archive.
        source: String,
        /// Where to.
        destination: String,
        /// `user` or `user:group`; `None`: the user set before.
        owner: Option<String>,
        /// Permission bits of the files, octal.
        mode: Option<String>,
        /// The upload's digest.
        archive: String,
    },
    /// Sets variables; `$NAME` stands for an earlier value.
    Env(Vec<(String, String)>),
    /// Sets the directory of what follows, and of sandboxes; made if it is not there.
    WorkDir(String),
    /// Sets the user of what follows, and of sandboxes; made if there is none.
    User {
        /// Its name.
        name: String,
        /// May become root without a password.
        sudo: bool,
    },
}

/// How far a build is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BuildState {
    /// Reserved, or behind other builds.
    Waiting,
    /// Under way.
    Building,
    /// There is a template.
    Ready,
    /// There is none.
    Failed,
}

/// Where a build failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BuildPlace {
    /// Before its first step.
    Base,
    /// At this step, from 1.
    Step(usize),
    /// After its last step.
    Finalize,
}

/// A build as it is now.
#[derive(Clone, Debug)]
pub struct BuildView {
    /// Its id, a UUID.
    pub id: String,
    /// The template it makes.
    pub template: TemplateId,
    /// The template's name.
    pub name: String,
    /// The template's tags.
    pub tags: Vec<String>,
    /// How far it is.
    pub state: BuildState,
    /// Lines of its log, from where they were asked for.
    pub log: Vec<LogEntry>,
    /// Where and why it failed.
    pub failure: Option<(BuildPlace, String)>,
}

/// All builds this process knows.
pub(crate) struct Builds {
    known: Mutex<HashMap<String, Arc<Build>>>,
    running: Arc<Semaphore>,
}

impl Default for Builds {
    fn default() -> Self {
        Self { known: Mutex::default(), running: Arc::new(Semaphore::new(MOST_AT_ONCE)) }
    }
}

impl Builds {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Build>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One build.
pub(crate) struct Build {
    id: String,
    owner: Principal,
    template: TemplateId,
    name: String,
    tags: Vec<String>,
    reserved_at: Timestamp,
    log: Log,
    progress: Mutex<Progress>,
    /// Nobody wants what it makes any more.
    cancel: CancellationToken,
    /// It has ended, whatever became of it.
    over: CancellationToken,
}

#[derive(Default)]
struct Progress {
    state: Option<BuildState>,
    failure: Option<(BuildPlace, String)>,
}

impl Build {
    fn state(&self) -> BuildState {
        self.progress().state.unwrap_or(BuildState::Waiting)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_meant_by(&self, who: &Principal, name: &str) -> bool {
        self.owner.workspace == who.workspace && (self.name == name || self.template.as_str() == name)
    }

    fn set(&self, state: BuildState) {
        self.progress().state = Some(state);
    }

    fn fail(&self, place: BuildPlace, message: String) {
        self.log.say(LogLevel::Error, place, &message);
        let mut progress = self.progress();
        progress.failure = Some((place, message));
        progress.state = Some(BuildState::Failed);
    }

    fn view(&self, offset: usize, limit: usize) -> BuildView {
        // The state first: what is final has its whole log.
        let state = self.state();
        BuildView {
            id: self.id.clone(),
            template: self.template.clone(),
            name: self.name.clone(),
            tags: self.tags.clone(),
            state,
            log: self.log.read(offset, limit),
            failure: self.progress().failure.clone(),
        }
    }
}

#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: `Invalid` for what makes no sense, `BuildNotFound` also for what belongs to others, \
              `Store` and `Engine` for what is broken below"
)]
impl Service {
    /// Makes room for a build; files can be uploaded for it.
    pub fn reserve_build(&self, who: &Principal, new: NewBuild) -> Result<BuildView, ServiceError> {
        check_name("name", TEMPLATE_NAME, &new.name)?;
        let mut tags = new.tags;
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned());
        }
        tags.iter().try_for_each(|tag| check_name("tags", TEMPLATE_TAG, tag))?;
        if tags.len() > MOST_TAGS {
            return invalid("tags", format!("has {} entries; {MOST_TAGS} are possible", tags.len()));
        }
        let build = Build {
            id: random_uuid(),
            owner: who.clone(),
            template: TemplateId::random(),
            name: new.name,
            tags,
            reserved_at: self.handle.core.now(),
            log: Log::default(),
            progress: Mutex::default(),
            cancel: CancellationToken::new(),
            over: CancellationToken::new(),
        };
        let view = build.view(0, 0);
        let mut known = self.handle.core.builds.lock();
        if known.len() >= MOST_KEPT {
            // The oldest that is over, or never began.
            let idle = known.values().filter(|build| build.state() != BuildState::Building);
            let oldest = idle.min_by_key(|build| build.reserved_at).map(|build| build.id.clone());
            oldest.and_then(|id| known.remove(&id));
        }
        known.insert(build.id.clone(), Arc::new(build));
        Ok(view)
    }

    /// Begins a reserved build; it goes on by itself.
    pub fn start_build(&self, who: &Principal, id: &str, plan: BuildPlan) -> Result<(), ServiceError> {
        let build = self.find_build(who, id)?;
        if plan.steps.len() > MOST_STEPS {
            return invalid("steps", format!("has {} entries; {MOST_STEPS} are possible", plan.steps.len()));
        }
        {
            let mut progress = build.progress();
            if progress.state.is_some() {
                return invalid("build", format!("{id} has been started already"));
            }
            progress.state = Some(BuildState::Building);
        }
        let core = &self.handle.core;
        let (handle, running) = (Arc::downgrade(&self.handle), Arc::clone(&core.builds.running));
        core.spawn(async move {
            // Whoever deletes the template does not wait for other builds.
            let _turn = tokio::select! {
                turn = running.acquire_owned() => Some(turn),
                () = build.cancel.cancelled() => None,
            };
            if let Some(handle) = handle.upgrade() {
                run::run(&Self { handle }, &build, plan).await;
            }
            build.over.cancel();
        });
        Ok(())
    }

    /// A build, with at most `limit` lines of its log from `offset` on.
    pub async fn build(
        &self,
        who: &Principal,
        id: &str,
        offset: usize,
        limit: usize,
    ) -> Result<BuildView, ServiceError> {
        match self.find_build(who, id) {
            Ok(build) => Ok(build.view(offset, limit)),
            // An earlier server's; its template is all there is left of it.
            Err(unknown) => self.built_before(who, id).await?.ok_or(unknown),
        }
    }

    async fn built_before(&self, who: &Principal, id: &str) -> Result<Option<BuildView>, ServiceError> {
        let records = self.store().all_templates().await.map_err(store_error)?;
        let found = records.into_iter().find(|record| {
            record.template.workspace.as_ref() == Some(&who.workspace)
                && record.built.as_ref().is_some_and(|built| built.build == id)
        });
        Ok(found.map(|record| BuildView {
            id: id.to_owned(),
            template: record.template.id,
            name: record.template.name,
            tags: Vec::new(),
            state: BuildState::Ready,
            log: Vec::new(),
            failure: None,
        }))
    }

    fn find_build(&self, who: &Principal, id: &str) -> Result<Arc<Build>, ServiceError> {
        let known = self.handle.core.builds.lock().get(id).cloned();
        known
            .filter(|build| build.owner.workspace == who.workspace)
            .ok_or_else(|| ServiceError::BuildNotFound { id: id.to_owned() })
    }

    /// The build that makes, or made, a template.
    pub async fn build_of(&self, who: &Principal, template: &TemplateId) -> Result<Option<String>, ServiceError> {
        let is_it = |build: &&Arc<Build>| build.template == *template && build.owner.workspace == who.workspace;
        let found = self.handle.core.builds.lock().values().find(is_it).map(|build| build.id.clone());
        if found.is_some() {
            return Ok(found);
        }
        match self.template_record(who, template.as_str()).await {
            Ok(record) => Ok(record.built.map(|built| built.build)),
            Err(ServiceError::TemplateNotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Points tags to the template that `name` (or `name:tag`, or an id) means.
    pub async fn tag_template(&self, who: &Principal, target: &str, tags: &[String]) -> Result<Template, ServiceError> {
        tags.iter().try_for_each(|tag| check_name("tags", TEMPLATE_TAG, tag))?;
        let record = self.template_record(who, target).await?;
        if record.built.is_none() {
            return invalid(
                "target",
                format!("{} is a template of the server; tags are for those you built", quoted(target)),
            );
        }
        let template = record.template;
        let now = self.handle.core.now();
        let tagged = self.store().tag_template(&who.workspace, &template.name, tags, &template.id, now).await;
        tagged.map_err(store_error)?;
        Ok(template)
    }

    /// Removes tags of a name.
    pub async fn untag_template(&self, who: &Principal, name: &str, tags: &[String]) -> Result<(), ServiceError> {
        for tag in tags {
            if tag == DEFAULT_TAG {
                return invalid("tags", "has \"default\", which cannot be removed".to_owned());
            }
            if !self.store().untag_template(&who.workspace, name, tag).await.map_err(store_error)? {
                return Err(ServiceError::TemplateNotFound { name: format!("{name}:{tag}") });
            }
        }
        Ok(())
    }

    /// The tags of all names in the workspace.
    pub async fn template_tags(&self, who: &Principal) -> Result<Vec<TemplateTag>, ServiceError> {
        self.store().template_tags(&who.workspace).await.map_err(store_error)
    }

    /// How often sandboxes were made from one of these, as far as records go back, and when last.
    pub async fn template_uses(
        &self,
        who: &Principal,
        templates: &[Template],
    ) -> Result<(u64, Option<Timestamp>), ServiceError> {
        let (mut count, mut last) = (0, None);
        for template in templates {
            let uses = self.store().template_uses(&who.workspace, &template.id).await.map_err(store_error)?;
            (count, last) = (count + uses.0, last.max(uses.1));
        }
        Ok((count, last))
    }

    /// Deletes a template that was built: by its name all builds of it, those under way included; by `name:tag` or an id
    /// that one. Refused while sandboxes or snapshots need one of them: then only what is under way has ended.
    pub async fn delete_template(&self, who: &Principal, name: &str) -> Result<(), ServiceError> {
        let was_built = self.cancel_builds(who, name).await;
        let mut found = self.store().templates_built(&who.workspace, name).await.map_err(store_error)?;
        if found.is_empty() {
            match self.template_record(who, name).await {
                Ok(record) if record.built.is_none() => {
                    return invalid("template", format!("{} is a template of the server and stays", quoted(name)));
                }
                Ok(record) => found.push(record),
                Err(ServiceError::TemplateNotFound { .. }) if was_built => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        let ids: Vec<TemplateId> = found.iter().map(|record| record.template.id.clone()).collect();
        if !self.store().remove_templates(&ids).await.map_err(store_error)? {
            return Err(ServiceError::TemplateInUse { name: name.to_owned() });
        }
        let mut snapshots: Vec<SnapshotId> =
            found.into_iter().filter_map(|record| Some(record.built?.snapshot)).collect();
        for id in &ids {
            snapshots.extend(self.store().steps_on(id).await.map_err(store_error)?);
        }
        for snapshot in snapshots {
            if self.store().begin_snapshot_delete(&snapshot).await.map_err(store_error)? {
                self.handle.core.remove_snapshot_soon(snapshot);
            }
        }
        Ok(())
    }

    /// Whether something of this name is being built, or was and failed.
    pub fn knows_builds_of(&self, who: &Principal, name: &str) -> bool {
        let known = self.handle.core.builds.lock();
        let is_one = |build: &Arc<Build>| build.is_meant_by(who, name) && build.state() != BuildState::Ready;
        known.values().any(|build| is_one(build) && !build.cancel.is_cancelled())
    }

    /// Ends builds of a name (or the one that makes a template); whether there were any that nobody had deleted yet and
    /// that have made no template.
    async fn cancel_builds(&self, who: &Principal, name: &str) -> bool {
        let mut ended = Vec::new();
        self.handle.core.builds.lock().retain(|_, build| {
            if !build.is_meant_by(who, name) || build.cancel.is_cancelled() {
                return true;
            }
            build.cancel.cancel();
            ended.push(Arc::clone(build));
            // One that was never started has nothing to tell.
            build.progress().state.is_some()
        });
        for build in &ended {
            if build.progress().state.is_some() {
                build.over.cancelled().await;
            }
        }
        ended.iter().any(|build| build.state() != BuildState::Ready)
    }

    /// Where an upload is, if it is there.
    pub async fn upload(&self, who: &Principal, digest: &str) -> Result<Option<PathBuf>, ServiceError> {
        uploads::find(&self.handle.core, &who.workspace, digest).await
    }

    /// Keeps what a build copies from; whole, or not at all.
    pub async fn keep_upload<S>(&self, workspace: &WorkspaceId, digest: &str, body: S) -> Result<(), ServiceError>
    where
        S: futures::Stream<Item = Result<Vec<u8>, std::io::Error>> + Send + Unpin,
    {
        uploads::keep(&self.handle.core, workspace, digest, body).await
    }

    /// A word that lets whoever has it upload this one thing, until the server gets another secret.
    pub fn upload_token(&self, workspace: &WorkspaceId, digest: &str) -> Secret {
        let bytes = self.store().request_digest(format!("upload:{workspace}:{digest}").as_bytes());
        Secret::new(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }
}

/// How long steps of a build are kept for later ones.
const STEPS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

fn invalid<T>(field: &'static str, problem: String) -> Result<T, ServiceError> {
    Err(ServiceError::Invalid { field, problem })
}

fn random_uuid() -> String {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).expect("the kernel's random generator works once it is seeded");
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
