//! One server per test: its own directory, host and database.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use stockade_engine::fake::FakeHost;
use stockade_model::{EndCause, Sandbox, SandboxId, SandboxState, Template, TemplateId, Tier, WorkspaceId};
use stockade_service::{
    CreateSandbox, ListFilter, Principal, Service, ServiceConfig, ServiceError, SnapshotFilter, fake,
};
use stockade_store::Store;
use tempfile::TempDir;

/// Nothing here takes that long unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct TestServer {
    pub(crate) service: Service,
    pub(crate) host: FakeHost,
    pub(crate) who: Principal,
    pub(crate) template: TemplateId,
    configure: Arc<dyn Fn(&mut ServiceConfig) + Send + Sync>,
    store: Store,
    dir: TempDir,
}

impl TestServer {
    /// Without a pool.
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(configure: impl Fn(&mut ServiceConfig) + Send + Sync + 'static) -> Self {
        let dir = tempfile::tempdir().expect("temp dir");
        let host = FakeHost::hosting().expect("fake host");
        let configure = Arc::new(configure);
        let (service, store) = serve(&dir, &host, &*configure).await;
        let workspace = service.default_workspace().await.expect("workspace");
        let who = principal(&service, &workspace).await;
        let template = template(&service, &dir, None, "base").await;
        Self { service, host, who, template, configure, store, dir }
    }

    /// `kill -9` and a new server on what is left.
    pub(crate) async fn crash(&mut self) {
        self.service.cut().await;
        self.store.close().await;
        self.restart().await;
    }

    /// A new server on what the last one, already cut or shut down, left.
    pub(crate) async fn restart(&mut self) {
        let (service, store) = serve(&self.dir, &self.host, &*self.configure).await;
        self.service = service;
        self.store = store;
    }

    /// The same, and the new server keeps no pool.
    pub(crate) async fn restart_without_pool(&mut self) {
        let configure = Arc::clone(&self.configure);
        self.configure = Arc::new(move |config| {
            configure(config);
            config.pool_size = 0;
        });
        self.restart().await;
    }

    pub(crate) async fn stranger(&self) -> Principal {
        let workspace = self.service.workspace("strangers").await.expect("workspace");
        principal(&self.service, &workspace).await
    }

    pub(crate) async fn add_template(&self, workspace: Option<&WorkspaceId>, name: &str) -> TemplateId {
        template(&self.service, &self.dir, workspace, name).await
    }

    pub(crate) async fn create(&self) -> Sandbox {
        self.try_create(request()).await.expect("created")
    }

    pub(crate) async fn try_create(&self, request: CreateSandbox) -> Result<Sandbox, ServiceError> {
        within(self.service.create(&self.who, request)).await
    }

    pub(crate) fn create_in_background(
        &self,
        request: CreateSandbox,
    ) -> tokio::task::JoinHandle<Result<Sandbox, ServiceError>> {
        let (service, who) = (self.service.clone(), self.who.clone());
        tokio::spawn(async move { service.create(&who, request).await })
    }

    pub(crate) async fn get(&self, id: &SandboxId) -> Sandbox {
        within(self.service.get(&self.who, id)).await.expect("there is a record")
    }

    pub(crate) async fn kill(&self, id: &SandboxId) -> Result<(), ServiceError> {
        within(self.service.kill(&self.who, id)).await
    }

    /// Waits for a state, or for one that nothing can follow.
    pub(crate) async fn wait_for(&self, id: &SandboxId, state: SandboxState) -> Sandbox {
        within(async {
            loop {
                let sandbox = self.get(id).await;
                if sandbox.state == state {
                    return sandbox;
                }
                assert!(!sandbox.state.is_final(), "{id} is {}, not {state}: {:?}", sandbox.state, sandbox.ending);
                tokio::task::yield_now().await;
            }
        })
        .await
    }

    /// The cause of an end that has come or will.
    pub(crate) async fn cause(&self, id: &SandboxId) -> EndCause {
        self.wait_for(id, SandboxState::Gone).await.ending.expect("final").cause
    }

    pub(crate) async fn list(&self, filter: ListFilter) -> Vec<Sandbox> {
        within(self.service.list(&self.who, &filter)).await.expect("a list").items
    }

    pub(crate) async fn everything(&self) -> Vec<Sandbox> {
        self.list(ListFilter { states: SandboxState::ALL.to_vec(), ascending: true, limit: 1000, ..<_>::default() })
            .await
    }

    /// Sandboxes that run or stand by have their machine, other living ones their directory; there is no other
    /// machine and no other directory.
    pub(crate) async fn assert_nothing_stray(&self) {
        let alive: Vec<_> = self.everything().await.into_iter().filter(|sandbox| !sandbox.state.is_final()).collect();
        for sandbox in &alive {
            let is_there = (sandbox.machine.is_some(), sandbox.saved.is_some());
            let has_machine = sandbox.state == SandboxState::Running || sandbox.tier == Some(Tier::Standby);
            assert_eq!(is_there, (has_machine, !has_machine), "{}: {} {:?}", sandbox.id, sandbox.state, sandbox.tier);
        }
        let mut machines: Vec<_> = alive.iter().filter_map(|sandbox| sandbox.machine.clone()).collect();
        machines.sort();
        assert_eq!(self.host.machines(), machines);
        let is_archived = |sandbox: &&Sandbox| sandbox.tier == Some(Tier::Archived);
        let (archived, here): (Vec<_>, Vec<_>) = alive.iter().partition(is_archived);
        let saved = |sandboxes: Vec<&Sandbox>| {
            let mut saved: Vec<_> =
                sandboxes.into_iter().filter_map(|sandbox| Some(sandbox.saved.clone()?.to_string())).collect();
            saved.sort();
            saved
        };
        assert_eq!(self.directories("paused"), saved(here));
        let mut in_archive = self.directories("archive");
        in_archive.retain(|name| !name.ends_with(".json"));
        assert_eq!(in_archive, saved(archived));
        let all = SnapshotFilter { limit: 1000, ..<_>::default() };
        let snapshots = within(self.service.snapshots(&self.who, &all)).await.expect("a list").items;
        let mut snapshots: Vec<_> = snapshots.into_iter().map(|snapshot| snapshot.id.to_string()).collect();
        snapshots.sort();
        assert_eq!(self.directories("snapshots"), snapshots);
    }

    /// Where the server keeps its things.
    pub(crate) fn path(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// What is in a directory of saved state.
    pub(crate) fn directories(&self, kind: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path().join(kind)).expect("the directory");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

async fn serve(dir: &TempDir, host: &FakeHost, configure: &dyn Fn(&mut ServiceConfig)) -> (Service, Store) {
    let served = fake::serve(dir.path(), host, |config| {
        config.metrics_period = Duration::ZERO;
        config.meter_period = Duration::ZERO;
        configure(config);
    });
    within(served).await.expect("service")
}

async fn principal(service: &Service, workspace: &WorkspaceId) -> Principal {
    let (_, key) = service.create_api_key(workspace, "test").await.expect("key");
    service.authenticate(key.expose()).await.expect("looked up").expect("known")
}

async fn template(service: &Service, dir: &TempDir, workspace: Option<&WorkspaceId>, name: &str) -> TemplateId {
    let template = Template {
        workspace: workspace.cloned(),
        env: BTreeMap::from([("FROM".to_owned(), "template".to_owned()), ("BOTH".to_owned(), "template".to_owned())]),
        default_user: "user".to_owned(),
        ..fake::template(name)
    };
    let id = template.id.clone();
    fake::register(service, dir.path(), template).await.expect("registered");
    id
}

pub(crate) fn request() -> CreateSandbox {
    CreateSandbox { template: "base".to_owned(), lifetime: Duration::from_secs(300), ..CreateSandbox::default() }
}

pub(crate) fn labels<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// A hang becomes a failure.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("hangs")
}

/// Waits for a condition that some other task brings about.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let holds = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, holds).await.is_ok(), "never: {what}");
}
